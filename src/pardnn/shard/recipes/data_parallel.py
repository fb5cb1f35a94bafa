"""Data parallelism: each device takes a part of the batch; all have the whole model.

Problem: make the most common scheme a plan that can be compared with others.
Idea: the batch is followed through the step as for microbatches (`microbatch.analysis`), with one
piece on each device at the same time. Dims that run over the samples are cut; everything else is
whole on every device. A gradient is a partial result of each device, so its reduction is an
all-reduce.
Complexity: O(ops), as that analysis.
Reference: Li et al., "PyTorch Distributed", VLDB 2020 (DDP).
Deviations: the result is that of one device, so a batch norm sees the whole batch, which has to be
moved. A weight that is read several times, as by the time steps of a recurrent layer, has as many
partial gradients, and each is reduced where it is made: a layout cannot say "not reduced yet".
"""

from __future__ import annotations

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Layout, Mesh
from pardnn.shard.cache import begin_graph
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.microbatch.analysis import analyse_batch
from pardnn.shard.recipes.loops import bytes_of_tensors, cheapest_loop
from pardnn.shard.sharding import AxisLoops, FixedLayouts, Sharding


def data_parallel(
    graph: Graph, target: Mesh | Cluster | FixedLayouts, objective: str = "bytes"
) -> Sharding:
    """Return the batch cut over all devices, and everything else whole on each.

    Args:
        graph: A captured graph.
        target: What to lay the batch over.
        objective: Not used: the choice does not depend on it.

    Raises:
        UsageError: E226, if the batch has fewer samples than there are devices.
    """
    del objective  # the choice does not depend on it
    begin_graph()
    mesh = mesh_over(target)
    layouts, axes = dict[str, Layout](), dict[str, AxisLoops]()
    if mesh.size > 1:
        cut = analyse_batch(graph, mesh.size, in_runs=False)  # shards are boxes
        dims = {name: at.dim for name, at in cut.dims.items()}
        sizes = bytes_of_tensors(graph)
        for name, call in cut.calls.items():
            is_cut = name in cut.ops
            loop = cut.ops[name].loop if is_cut else cheapest_loop(call, dims, sizes, mesh.size)
            axes[name] = (loop,) * len(mesh.shape)
        layouts = {name: (dim,) * len(mesh.shape) for name, dim in dims.items()}
    return Sharding(mesh, layouts, axes)


def mesh_over(target: Mesh | Cluster | FixedLayouts) -> Mesh:
    """Return the target if it is a mesh, otherwise the mesh over it."""
    if isinstance(target, FixedLayouts):
        return target.mesh
    return mesh_of(target) if isinstance(target, Cluster) else target
