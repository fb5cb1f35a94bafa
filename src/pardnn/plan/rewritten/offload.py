"""Optimizer state on the host: on its device only while ops of the step use it.

A plan names the states; the graph that it places follows from them. The source op "s" takes memory
of the host alone. "s<host" copies it to the device before the first op that reads it, all ops read
and write that copy, and "s>host" copies it back after the last write. Nothing else changes, so the
rewritten graph is placed, proven, simulated and run like any other, and no bit of the step changes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.build import build_graph
from pardnn.graph.ir import FROM_HOST, TO_HOST, Graph, Op, Tensor, storage_owners, writes
from pardnn.plan.rewritten.recompute import rewired


def may_offload(graph: Graph) -> list[Op]:
    """Return the optimizer states that may live on the host, in the graph's order. O(ops).

    A state that the step returns stays. One that no op reads (of a frozen layer) is never copied.
    """
    owners = storage_owners(graph.ops)
    of_tensors = ("replaced", "moved", "written")
    told = [each for key, each in graph.step_notes.items() if key not in of_tensors]
    noted = {owners.get(name) for name in _strings(told)}
    return [
        op for op in graph.ops
        if op.kind == "state" and op.memory == "residual"
        and op.outputs[0].shape and op.outputs[0].bytes
        and not (op.outputs[0].dtype or "host").startswith("host")
        and op.outputs[0].name not in noted
    ]  # fmt: skip


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for item in data.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _strings(item)
    elif isinstance(data, list | tuple):
        for item in data:  # pyright: ignore[reportUnknownVariableType]
            yield from _strings(item)


@functools.lru_cache(maxsize=1)
def graph_with_host(graph: Graph, names: tuple[str, ...]) -> Graph:
    """Return the graph with these states on the host.

    Raises:
        InvalidPlanError: E410, if one is no state of the graph that may be there.
        FileError: E402, if the ops form no graph.
    """
    known = {op.name for op in may_offload(graph)}
    wrong = [name for name in names if name not in known]
    if wrong or len(set(names)) < len(names):
        what = shown(wrong[0]) if wrong else "a name that appears twice"
        raise InvalidPlanError(f"offload: {what} is not an optimizer state that can be on the host")
    made = build_graph(graph.name, _ops_with_host(graph, names))
    return dataclasses.replace(made, is_captured=graph.is_captured)


def _ops_with_host(graph: Graph, names: Sequence[str]) -> list[Op]:
    sources = {op.name: op for op in graph.ops if op.name in set(names)}
    held = {op.outputs[0].name: op for op in sources.values()}
    owners = storage_owners(graph.ops)
    copies = {name: _load(op).outputs[0].name for name, op in held.items()}
    uses = _uses(graph, owners, held)
    first: dict[str, list[Op]] = {}
    last: dict[str, list[Op]] = {}
    for name, ops in ((name, ops) for name, ops in uses.items() if ops):
        first.setdefault(ops[0].name, []).append(_load(held[name]))
        written = [op for op in ops if any(owners[each] == name for each in writes(op))]
        if written:
            last.setdefault(written[-1].name, []).append(_store(held[name], written))
    found: list[Op] = []
    for op in graph.ops:
        if op.name in sources:
            group = op.group or f"{op.name}<host"
            found.append(dataclasses.replace(op, memory="host", group=group))
            continue
        found += first.get(op.name, ())
        found.append(rewired(op, None, {n: copies[n] for n in op.inputs if n in copies}))
        found += last.get(op.name, ())
    return found


def _uses(graph: Graph, owners: dict[str, str | None], held: Iterable[str]) -> dict[str, list[Op]]:
    """Return the ops that read or write each of these storages, in the order of the step."""
    found: dict[str, list[Op]] = {name: [] for name in held}
    order: list[int] = graph.arrays.topological.tolist()
    for op in (graph.ops[i] for i in order):
        for owner in {owners[name]: None for name in op.inputs}:
            if owner in found:
                found[owner].append(op)
    return found


def _load(source: Op) -> Op:
    """Return the op that copies a state to its device."""
    (tensor,) = source.outputs
    return _copy(
        source, f"{source.name}<host", FROM_HOST, (tensor.name,),
        outputs=(dataclasses.replace(tensor, name=f"{tensor.name}<host"),),
    )  # fmt: skip


def _store(source: Op, written: Sequence[Op]) -> Op:
    """Return the op that copies a state back, when its last write has been made."""
    (tensor,) = source.outputs
    reads = (tensor.name, f"{tensor.name}<host")
    after = tuple(op.name for op in written)
    return _copy(source, f"{source.name}>host", TO_HOST, reads, after=after, mutates=[tensor.name])


def _copy(
    source: Op,
    name: str,
    kind: str,
    inputs: tuple[str, ...],
    outputs: tuple[Tensor, ...] = (),
    after: tuple[str, ...] = (),
    **arguments: Any,
) -> Op:
    args = [{"tensor": each} for each in inputs]
    return Op(
        name=name, kind=kind, inputs=inputs, outputs=outputs, after=after,
        group=source.group or f"{source.name}<host", module=source.module, source=source.source,
        arguments={"args": args, **arguments},
    )  # fmt: skip
