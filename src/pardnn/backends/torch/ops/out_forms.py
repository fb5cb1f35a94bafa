"""Calls in the form that writes into given memory.

Only kernels are used of which torch generates both forms from one implementation ("structured"), or
whose plain form calls this one (abs, where): the bits are the same, and a test compares each. Other
calls also have such a form, but it copies what the plain one returns. The forms of copies, empty
tensors, zeros, random bits and arithmetic with a number are what their plain calls use inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import bind, find_call
from pardnn.graph.ir import Op

#: Tensors of at least this many bytes have places: such blocks go back to the system when freed.
LEAST_BYTES = 128 << 10
_COPIES = frozenset({"aten.clone.default", "aten._to_copy.default"})
_EMPTY = frozenset({"aten.empty.memory_format", "aten.empty_like.default"})
_ZEROS = frozenset({"aten.zeros.default", "aten.zeros_like.default"})
_BITS = "aten.bernoulli.p"
_BY_NUMBER = {
    "aten.mul.Scalar": torch.ops.aten.mul.out,
    "aten.div.Scalar": torch.ops.aten.div.out,
}
_STRUCTURED = frozenset({
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "abs",
    "add", "addcdiv", "addcmul", "addmm", "baddbmm", "bmm", "cat", "clamp", "clamp_max",
    "clamp_min", "cos", "div", "eq", "erf", "exp", "ge", "gelu", "gelu_backward", "gt", "le",
    "lerp", "log", "lt", "maximum", "mean", "minimum", "mm", "mul", "ne", "neg",
    "nll_loss_backward", "pow", "reciprocal", "rsqrt", "sigmoid", "sigmoid_backward", "silu",
    "silu_backward", "sin", "sqrt", "sub", "sum", "tanh", "tanh_backward", "threshold_backward",
    "where",
})  # fmt: skip


@functools.cache
def out_form(kind: str) -> Callable[..., torch.Tensor] | None:
    """Return the call with a keyword `out`, a tensor of the result's geometry; None without one."""
    if kind in _COPIES:
        return lambda tensor, *_args, out, **_kwargs: out.copy_(tensor)
    if kind in _EMPTY:
        return lambda *_args, out, **_kwargs: out
    if kind in _ZEROS:
        return lambda *_args, out, **_kwargs: out.zero_()
    if kind == _BITS:
        return lambda _tensor, *args, out, **kwargs: out.bernoulli_(*args, **kwargs)
    if kind in _BY_NUMBER:
        return _BY_NUMBER[kind]
    namespace, _, rest = kind.partition(".")
    name = rest.partition(".")[0]
    if namespace != "aten" or name not in _STRUCTURED:
        return None
    schema = getattr(find_call(kind), "_schema")  # noqa: B009
    takes = [(each.name, str(each.type)) for each in schema.arguments]
    packet = getattr(torch.ops.aten, name)
    for overload in (getattr(packet, each) for each in packet.overloads()):
        arguments = overload._schema.arguments
        outs = [each.name for each in arguments if each.is_out]
        others = [(each.name, str(each.type)) for each in arguments if not each.is_out]
        if len(outs) == 1 and others == takes and _is_native(overload):
            return _named_out(overload, outs[0])
    return None


def _is_native(overload: torch._ops.OpOverload) -> bool:
    name = f"{overload._schema.name}.{overload._overloadname}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


def _named_out(overload: Callable[..., Any], name: str) -> Callable[..., torch.Tensor]:
    return lambda *args, out, **kwargs: overload(*args, **kwargs, **{name: out})


def is_worth_a_place(num_bytes: int) -> bool:
    """Whether a tensor is large enough for a place."""
    return num_bytes >= LEAST_BYTES


def may_have_place(op: Op) -> bool:
    """Whether an op can write its result, and nothing else, to a given place."""
    if len(op.outputs) != 1 or op.memory == "residual":
        return False
    (output,) = op.outputs
    is_plain = output.alias_of is None and output.misaligned_bytes == 0
    is_worth_it = output.shape is not None and is_worth_a_place(output.bytes)
    return is_plain and is_worth_it and out_form(op.kind) is not None


def bind_into(
    op: Op, device: torch.device, place: Callable[[], torch.Tensor]
) -> Callable[[dict[str, Any]], None]:
    """Return what `codec.bind` does, for a call that writes its result into a place.

    Args:
        op: A call that has an `out_form`.
        device: See `codec.bind`.
        place: Returns a tensor of the result's geometry.
    """
    form = out_form(op.kind)
    assert form is not None
    return bind(op, device, lambda *args, **kwargs: form(*args, out=place(), **kwargs))
