"""Gradient accumulation: devices add up their own terms of a gradient, then reduce them once.

Problem: a piece of the batch is cut over the devices like the batch, so each device has a partial
gradient of every piece. Reduced piece by piece, as in the recipes for a whole batch, it crosses the
links as many times as there are pieces.
Idea: if a recipe keeps gradients whole on every device, a device has room for the sum of its own
terms (`PARTIAL`); after the last piece, one reduction makes the gradient. Each owner needs only its
part, so stage 1 of ZeRO is cut like stage 2, and moves 2 (k - 1) / k times the parameters' bytes
per device, whatever the number of pieces. Stages 2 and 3 have no room for whole gradients, and
reduce each piece.
Complexity: O(size of the graph of the pieces), beside the recipe.
Reference: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.4 (`no_sync`).
Deviations: only for steps whose own code does not accumulate gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph, Op
from pardnn.plan.mesh import PARTIAL
from pardnn.plan.pieces import ADD
from pardnn.shard.recipes.data_parallel import data_parallel
from pardnn.shard.recipes.in_pieces import in_pieces
from pardnn.shard.recipes.product import PRODUCTS
from pardnn.shard.recipes.zero import zero_2
from pardnn.shard.sharding import FixedLayouts, Sharding

#: Recipes that keep gradients whole, and how each cuts the step once their sums are made.
ACCUMULATING: Mapping[str, Callable[..., Sharding]] = {
    "data-parallel": data_parallel,
    "zero-1": zero_2,
    "data-parallel*megatron": PRODUCTS["data-parallel*megatron"],
    "zero-1*megatron": PRODUCTS["zero-2*megatron"],
}


def accumulating(name: str, whole: Graph, cut: Graph, target: Cluster | FixedLayouts) -> Sharding:
    """Return how a recipe cuts the pieces of a step.

    Args:
        name: A key of `ACCUMULATING`.
        whole: The step with its batch whole.
        cut: The same with its batch in pieces, and with `totals`.
        target: What to lay tensors over.

    Raises:
        UsageError: E226, E228 or E229, if the step has no such cut.
    """
    found = in_pieces(whole, cut, ACCUMULATING[name](whole, target))
    axes = len(found.mesh.shape)
    batch = axes - (name in PRODUCTS)  # the last axis of a product cuts tensors
    layouts, loops = dict(found.layouts), dict(found.axes)
    for term, op in _terms(cut):
        held = layouts.get(term, (None,) * axes)
        layouts[term] = (PARTIAL,) * batch + held[batch:]
        if op.kind == ADD:
            loops[op.name] = (None,) * batch + loops[op.name][batch:]
    return Sharding(found.mesh, layouts, loops)


def _terms(cut: Graph) -> Iterator[tuple[str, Op]]:
    """Yield the tensors that are added up to a total, each with the op that makes it."""
    makers = {tensor.name: op for op in cut.ops for tensor in op.outputs}
    waiting = [op.inputs[0] for op in cut.ops if op.name.endswith(":total")]
    while waiting:
        name = waiting.pop()
        maker = makers[name]
        yield name, maker
        if maker.kind == ADD:
            waiting += maker.inputs
