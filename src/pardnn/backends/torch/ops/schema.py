"""Op schemas: what a call aliases, writes and draws, with corrections where a schema is wrong.

Most ops declare what they alias and write. A few change arguments or return views that their
schema does not mark, and some fake kernels return other strides than the real ones; these are
listed here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from pardnn.backends.torch.ops.codec import instances, op_kind

#: Ops that change these arguments although their schema does not say so, when `training` is set.
_UNMARKED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
#: Ops that return a view although their schema does not say so.
_UNMARKED_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})
#: Ops that matter only to autograd: their result is their input.
_IDENTITIES = frozenset({
    "aten::detach", "aten::detach_", "aten::alias", "aten::lift", "aten::lift_fresh",
})  # fmt: skip
#: Ops that change a tensor's geometry in place; without the underscore, they return that view.
_VIEWS_IN_PLACE = frozenset({
    "as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
})  # fmt: skip
#: Only their device knows how much memory they keep for the backward pass.
_UNKNOWN_WORKSPACES = frozenset({"aten::_cudnn_rnn", "aten::miopen_rnn"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
#: Namespaces of queries about a tensor and of profiler marks, which compute nothing.
_QUERIES = frozenset({"prim", "profiler"})
_NO_EFFECT = frozenset({"aten::_assert_scalar", "aten::_assert_tensor_metadata"})
#: The size of their results depends on their numbers.
_SIZED_BY_SCALARS = frozenset({"aten::arange", "aten::range"})
#: Ops whose results depend on a whole storage, or that change an argument's geometry.
_UNCACHEABLE_PREFIXES = ("as_strided", "resize", "set_", "_resize", "swap_")
_UNCACHEABLE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.inplace_view})
#: Norms to whose statistics fake kernels give the type of the input.
_WITH_STATISTICS = frozenset({
    "aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm",
})  # fmt: skip
#: Backward passes whose `output_mask` selects the gradients to compute.
_MASKED = frozenset({
    "aten::native_batch_norm_backward", "aten::native_group_norm_backward",
    "aten::native_layer_norm_backward", "aten::convolution_backward",
})  # fmt: skip
#: Real kernels return contiguous results, fake ones results strided like their arguments.
_CONTIGUOUS = frozenset({
    "aten::_ctc_loss_backward", "aten::_log_softmax_backward_data", "aten::huber_loss_backward",
    "aten::mse_loss_backward", "aten::smooth_l1_loss_backward",
})  # fmt: skip
#: Zero tangents of forward-mode derivatives have no memory, so they could not be sent.
_KINDS = {"aten::_efficientzerotensor": "aten.zeros.default"}
_CONTIGUOUS_ON_HOST = "aten::log_sigmoid_forward"
#: Real kernels stride their result like a product of the first two arguments.
_LAID_OUT_AS_PRODUCT = frozenset({
    "aten::copysign", "aten::div", "aten::floor_divide", "aten::hardswish_backward",
    "aten::hardtanh_backward", "aten::heaviside", "aten::logaddexp", "aten::logical_and",
    "aten::logical_or", "aten::logical_xor", "aten::logit_backward",
    "aten::native_dropout_backward", "aten::softplus_backward", "aten::xlogy",
})  # fmt: skip
#: Real kernels on the CPU give their first result the memory format of this argument.
_IN_FORMAT_OF = {
    "aten::_batch_norm_with_update": 0, "aten::_native_batch_norm_legit": 0,
    "aten::batch_norm_backward": 1, "aten::channel_shuffle": 0, "aten::max_unpool2d": 0,
    "aten::native_batch_norm": 0, "aten::native_batch_norm_backward": 1,
    "aten::reflection_pad2d_backward": 1, "aten::reflection_pad3d": 0,
    "aten::reflection_pad3d_backward": 1, "aten::replication_pad2d_backward": 1,
    "aten::replication_pad3d": 0, "aten::replication_pad3d_backward": 1,
}  # fmt: skip
#: Real kernels give their result the type of this argument, fake ones that of all of them together.
_OF_TYPE_OF = {
    torch.ops.aten.huber_loss.default: 0, torch.ops.aten.mse_loss_backward.default: 1,
    torch.ops.aten.normal.Tensor_Tensor: 0, torch.ops.aten.smooth_l1_loss_backward.default: 1,
    torch.ops.aten.soft_margin_loss.default: 0, torch.ops.aten.soft_margin_loss_backward.default: 1,
}  # fmt: skip
_PER_ELEMENT = ("List[Tensor]", "List[Optional[Tensor]]", "List[number]")


@dataclass(frozen=True, slots=True)
class Signature:
    """What the tracer needs to know about an op.

    Attributes:
        names: Argument names in order.
        types: Their types as the schema writes them.
        writes: Names of the arguments that it changes in place.
        view: Whether it returns a view of its input.
        random: Whether it draws from a generator.
        split: Whether it can be split into one call per element of its lists.
        sized: Whether its numbers decide a shape.
        cacheable: Whether its fake result depends on geometries and plain arguments alone.
        kind: Its kind in a graph.
        view_kind: Kind of the op that returns the view which it makes in place; "" if none is made.
        role: How the tracer treats it; None for an ordinary call.
        unmarked: Arguments that it may change although its schema does not say so.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    writes: frozenset[str]
    view: bool
    random: bool
    split: bool
    sized: bool
    cacheable: bool
    kind: str
    view_kind: str
    role: str | None
    unmarked: tuple[str, ...]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name."""
        return dict(zip(self.names, args, strict=False)) | kwargs


@functools.cache
def signature(op: torch._ops.OpOverload) -> Signature:
    """Return what an op's schema says, with corrections."""
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
        cacheable=_is_cacheable(op),
        kind=_KINDS.get(schema.name) or op_kind(op),
        view_kind=_view_kind(op),
        role=_role(op),
        unmarked=_UNMARKED_WRITES.get(schema.name, ()),
    )


def _is_cacheable(op: torch._ops.OpOverload) -> bool:
    name = op._schema.name.partition("::")[2]
    inside = op.namespace in ("aten", "prims") and not name.startswith(_UNCACHEABLE_PREFIXES)
    return inside and not _UNCACHEABLE_TAGS.intersection(op.tags)


def written_names(sig: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Return the names of the arguments that a call changes in place, marked or not.

    A fused update stores gradients only where it unscales them: with a `grad_scale`, which a
    gradient scaler passes (`ATen/native/cuda/fused_adam_utils.cuh`, `native/cpu/Fused*Kernel.cpp`).

    Args:
        sig: The signature of its op.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    if not sig.unmarked and "grad_scale" not in sig.names:
        return sig.writes
    bound = sig.bound(args, kwargs)
    if "grad_scale" in sig.names and bound.get("grad_scale") is None:
        return sig.writes - {"grads"}
    training = bound.get("training", bound.get("train", False))
    return sig.writes | {name for name in sig.unmarked if training and bound.get(name) is not None}


def _role(op: torch._ops.OpOverload) -> str | None:
    name = op._schema.name
    if op.namespace in _QUERIES:
        return "query"
    if op.namespace in _COLLECTIVES:
        return "collective"
    if name in _NO_EFFECT:
        return "no effect"
    if name in _UNKNOWN_WORKSPACES:
        return "unknown workspace"
    if name in _IDENTITIES:
        return "identity"
    if name == "aten::mkldnn_rnn_layer":
        return "fused rnn"
    if name == "aten::set_":
        return "new data"  # like an assignment to `data`: nothing is computed
    return "view in place" if name.removeprefix("aten::") in _VIEWS_IN_PLACE else None


def _view_kind(op: torch._ops.OpOverload) -> str:
    """Return the kind of the op that returns the view which `op` makes of its argument in place."""
    name = op._schema.name.removeprefix("aten::")
    if name not in _VIEWS_IN_PLACE:
        return ""
    packet = getattr(torch.ops.aten, name[:-1])
    # `transpose_` has one overload without a name, which corresponds to `transpose.int`.
    types = [str(argument.type) for argument in op._schema.arguments]
    for overload_name in packet.overloads():
        overload = getattr(packet, overload_name)
        if [str(argument.type) for argument in overload._schema.arguments] == types:
            return op_kind(overload)
    raise AssertionError(f"{name} has no overload that returns a view")


def same_view(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the op that gives the same view and whose fake result shares the storage."""
    if op._schema.name == "aten::_unsafe_view":
        return torch.ops.aten.view.default
    return op


def fake_result(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op's fake kernel, and correct types and strides that it gets wrong.

    On CPUs, batch norm and padding know two memory formats and no other order of dims. Some
    elementwise ops stride their results like a product, whatever their fake kernels say.

    Args:
        op: The overload.
        args: Positional arguments, fake tensors inside.
        kwargs: Keyword arguments.
    """
    name, result = op._schema.name, _of_right_types(op, args, kwargs)
    if "out" in kwargs:
        return result
    if name in _LAID_OUT_AS_PRODUCT and all(isinstance(x, torch.Tensor) for x in args[:2]):
        return torch.empty_like(torch.ops.aten.mul.Tensor(*args[:2]), dtype=result.dtype)
    if op is torch.ops.aten.pow.Scalar:
        return _contiguous(result)
    if (typed := _OF_TYPE_OF.get(op)) is not None and result.dtype != args[typed].dtype:
        return torch.empty_like(result, dtype=args[typed].dtype)
    given = _IN_FORMAT_OF.get(name)
    if given is None or not args[given].is_cpu:
        return result
    first, *others = result if isinstance(result, tuple) else (result,)
    if first is not None:
        first = torch.empty_like(first, memory_format=suggest_memory_format(args[given]))
    return (first, *others) if isinstance(result, tuple) else first


def _of_right_types(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op's fake kernel, and correct what it is known to get wrong.

    The fake kernel of `_grouped_mm` only takes bfloat16, while the real one on the CPU takes any
    type: it is run on bfloat16, and its result gets the dtype of the arguments. In backward passes
    of layer norm and of losses, fake kernels stride the gradients like an argument, where real ones
    are contiguous; some follow another argument than the real ones. Results that an `output_mask`
    leaves out are None, but tensors in some fake kernels. For norms of bfloat16 under float32
    weights, as autocast makes them, statistics are float32 on the CPU, while gradients of the input
    are not.

    Args:
        op: The overload.
        args: Positional arguments, fake tensors inside.
        kwargs: Keyword arguments.
    """
    name = op._schema.name
    if name == "aten::native_layer_norm_backward":
        made = op(*args, **kwargs)
        made = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
                for t in made]  # fmt: skip
        return _masked(op, args, kwargs, made)
    if name in _MASKED:
        made = list(op(*args, **kwargs))
        if name == "aten::native_group_norm_backward" and made[0] is not None:
            made[0] = torch.empty_like(made[0], dtype=args[1].dtype)
        return _masked(op, args, kwargs, made)
    if name in _WITH_STATISTICS and args[0].is_cpu:
        kinds = [arg.dtype for arg in args[1:] if isinstance(arg, torch.Tensor)]
        result, *made = op(*args, **kwargs)
        return result, *(torch.empty_like(t, dtype=kinds[0] if kinds else t.dtype) for t in made)
    if name in _CONTIGUOUS or (name == _CONTIGUOUS_ON_HOST and args[0].is_cpu):
        made = op(*args, **kwargs)
        return tuple(map(_contiguous, made)) if isinstance(made, tuple) else _contiguous(made)
    if name == "aten::_grouped_mm" and args[0].dtype != torch.bfloat16:
        low = [a.bfloat16() if isinstance(a, torch.Tensor) and i < 2 else a
               for i, a in enumerate(args)]  # fmt: skip
        return torch.empty_like(op(*low, **kwargs), dtype=args[0].dtype).contiguous()
    return same_view(op)(*args, **kwargs)


def _contiguous(made: torch.Tensor) -> torch.Tensor:
    return torch.empty(made.shape, dtype=made.dtype, device=made.device)


def _masked(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results: list[Any]
) -> tuple[Any, ...]:
    names = [argument.name for argument in op._schema.arguments]
    mask = (dict(zip(names, args, strict=False)) | kwargs)["output_mask"]
    return tuple(t if is_kept else None for t, is_kept in zip(results, mask, strict=True))


def split_call(
    sig: Signature, args: list[Any], kwargs: dict[str, Any]
) -> list[tuple[Any, Any]] | None:
    """Split a call on lists into calls on lists of length one, which give the same bits.

    Args:
        sig: The signature of its op.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Arguments and keyword arguments of each; None if the lists differ in length.
    """
    length = len(args[0])
    lists = {n for n, t in zip(sig.names, sig.types, strict=True) if t in _PER_ELEMENT}
    named = dict(zip(sig.names, args, strict=False)) | kwargs
    if any(len(value) not in (0, length) for name, value in named.items() if name in lists):
        return None

    def element(name: str, value: Any, i: int) -> Any:
        return value[i : i + 1] if name in lists else value

    return [
        (
            [element(name, value, i) for name, value in zip(sig.names, args, strict=False)],
            {name: element(name, value, i) for name, value in kwargs.items()},
        )
        for i in range(length)
    ]


def written_tensors(
    sig: Signature, writes: Collection[str], args: list[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the tensors among the arguments that are changed in place, in schema order.

    Args:
        sig: The signature of the op.
        writes: Names of the arguments that are changed.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    bound = sig.bound(tuple(args), kwargs)
    return [
        t for name in sig.names if name in writes for t in instances(bound.get(name), torch.Tensor)
    ]
