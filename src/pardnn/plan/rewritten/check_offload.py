"""The checker of state on the host: independent of the code that rewrites the graph.

It proves that, without the copies, the graph is the one that was planned; that each copy to the
device comes before all that uses the state; and that each copy back comes after every write.
O(ops + edges).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pardnn.errors import shown
from pardnn.graph.ir import FROM_HOST, TO_HOST, Graph, Op, storage_owners, writes
from pardnn.plan.rewritten.original_names import with_original_names


def offload_problems(graph: Graph, names: Sequence[str], rewritten: Graph) -> Iterator[str]:
    """Yield what is wrong with states on the host.

    Args:
        graph: With all state on devices.
        names: Of the states on the host.
        rewritten: What the plan places.
    """
    ops = {op.name: op for op in graph.ops}
    order = [op.name for op in graph.ops if op.name in set(names)]
    if not names or order != list(names):
        yield "offload: the states are not named in the graph's order, each once"
        return
    copies = {
        op.outputs[0].name: op.inputs[0] for op in rewritten.ops if op.kind == FROM_HOST
    }  # by the name on the device
    owners = storage_owners(graph.ops)
    read = {owners[name] for op in graph.ops for name in op.inputs}
    states = {ops[name].outputs[0].name for name in names} & read
    if set(copies.values()) != states or len(copies) != len(states):
        yield "offload: a state is not copied to its device exactly once"
        return
    kept = [op for op in rewritten.ops if op.kind not in (FROM_HOST, TO_HOST)]
    if [op.name for op in kept] != [op.name for op in graph.ops]:
        yield "offload: the rewritten graph has other ops"
        return
    for op in kept:
        problem = _differs(op, ops[op.name], set(names), copies)
        if problem is not None:
            yield f"offload: {shown(op.name)} {problem}"
    yield from _stores(rewritten, copies)


def _differs(op: Op, whole: Op, on_host: set[str], copies: Mapping[str, str]) -> str | None:
    """Return how an op differs from the op of the graph that it is."""

    def plain(name: str | None) -> str | None:
        return name and copies.get(name, name)

    if op.memory != ("host" if op.name in on_host else whole.memory):
        return f"has memory {op.memory}"
    if (op.kind, op.workspace, op.after) != (whole.kind, whole.workspace, whole.after):
        return "is another op"
    if op.group != whole.group and not (op.name in on_host and whole.group is None):
        return "is in another group"
    if tuple(map(plain, op.inputs)) != whole.inputs:
        return "reads other tensors"
    if with_original_names(op.arguments, copies) != with_original_names(whole.arguments, {}):
        return "has other arguments"
    made = [(t.name, plain(t.alias_of), t.bytes, t.shape, t.dtype, t.strides) for t in op.outputs]
    if made != [(t.name, t.alias_of, t.bytes, t.shape, t.dtype, t.strides) for t in whole.outputs]:
        return "makes other tensors"
    return None


def _stores(graph: Graph, copies: Mapping[str, str]) -> Iterator[str]:
    """Check that what is written in the copy of a state goes back, after the last write."""
    owners = storage_owners(graph.ops)
    written: dict[str, set[str]] = {}
    stores: dict[str, list[Op]] = {}
    groups = {tensor.name: op.group for op in graph.ops for tensor in op.outputs}
    for op in graph.ops:
        if op.kind == TO_HOST:
            stores.setdefault(op.inputs[-1], []).append(op)
            continue
        for name in writes(op):
            written.setdefault(owners[name] or "", set()).add(op.name)
    for copy, state in copies.items():
        back = stores.pop(copy, [])
        wanted = written.get(copy, set())
        if len(back) != bool(wanted):
            yield f"offload: {shown(state)} is written back {len(back)} times"
        for op in back:
            if op.inputs != (state, copy) or writes(op) != (state,):
                yield f"offload: {shown(op.name)} does not write {shown(state)} back"
            if set(op.after) != wanted:
                yield f"offload: {shown(op.name)} does not wait for every write"
        if {groups[copy], *(op.group for op in back)} != {groups[state]} or not groups[state]:
            yield f"offload: the copies of {shown(state)} may be on another device"
    for name in stores:
        yield f"offload: {shown(name)} is written back, but is not a copy of a state"
