"""Spread reduction: partial results are reduced by all devices, each the blocks that it owns.

Problem: one device that adds up all partial results of a tensor is a bottleneck.
Idea: reduce-scatter. The owner of each block fetches its slices of the partial results and adds
them in the order of the devices, so that all replicas agree in every bit. Where three or more
devices own the same large block, each adds up a part of it, and the parts are all-gathered: an
all-reduce. Results that are not partial but lie elsewhere are resharded.
Complexity: O(devices x slices) per result.
Reference: Tofu (EuroSys 2019), section 6: "we also spread out the reduction workload to all GPUs
(all-reduce)".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Tensor
from pardnn.plan.mesh import Box, cut_points
from pardnn.plan.partitioned_graph import FETCH, REDUCE
from pardnn.shard.boxes import Slice, bytes_of, clipped, cover, inside, lengths, nearest, relative
from pardnn.shard.partition.per_device import LocalResult
from pardnn.shard.spmd.collectives import collective_of
from pardnn.shard.spmd.emitter import (
    Anchor,
    Emitter,
    FetchRequest,
    ShardedTensor,
    box_list,
    local_tensor,
    number,
)
from pardnn.shard.spmd.multi_fetch import fetch, send_slices, view

#: From so many bytes on, the reduction of a replicated result is spread over its replicas.
SPREAD_BYTES = 1 << 14

#: The neutral element of each reducer.
IDENTITY = {"sum": 0.0, "prod": 1.0, "max": float("-inf"), "min": float("inf"), "mean": 0.0}


def reduce_or_reshard(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    anchor: Anchor,
    *,
    is_view: bool,
) -> None:
    """Bring a result from how it was computed to its layout.

    Partial results are reduced by the owners of the blocks; others are resharded.

    Args:
        emitter: Where to write.
        computed: The results as they were computed; those with the final name stay.
        results: What they are of the whole, by device.
        anchor: Where in the step.
        is_view: Blocks may be views of the results; else they are copied out of them.

    Raises:
        InvalidPlanError: E410, if partial results cannot be combined.
    """
    tensor = computed.tensor
    axes = [a for a in range(len(emitter.mesh.shape)) if any(s.reducers[a] for s in results)]
    if axes:
        _reduce_scatter(emitter, computed, results, axes, anchor)
        return
    own = emitter.own(tensor.name)
    requests: list[FetchRequest | None] = []
    for device, (name, box) in enumerate(zip(own.names, own.boxes, strict=True)):
        assert box is not None
        is_done = computed.names[device] == name
        if not is_done and is_view and inside(box, results[device].box):
            view(emitter, computed, device, box, anchor, name)
            is_done = True
        requests.append(None if is_done else FetchRequest(box))
    _fetch_all(emitter, computed, requests, anchor)


def _fetch_all(
    emitter: Emitter,
    computed: ShardedTensor,
    requests: Sequence[FetchRequest | None],
    anchor: Anchor,
) -> None:
    """Fetch blocks under their final names."""
    if not any(request is not None for request in requests):
        return
    base = emitter.fresh(f"{computed.tensor.name}:own")
    ops = [f"{base}@{device}" for device in emitter.devices]
    hold = tuple(m if w is not None else None for m, w in zip(ops, requests, strict=True))
    outs = [f"{computed.tensor.name}@{device}" for device in emitter.devices]
    fetch(emitter, computed, requests, Anchor(anchor.op, hold), ops, outs)


def _reducer(tensor: Tensor, results: Sequence[LocalResult]) -> str:
    names = {reducer.name for result in results for reducer in result.reducers if reducer}
    if len(names) > 1 or not names <= IDENTITY.keys():
        raise InvalidPlanError(
            f"partial results of {shown(tensor.name)} would be combined by {sorted(names)}; one of "
            f"{', '.join(IDENTITY)} can be.\nCut another loop of the op."
        )
    return names.pop()


def _reduce_scatter(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    axes: Sequence[int],
    anchor: Anchor,
) -> None:
    """Reduce partial results: every owner adds up its block; replicas share the work."""
    tensor = computed.tensor
    own = emitter.own(tensor.name)
    blocks = _scattered_blocks(tensor, own.boxes)
    is_split = blocks != own.boxes
    base = emitter.fresh(f"{tensor.name}:sum")
    ops = tuple(f"{base}@{device}" for device in emitter.devices)
    by_device = _addends(emitter, computed, results, axes, blocks)
    anchor = Anchor(anchor.op, ops)
    sources = {
        device: [source for addend in addends for source in addend.sources]
        for device, addends in by_device.items()
    }
    first = [next((r.name for r in by_device[d] if r.name), ops[d]) for d in emitter.devices]
    slices = send_slices(emitter, computed, sources, anchor, first)
    collective = collective_of(emitter.mesh, computed.boxes, blocks, tensor.shape or (), axes)
    reducer = _reducer(tensor, results)
    for device, addends in by_device.items():
        block = blocks[device]
        assert block is not None
        names = [
            _assembled_addend(emitter, tensor, device, block, addend, slices, reducer, anchor)
            for addend in addends
        ]
        out = local_tensor(tensor, ops[device] if is_split else str(own.names[device]), block)
        more: dict[str, Any] = {"collective": collective}
        kind, args = REDUCE, _reduction(reducer, names, [addend.weight for addend in addends])
        if not addends:  # as of a strided convolution, whose gradient does not reach this block
            kind, args = FETCH, [list(lengths(block)), number(IDENTITY[reducer]), []]
        emitter.helper(device, ops[device], kind, args, names, out, anchor, more=more)
    if is_split:
        requests = [FetchRequest(box) for box in own.boxes if box is not None]
        _fetch_all(emitter, ShardedTensor(tensor, ops, blocks), requests, anchor)


def _reduction(reducer: str, names: Sequence[str], weights: Sequence[float]) -> list[Any]:
    """Return the arguments of a reduction of local tensors."""
    shares = [weight / sum(weights) for weight in weights] if reducer == "mean" else None
    return [reducer, [{"tensor": name} for name in names], shares]


def _scattered_blocks(tensor: Tensor, boxes: Sequence[Box | None]) -> tuple[Box | None, ...]:
    """Cut a large block that three or more devices own into one smaller block for each of them."""
    owners: dict[Box, list[int]] = {}
    for device, box in enumerate(boxes):
        assert box is not None
        owners.setdefault(box, []).append(device)
    found = list(boxes)
    for box, devices in owners.items():
        shape = lengths(box)
        dim = next((d for d, size in enumerate(shape) if size >= len(devices)), None)
        if len(devices) < 3 or dim is None or bytes_of(tensor, shape) < SPREAD_BYTES:
            continue
        points = cut_points(shape[dim], len(devices))
        assert points is not None
        low = box[dim][0]
        for device, (a, z) in zip(devices, itertools.pairwise(points), strict=True):
            found[device] = (*box[:dim], (low + a, low + z), *box[dim + 1 :])
    return tuple(found)


class _Addend(NamedTuple):
    """One of the partial results that make up a block.

    Attributes:
        weight: For "mean".
        sources: The slices that it is made of.
        name: Of the op that assembles it; None if it is one slice.
    """

    weight: float
    sources: Sequence[Slice]
    name: str | None


def _addends(
    emitter: Emitter,
    computed: ShardedTensor,
    results: Sequence[LocalResult],
    axes: Sequence[int],
    blocks: Sequence[Box | None],
) -> dict[int, list[_Addend]]:
    """Return the addends of each device's block, in the order of the devices."""
    shape = computed.tensor.shape or ()
    groups: dict[tuple[int, ...], list[Box | None]] = {}
    for device, result in enumerate(results):
        coordinates = emitter.mesh.coordinates(device)
        group = groups.setdefault(tuple(coordinates[a] for a in axes), [None] * emitter.mesh.size)
        group[device] = clipped(result.box, shape)
    found: dict[int, list[_Addend]] = {}
    for device, block in enumerate(blocks):
        assert block is not None
        addends = found.setdefault(device, [])
        for key in sorted(groups):
            sources, _ = cover(block, tuple(groups[key]), nearest(emitter.mesh.shape, device))
            if not sources:
                continue
            is_one = len(sources) == 1 and sources[0][1] == block
            name = (
                None if is_one else emitter.fresh(f"{computed.tensor.name}:addend") + f"@{device}"
            )
            addends.append(_Addend(results[sources[0][0]].weight, sources, name))
    return found


def _assembled_addend(
    emitter: Emitter,
    tensor: Tensor,
    device: int,
    block: Box,
    addend: _Addend,
    slices: Mapping[Slice, str],
    reducer: str,
    anchor: Anchor,
) -> str:
    """Return the name of an addend: one slice, or several with the neutral element around."""
    names = [slices[key] for key in addend.sources]
    if addend.name is None:
        return names[0]
    addends_of = [
        [{"tensor": name}, box_list(relative(box, block))]
        for name, (_, box) in zip(names, addend.sources, strict=True)
    ]
    args = [list(lengths(block)), number(IDENTITY[reducer]), addends_of]
    output = local_tensor(tensor, addend.name, block)
    return emitter.helper(device, addend.name, FETCH, args, names, output, anchor)
