"""The ops that SPMD partitioning adds to a graph (`plan.partitioned_graph`), as torch calls.

| kind | runs as |
| --- | --- |
| `pardnn.slice` | a view of the local tensor |
| `pardnn.fetch` | MultiFetch: shards copied into one new buffer; adjacent ones by one `cat` |
| `pardnn.reduce` | spread reduction: the partial results added in the given order |
| `pardnn.update` | a copy into a box of the local tensor |
| `pardnn.join` | the buffer itself; a shard that was not received in place is copied into it |
| `pardnn.from_host`, `pardnn.to_host` | copies between a device and its host (`plan.rewritten`) |
| `pardnn.draw` | the random call on the whole tensors, of which boxes are kept |

Every device reduces the same partial results in the same order, so replicas agree to the last bit.

Source: Tofu (EuroSys 2019), section 6, for MultiFetch and spread reduction.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.devices import empty_tensor
from pardnn.errors import FileError, shown
from pardnn.graph.ir import FROM_HOST, TO_HOST, Op, contiguous_strides
from pardnn.plan.mesh import Box
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE, UPDATE

Environment = MutableMapping[str, Any]
Result = Callable[[Environment], Any]


def box_view(value: torch.Tensor, box: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return a box of a tensor as a view.

    Args:
        value: The whole tensor.
        box: First and last index per dim, the last exclusive.
    """
    for dim, (low, high) in enumerate(box):
        if low != 0 or high != value.shape[dim]:
            value = value.narrow(dim, low, high - low)
    return value


def box_copy(
    value: torch.Tensor, box: Sequence[Sequence[int]], strides: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a copy of a box of a tensor, in its own storage.

    Args:
        value: The whole tensor.
        box: First and last index per dim, the last exclusive.
        strides: The strides of the result, in elements; contiguous if None.
    """
    view = box_view(value.detach(), box)
    strides = tuple(strides) if strides is not None else contiguous_strides(view.shape)
    made = torch.empty_strided(view.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(view).requires_grad_(value.requires_grad)


def bind_partition_op(op: Op, args: Sequence[Any], device: torch.device) -> Result:
    """Return the function that runs an op of the table, except a draw.

    Args:
        op: The op.
        args: Its decoded arguments; references for tensors.
        device: The device of new tensors.

    Returns:
        A function of the environment that returns the op's result.

    Raises:
        FileError: E402, if its arguments are invalid.
    """
    make = _BINDERS.get(op.kind)
    try:
        if make is None:
            raise ValueError("there is no such call")
        return make(op, args, device)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise FileError(f"op {shown(op.name)} ({shown(op.kind)}) cannot run: {error}") from error


def _slice(_op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    name, box = args
    return lambda env: box_view(env[name], box)


def _from_host(op: Op, args: Sequence[Any], device: torch.device) -> Result:
    (name,) = args
    (output,) = op.outputs
    return lambda env: empty_tensor(output, device).copy_(env[name])


def _to_host(_op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    host, name = args
    return lambda env: env[host].copy_(env[name])


def _update(_op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    name, box, source = args

    def update(env: Environment) -> Any:
        box_view(env[name], box).copy_(env[source])
        return env[name]

    return update


def _join(_op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    name, shards = args

    def join(env: Environment) -> Any:
        buffer = env[name]
        for shard, box in shards:
            place, value = box_view(buffer, box), env[shard]
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        return buffer

    return join


def receive_view(op: Op, shard: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that finds where in a join's buffer a shard is received in place.

    Args:
        op: The join.
        shard: Name of the shard.

    Returns:
        A function of the buffer that returns the view.
    """
    _, shards = (op.arguments or {})["args"]
    box = next(box for reference, box in shards if reference["tensor"] == shard)
    return lambda buffer: box_view(buffer, box)


def _fetch(op: Op, args: Sequence[Any], device: torch.device) -> Result:
    shape, fill, shards = args
    (output,) = op.outputs
    shape, dtype = tuple(shape), getattr(torch, output.dtype or "float32")
    strides = tuple(output.strides or contiguous_strides(shape))
    names = [name for name, _ in shards]
    dim = concatenation_dim(shape, [box for _, box in shards]) if fill is None else None
    if dim is not None and len(names) > 1:

        def concatenate(env: Environment) -> torch.Tensor:
            buffer = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            return torch.cat([env[name] for name in names], dim, out=buffer)

        return concatenate
    places = [(name, *_place(box, strides)) for name, box in shards]

    def fetch(env: Environment) -> torch.Tensor:
        buffer = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if fill is not None:
            buffer.fill_(fill)
        for name, size, offset in places:
            buffer.as_strided(size, strides, offset).copy_(env[name])
        return buffer

    return fetch


def _place(box: Sequence[Sequence[int]], strides: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return shape and offset, elements, of a box in a buffer."""
    size = tuple(high - low for low, high in box)
    return size, sum(low * stride for (low, _), stride in zip(box, strides, strict=True))


def concatenation_dim(shape: Sequence[int], boxes: Sequence[Box]) -> int | None:
    """Return the dim along which boxes concatenate to the whole; None if there is none.

    Args:
        shape: The shape of the whole tensor.
        boxes: First and last index per dim, the last exclusive.
    """
    for dim, extent in enumerate(shape):
        rest = [[(0, n) for d, n in enumerate(shape) if d != dim]] * len(boxes)
        if [[tuple(e) for d, e in enumerate(box) if d != dim] for box in boxes] != rest:
            continue
        ends = [0, *(box[dim][1] for box in boxes)]
        if [box[dim][0] for box in boxes] == ends[:-1] and ends[-1] == extent:
            return dim
    return None


#: How partial results are combined, by the name of the reduction; a quotient has just two.
COMBINE: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum,
    "prod": torch.mul, "quotient": torch.div,
}  # fmt: skip


def _reduce(op: Op, args: Sequence[Any], _device: torch.device) -> Result:
    how, names, weights = args
    combine = COMBINE[how]
    (first, *others), strides = names, op.outputs[0].strides
    if weights is not None:
        return _weighted(names, weights, strides)

    def reduce(env: Environment) -> torch.Tensor:
        total = copy_with_strides(env[first], strides)
        for name in others:
            combine(total, env[name], out=total)
        return total

    if strides is None and len(others) == 1:
        (second,) = others
        return lambda env: combine(env[first], env[second]).contiguous()
    return reduce


def _weighted(names: Sequence[str], weights: Sequence[float], strides: Any) -> Result:
    def mean(env: Environment) -> torch.Tensor:
        total = copy_with_strides(env[names[0]], strides).mul_(weights[0])
        for name, weight in zip(names[1:], weights[1:], strict=True):
            total.add_(env[name], alpha=weight)
        return total

    return mean


def copy_with_strides(value: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Return a copy with these strides, in elements; contiguous if None."""
    if strides is None:
        return value.clone(memory_format=torch.contiguous_format)
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return made.copy_(value)


_BINDERS: Mapping[str, Callable[[Op, Sequence[Any], torch.device], Result]] = {
    SLICE: _slice,
    UPDATE: _update,
    JOIN: _join,
    FETCH: _fetch,
    REDUCE: _reduce,
    FROM_HOST: _from_host,
    TO_HOST: _to_host,
}


def name_ones(data: Any, made: dict[str, Any]) -> Any:
    """Return a draw's arguments with each tensor of ones replaced by a reference.

    Args:
        data: The arguments.
        made: Gets shape, strides and dtype of each tensor of ones, by name.
    """
    if isinstance(data, list):
        return [name_ones(item, made) for item in data]
    if isinstance(data, dict) and set(data) == {"ones"}:
        # No tensor of a graph file can have this name: names there are printable, this is not.
        name = f"\0ones{len(made)}"
        shape, dtype, strides = data["ones"]
        made[name] = (
            tuple(shape),
            tuple(strides or contiguous_strides(shape)),
            getattr(torch, dtype),
        )
        return {"tensor": name}
    return data


def keep_boxes(
    call: Result,
    boxes: Sequence[Box | None],
    ones: Mapping[str, Any],
    device: torch.device,
    flat: Callable[[Any], list[Any]],
) -> Result:
    """Return a random call on whole tensors that keeps one box of each of its results.

    Args:
        call: The call.
        boxes: The box to keep of each result; None for a result that no op reads.
        ones: Shape, strides and dtype of the tensors of ones among its arguments, by name.
        device: The device of the tensors of ones.
        flat: Flattens the result of a call.
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
