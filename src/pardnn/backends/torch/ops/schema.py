"""What an op's schema says, and what it does not say.

Most ops declare what they alias and write. A few change arguments that their schema does not mark,
or return views that it does not mark; they are listed here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import op_kind

#: Ops that change these arguments although their schema does not say so, when `training` is set.
_UNMARKED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
#: Ops that return a view although their schema does not say so.
_UNMARKED_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})
#: Ops whose result is their input as far as a graph without autograd is concerned.
_IDENTITIES = frozenset({
    "aten::detach", "aten::detach_", "aten::alias", "aten::lift", "aten::lift_fresh",
})  # fmt: skip
#: Ops that describe the tensor itself anew; their twins without the underscore make a view of it.
_VIEWS_IN_PLACE = frozenset({
    "as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
})  # fmt: skip
#: Nobody knows, without their device, how much they hand to the backward pass.
_HIDDEN_SIZES = frozenset({"aten::_cudnn_rnn", "aten::miopen_rnn"})
#: Questions about a tensor, and marks for profilers: no part of what is computed.
_NO_CALLS = frozenset({"prim", "profiler"})
_NO_EFFECT = frozenset({
    "aten::_assert_async", "aten::_assert_scalar", "aten::_assert_tensor_metadata",
})  # fmt: skip
#: The size of what these make depends on their numbers.
_SIZED_BY_SCALARS = frozenset({"aten::arange", "aten::range"})
#: Their results depend on a whole storage, or they change the geometry of an argument.
_UNKEPT_PREFIXES = ("as_strided", "resize", "set_", "_resize", "swap_")
_UNKEPT_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})
#: Backward passes of which `output_mask` says which gradients they make.
_MASKED = frozenset({
    "aten::native_batch_norm_backward", "aten::native_group_norm_backward",
    "aten::native_layer_norm_backward", "aten::convolution_backward",
})  # fmt: skip
#: Real kernels lay their results out in order, fake ones as their arguments.
_WITHOUT_GAPS = frozenset({
    "aten::_ctc_loss_backward", "aten::_log_softmax_backward_data", "aten::huber_loss_backward",
    "aten::mse_loss_backward", "aten::smooth_l1_loss_backward",
})  # fmt: skip
_ON_HOST_WITHOUT_GAPS = "aten::log_sigmoid_forward"
#: Real kernels lay their result out as a product of the first two arguments.
_AS_PRODUCT = frozenset({
    "aten::hardswish_backward", "aten::hardtanh_backward", "aten::logit_backward",
    "aten::softplus_backward",
})  # fmt: skip
_PER_ELEMENT = ("List[Tensor]", "List[Optional[Tensor]]", "List[number]")


@dataclass(frozen=True, slots=True)
class Signature:
    """What the tracer needs to know of an op.

    Attributes:
        names: Argument names in order.
        types: Their types as the schema writes them.
        writes: Names of the arguments that it changes in place.
        view: Whether it only describes its input's storage anew.
        random: Whether it draws from a generator.
        split: Whether it does the same to each element of its lists.
        sized: Whether its numbers decide a shape.
        kept: Whether its fake result depends on geometries and plain arguments alone.
        kind: Its kind in a graph.
        twin_kind: Kind of the view which it turns its argument into; "" if it does not.
        role: How the tracer treats it; None for a call like most.
        unmarked: Arguments that it may change although its schema does not say so.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    writes: frozenset[str]
    view: bool
    random: bool
    split: bool
    sized: bool
    kept: bool
    kind: str
    twin_kind: str
    role: str | None
    unmarked: tuple[str, ...]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name."""
        return dict(zip(self.names, args, strict=False)) | kwargs


@functools.cache
def signature(op: torch._ops.OpOverload) -> Signature:
    """Read an op's schema."""
    schema = op._schema
    writes = frozenset(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = any(a.alias_info is not None for a in schema.arguments)
    return Signature(
        names=tuple(argument.name for argument in schema.arguments),
        types=tuple(str(argument.type) for argument in schema.arguments),
        writes=writes,
        view=schema.name in _UNMARKED_VIEWS or (aliases and not writes),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        split=schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
        and str(schema.arguments[0].type) in _PER_ELEMENT,
        sized=schema.name in _SIZED_BY_SCALARS,
        kept=_is_kept(op),
        kind=op_kind(op),
        twin_kind=_twin_kind(op),
        role=_role(op),
        unmarked=_UNMARKED_WRITES.get(schema.name, ()),
    )


def _is_kept(op: torch._ops.OpOverload) -> bool:
    name = op._schema.name.partition("::")[2]
    inside = op.namespace in ("aten", "prims") and not name.startswith(_UNKEPT_PREFIXES)
    return inside and not _UNKEPT_TAGS.intersection(op.tags)


def written_names(sig: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Names of the arguments that this call changes in place, marked or not."""
    if not sig.unmarked:
        return sig.writes
    bound = sig.bound(args, kwargs)
    training = bound.get("training", bound.get("train", False))
    return sig.writes | {name for name in sig.unmarked if training and bound.get(name) is not None}


def _role(op: torch._ops.OpOverload) -> str | None:
    name = op._schema.name
    if op.namespace in _NO_CALLS:
        return "question"
    if name in _NO_EFFECT:
        return "no effect"
    if name in _HIDDEN_SIZES:
        return "hidden size"
    if name in _IDENTITIES:
        return "identity"
    if name == "aten::mkldnn_rnn_layer":
        return "fused rnn"
    return "view in place" if name.removeprefix("aten::") in _VIEWS_IN_PLACE else None


def _twin_kind(op: torch._ops.OpOverload) -> str:
    """Kind of the op that makes the view which `op` turns its argument into; "" if it does not."""
    name = op._schema.name.removeprefix("aten::")
    if name not in _VIEWS_IN_PLACE:
        return ""
    twins = getattr(torch.ops.aten, name[:-1])
    # `transpose_` has one overload without a name, `transpose.int` is its twin.
    types = [str(argument.type) for argument in op._schema.arguments]
    for overload in twins.overloads():
        twin = getattr(twins, overload)
        if [str(argument.type) for argument in twin._schema.arguments] == types:
            return op_kind(twin)
    raise AssertionError(f"{name} has no twin that makes a view")


def same_view(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the op that gives the same view and whose fake result shares the storage."""
    if op._schema.name == "aten::_unsafe_view":
        return torch.ops.aten.view.default
    return op


def fake_result(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op's fake kernel, and put right what it is known to get wrong.

    That of `_grouped_mm` takes bfloat16 only, while the real one on the CPU takes any: it is asked
    about bfloat16, and its answer has the dtype of the arguments. Those of the backward passes of
    layer norm and of losses lay the gradients out as an argument, the real ones without gaps; some
    follow another argument than the real ones. Results that an `output_mask` leaves out are None
    in truth, and tensors for some fake kernels.
    """
    name = op._schema.name
    if name == "aten::native_layer_norm_backward":
        made = op(*args, **kwargs)
        made = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
                for t in made]  # fmt: skip
        return _masked(op, args, kwargs, made)
    if name in _MASKED:
        return _masked(op, args, kwargs, list(op(*args, **kwargs)))
    if name in _WITHOUT_GAPS or (name == _ON_HOST_WITHOUT_GAPS and args[0].is_cpu):
        made = op(*args, **kwargs)
        return tuple(map(_without_gaps, made)) if isinstance(made, tuple) else _without_gaps(made)
    if name in _AS_PRODUCT:
        return torch.ops.aten.mul.Tensor(args[0], args[1])
    if op._schema.name == "aten::_grouped_mm" and args[0].dtype != torch.bfloat16:
        low = [a.bfloat16() if isinstance(a, torch.Tensor) and i < 2 else a
               for i, a in enumerate(args)]  # fmt: skip
        return torch.empty_like(op(*low, **kwargs), dtype=args[0].dtype).contiguous()
    return same_view(op)(*args, **kwargs)


def _without_gaps(made: torch.Tensor) -> torch.Tensor:
    return torch.empty(made.shape, dtype=made.dtype, device=made.device)


def _masked(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results: list[Any]
) -> tuple[Any, ...]:
    names = [argument.name for argument in op._schema.arguments]
    mask = (dict(zip(names, args, strict=False)) | kwargs)["output_mask"]
    return tuple(t if kept else None for t, kept in zip(results, mask, strict=True))


def parts(sig: Signature, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]] | None:
    """Split a call on lists into calls on lists of length one, which give the same bits.

    Returns:
        Arguments and keyword arguments of each; None if the lists do not match.
    """
    length = len(args[0])
    lists = {n for n, t in zip(sig.names, sig.types, strict=True) if t in _PER_ELEMENT}
    named = dict(zip(sig.names, args, strict=False)) | kwargs
    if any(len(value) not in (0, length) for name, value in named.items() if name in lists):
        return None

    def part(name: str, value: Any, i: int) -> Any:
        return value[i : i + 1] if name in lists else value

    return [
        (
            [part(name, value, i) for name, value in zip(sig.names, args, strict=False)],
            {name: part(name, value, i) for name, value in kwargs.items()},
        )
        for i in range(length)
    ]


def written_tensors(
    sig: Signature, writes: Collection[str], args: list[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the tensors among the arguments that are changed in place, in schema order."""
    bound = sig.bound(tuple(args), kwargs)
    return [
        t for name in sig.names if name in writes for t in leaves(bound.get(name), torch.Tensor)
    ]


def leaves(data: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Return the instances of `kind` inside lists and tuples, in order."""
    if isinstance(data, kind):
        return [data]
    if isinstance(data, list | tuple):
        return [leaf for item in data for leaf in leaves(item, kind)]
    return []
