"""Bytes that a sharding moves, exactly: counted box by box, device by device.

    sum over ops, inputs, devices of |needed - owned|
    + sum over ops, outputs, devices of the partial results of the owned block that others hold

times the size of an element. A region that two ops need counts twice: each has its own fetch. An
output that is not partial but computed elsewhere is exchanged: |owned - computed|.
Complexity: O(distinct ops x devices), x devices where results are partial.
Reference: Tofu (EuroSys 2019), section 5 ("minimize the total communication cost") and Lemma 1.
Deviations: exact boxes over all mesh axes. An input that is needed whole stays whole inside each
worker group, so two cuts that replicate it cost 3 S where Lemma 1 with section 5.2 gives 2 S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from pardnn.shard.search.box_volumes import common_volumes, group_numbers, partial_volumes, volumes
from pardnn.shard.sharding import Sharding


def fetched(
    regions: Int64[ndarray, "s n rank 2"], owned: Int64[ndarray, "l n rank 2"]
) -> Int64[ndarray, "s l"]:
    """Return the elements that all devices fetch, for each strategy and layout.

    Args:
        regions: What each of n devices needs, inside the tensor, by s strategies.
        owned: What each device owns, in l layouts.
    """
    common = common_volumes(regions[:, None], owned[None]).sum(axis=-1)
    return volumes(regions).sum(axis=-1)[:, None] - common


def combined(
    results: Int64[ndarray, "s n rank 2"],
    reduced: Sequence[Sequence[bool]],
    axis_sizes: Sequence[int],
    owned: Int64[ndarray, "l n rank 2"],
) -> Int64[ndarray, "s l"]:
    """Return the elements that devices receive to have the blocks of an output that they own.

    Of each group of partial results, a device receives the parts in its block, except what it has
    itself; equal results of a group count once.

    Args:
        results: Where the result of each of n devices lies, inside the output, by s strategies.
        reduced: For each strategy and mesh axis, whether results along it are partial.
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


def element_bytes(tensor: Tensor) -> int:
    """Bytes of one element."""
    count = math.prod(tensor.shape or ())
    return tensor.bytes // count if count else 0


def is_call(op: Op) -> bool:
    """Whether an op is a call on tensors: no source, no loss marker, no host arithmetic."""
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
        ValueError: If an op's axes cannot be cut, or a tensor's layout leaves a device without any.
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
    assert not sharding.mesh.shares, "bytes are counted on meshes of equal parts"
    axis_sizes = sharding.mesh.shape
    total = 0
    for name, regions in needed(strategies, slots_of(call)).items():
        owned = _owned(tensors[name], sharding.layouts[name], axis_sizes)
        total += int(fetched(regions, owned[None]).sum()) * element_bytes(tensors[name])
    for name, result, flags in produced(op, strategies):
        owned = _owned(tensors[name], sharding.layouts[name], axis_sizes)
        moved = combined(result[None], [flags], axis_sizes, owned[None])
        total += int(moved.sum()) * element_bytes(tensors[name])
    return total


def needed(
    strategies: MeshStrategies, names: Mapping[str, str]
) -> dict[str, Int64[ndarray, "r n rank 2"]]:
    """Return the distinct regions that an op fetches of each input, one or several, by name.

    Args:
        strategies: Of the op; the first is taken.
        names: Of the tensor in each slot.
    """
    found: dict[str, list[ndarray]] = {}
    for slot in strategies.dim_slices.inputs:
        name = names[slot]
        if not strategies.contents[0][slot]:
            continue
        inside = strategies.region(slot)[0]
        known = found.setdefault(name, [])
        if not any(np.array_equal(inside, other) for other in known):
            known.append(inside)
    return {name: np.stack(boxes) for name, boxes in found.items() if boxes}


def produced(op: Op, strategies: MeshStrategies) -> list[tuple[str, ndarray, Flags]]:
    """Return name, boxes and partial axes of each tensor that an op computes, first strategy."""
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
