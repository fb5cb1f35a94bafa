"""Ops that a step calls a second time, to free their first results before the backward pass.

A plan names the calls; the graph that it places follows from them: the second call of op "h" is the
op "h~2" with the same kind and arguments, its tensors are "t~2", and the readers that the plan
names read those. Nothing else changes, so the rewritten graph is placed, simulated and run like any
other, and no bit of the step either: a random op draws the numbers of its first call once more.

A storage that is written in place is read between two writes, and a late second call must not see
the later one. So where a call reads or writes a storage, `after` orders it against the writes of
that storage as its op is ordered in the graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pardnn.cluster import STRICT
from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor, storage_owners, writes


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondCall:
    """An op that is called once more.

    Attributes:
        op: Its name in the graph.
        readers: The ops that read the results of this call, not of an earlier one: ops of the
            graph, or second calls by their own names, "h~2".
        number: 2 for the second call, 3 for the third.
    """

    __pydantic_config__ = STRICT

    op: str
    readers: tuple[str, ...]
    number: int = 2

    @property
    def name(self) -> str:
        """Name of the op in the rewritten graph."""
        return call_of(self.op, self.number)


def call_of(name: str, number: int) -> str:
    """Return the name of a further call of an op, or of a tensor that it makes."""
    return f"{name}~{number}"


def first_call(name: str) -> str:
    """Return the op that an op of a rewritten graph calls again; the name itself if it does not."""
    of, mark, number = name.rpartition("~")
    return of if mark and number.isascii() and number.isdigit() else name


@functools.lru_cache(maxsize=1)
def graph_with_calls(graph: Graph, calls: tuple[SecondCall, ...]) -> Graph:
    """Return the graph with second calls; each stands before the first op that reads it.

    Raises:
        InvalidPlanError: E410, if a call is of no op of the graph, or has no reader in it.
        FileError: E402, if the ops form no graph.
    """
    made = build_graph(graph.name, _ops_with_calls(graph, calls))
    return dataclasses.replace(made, is_captured=graph.is_captured)


def topological_positions(graph: Graph) -> dict[str, int]:
    """Return where each op stands in a topological order: the file's, if that is one."""
    order: list[int] = graph.arrays.topological.tolist()
    return {graph.ops[i].name: at for at, i in enumerate(order)}


def _ops_with_calls(graph: Graph, calls: Sequence[SecondCall]) -> list[Op]:
    position = topological_positions(graph)
    by_name = {call.name: call for call in calls}
    for call in calls:
        known = {*position, *by_name}
        unknown = [name for name in (call.op, *call.readers) if name not in known]
        if call.op not in position or unknown or not call.readers:
            raise InvalidPlanError(f"recompute: {shown(call.name)} has no op or no readers")
    of = {name: call.op for name, call in by_name.items()} | {name: name for name in position}
    stage = dict(position)
    for call in sorted(calls, key=lambda call: -position[call.op]):
        late = [name for name in call.readers if position[of[name]] <= position[call.op]]
        if late:
            raise InvalidPlanError(
                f"recompute: {shown(call.name)} is read by {shown(late[0])}, which runs before it"
            )
        stage[call.name] = min(stage[name] for name in call.readers)
    order = sorted(of, key=lambda name: (stage[name], position[of[name]], name in position))
    whole = {op.name: op for op in graph.ops}
    renamed = _renamings(graph, calls)
    numbers = {name: call.number for name, call in by_name.items()}
    ops = [rewired(whole[of[n]], numbers.get(n), renamed.get(n, {})) for n in order]
    return _ordered(ops, of, position)


def _renamings(graph: Graph, calls: Iterable[SecondCall]) -> dict[str, dict[str, str]]:
    """Return what each reader of a call reads, by the names of the graph's tensors."""
    outputs = {op.name: [tensor.name for tensor in op.outputs] for op in graph.ops}
    found: dict[str, dict[str, str]] = {}
    for call in calls:
        names = {name: call_of(name, call.number) for name in outputs[call.op]}
        for reader in call.readers:
            found.setdefault(reader, {}).update(names)
    return found


def rewired(op: Op, number: int | None, reads: Mapping[str, str]) -> Op:
    """Return an op, or a further call of it, that reads other tensors."""
    if number is None and not reads:
        return op
    made = {} if number is None else {t.name: call_of(t.name, number) for t in op.outputs}
    names = {**reads, **made}

    def renamed(tensor: Tensor) -> Tensor:
        alias = tensor.alias_of and names.get(tensor.alias_of, tensor.alias_of)
        return dataclasses.replace(tensor, name=names.get(tensor.name, tensor.name), alias_of=alias)

    return dataclasses.replace(
        op,
        name=op.name if number is None else call_of(op.name, number),
        inputs=tuple(reads.get(name, name) for name in op.inputs),
        outputs=tuple(map(renamed, op.outputs)),
        arguments=op.arguments and _renamed_arguments(op.arguments, names),
    )


def _renamed_arguments(arguments: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    found = {key: _renamed(value, names) for key, value in arguments.items()}
    for key in ("returns", "mutates"):
        if arguments.get(key):
            found[key] = [names.get(name, name) for name in arguments[key]]
    return found


def _renamed(data: Any, names: Mapping[str, str]) -> Any:
    if isinstance(data, list):
        return [_renamed(item, names) for item in cast("list[Any]", data)]
    if isinstance(data, dict):
        found = cast("dict[str, Any]", data)
        if found.keys() == {"tensor"}:
            return {"tensor": names.get(found["tensor"], found["tensor"])}
        return {key: _renamed(value, names) for key, value in found.items()}
    return data


def _ordered(ops: list[Op], of: Mapping[str, str], position: Mapping[str, int]) -> list[Op]:
    """Add to `after` the order of calls against the writes of what they read or write."""
    added: dict[str, list[str]] = {}
    for writer, other in write_orders(ops, {name for name in of if name not in position}):
        if of[writer] == of[other]:  # which the checker refuses
            continue
        is_before = position[of[writer]] < position[of[other]]
        first, second = (writer, other) if is_before else (other, writer)
        added.setdefault(second, []).append(first)
    return [
        dataclasses.replace(op, after=tuple(dict.fromkeys((*op.after, *added[op.name]))))
        if op.name in added
        else op
        for op in ops
    ]


def write_orders(ops: Iterable[Op], calls: set[str]) -> list[tuple[str, str]]:
    """Return each (writer, other) on one storage of which one is a second call, by name.

    Args:
        ops: Of the rewritten graph.
        calls: Names of the second calls among them.
    """
    ops = list(ops)
    owners = storage_owners(ops)
    writers: dict[str | None, list[str]] = {}
    for op in ops:
        for name in writes(op):
            writers.setdefault(owners[name], []).append(op.name)
    found: dict[tuple[str, str], None] = {}
    for op in ops:
        for owner in {owners[name] for name in op.inputs}:
            for writer in writers.get(owner, ()):
                if writer != op.name and (writer in calls or op.name in calls):
                    found[writer, op.name] = None
    return list(found)
