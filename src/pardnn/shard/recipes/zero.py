"""ZeRO's first two stages: data parallelism with optimizer states cut, and gradients too.

Problem: in data parallelism every device holds all states and gradients, and makes every update.
Idea: each device owns a part of every state, and updates only that part of the parameter. The
tensors that belong to a parameter, dim by dim, are its class in the search's coarsening: its
gradient, its states and the intermediate results of the update. States, and what is computed from
them, are cut along the parameter's first dim that is long enough; in stage 2 gradients are, too, so
that an all-reduce becomes a reduce-scatter. The update writes a part of a parameter that is whole,
so the parts are gathered in place (`spmd.gathered_writes`).
Complexity: O(ops), and the coarsening.
Reference: Rajbhandari et al., "ZeRO", SC 2020, section 5.
Deviations: stage 3, parameters cut as well, is `search.baselines.zero_3`. Without states stage 1 is
data parallelism. In stage 1 gradients are reduced whole and then each device's part is used, which
moves 3 (k - 1) / k times the parameters' bytes per device, and not 2: a layout cannot say "reduced
in part". A fused update that unscales gradients writes them, so stage 1 gathers them once more. In
stage 2, ops that read a whole gradient, such as a norm that no loop cuts, gather it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Layout, Mesh, owned_boxes
from pardnn.shard.recipes.data_parallel import data_parallel
from pardnn.shard.recipes.loops import bytes_of_tensors, cheapest_loop
from pardnn.shard.search.coarsening import (
    TRAINING,
    coarsened,
    gradient_names,
    op_calls,
    storage_of,
)
from pardnn.shard.search.tensor_classes import TensorClasses
from pardnn.shard.sharding import FixedLayouts, Sharding

Target = Mesh | Cluster | FixedLayouts


def zero_1(graph: Graph, target: Target, objective: str = "bytes") -> Sharding:
    """Return data parallelism with the optimizer's states cut.

    Args:
        graph: A captured graph.
        target: What to lay the batch over.
        objective: Not used: the choice does not depend on it.

    Raises:
        UsageError: E226, if the batch has fewer samples than there are devices.
    """
    return with_owners(graph, data_parallel(graph, target, objective), gradients=False)


def zero_2(graph: Graph, target: Target, objective: str = "bytes") -> Sharding:
    """Return data parallelism with the optimizer's states and the gradients cut.

    Args:
        graph: A captured graph.
        target: What to lay the batch over.
        objective: Not used: the choice does not depend on it.

    Raises:
        UsageError: E226, if the batch has fewer samples than there are devices.
    """
    return with_owners(graph, data_parallel(graph, target, objective), gradients=True)


def with_owners(
    graph: Graph,
    replicated: Sharding,
    *,
    gradients: bool,
    taken: Mapping[str, Layout] | None = None,
) -> Sharding:
    """Cut states, and optionally gradients, of replicated parameters.

    Args:
        graph: A captured graph.
        replicated: From `data_parallel`.
        gradients: Whether gradients are cut, too.
        taken: Dims of parameters that other mesh axes cut, by name: owners get parts of another
            dim.
    """
    mesh = replicated.mesh
    if mesh.size == 1:
        return replicated
    calls, storage = op_calls(graph), storage_of(graph)
    classes = coarsened(graph, calls, TRAINING, storage).classes
    dims = dict(_owner_dims(graph, classes, mesh, taken or {}))
    parameters = {op.outputs[0].name for op in graph.ops if op.kind == "parameter"}
    states = {op.outputs[0].name for op in graph.ops if op.kind == "state"}
    may_cut = {
        name: dim
        for name, dim in dims.items()
        if name not in replicated.layouts and storage.owners[name] not in parameters
    }
    cut = {name: dim for name, dim in may_cut.items() if name in states}
    if gradients:
        made = gradient_names(calls)
        cut |= {name: dim for name, dim in may_cut.items() if name in made}
    layouts, axes, count = dict(replicated.layouts), dict(replicated.axes), len(mesh.shape)
    held = {name: layout[0] for name, layout in layouts.items() if layout[0] is not None}
    sizes = bytes_of_tensors(graph)
    for call in calls:
        if not any(name in cut for name in call.op.inputs):
            continue
        for name in (t.name for t in call.op.outputs if t.name in may_cut):
            if storage.owners[name] in cut or storage.owners[name] == name:
                cut[name] = may_cut[name]  # else it is a whole gradient that a fused update writes
        if axes[call.op.name] == (None,) * count:
            axes[call.op.name] = (cheapest_loop(call, held | cut, sizes, mesh.size),) * count
    layouts |= {name: (dim,) * count for name, dim in cut.items()}
    return Sharding(mesh, layouts, axes)


def _owner_dims(
    graph: Graph, classes: TensorClasses, mesh: Mesh, taken: Mapping[str, Layout]
) -> Iterator[tuple[str, int]]:
    """Yield the dim that is cut of all that belongs to a parameter: its first one long enough."""
    done = set[str]()
    for op in graph.ops:
        if op.kind != "parameter" or classes.root[op.outputs[0].name] in done:
            continue
        (tensor,) = op.outputs
        root, shape = classes.root[tensor.name], tensor.shape or ()
        done.add(root)
        for dim in range(len(shape)):
            if dim in taken.get(tensor.name, ()):
                continue
            if owned_boxes(shape, (dim,) * len(mesh.shape), mesh) is None:
                continue
            at = classes.dims[tensor.name].index(dim) if dim in classes.dims[tensor.name] else None
            if at is not None and at not in classes.blocked.get(root, ()):
                for name in classes.members[root]:
                    own = classes.dims[name][at]
                    if own is not None:
                        yield name, own
                break
