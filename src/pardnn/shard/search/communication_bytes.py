"""Bytes that a sharding moves, exactly: counted box by box, device by device.

    sum over ops, inputs, devices of |needed - owned|
    + sum over ops, outputs, devices of the partial results of the owned block that others hold

times the size of an element. A region that two ops need counts twice: each has its own fetch.
An output whose share is no partial result but lies elsewhere is exchanged: |owned - computed|.
Reference: Tofu (EuroSys 2019), section 5.1 and Lemma 1, with ghost regions carried along exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import PardnnError
from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor
from pardnn.plan.mesh import Layout
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.partition.call import call_of, fingerprint, skeleton_of
from pardnn.shard.partition.mesh_strategies import (
    Flags,
    MeshStrategies,
    mesh_strategy_of,
    owned_array,
)
from pardnn.shard.partition.per_device import input_names
from pardnn.shard.sharding import Sharding


def volumes(boxes: Int64[ndarray, "*b rank 2"]) -> Int64[ndarray, "*b"]:
    """Return the number of elements of each box; 0 where it is empty."""
    lengths = boxes[..., 1] - boxes[..., 0]
    return np.multiply.reduce(np.maximum(lengths, 0, out=lengths), axis=-1)


def overlaps(
    one: Int64[ndarray, "*b rank 2"], other: Int64[ndarray, "*c rank 2"]
) -> Int64[ndarray, "*d rank 2"]:
    """Return what boxes have in common, broadcast against each other."""
    low = np.maximum(one[..., 0], other[..., 0])
    found = np.empty((*low.shape, 2), dtype=np.int64)
    found[..., 0] = low
    np.minimum(one[..., 1], other[..., 1], out=found[..., 1])
    return found


def common_volumes(
    one: Int64[ndarray, "*b rank 2"], other: Int64[ndarray, "*c rank 2"]
) -> Int64[ndarray, "*d"]:
    """Return the number of elements that boxes have in common, broadcast against each other."""
    lengths = np.minimum(one[..., 1], other[..., 1])
    lengths -= np.maximum(one[..., 0], other[..., 0])
    return np.multiply.reduce(np.maximum(lengths, 0, out=lengths), axis=-1)


def fetched(
    regions: Int64[ndarray, "a n rank 2"], owned: Int64[ndarray, "l n rank 2"]
) -> Int64[ndarray, "a l"]:
    """Return the elements that all devices fetch, for each way to compute and to own.

    Args:
        regions: What each of n devices needs, inside of the tensor, in a ways.
        owned: What each owns, in l layouts.
    """
    common = common_volumes(regions[:, None], owned[None]).sum(axis=-1)
    return volumes(regions).sum(axis=-1)[:, None] - common


def combined(
    results: Int64[ndarray, "a n rank 2"],
    reduced: Sequence[Sequence[bool]],
    axis_sizes: Sequence[int],
    owned: Int64[ndarray, "l n rank 2"],
) -> Int64[ndarray, "a l"]:
    """Return the elements that devices get of others to have what they own of an output.

    Of each group of partial results a device gets what its block has in common with them, except
    what it has itself; those of a group that are equal count once.

    Args:
        results: Where the result of each of n devices lies, inside of the output, in a ways.
        reduced: For each way and mesh axis, whether results along it are partial ones.
        axis_sizes: Devices along each mesh axis.
        owned: What each device owns, in l layouts.
    """
    own = common_volumes(owned[None], results[:, None]).sum(axis=-1)
    held = volumes(owned).sum(axis=-1)
    total = held - own
    partial = [strategy for strategy, flags in enumerate(reduced) if any(flags)]
    if partial:
        groups = np.array(
            [group_numbers(tuple(reduced[strategy]), tuple(axis_sizes)) for strategy in partial]
        )
        total[partial] += partial_volumes(results[partial], groups, owned[None]) - held
    return total


def partial_volumes(
    results: Int64[ndarray, "p n rank 2"],
    groups: Int64[ndarray, "p n"],
    owned: Int64[ndarray, "#p l n rank 2"],
) -> Int64[ndarray, "p l"]:
    """Return the elements of partial results that make up what devices own, their own included.

    Args:
        results: Where the partial result of each device lies.
        groups: Number of each device's group, equal for those whose results are added up.
        owned: What each device owns, in l layouts.
    """
    equal = (results[:, :, None] == results[:, None]).all(axis=(-1, -2))
    equal &= groups[:, :, None] == groups[:, None]
    is_first = equal.argmax(axis=-1) == np.arange(results.shape[1])
    common = common_volumes(owned[:, :, :, None], results[:, None, None]).sum(axis=2)
    return (common * is_first[:, None]).sum(axis=-1)


@lru_cache(maxsize=1024)
def group_numbers(reduced: tuple[bool, ...], axis_sizes: tuple[int, ...]) -> ndarray:
    """Return a number per device, equal for those whose partial results are of one group."""
    number = np.zeros(tuple(axis_sizes), dtype=np.int64)
    for axis, (flag, size) in enumerate(zip(reduced, axis_sizes, strict=True)):
        if flag:
            shape = [1] * len(axis_sizes)
            shape[axis] = size
            number = number * size + np.arange(size).reshape(shape)
    return number.reshape(-1)


def element_bytes(tensor: Tensor) -> int:
    """Bytes of one element."""
    count = math.prod(tensor.shape or ())
    return tensor.bytes // count if count else 0


def is_call(op: Op) -> bool:
    """Whether an op is a call on tensors: no source, no mark of the loss, no host arithmetic."""
    return not op.is_source and op.kind != LOSS_KIND and not op.kind.startswith("scalar.")


def slots_of(call: Any) -> dict[str, str]:
    """Return the name of the tensor in each slot.

    Without a description, or with one that does not fit, slots are numbers: "0" for the first
    tensor of the arguments and so on.
    """
    try:
        if description_of(call.kind) is not None:
            return input_names(call)
    except PardnnError:
        pass
    names = skeleton_of(call.kind, call.args, call.kwargs).names
    return {str(slot): name for slot, name in enumerate(names)}


def sharding_bytes(graph: Graph, sharding: Sharding) -> dict[str, int]:
    """Return the bytes that each op moves between devices, by its name; sums to the objective.

    Args:
        graph: The graph.
        sharding: Of all its tensors and calls.

    Raises:
        ValueError: If an op's axes cannot be cut, or a tensor's layout leaves a device nothing.
    """
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    kept: dict[Any, int] = {}
    found: dict[str, int] = {}
    for op in graph.ops:
        if not is_call(op):
            continue
        call = call_of(op, tensors)
        names = list(dict.fromkeys([*call.shapes, *(t.name for t in op.outputs)]))
        key = (
            fingerprint(call),
            tuple(names.index(n) for n in op.inputs),
            tuple((sharding.layouts[n], element_bytes(tensors[n])) for n in names),
            sharding.axes[op.name],
        )
        if key not in kept:
            kept[key] = _op_bytes(op, call, tensors, sharding)
        found[op.name] = kept[key]
    return found


def _op_bytes(op: Op, call: Any, tensors: Mapping[str, Tensor], sharding: Sharding) -> int:
    strategies = mesh_strategy_of(call, sharding.axes[op.name], sharding.mesh)
    if strategies is None:
        raise ValueError(f"op {op.name!r} cannot be cut along {sharding.axes[op.name]}")
    axis_sizes = sharding.mesh.shape
    total = 0
    for name, regions in needed(strategies, slots_of(call), call.shapes).items():
        owned = _owned(tensors[name], sharding.layouts[name], axis_sizes)
        total += int(fetched(regions, owned[None]).sum()) * element_bytes(tensors[name])
    for name, result, flags in produced(op, strategies):
        owned = _owned(tensors[name], sharding.layouts[name], axis_sizes)
        moved = combined(result[None], [flags], axis_sizes, owned[None])
        total += int(moved.sum()) * element_bytes(tensors[name])
    return total


def needed(
    strategies: MeshStrategies, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Int64[ndarray, "r n rank 2"]]:
    """Return the distinct regions that an op fetches of each input, one or several, by name.

    Args:
        strategies: To compute the op; the first is taken.
        names: Of the tensor in each slot.
        shapes: Of tensors.
    """
    found: dict[str, list[ndarray]] = {}
    for slot in strategies.dim_slices.inputs:
        name = names[slot]
        if not strategies.contents[0][slot] or not shapes[name]:
            continue
        inside = strategies.region(slot)[0]
        known = found.setdefault(name, [])
        if not any(np.array_equal(inside, other) for other in known):
            known.append(inside)
    return {name: np.stack(boxes) for name, boxes in found.items() if boxes}


def produced(op: Op, strategies: MeshStrategies) -> list[tuple[str, ndarray, Flags]]:
    """Return name, shares and partial axes of each tensor that an op computes in the first way."""
    returned = (op.arguments or {}).get("returns") or [tensor.name for tensor in op.outputs]
    results = [strategies.result(output) for output in range(len(returned))]
    rows = zip(returned, results, strategies.reduced[0], strict=True)
    return [(name, result[0], flags) for name, result, flags in rows if name and result is not None]


def _owned(tensor: Tensor, layout: Layout, axis_sizes: tuple[int, ...]) -> ndarray:
    owned = owned_array(tensor.shape or (), layout, axis_sizes)
    if owned is None:
        raise ValueError(f"tensor {tensor.name!r} cannot be laid out as {layout}")
    return owned


def total_bytes(graph: Graph, sharding: Sharding) -> int:
    """Return the bytes that a step moves between devices: the objective `bytes`."""
    return sum(sharding_bytes(graph, sharding).values())
