"""A cut of the whole step, carried over to the graph of the pieces of its batch.

Problem: a search over the graph of m pieces takes m times as long, and pieces of one op might be
cut in different ways.
Idea: a piece of a tensor has the layout of the tensor, and a piece of an op cuts the same loop as
the op. Ops that exist only in pieces (slices, joins, sums) follow the tensors that they read and
make (`loops`).
Complexity: O(size of the cut graph).
"""

from __future__ import annotations

from collections.abc import Mapping

from pardnn.graph.ir import Graph, Tensor
from pardnn.plan.mesh import Layout
from pardnn.plan.pieces import piece_number
from pardnn.shard.recipes.loops import bytes_of_tensors, cheapest_loop
from pardnn.shard.search.coarsening import op_calls
from pardnn.shard.sharding import AxisLoops, Sharding


def in_pieces(whole: Graph, cut: Graph, sharding: Sharding) -> Sharding:
    """Return how the pieces of a step are cut.

    Args:
        whole: The step with its batch whole.
        cut: The same with its batch in pieces.
        sharding: Of the whole one.
    """
    tensors = {tensor.name: tensor for op in whole.ops for tensor in op.outputs}
    kinds = {op.name: op.kind for op in whole.ops}
    layouts: dict[str, Layout] = {}
    for op in cut.ops:
        for tensor in op.outputs:
            layout = sharding.layouts.get(_like(tensor, tensors))
            if layout is not None:
                layouts[tensor.name] = layout
    mesh, sizes = sharding.mesh, bytes_of_tensors(cut)
    dims = [
        {name: dim for name, layout in layouts.items() if (dim := layout[axis]) is not None}
        for axis in range(len(mesh.shape))
    ]
    axes: dict[str, AxisLoops] = {}
    for call in op_calls(cut):
        name = _whole_name(call.op.name, kinds)
        if kinds.get(name) == call.op.kind:
            axes[call.op.name] = sharding.axes.get(name, (None,) * len(dims))
        else:
            axes[call.op.name] = tuple(
                cheapest_loop(call, along, sizes, count)
                for along, count in zip(dims, mesh.shape, strict=True)
            )
    return Sharding(mesh, layouts, axes)


def _like(tensor: Tensor, tensors: Mapping[str, Tensor]) -> str:
    """Return the tensor of the whole step that a tensor is laid out as; itself if there is none."""
    name = _whole_name(tensor.name, tensors)
    while name not in tensors and ":" in name:
        name = name.rpartition(":")[0]
    is_like = name in tensors and len(tensors[name].shape or ()) == len(tensor.shape or ())
    return name if is_like else tensor.name


def _whole_name(name: str, known: Mapping[str, object]) -> str:
    return name if name in known or piece_number(name) < 0 else name.rpartition("@")[0]
