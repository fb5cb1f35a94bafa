"""Legalization: the rules of shardings, and the nearest sharding that follows them.

Problem: a sharding may cut what cannot be cut, or give two layouts to one storage that is written
in place.
Idea: tensors and ops that cannot be cut as stated stay whole. All tensors that share a written
storage must have the same blocks; if one is needed elsewhere, the storage is whole everywhere, and
so are the ops that write or view it. This is repeated until nothing changes.
Complexity: O(passes x ops), with at most one pass per storage that is left whole.
"""

from __future__ import annotations

from pardnn.graph.ir import Graph, Op, writes
from pardnn.plan.mesh import Layout, owned_boxes
from pardnn.shard.boxes import whole
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.emitter import Emitter
from pardnn.shard.spmd.gathered_writes import gathered_writes
from pardnn.shard.spmd.partial_sums import is_partial, misused_terms
from pardnn.shard.spmd.random_ops import is_random_op
from pardnn.shard.spmd.templates import non_local_tensor, partition_op, replicate_op
from pardnn.time_limit import check_time


def legalize(graph: Graph, sharding: Sharding) -> Sharding:
    """Return the nearest sharding that can be carried out.

    Args:
        graph: A captured graph.
        sharding: Any layouts and loops; tensors and ops that it lacks count as whole.
    """
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    none = (None,) * len(sharding.mesh.shape)
    layouts: dict[str, Layout] = {}
    for name, tensor in tensors.items():
        check_time()
        layout = sharding.layouts.get(name, none) if tensor.shape else none
        fits = owned_boxes(tensor.shape or (), layout, sharding.mesh) is not None
        layouts[name] = layout if fits else none
    axes = {op.name: sharding.axes.get(op.name, none) for op in graph.ops if not op.is_source}
    emitter = Emitter(graph, Sharding(sharding.mesh, layouts, axes))
    members: dict[str | None, list[str]] = {}
    for name in tensors:
        members.setdefault(emitter.owners[name], []).append(name)
    changed = True
    while changed:
        changed = False
        for op in graph.ops:
            if op.is_source:
                continue
            check_time()
            found = _misplaced(emitter, op, axes)
            if found is None:
                continue
            group = members[emitter.owners[found]]
            if is_partial(emitter, found):
                layouts.update(dict.fromkeys(group, none))
                changed = True
                continue
            # All whole already: shapes of a storage that do not agree, as of a graph without them.
            if axes[op.name] == none and all(layouts[name] == none for name in group):
                continue
            changed = True
            axes[op.name] = none
            for name in group:
                layouts[name] = none
                emitter.boxes[name] = (whole(tensors[name].shape or ()),) * emitter.mesh.size
    return Sharding(sharding.mesh, layouts, axes)


def _misplaced(emitter: Emitter, op: Op, axes: dict[str, tuple[str | None, ...]]) -> str | None:
    """Leave an op whole that cannot be cut; return a tensor that it still does not find locally."""
    partitioned = partition_op(op, axes[op.name], emitter.tensors, emitter.mesh)
    if partitioned is None:
        axes[op.name] = (None,) * len(emitter.mesh.shape)
    if is_random_op(op.kind):
        for name in writes(op):
            owner = emitter.owners[name]
            written = [t.name for t in op.outputs if emitter.owners[t.name] == owner]
            if any(emitter.boxes[each] != emitter.boxes[name] for each in written):
                return name
        return None
    if partitioned is None:
        partitioned = replicate_op(op, emitter.tensors, emitter.mesh)
    gathered = gathered_writes(emitter, op, partitioned)
    misused = misused_terms(emitter, op, partitioned)
    return misused or non_local_tensor(emitter, op, partitioned, gathered)
