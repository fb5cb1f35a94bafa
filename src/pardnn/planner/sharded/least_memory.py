"""Lower bound on the bytes of devices under a sharding, whatever is fetched and when.

Problem: a cut that does not fit is partitioned once for each way to share fetches, seconds each.
Idea: local ops keep the order of the graph, so a device has its shard of a tensor from the op that
makes it to the last op that reads that shard itself. Regions that are fetched or added up, and what
an op makes while it runs, do not count: how long they are held is for the partitioner to decide.
Of tensors that share a storage the largest counts: a local view may be a copy.
Complexity: O(ops x devices); equal devices are walked once per storage.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import LOSS_KIND, Graph, Tensor, contiguous_strides, writes
from pardnn.shard.boxes import bytes_of, inside, lengths
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.emitter import Emitter
from pardnn.shard.spmd.partial_sums import is_total
from pardnn.shard.spmd.random_ops import is_random_op
from pardnn.shard.spmd.templates import partition_op
from pardnn.time_limit import check_time


def least_peaks(graph: Graph, sharding: Sharding) -> list[int]:
    """Return a lower bound on each device's peak, in addition to what it always holds.

    Args:
        graph: A captured graph.
        sharding: Of all its tensors and calls; see `legalize`.
    """
    emitter = Emitter(graph, sharding)
    members: dict[str, list[_Shards]] = {}
    held = np.zeros((len(graph.ops) + 1, emitter.mesh.size), dtype=np.int64)
    residual = {t.name for op in graph.ops if op.memory == "residual" for t in op.outputs}
    read = _last_readers(emitter)
    for at, number in enumerate(graph.arrays.topological.tolist()):
        op = graph.ops[number]
        if is_random_op(op.kind) and writes(op):  # what it makes may be what it writes
            continue
        for tensor in op.outputs:
            owner = emitter.owners[tensor.name]
            is_counted = tensor.name == owner or _is_apart(tensor)
            if owner is not None and owner not in residual and is_counted and tensor.name in read:
                sizes = tuple(bytes_of(tensor, lengths(b)) for b in emitter.boxes[tensor.name])
                members.setdefault(owner, []).append(_Shards(at, read[tensor.name], sizes))
    for shards in members.values():
        _add(held, shards)
    return held.cumsum(axis=0).max(axis=0).tolist()


class _Shards(NamedTuple):
    """When a tensor is made and, per device, when its shard is last read, and its bytes."""

    made: int
    read: list[int]
    sizes: tuple[int, ...]


def _last_readers(emitter: Emitter) -> dict[str, list[int]]:
    """Return, by tensor and device, the position of the last op that reads the shard; -1: none."""
    graph, found = emitter.graph, dict[str, list[int]]()
    for at, number in enumerate(graph.arrays.topological.tolist()):
        check_time()
        op = graph.ops[number]
        is_call = not op.is_source and op.kind != LOSS_KIND and not is_random_op(op.kind)
        if not is_call or is_total(emitter, op):
            continue
        axes = emitter.sharding.axes[op.name]
        partitioned = partition_op(op, axes, emitter.tensors, emitter.mesh)
        assert partitioned is not None, "legal shardings cut what can be cut"
        for slot, name in partitioned.names.items():
            last = found.setdefault(name, [-1] * emitter.mesh.size)
            template, own = partitioned.template, emitter.boxes[name]
            if template.boxes[slot] == own:
                last[:] = [at] * len(own)
                continue
            for device, (request, box) in enumerate(zip(template.requests[slot], own, strict=True)):
                if request is not None and request.content and inside(request.box, box):
                    last[device] = at
    return found


def _is_apart(tensor: Tensor) -> bool:
    """Whether a view has as many bytes of storage as it has itself."""
    shape = tensor.shape or ()
    strides = tensor.strides or contiguous_strides(shape)
    end = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < end:
            return False
        end += stride * (size - 1)
    return True


def _add(held: Int64[ndarray, "p k"], shards: list[_Shards]) -> None:
    """Add what a storage holds at each position, as differences."""
    known: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    for device in range(held.shape[1]):
        key = tuple((each.made, each.read[device], each.sizes[device]) for each in shards)
        known.setdefault(key, []).append(device)
    for spans, devices in known.items():
        ends = sorted({end + 1 for made, read, _ in spans if read > made for end in (made, read)})
        for begin, end in itertools.pairwise(ends):
            size = max((size for made, read, size in spans if made < begin <= read), default=0)
            held[begin, devices] += size
            held[end, devices] -= size
