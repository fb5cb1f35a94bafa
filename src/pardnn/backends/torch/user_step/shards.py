"""Tensors of which a rank holds a shard: what would be wrong on a shard is refused by name.

Problem: between steps a cut parameter has the shape of its shard. `p.mul_(0.5)` is right on each
rank, but `p[0] = 5.0` writes a row of every shard, `nn.init.normal_(p)` draws the same numbers for
all of them, and `p.norm()` is that of a part. A tensor made from a shard is taken for a whole one.
Idea: the object gets a special class, whose `__torch_function__` allows what computes each element
from the same one: the result is the shard of what eager code would get, and is marked, too. The
rest is refused, unless code of this package asks.

Complexity: some microseconds more for each function and getter of such a tensor; none for others,
and none in steps, which run on tensors of their own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pardnn.backends.torch.user_step.absent import flat, is_absent, written_by
from pardnn.backends.torch.user_step.code_names import is_library_frame, is_own_frame, users_line
from pardnn.errors import MismatchError, shown
from pardnn.plan.mesh import Box

#: Functions that read and write no element, or only show them.
_METADATA = frozenset({
    "__delete__", "__dir__", "__format__", "__hash__", "__len__", "__repr__", "_is_view",
    "data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "is_pinned", "is_same_size", "is_set_to", "is_shared", "is_signed",
    "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "retain_grad", "set_", "share_memory_", "size", "storage",
    "storage_offset", "storage_type", "stride", "untyped_storage",
})  # fmt: skip
#: Functions that compute each element from the same one, without the underscores around.
_ELEMENTWISE = frozenset({
    "abs", "absolute", "add", "addcdiv", "addcmul", "bfloat16", "bool", "ceil", "clamp",
    "clamp_max", "clamp_min", "clip", "clone", "constant", "contiguous", "copy", "copysign", "cos",
    "cpu", "cuda", "detach", "div", "divide", "double", "empty_like", "eq", "erf", "exp", "exp2",
    "expm1", "fill", "float", "floor", "floor_divide", "floordiv", "fmod", "frac", "full_like",
    "ge", "gt", "half", "int", "isfinite", "isinf", "isnan", "le", "lerp", "log", "log10", "log1p",
    "log2", "logical_and", "logical_not", "logical_or", "long", "lt", "masked_fill", "maximum",
    "minimum", "mul", "multiply", "nan_to_num", "ne", "neg", "negative", "ones", "ones_like",
    "pow", "rdiv", "reciprocal", "relu", "remainder", "rfloordiv", "round", "rpow", "rsqrt",
    "rsub", "sigmoid", "sign", "sin", "sqrt", "square", "sub", "subtract", "tanh", "to",
    "true_divide", "trunc", "type", "where", "xlogy", "zero", "zeros", "zeros_like",
})  # fmt: skip


#: Attributes with the elements of the tensor, or with those of another one.
_SAME_ELEMENTS = frozenset({"data", "grad", "_grad", "_base"})
_TEXTS = frozenset({"__repr__", "__format__"})


class ShardOf(NamedTuple):
    """Which part of which tensor a rank holds.

    Attributes:
        name: The name of the whole tensor.
        shape: Its shape.
        box: The part.
    """

    name: str
    shape: tuple[int, ...]
    box: Box

    def is_alike(self, other: ShardOf | None) -> bool:
        """Whether another one is the same part of a tensor of the same shape."""
        return other is not None and (self.shape, self.box) == (other.shape, other.box)


class _Known(NamedTuple):
    storage: StorageWeakRef  # as long as it exists, no other storage has its address
    of: ShardOf


#: What is held, by the address of the storage.
_SHARDS: dict[int, _Known] = {}
_MAX_GONE = 4096


def mark_shard(tensor: Any, of: ShardOf) -> None:
    """Mark a tensor of the user's objects as a shard; one of a class not torch's own stays.

    Args:
        tensor: What this rank holds.
        of: What that is.
    """
    if type(tensor) not in _CLASSES or tensor.layout != torch.strided:
        return
    storage = tensor.untyped_storage()
    if len(_SHARDS) > _MAX_GONE:
        for key in [key for key, known in _SHARDS.items() if known.storage.expired()]:
            del _SHARDS[key]
    _SHARDS[storage._cdata] = _Known(StorageWeakRef(storage), of)
    tensor.__class__ = _CLASSES[type(tensor)]


def mark_if_shard(tensor: torch.Tensor) -> None:
    """Mark a tensor that has got the memory of a shard."""
    if _SHARDS and type(tensor) in _CLASSES and _known(tensor) is not None:
        tensor.__class__ = _CLASSES[type(tensor)]


def has_shards() -> bool:
    """Whether any tensor of this process may be marked."""
    return bool(_SHARDS)


def shard_held(tensor: Any) -> ShardOf | None:
    """Return what a marked tensor is the shard of; None for others."""
    return _known(tensor) if isinstance(tensor, _Shard) else None


def made_of_a_shard(name: str, of: ShardOf) -> MismatchError:
    """Return the error for a tensor that was computed from a shard and put into the state.

    Args:
        name: Where it is.
        of: What it was computed from.
    """
    return MismatchError(
        f"{shown(name)} was made from {_part(of)}: the call{users_line()} would take it for a "
        f"whole tensor.\n{_INSTEAD}",
        code="E529",
        details={"name": name, "of": of.name},
    )


class _Shard(torch.Tensor):
    """What both classes have in common.

    Attributes:
        present_class: The class that the object had.
    """

    present_class: type[torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return _accessed(func, args)
        if name in _METADATA or _is_our_call():
            with torch._C.DisableTorchFunctionSubclass():
                if name in _TEXTS:  # these read the class
                    args = (args[0].detach(), *args[1:])
                return func(*args, **kwargs)
        return _called(func, name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                copy = self.detach().clone()
                if self.present_class is torch.nn.Parameter:
                    copy = torch.nn.Parameter(copy)
                copy.requires_grad_(self.requires_grad).__dict__.update(self.__dict__)
                if not _is_our_call():
                    mark_shard(copy, _of(self))
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not _is_our_call():
            raise _error("a file would get", _of(self))
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)


class _ShardTensor(_Shard):
    present_class = torch.Tensor


class _ShardParameter(_Shard, torch.nn.Parameter):
    present_class = torch.nn.Parameter


_CLASSES: dict[type, type] = {each.present_class: each for each in (_ShardTensor, _ShardParameter)}
for _kind in _CLASSES.values():  # classes show the same name on every rank
    _kind.__name__ = _kind.__qualname__ = _kind.present_class.__name__


def _known(tensor: torch.Tensor) -> ShardOf | None:
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided:
            return None
        known = _SHARDS.get(tensor.untyped_storage()._cdata)
    return None if known is None or known.storage.expired() else known.of


def _of(tensor: torch.Tensor) -> ShardOf:
    of = _known(tensor)
    assert of is not None
    return of


def _is_our_call() -> bool:
    """Whether code of this package, rather than the user's, calls torch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and is_library_frame(frame) and not is_own_frame(frame):
        frame = frame.f_back
    return frame is None or is_own_frame(frame)


def _accessed(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Get or set an attribute: what shares its memory is marked, and what has other data is not."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute == "grad" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        of = shard_held(args[0])
        if of is not None and not (_goes_with(args[1], of) or _is_our_call()):
            raise _error("grad is set, with other elements, of", of)
    with torch._C.DisableTorchFunctionSubclass():
        value = func(*args)
    for each in (args[0], value):
        if isinstance(each, _Shard) and _known(each) is None:
            each.__class__ = each.present_class
    if isinstance(value, torch.Tensor) and value is not args[0] and not _is_our_call():
        of = _known(value)
        if of is not None and attribute not in _SAME_ELEMENTS:
            raise _error("reads, in another order,", of)
        mark_if_shard(value)
    return value


def _called(func: Callable[..., Any], name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch's that computes each element from the same ones.

    Raises:
        MismatchError: E529, if it is another one.
    """
    given = [*args, *kwargs.values()]
    tensors = [each for each in flat(given) if isinstance(each, torch.Tensor)]
    of = next(found for each in tensors if (found := shard_held(each)) is not None)
    base = "fill" if _fills_all(name, args) else name.strip("_").removeprefix("foreach_")
    base = base if base in _ELEMENTWISE else base.removeprefix("i")
    if base not in _ELEMENTWISE or not all(_goes_with(each, of) for each in tensors):
        what = "writes to" if written_by(func, given, kwargs.get("out")) else "reads"
        raise _error(f"{name}() {what}", of)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        for each in flat([result]):
            if isinstance(each, torch.Tensor) and each.shape == _shape(of):
                mark_shard(each, of)
    return result


def _fills_all(name: str, args: Sequence[Any]) -> bool:
    """Whether this is `p[...] = 1.0` or `p[:] = 1.0`."""
    return name == "__setitem__" and (args[1] is Ellipsis or args[1] == slice(None))


def _goes_with(tensor: torch.Tensor, of: ShardOf) -> bool:
    """Whether elements of a tensor can be computed with the elements of a shard."""
    if (mine := shard_held(tensor)) is not None:
        return of.is_alike(mine) and tensor.shape == _shape(of)
    return tensor.numel() == 1 and not is_absent(tensor)


def _shape(of: ShardOf) -> tuple[int, ...]:
    return tuple(high - low for low, high in of.box)


_INSTEAD = (
    "Do it in the step, under an argument if not in every one (`if reset: p[0] = 0.0`). "
    "fast.whole(name) reads the whole on every rank; fast.state_dict() has it on rank 0, and "
    "fast.load_state_dict(...) takes it back changed. What computes each element from itself "
    "(`p.mul_(0.5)`) is right on shards, too."
)


def _part(of: ShardOf) -> str:
    box = ", ".join(f"{low}:{high}" for low, high in of.box)
    return f"what this rank holds of {shown(of.name)}, [{box}] of {list(of.shape)}"


def _error(what: str, of: ShardOf) -> MismatchError:
    return MismatchError(
        f"{what} {_part(of)}{users_line()}, and not the whole.\n{_INSTEAD}",
        code="E529",
        details={"name": of.name},
    )
