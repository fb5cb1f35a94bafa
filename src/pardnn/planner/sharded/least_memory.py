"""Lower bounds on the bytes of devices under a sharding, whatever is fetched and when.

Problem: a cut that does not fit is partitioned once for each way to share fetches, seconds each.
Idea: local ops keep the order of the graph, so a device has its shard of a tensor from the op that
makes it to the last op that reads that shard itself. Regions that are fetched, and results that are
added up or resharded, count while their op runs: how much longer they are held is for the
partitioner to decide. Of tensors that share a storage the largest counts: a local view may be a
copy.
Once there is a partition, the others are bounded by what it holds without what it fetched.
Complexity: O(ops x devices); equal devices are walked once per storage.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor, contiguous_strides, writes
from pardnn.plan.partitioned_graph import REDUCE
from pardnn.plan.plan import PlanArrays
from pardnn.shard.boxes import bytes_of, inside, lengths
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.emitter import Emitter
from pardnn.shard.spmd.partial_sums import is_total
from pardnn.shard.spmd.random_ops import is_random_op
from pardnn.shard.spmd.templates import PartitionedOp, partition_op
from pardnn.sim.peak import live_bytes, live_ranges
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
    read, brief = _reads_and_needs(emitter)
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
    held = held.cumsum(axis=0)
    held[:-1] += brief
    return held.max(axis=0).tolist()


class _Shards(NamedTuple):
    """When a tensor is made and, per device, when its shard is last read, and its bytes."""

    made: int
    read: list[int]
    sizes: tuple[int, ...]


def _reads_and_needs(emitter: Emitter) -> tuple[dict[str, list[int]], Int64[ndarray, "n k"]]:
    """Return who reads shards, and the bytes of what an op has besides them while it runs.

    Returns:
        By tensor and device, the position of the last op that reads the shard, -1 if none does; and
        by position and device, bytes of fetched regions, results and workspace.
    """
    graph, found = emitter.graph, dict[str, list[int]]()
    brief = np.zeros((len(graph.ops), emitter.mesh.size), dtype=np.int64)
    for at, number in enumerate(graph.arrays.topological.tolist()):
        check_time()
        op = graph.ops[number]
        is_call = not op.is_source and op.kind != LOSS_KIND and not is_random_op(op.kind)
        if not is_call or is_total(emitter, op):
            continue
        axes = emitter.sharding.axes[op.name]
        partitioned = partition_op(op, axes, emitter.tensors, emitter.mesh)
        assert partitioned is not None, "legal shardings cut what can be cut"
        brief[at] = _made(emitter, op, partitioned)
        fetched: dict[str | None, list[int]] = {}
        for slot, name in partitioned.names.items():
            last = found.setdefault(name, [-1] * emitter.mesh.size)
            template, own = partitioned.template, emitter.boxes[name]
            if template.boxes[slot] == own:
                last[:] = [at] * len(own)
                continue
            sizes = fetched.setdefault(emitter.owners[name], [0] * emitter.mesh.size)
            for device, (request, box) in enumerate(zip(template.requests[slot], own, strict=True)):
                if request is None or not request.content:
                    continue
                if inside(request.box, box):
                    last[device] = at
                else:
                    size = bytes_of(emitter.tensors[name], lengths(request.box))
                    sizes[device] = max(sizes[device], size)
        for sizes in fetched.values():
            brief[at] += sizes
    return found, brief


def _made(emitter: Emitter, op: Op, partitioned: PartitionedOp) -> list[int]:
    """Return the bytes of each device's results of an op, unadded, and its workspace."""
    template = partitioned.template
    sizes = [math.ceil(op.workspace * fraction) for fraction in template.fractions]
    for tensor in op.outputs:
        if emitter.owners[tensor.name] == tensor.name and tensor.name in partitioned.returned:
            number = partitioned.returned.index(tensor.name)
            for device, box in enumerate(template.made[number]):
                sizes[device] += 0 if box is None else bytes_of(tensor, lengths(box))
    return sizes


def least_of_partitions(local: Graph, plan: PlanArrays) -> Int64[ndarray, " k"]:
    """Return a lower bound on devices' peaks in every partition of a sharding, from one of them.

    Partitions differ in how long they hold what is fetched: slices, received copies and regions
    count for the ops alone that read them, unless they are added up. O(edges).

    Args:
        local: The partitioned graph.
        plan: Its plain plan.
    """
    a, n = local.arrays, local.arrays.num_ops
    reader, read = np.repeat(np.arange(n), np.diff(a.input_ptr)), a.input_tensor
    is_move = np.array([op.kind.startswith("pardnn.") for op in local.ops])[a.tensor_op]
    is_sum = np.array([op.kind == REDUCE for op in local.ops])
    is_fetched = ~is_move
    is_fetched[read[~is_sum[reader]]] = True
    sizes = np.where(is_fetched, a.tensor_bytes, 0)
    sizes = np.concatenate([np.where(is_move, sizes, 0), sizes[plan.message_tensor]])
    allocated, released = live_ranges(a, plan)
    devices = np.concatenate([plan.place[a.tensor_op], plan.message_target])
    is_live = (allocated < n) & (sizes > 0)
    last = np.minimum(released, plan.order_ptr[devices + 1] - 1)
    brief = np.zeros(n + 1, dtype=np.int64)
    np.add.at(brief, np.maximum(allocated, plan.order_ptr[devices])[is_live], sizes[is_live])
    np.add.at(brief, last[is_live] + 1, -sizes[is_live])
    is_brief = is_fetched[read] & (a.tensor_alias[read] < 0)
    is_brief &= is_move[read] | (plan.place[a.tensor_op[read]] != plan.place[reader])
    needed = np.zeros(n, dtype=np.int64)
    np.add.at(needed, reader, np.where(is_brief, a.tensor_bytes[read], 0))
    least = live_bytes(a, plan, (allocated, released)) - brief.cumsum()[:n] + needed[plan.order_op]
    ends = zip(plan.order_ptr[:-1], plan.order_ptr[1:], strict=True)
    return np.array([least[begin:end].max(initial=0) for begin, end in ends], dtype=np.int64)


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
