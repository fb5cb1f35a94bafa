"""Sums over the pieces of a batch that each device first adds up by itself.

Problem: a gradient of a piece is a partial result of every device that has samples of it. Reduced
piece by piece, it crosses the links as many times as there are pieces.
Idea: a device holds the sum of its own terms, in a tensor whose layout says so (`PARTIAL`). A term
is a partial result that is not reduced; adding terms is a local op; and the op that makes the whole
of them (`t:total`) is their only reduction. If anything else reads such a tensor, `legalize` leaves
it whole, and each term is reduced where it is made.
Complexity: O(1) per op.
Reference: gradient accumulation under `no_sync`, Li et al., "PyTorch Distributed", VLDB 2020.
Deviations: only the sums of a graph in pieces.
"""

from __future__ import annotations

from pardnn.graph.ir import Op
from pardnn.plan.mesh import PARTIAL
from pardnn.plan.partitioned_graph import REDUCE
from pardnn.plan.pieces import ADD
from pardnn.shard.partition.per_device import LocalResult
from pardnn.shard.spmd.emitter import Emitter, ShardedTensor
from pardnn.shard.spmd.spread_reduction import reduce_scatter
from pardnn.shard.spmd.templates import PartitionedOp
from pardnn.shard.tdl.language import Sum


def is_partial(emitter: Emitter, name: str) -> bool:
    """Whether devices hold terms of a tensor."""
    return PARTIAL in emitter.layout(name)


def is_total(emitter: Emitter, op: Op) -> bool:
    """Whether an op makes the whole tensor of the terms that devices hold."""
    return (
        op.kind == REDUCE
        and len(op.inputs) == len(op.outputs) == 1
        and is_partial(emitter, op.inputs[0])
        and not is_partial(emitter, op.outputs[0].name)
    )


def keeps_terms(emitter: Emitter, partitioned: PartitionedOp, number: int) -> bool:
    """Whether a partial result of an op stays on its devices, as terms.

    Args:
        emitter: Has the layouts.
        partitioned: The op.
        number: Of the result.
    """
    name, template = partitioned.returned[number], partitioned.template
    if name is None or not is_partial(emitter, name):
        return False
    axes = [
        tuple(reducer and reducer.name for reducer in found.reducers)
        for found in template.results[number]
        if found is not None
    ]
    wanted = tuple("sum" if dim == PARTIAL else None for dim in emitter.layout(name))
    return set(axes) == {wanted} and template.made[number] == emitter.boxes[name]


def misused_terms(emitter: Emitter, op: Op, partitioned: PartitionedOp) -> str | None:
    """Return a tensor of an op that devices cannot hold as terms; None if there is none.

    Args:
        emitter: Has the layouts.
        op: The op.
        partitioned: What each device does of it.
    """
    made = [tensor.name for tensor in op.outputs]
    terms = [name for name in (*op.inputs, *made) if is_partial(emitter, name)]
    if not terms or is_total(emitter, op):
        return None
    layouts = {emitter.layout(name) for name in (*op.inputs, *made)}
    if op.kind == ADD and len(op.inputs) == 2 and len(layouts) == 1:
        return None
    kept = [
        name
        for number, name in enumerate(partitioned.returned)
        if keeps_terms(emitter, partitioned, number)
    ]
    return next((name for name in terms if name in op.inputs or name not in kept), None)


def emit_total(emitter: Emitter, op: Op) -> None:
    """Write the reduction of the terms that devices hold, as the local ops of the total.

    Args:
        emitter: Where to write.
        op: See `is_total`.
    """
    (name,), (made,) = op.inputs, op.outputs
    terms = emitter.own(name)
    layout = emitter.layout(name)
    reducers = tuple(Sum if dim == PARTIAL else None for dim in layout)
    axes = [axis for axis, dim in enumerate(layout) if dim == PARTIAL]
    results = [LocalResult(box, reducers, 1.0) for box in terms.boxes if box is not None]
    held = ShardedTensor(made, terms.names, terms.boxes)
    reduce_scatter(emitter, held, results, axes, op, op.name)
