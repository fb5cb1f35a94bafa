"""Positions that only a run knows: `queue[:, i : i + n] = keys`, `bank[i] = row`, `x[i]`.

Problem: a slice would be a view whose position in memory depends on data, such as MoCo's queue at
its pointer. Its size does not if both bounds are the same number plus constants.

Idea: such a write becomes `index_copy_` at `i + arange(n)`, such a read `index_select`: calls with
known shapes and the same bits. A slice that Python would clip, or count from the end, is then an
error at run time. A read is a copy instead of a view: it is refused if either is written while the
other is still used, except that `x[i] += y` writes its copy back.

Deviation: numbers that the program counts itself are guarded, so the step is captured for each.

Complexity: as indexing, and a copy of what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.default_dtype import numpy_dtype
from pardnn.backends.torch.capture.trace_ir import ITEM, Storage, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import HostNode, node_of

_SUMS = {"scalar.add": 1, "aten.add.Tensor": 1, "scalar.sub": -1, "aten.sub.Tensor": -1}


def tensor_of_numbers(
    tracer: Tracer, real: Callable[..., Any], data: Any, **options: Any
) -> torch.Tensor:
    """Return `torch.tensor(data)` of a number that only a run knows, or of a list with one."""
    found = _dtype_of(data)
    if "dtype" not in options and _is_of_numpy(tracer, data):
        raise numpy_dtype(tracer.locator.line())
    if found is None:
        return real(data, **options)
    dtype = options.pop("dtype", None) or found
    requires_grad = options.pop("requires_grad", False)
    options.pop("pin_memory", None)
    return _made(data, dtype, options).requires_grad_(requires_grad)


def _is_of_numpy(tracer: Tracer, data: Any) -> bool:
    if isinstance(data, list | tuple):
        return any(_is_of_numpy(tracer, each) for each in data)
    node = node_of(data)
    return node is not None and tracer.scalars.is_of_numpy(node)


def _made(data: Any, dtype: torch.dtype, options: dict[str, Any]) -> torch.Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_made(each, dtype, options) for each in data])
    return torch.scalar_tensor(data, dtype=dtype, **options)


def _dtype_of(data: Any) -> torch.dtype | None:
    """Return the dtype of a tensor of numbers with one among them that only a run knows."""
    numbers, is_data = [data], False
    kinds: set[type] = set()
    while numbers:
        at = numbers.pop()
        node = node_of(at)
        if isinstance(at, list | tuple):
            numbers += at
        elif node is None and type(at) not in (bool, int, float):
            return None
        else:
            is_data |= node is not None and node.hint is None
            kinds.add(type(at) if node is None else node.kind)
    if not is_data:
        return None
    if float in kinds:
        return torch.get_default_dtype()
    return torch.int64 if int in kinds else torch.bool


class _Place(NamedTuple):
    """Where a number of the run indexes a tensor.

    Attributes:
        view: The tensor, or its view by the rest of the key.
        dim: The dim of the view.
        first: The first position, a symbol.
        size: How many there are; None for one that has no dimension of its own.
    """

    view: torch.Tensor
    dim: int
    first: Any
    size: int | None


class _Read(NamedTuple):
    """A copy that stands for a view.

    Attributes:
        base: The tensor that was indexed.
        copy: The storage of the result.
        at: Its base, the dimension, the first position and the size.
        end: Index of the first call after it.
        line: "file.py:line" of the user's code.
    """

    base: Storage
    copy: Storage
    at: tuple[Any, ...]
    end: int
    line: str | None


class Positions:
    """Indexing while a step is traced: the methods replace those of `torch.Tensor`."""

    def __init__(self) -> None:
        self._reads: list[_Read] = []
        self._written_back: dict[Storage, int] = {}

    def get(self, tracer: Tracer, real: Callable[..., Any], tensor: Any, key: Any) -> Any:
        """Return `tensor[key]`; a copy if only a run knows the key's numbers."""
        place = _place(tensor, key)
        return real(tensor, key) if place is None else self._copied(tracer, place)

    def narrow(
        self, tracer: Tracer, real: Callable[..., Any], tensor: Any, dim: int, start: Any,
        length: int,
    ) -> Any:  # fmt: skip
        """Return `tensor.narrow(dim, start, length)`."""
        if not _may_be_position(start):
            return real(tensor, dim, start, length)
        first = _numbered(start)
        key = (*[slice(None)] * (dim % tensor.dim()), slice(first, first + length))
        place = _place(tensor, key)
        if place is None:
            return real(tensor, dim, start, length)
        return self._copied(tracer, place)

    def _copied(self, tracer: Tracer, place: _Place) -> torch.Tensor:
        found = place.view.index_select(place.dim, _index(tracer, place))
        found = _laid_out(found, place.view.stride())
        found = found.squeeze(place.dim) if place.size is None else found
        base, copy = (tracer.aliases.value(each).storage for each in (place.view, found))
        assert base is not None
        assert copy is not None
        read = _Read(base, copy, _at(tracer, place), len(tracer.calls), tracer.locator.line())
        self._reads.append(read)
        self._written_back[copy] = len(copy.writes)
        return found

    def set(
        self, tracer: Tracer, real: Callable[..., Any], tensor: Any, key: Any, value: Any
    ) -> None:
        """Do `tensor[key] = value`."""
        place = _place(tensor, key)
        if place is None:
            real(tensor, key, value)
            return
        view, dim, _, size = place
        if isinstance(value, FakeTensor):
            copy = tracer.aliases.value(value).storage
            if any(r.copy is copy and r.at == _at(tracer, place) for r in self._reads):
                assert copy is not None
                self._written_back[copy] = len(copy.writes)
        shape = [*view.shape[:dim], *([] if size is None else [size]), *view.shape[dim + 1 :]]
        if not isinstance(value, torch.Tensor):
            value = view.new_empty(shape).fill_(value)
        value = value.to(view.device, view.dtype)
        while value.dim() > len(shape) and value.shape[0] == 1:
            value = value.squeeze(0)
        value = value.expand(shape)
        value = value.unsqueeze(dim) if size is None else value
        view.index_copy_(dim, _index(tracer, place), value)

    def check(self, tracer: Tracer) -> None:
        """Reject a copy that would differ from the view that it replaces.

        Raises:
            UnsupportedError: E803, if one of the two is written and the other used afterwards.
        """
        for read in self._reads:
            later = tracer.calls[read.end :]
            writes = {*read.base.writes}
            first = next((i for i, call in enumerate(later) if call in writes), len(later))
            used = any(v.storage is read.copy for call in later[first + 1 :] for v in call.inputs)
            if used or len(read.copy.writes) > self._written_back[read.copy]:
                raise unsupported.data_dependent_size(read.line)


def _place(tensor: Any, key: Any) -> _Place | None:
    """Return the place of a key with one number of the run; None for any other key."""
    items = key if type(key) is tuple else (key,)
    if not any(map(_may_be_position, items)) or not isinstance(tensor, FakeTensor):
        return None
    num = sum(each is not Ellipsis for each in items)
    full = [slice(None)] * (tensor.dim() - num)
    whole = [x for each in items for x in (full if each is Ellipsis else [_numbered(each)])]
    whole += [] if Ellipsis in items else full
    if len(whole) != tensor.dim() or not all(type(x) in (int, slice, torch.SymInt) for x in whole):
        return None
    found = [i for i, each in enumerate(whole) if _is_position(each)]
    if len(found) != 1:
        return None
    at = whole[found[0]]
    size = _size(at) if isinstance(at, slice) else 1
    if size is None:
        return None
    whole[found[0]] = slice(None)
    view = tensor if all(each == slice(None) for each in whole) else tensor[tuple(whole)]
    dim = sum(isinstance(each, slice) for each in whole[: found[0]])
    return (
        _Place(view, dim, at.start, size) if isinstance(at, slice) else _Place(view, dim, at, None)
    )


def _may_be_position(item: Any) -> bool:
    """Whether an item of a key may be a number of the run, or have one as a bound."""
    if isinstance(item, slice):
        return any(isinstance(x, torch.SymInt | FakeTensor) for x in (item.start, item.stop))
    is_number = isinstance(item, FakeTensor) and not item.dim() and not item.is_floating_point()
    return isinstance(item, torch.SymInt) or (is_number and item.dtype != torch.bool)


def _is_position(item: Any) -> bool:
    bounds = (item.start, item.stop) if isinstance(item, slice) else (item,)
    nodes = [node for node in map(node_of, bounds) if node is not None]
    return bool(nodes) and all(node.hint is None for node in nodes)


def _numbered(item: Any) -> Any:
    """Return an item of a key with tensors replaced by their numbers."""
    if isinstance(item, slice):
        return slice(_numbered(item.start), _numbered(item.stop), item.step)
    return item.item() if isinstance(item, FakeTensor) and item.numel() == 1 else item


def _size(item: slice) -> int | None:
    """Return the length of a slice if it does not depend on its first position; else None."""
    begin, end = node_of(item.start), node_of(item.stop)
    if begin is None or end is None or item.step not in (None, 1):
        return None
    (base, offset), (other, further) = _linear(begin.value), _linear(end.value)
    return further - offset if base is other and further > offset else None


def _linear(value: Value) -> tuple[Value, int]:
    """Return a number as the sum of another one and a constant."""
    offset = 0
    while True:
        call = value.call
        one, *others = call.args or [None]
        if call.kind == ITEM:
            value = call.inputs[0]
        elif call.kind in _SUMS and not call.kwargs and type(others[0]) is int:
            offset += _SUMS[call.kind] * others[0]
            value = one
        elif call.kind == "scalar.add" and type(one) is int:
            offset += one
            value = others[0]
        else:
            return value, offset


def _index(tracer: Tracer, place: _Place) -> torch.Tensor:
    """Return the positions as a tensor."""
    node, device = node_of(place.first), place.view.device
    assert node is not None
    at = torch.arange(place.size or 1, device=device)
    read = _read_behind(node)
    held = None if read is None else read.tensor
    if held is None or read.value.call.inputs[0] is not tracer.aliases.fresh_value(held):
        at = at + place.first
    else:
        at = at + held.detach().reshape(1).to(device, torch.int64)
        offset = _linear(node.value)[1] - _linear(read.value)[1]
        at = at + offset if offset else at
    if place.size is not None:
        return at
    return torch.where(at < 0, at + place.view.shape[place.dim], at)  # counted from the end


def _read_behind(node: HostNode) -> HostNode | None:
    """Return the number of the tensor to which constants were added; None if there is none."""
    base, _ = _linear(node.value)
    waiting = [node]
    while waiting:
        at = waiting.pop()
        if at.tensor is not None and _linear(at.value)[0] is base:
            return at
        waiting += at.parents
    return None


def _laid_out(copy: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a copy with the strides of the view that it replaces, on which sums depend."""
    pairs = zip(copy.stride(), strides, copy.shape, strict=True)
    if all(one == other or size == 1 for one, other, size in pairs):
        return copy
    laid_out = torch.empty_strided(copy.shape, strides, dtype=copy.dtype, device=copy.device)
    return laid_out.copy_(copy)


def _at(tracer: Tracer, place: _Place) -> tuple[Any, ...]:
    node = node_of(place.first)
    assert node is not None
    return (tracer.aliases.value(place.view).geometry, place.dim, *_linear(node.value), place.size)
