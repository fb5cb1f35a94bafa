"""Megatron's tensor parallelism: a weight cut by columns, the next one by rows.

Problem: find the pairs of products whose weights have to be cut so that everything between them is
cut and a block needs one all-reduce per pass. The step names no layers.
Idea: walk through the forward ops. A product of a whole activation with a weight may be cut along
the weight's columns (an output dim): its result is then cut. Ops pass the cut on through one of
their loops: heads of attention, element-wise ops, the bias. It must end in products that sum over
it: their weights are cut by rows, and the partial results are all-reduced. If the cut of some
columns meets anything else (a norm over features, the residual stream, the loss), that weight is
given up, and the walk begins again without it. Gradients, states and updates are cut like their
parameter; then each op takes the loop that moves least (`loops`), which gives the backward pass its
all-reduce.
Complexity: O(ops) per weight that is given up.
Reference: Shoeybi et al., "Megatron-LM", 2019, section 3.
Deviations: norms are not sequence-parallel; embeddings and the loss stay whole. A product that
makes queries, keys and values at once is cut into contiguous ranges, so that the queries, keys and
values of a head are on different devices: between it and the heads there is an all-to-all in each
pass. If the number of heads is not divisible by the number of devices, a block stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pardnn.cluster import Cluster
from pardnn.errors import UsageError, shown
from pardnn.graph.ir import Graph, alias_of
from pardnn.plan.mesh import Mesh
from pardnn.shard.cache import begin_graph
from pardnn.shard.partition.interning import strategies_of
from pardnn.shard.partition.strategy import Cut, Reduce, Strategy, Unread
from pardnn.shard.recipes.data_parallel import mesh_over
from pardnn.shard.recipes.loops import bytes_of_tensors, cheapest_loop
from pardnn.shard.search.coarsening import TRAINING, OpCall, coarsened, op_calls, storage_of
from pardnn.shard.search.tensor_classes import TensorClasses
from pardnn.shard.sharding import FixedLayouts, Sharding


def megatron(
    graph: Graph, target: Mesh | Cluster | FixedLayouts, objective: str = "bytes"
) -> Sharding:
    """Return pairs of weights cut by columns and rows, with everything between them cut.

    Args:
        graph: A captured graph.
        target: What to lay tensors over.
        objective: Not used: the choice does not depend on it.

    Raises:
        UsageError: E228, if no pair of products can be cut in this way.
    """
    del objective  # the choice does not depend on it
    begin_graph()
    mesh = mesh_over(target)
    if mesh.size == 1:
        return Sharding(mesh, {}, {})
    calls = op_calls(graph)
    classes = coarsened(graph, calls, TRAINING, storage_of(graph)).classes
    dims = _tensor_parallel(graph, calls, classes, mesh.size)
    if not dims:
        raise UsageError(
            f"megatron finds no two products of {shown(graph.name)} to cut over {mesh.size} "
            "devices, the first by columns and the next by rows.\nUse data-parallel or tofu.",
            code="E228",
        )
    count = len(mesh.shape)
    sizes = bytes_of_tensors(graph)
    axes = {c.op.name: (cheapest_loop(c, dims, sizes, mesh.size),) * count for c in calls}
    return Sharding(mesh, {name: (dim,) * count for name, dim in dims.items()}, axes)


class _Mark(NamedTuple):
    """A tensor that is cut: along which dim, and because of which columns."""

    dim: int
    columns: frozenset[str]


@dataclass
class _Walk:
    """What is cut so far.

    Attributes:
        marks: Activations that are cut, by name.
        weights: By root of a parameter's class, what is cut of the root.
        paired: Columns whose cut reached a product that adds up over it.
    """

    marks: dict[str, _Mark] = field(default_factory=dict[str, _Mark])
    weights: dict[str, _Mark] = field(default_factory=dict[str, _Mark])
    paired: set[str] = field(default_factory=set[str])


def _tensor_parallel(
    graph: Graph, calls: Sequence[OpCall], classes: TensorClasses, count: int
) -> dict[str, int]:
    """Return the dim of each tensor that is cut, by name."""
    roots = {classes.root[op.outputs[0].name] for op in graph.ops if op.kind == "parameter"}
    forward = [call for call in calls if call.op.backward_of is None]
    banned = set[str]()
    while True:
        walk, lost = _Walk(), frozenset[str]()
        for call in forward:
            if lost := _followed(call, classes, roots, count, banned, walk):
                break
        if not lost:
            columns = {c for mark in walk.weights.values() for c in mark.columns}
            lost = frozenset(columns - walk.paired)
        if not lost:
            return dict(_cut_dims(walk, classes))
        banned |= lost


def _cut_dims(walk: _Walk, classes: TensorClasses) -> Iterator[tuple[str, int]]:
    """Yield what is cut with the marked tensors: gradients, states, what is made one by one."""
    for root, mark in walk.weights.items():
        for name in classes.members[root]:
            if (dim := classes.dims[name][mark.dim]) is not None:
                yield name, dim
    for name, mark in walk.marks.items():
        at = classes.dims[name].index(mark.dim) if mark.dim in classes.dims[name] else None
        for member in classes.members[classes.root[name]]:
            dim = None if at is None else classes.dims[member][at]
            if dim is not None:
                yield member, dim
        yield name, mark.dim


def _followed(
    call: OpCall,
    classes: TensorClasses,
    roots: set[str],
    count: int,
    banned: set[str],
    walk: _Walk,
) -> frozenset[str]:
    """Take the next op of the forward pass; return the columns that have to be given up."""
    slots = {place: name for place, name in call.places.items() if isinstance(place, str)}
    weights = {p: name for p, name in slots.items() if classes.root[name] in roots}
    marked = {p: walk.marks[name] for p, name in slots.items() if name in walk.marks}
    found = list(strategies_of(call.number).values())
    if not marked:
        begin = _column(found, slots, weights, count) if weights else None
        name = begin and min(weights[p] for p in weights if isinstance(begin.inputs.get(p), Cut))
        if begin is None or name is None or classes.root[name] in banned:
            return frozenset()
        return _take(call, begin, frozenset([classes.root[name]]), weights, classes, walk)
    columns = frozenset[str]().union(*(mark.columns for mark in marked.values()))
    suiting = [s for s in found if _suits(s, marked, count)]
    if suiting:
        chosen = suiting[0]
        is_row = any(isinstance(chosen.inputs.get(p), Cut) for p in weights)
        if any(isinstance(made, Reduce) for made in chosen.outputs):
            if not is_row:
                return columns
            walk.paired |= columns
        return _take(call, chosen, columns, weights, classes, walk)
    for tensor in call.op.outputs:  # parts of a view: queries, keys and values made at once
        source = alias_of(call.op, tensor)
        mark = walk.marks.get(str(source))
        if mark is None or len(classes.shapes[str(source)]) != len(classes.shapes[tensor.name]):
            return columns
        walk.marks[tensor.name] = mark
    return frozenset()


def _column(
    found: Sequence[Strategy],
    slots: Mapping[str, str],
    weights: Mapping[str, str],
    count: int,
) -> Strategy | None:
    """Return the strategy that cuts a product by the columns of its weight, if it is a product."""
    others = slots.keys() - weights.keys()
    adds_up = any(
        isinstance(s.outputs[0], Reduce)
        and any(isinstance(s.inputs.get(p), Cut) for p in weights)
        and any(isinstance(s.inputs.get(p), Cut) for p in others)
        for s in found
    )
    for s in found if adds_up else ():
        cuts = any(isinstance(s.inputs.get(p), Cut) for p in weights)
        keeps = all(not isinstance(s.inputs.get(p), Cut) for p in others)
        if cuts and keeps and isinstance(s.outputs[0], Cut) and s.extent % count == 0:
            return s
    return None


def _suits(strategy: Strategy, marked: Mapping[str, _Mark], count: int) -> bool:
    """Whether a strategy reads all that is cut as it is cut."""
    if strategy.extent % count:
        return False
    for place, mark in marked.items():
        layout = strategy.inputs.get(place)
        if isinstance(layout, Unread):
            layout = strategy.outputs[0]
        if not isinstance(layout, Cut) or layout.dim != mark.dim or layout.before or layout.after:
            return False
    return True


def _take(
    call: OpCall,
    strategy: Strategy,
    columns: frozenset[str],
    weights: Mapping[str, str],
    classes: TensorClasses,
    walk: _Walk,
) -> frozenset[str]:
    """Note what an op makes and which weights it cuts; return columns that cannot be cut so."""
    for place, name in weights.items():
        layout, root = strategy.inputs.get(place), classes.root[name]
        dims = classes.dims[name]
        if not isinstance(layout, Cut):
            continue
        known = walk.weights.get(root)
        if layout.dim not in dims or (known and known.dim != dims.index(layout.dim)):
            return columns | (known.columns if known else frozenset())
        both = columns | (known.columns if known else frozenset())
        walk.weights[root] = _Mark(dims.index(layout.dim), both)
    for place, name in call.places.items():
        made = strategy.outputs[place] if isinstance(place, int) else None
        if isinstance(made, Cut) and classes.shapes[name]:
            walk.marks[name] = _Mark(made.dim, columns)
    return frozenset()
