"""Data parallelism across groups of devices, tensor parallelism inside them.

Problem: tensor parallelism sends activations in every layer, so it suits few devices with fast
links; data parallelism sends gradients once, and suits the others.
Idea: each mesh axis has its own recipe. The last axis, with the fastest links, uses Megatron's;
along the others each group has a part of the batch. So a tensor is cut by both: an activation by
samples and by heads, a state by its owner's part and by columns. Owners get parts of a dim that
tensor parallelism does not cut; a bias has no such dim, so its states are whole along the first
axes.
Complexity: that of both recipes.
Reference: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", SC 2021; Rajbhandari et al., "ZeRO", SC 2020, section 1.
Deviations: tensor parallelism has one axis of the mesh, the smallest prime factor if links are
alike. There is no product with ZeRO's third stage. See also the deviations of both recipes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

from pardnn.cluster import Cluster
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph
from pardnn.plan.mesh import Mesh, make_mesh
from pardnn.shard.partition.mesh_strategies import mesh_strategy_of
from pardnn.shard.recipes.data_parallel import data_parallel, mesh_over
from pardnn.shard.recipes.megatron import megatron
from pardnn.shard.recipes.zero import with_owners
from pardnn.shard.search.coarsening import op_calls
from pardnn.shard.sharding import AxisLoops, FixedLayouts, Sharding

Kept = Literal["whole", "states", "gradients"]
"""What each group of devices keeps a part of."""


def batch_by_tensor(
    cut: Kept, graph: Graph, target: Mesh | Cluster | FixedLayouts, objective: str = "bytes"
) -> Sharding:
    """Return the batch cut over the first mesh axes, and weights by Megatron's rule on the last.

    Args:
        cut: The tensors of a parameter that are also cut over the first axes.
        graph: A captured graph.
        target: What to lay tensors over.
        objective: Not used: the choice does not depend on it.

    Raises:
        UsageError: E229, if the mesh has one axis; E226 or E228, if one of the recipes is
            impossible.
    """
    mesh = mesh_over(target)
    if mesh.size == 1:
        return Sharding(mesh, {}, {})
    if len(mesh.shape) < 2:
        raise UsageError(
            f"{mesh.size} devices have one mesh axis; tensor parallelism inside groups and data "
            "parallelism across them need two.\nUse at least 4 devices, and not a prime number "
            "of them.",
            code="E229",
        )
    tensor = megatron(graph, make_mesh(mesh.shape[-1:], mesh.shares[-1:]), objective)
    batch = data_parallel(graph, make_mesh(mesh.shape[:-1], mesh.shares[:-1]), objective)
    if cut != "whole":
        taken = tensor.layouts
        batch = with_owners(graph, batch, gradients=cut == "gradients", taken=taken)
    names = batch.layouts.keys() | tensor.layouts.keys()
    none = (None,) * (len(mesh.shape) - 1)
    layouts = {n: (*batch.layouts.get(n, none), *tensor.layouts.get(n, (None,))) for n in names}
    axes: dict[str, AxisLoops] = {}
    for call in op_calls(graph):
        name = call.op.name
        both = *batch.axes.get(name, none), *tensor.axes.get(name, (None,))
        can_be = mesh_strategy_of(call.call, both, mesh) is not None
        axes[name] = both if can_be else (*both[:-1], None)
    return Sharding(mesh, layouts, axes)


#: The products by name.
PRODUCTS: Mapping[str, Callable[..., Sharding]] = {
    "data-parallel*megatron": functools.partial(batch_by_tensor, "whole"),
    "zero-1*megatron": functools.partial(batch_by_tensor, "states"),
    "zero-2*megatron": functools.partial(batch_by_tensor, "gradients"),
}
