"""The checker of second calls: independent of the code that rewrites the graph.

It proves that the rewritten graph is the graph, op by op, once the numbers of calls are taken off
the names; that only ops are called again whose first results do not outlive the step; and that
every op finds in every storage exactly what the same op of the graph finds there: the writes that
come before it there come before it here, and no others. So each call gives the bits of the first
one, if its kind does so for equal inputs; random ops draw their numbers once more, which the
runtime sees to. O(ops + touches of a written storage x its writers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pardnn.errors import shown
from pardnn.graph.ir import LOSS_KIND, Graph, Op, storage_owners, writes
from pardnn.plan.partitioned_graph import FETCH, REDUCE, SLICE, filled_later
from pardnn.plan.rewritten.original_names import with_original_names
from pardnn.plan.rewritten.recompute import SecondCall, topological_positions

#: Ops of ours that may run again; the others write, receive in place, or draw for all devices.
_PURE = (FETCH, REDUCE, SLICE)


def recompute_problems(
    graph: Graph, calls: Sequence[SecondCall], rewritten: Graph
) -> Iterator[str]:
    """Yield what is wrong with second calls.

    Args:
        graph: Without them.
        calls: The second calls.
        rewritten: The graph that follows from them.
    """
    names = {call.name: call.op for call in calls}
    if len(names) != len(calls) or any(call.number < 2 for call in calls):
        yield "recompute: two calls of one op have the same number"
        return
    ops = {op.name: op for op in graph.ops}
    tensors = {t.name: op.name for op in graph.ops for t in op.outputs}
    again = {
        f"{tensor.name}~{call.number}": tensor.name for call in calls
        for tensor in ops[call.op].outputs
    }  # fmt: skip
    clash = next((name for name in (*names, *again) if name in ops or name in tensors), None)
    if clash is not None:
        yield f"recompute: {shown(clash)} is in the graph already"
        return
    completed = filled_later(graph.ops)
    for call in calls:
        problem = _may_not(ops[call.op], completed)
        if problem is not None:
            yield f"recompute: {shown(call.op)} ({ops[call.op].kind:.60}) {problem}"
    if {names.get(op.name, op.name) for op in rewritten.ops} != ops.keys():
        yield "recompute: the rewritten graph has other ops"
        return
    for op in rewritten.ops:
        problem = _differs(op, ops[names.get(op.name, op.name)], again)
        if problem is not None:
            yield f"recompute: {shown(op.name)} {problem}"
    yield from _contents(graph, rewritten, names)


def _may_not(op: Op, completed: frozenset[str]) -> str | None:
    """Return why an op may not be called again."""
    if op.is_source or op.kind == LOSS_KIND or not op.outputs:
        return "is not a call that can be repeated"
    if op.memory == "residual":
        return "makes a tensor that outlives the step"
    if op.kind.startswith("pardnn.") and op.kind not in _PURE:
        return "works in place or for all devices"
    if op.kind == FETCH and op.outputs[0].name in completed:
        return "makes a buffer that messages fill"
    return None


def _differs(op: Op, whole: Op, again: Mapping[str, str]) -> str | None:
    """Return how an op differs from the op of the graph that it is, or is a call of."""

    def plain(name: str | None) -> str | None:
        return name and again.get(name, name)

    if (op.kind, op.memory, op.workspace, op.group) != (
        whole.kind, whole.memory, whole.workspace, whole.group,
    ):  # fmt: skip
        return f"is not the {whole.kind:.60} that it repeats"
    if tuple(map(plain, op.inputs)) != whole.inputs:
        return "reads other tensors"
    if not set(whole.after) <= set(op.after):
        return "does not wait for what its op waits for"
    if with_original_names(op.arguments, again) != whole.arguments:
        return "has other arguments"
    made = [
        (plain(t.name), plain(t.alias_of), t.bytes, t.shape, t.dtype, t.strides) for t in op.outputs
    ]
    if made != [(t.name, t.alias_of, t.bytes, t.shape, t.dtype, t.strides) for t in whole.outputs]:
        return "makes other tensors"
    return None


def _contents(graph: Graph, rewritten: Graph, names: Mapping[str, str]) -> Iterator[str]:
    """Check that each op finds the writes that come before it in the graph, and no others."""
    position = topological_positions(graph)
    owners, first_owners = storage_owners(rewritten.ops), storage_owners(graph.ops)
    first_writers, writers = _writers(graph, first_owners), _writers(rewritten, owners)
    if not first_writers:
        return
    whole = {op.name: op.inputs for op in graph.ops}
    again = {t.name for op in rewritten.ops if op.name in names for t in op.outputs}

    def at(op: Op) -> int:
        return position[names.get(op.name, op.name)]

    for op in rewritten.ops:
        of = names.get(op.name, op.name)
        if op.name in names and any(owners[name] not in again for name in writes(op)):
            yield f"recompute: {shown(op.name)} would write what {shown(of)} has written"
        for tensor, first in zip(op.inputs, whole[of], strict=True):
            here = writers.get(owners[tensor], [])
            is_met = {op.name, *(each.name for each in here)} & names.keys()
            if not is_met and owners[tensor] not in again:
                continue  # as in the graph
            there = first_writers.get(first_owners[first], [])
            before = sorted(each.name for each in there if at(each) < position[of])
            found = [each for each in here if each.name != op.name]
            if before != sorted(_of(each, names) for each in found if at(each) < position[of]):
                yield (
                    f"recompute: {shown(op.name)} finds other writes in {shown(tensor)} than "
                    f"{shown(of)} does"
                )
            for other in found:
                if {op.name, other.name} & names.keys():
                    first_of, second = (other, op) if at(other) < at(op) else (op, other)
                    yield from _order(first_of, second)


def _of(op: Op, names: Mapping[str, str]) -> str:
    return names.get(op.name, op.name)


def _writers(graph: Graph, owners: Mapping[str, str | None]) -> dict[str | None, list[Op]]:
    """Return the ops that write each storage in place, by the tensor that owns it."""
    found: dict[str | None, list[Op]] = {}
    for op in graph.ops:
        for owner in {owners[name]: None for name in writes(op)}:
            found.setdefault(owner, []).append(op)
    return found


def _order(first: Op, second: Op) -> Iterator[str]:
    """Check that one op waits for the other: one of them writes what both read."""
    made = {tensor.name for tensor in first.outputs}
    if first.name not in second.after and not made & set(second.inputs):
        yield f"recompute: {shown(second.name)} does not wait for {shown(first.name)}"
