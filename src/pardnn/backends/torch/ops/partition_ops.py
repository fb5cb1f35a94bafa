"""The calls of a partitioned graph (`plan.partitioned_graph`): cut out, put together, add up.

| kind | runs as |
| --- | --- |
| `pardnn.slice` | a view of the local tensor |
| `pardnn.fetch` | one new buffer, each piece copied into it; a plain row of pieces is one `cat` |
| `pardnn.reduce` | the first two parts into a new tensor, the others onto it, in the given order |
| `pardnn.update` | a copy into a box of the local tensor |
| `pardnn.join` | the tensor itself; a piece that was not received in its place is copied there |
| `pardnn.draw` | the random call on the whole, of which the boxes are kept |

Every device combines the same parts in the same order, so copies agree to the last bit.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from pardnn.errors import FileError, shown
from pardnn.graph.ir import Op
from pardnn.plan.mesh import Box
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE, UPDATE

Environment = MutableMapping[str, Any]
Result = Callable[[Environment], Any]


def shard_of(op: Op, whole: Mapping[str, Op]) -> tuple[str, Box | None]:
    """Return which source of the whole graph an op stands for, and its box; None for all of it.

    Args:
        op: A source of a planned graph.
        whole: The sources of the graph itself, by the names of their values.
    """
    shard = (op.arguments or {}).get("shard")
    if shard is None:
        return op.name, None
    box = tuple((low, high) for low, high in shard["box"])
    source = whole[shard["of"]]
    shape = source.outputs[0].shape or ()
    return source.name, None if box == tuple((0, n) for n in shape) else box


def box_view(value: torch.Tensor, box: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the view of a tensor that a box names."""
    for dim, (low, high) in enumerate(box):
        if low != 0 or high != value.shape[dim]:
            value = value.narrow(dim, low, high - low)
    return value


def box_copy(
    value: torch.Tensor, box: Sequence[Sequence[int]], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a box of a tensor in a storage of its own.

    Args:
        value: The whole tensor.
        box: First and last index per dim, the last exclusive.
        strides: Of the result; contiguous if absent.
    """
    view = box_view(value.detach(), box)
    strides = tuple(strides) if strides is not None else _contiguous(view.shape)
    made = torch.empty_strided(view.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(view).requires_grad_(value.requires_grad)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def planned_call(op: Op, args: Sequence[Any], device: torch.device) -> Result:
    """Return what an op of a partitioned graph does, but for a draw.

    Args:
        op: The op.
        args: Its decoded arguments; tensors stand by name.
        device: Of new tensors.

    Raises:
        FileError: E402, if its arguments mean nothing.
    """
    make = _MAKERS.get(op.kind)
    try:
        if make is None:
            raise ValueError("there is no such call")
        return make(op, args, device)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise FileError(f"op {shown(op.name)} ({shown(op.kind)}) cannot run: {error}") from error


def _slice(_op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    name, box = args
    return lambda env: box_view(env[name], box)


def _update(_op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    name, box, source = args

    def update(env: Environment) -> Any:
        box_view(env[name], box).copy_(env[source])
        return env[name]

    return update


def _join(_op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    name, pieces = args

    def join(env: Environment) -> Any:
        buffer = env[name]
        for piece, box in pieces:
            place, value = box_view(buffer, box), env[piece]
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        return buffer

    return join


def receive_view(op: Op, piece: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what finds the place of a received piece in the buffer that a join completes.

    Args:
        op: The join.
        piece: Name of the piece.
    """
    _, rows = (op.arguments or {})["args"]
    box = next(box for reference, box in rows if reference["tensor"] == piece)
    return lambda buffer: box_view(buffer, box)


def _fetch(op: Op, args: Sequence[Any], device: torch.device) -> Result:
    shape, fill, pieces = args
    (output,) = op.outputs
    shape, dtype = tuple(shape), getattr(torch, output.dtype or "float32")
    strides = tuple(output.strides or _contiguous(shape))
    names = [name for name, _ in pieces]
    dim = _row(shape, [box for _, box in pieces]) if fill is None else None
    if dim is not None and len(names) > 1:

        def in_a_row(env: Environment) -> torch.Tensor:
            buffer = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            return torch.cat([env[name] for name in names], dim, out=buffer)

        return in_a_row
    places = [(name, *_place(box, strides)) for name, box in pieces]

    def fetch(env: Environment) -> torch.Tensor:
        buffer = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if fill is not None:
            buffer.fill_(fill)
        for name, size, offset in places:
            buffer.as_strided(size, strides, offset).copy_(env[name])
        return buffer

    return fetch


def _place(box: Sequence[Sequence[int]], strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return size and offset of a box in a buffer, elements."""
    size = tuple(high - low for low, high in box)
    return size, sum(low * stride for (low, _), stride in zip(box, strides, strict=True))


def _row(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """Return the dim along which boxes, in their order, make up the whole; None if they do not."""
    for dim, extent in enumerate(shape):
        rest = [[(0, n) for d, n in enumerate(shape) if d != dim]] * len(boxes)
        if [[tuple(e) for d, e in enumerate(box) if d != dim] for box in boxes] != rest:
            continue
        ends = [0, *(box[dim][1] for box in boxes)]
        if [box[dim][0] for box in boxes] == ends[:-1] and ends[-1] == extent:
            return dim
    return None


_COMBINE: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum,
    "prod": torch.mul,
}  # fmt: skip


def _reduce(op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    how, names, weights = args
    combine = _COMBINE[how]
    (first, *others), strides = names, op.outputs[0].strides
    if weights is not None:
        return _weighted(names, weights, strides)

    def reduce(env: Environment) -> torch.Tensor:
        total = _laid_out(env[first], strides)
        for name in others:
            combine(total, env[name], out=total)
        return total

    if strides is None and len(others) == 1:
        (second,) = others
        return lambda env: combine(env[first], env[second]).contiguous()
    return reduce


def _weighted(names: Sequence[str], weights: Sequence[float], strides: Any) -> Result:
    def mean(env: Environment) -> torch.Tensor:
        total = _laid_out(env[names[0]], strides).mul_(weights[0])
        for name, weight in zip(names[1:], weights[1:], strict=True):
            total.add_(env[name], alpha=weight)
        return total

    return mean


def _laid_out(value: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    if strides is None:
        return value.clone(memory_format=torch.contiguous_format)
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(value)


_MAKERS: Mapping[str, Callable[[Op, Sequence[Any], torch.device], Result]] = {
    SLICE: _slice,
    UPDATE: _update,
    JOIN: _join,
    FETCH: _fetch,
    REDUCE: _reduce,
}


def with_ones(data: Any, made: dict[str, Any]) -> Any:
    """Return a draw's arguments with a name for each tensor of ones, which is put into `made`."""
    if isinstance(data, list):
        return [with_ones(item, made) for item in data]
    if isinstance(data, dict) and set(data) == {"ones"}:
        # No tensor of a graph file can have this name: names there are printed, this is not.
        name = f"\0ones{len(made)}"
        shape, dtype, strides = data["ones"]
        made[name] = (tuple(shape), tuple(strides or _contiguous(shape)), getattr(torch, dtype))
        return {"tensor": name}
    return data


def cut_results(
    call: Result,
    boxes: Sequence[Box | None],
    ones: Mapping[str, Any],
    device: torch.device,
    flat: Callable[[Any], list[Any]],
) -> Result:
    """Return a random call on whole tensors that keeps one box of each of its results.

    Args:
        call: The call.
        boxes: Of each result, None for what nobody needs.
        ones: Shape, strides and dtype of the tensors of ones among its arguments.
        device: Of those.
        flat: Puts the results of a call into a list.
    """

    def kept(env: Environment) -> list[Any]:
        filled = {
            name: torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1)
            for name, (shape, strides, dtype) in ones.items()
        }
        results = flat(call(ChainMap(filled, env)))
        return [
            None if box is None else box_copy(value, box)
            for value, box in zip(results, boxes, strict=True)
        ]

    return kept
