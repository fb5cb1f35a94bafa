"""The proof of a cut: what a cut plan's ops compute is what the graph computes.

Problem: a cut plan contains its own graph. `plan.check` follows data through it, but cannot know
what the local op of an op has to be: a sum instead of a mean, or another operand of the same shape,
would pass.
Idea: only the decision is taken from the plan (layouts, cut loops, how regions are fetched, where
pieces start). The ops are derived from it and the graph again, and must equal those of the plan in
every field: kind, arguments, inputs, `after`, bytes, strides. So must the devices they run on and
what is received in place. Only order and messages may differ; `plan.check` proves those.
No compiler is loaded, so a rank can prove the plan that it is given.
Complexity: that of partitioning once.
Deviations: the code that cut the graph cuts it again, so a bug in pardnn is not seen here; that is
what `plan.cut.check_partitioned_graph`, and numeric tests of all layouts by all operators, are for
(docs/decisions).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from pardnn.cluster import Cluster
from pardnn.errors import PardnnError, UsageError, shown
from pardnn.graph.file import op_to_dict
from pardnn.graph.ir import Graph, Op
from pardnn.plan.check import MAX_PROBLEMS, check_plan, raise_problems
from pardnn.plan.file import check_fingerprint
from pardnn.plan.mesh import boxes_of
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import Plan, graph_in_pieces
from pardnn.shard.microbatch.rewrite import cut_batch
from pardnn.shard.sharding import sharding_of
from pardnn.shard.spmd.partitioner import partition_for_submeshes, spmd_partition

#: What to do where nothing is proven.
_AGAIN = "Plan this graph again, with the descriptions of all its operators."


def cut_problems(graph: Graph, plan: Plan) -> Iterator[str]:
    """Yield where a cut plan's ops do not follow from its decision.

    Args:
        graph: The graph that it cuts.
        plan: Valid according to `plan.check`; one that cuts nothing has no problems.
    """
    if plan.pieces is not None:
        problems = list(_pieces_problems(graph, plan.pieces))
        yield from problems
        if problems:
            return
    if plan.partition is not None:
        yield from _partition_problems(graph_in_pieces(graph, plan), plan, plan.partition)


def check_cut(graph: Graph, plan: Plan) -> None:
    """Raise unless a cut plan's ops follow from its decision.

    Raises:
        InvalidPlanError: E410, with all problems in `details["problems"]`.
    """
    raise_problems(list(itertools.islice(cut_problems(graph, plan), MAX_PROBLEMS)))


def proven_cluster(graph: Graph, plan: Plan) -> Cluster:
    """Return the cluster of a plan, once the plan is proven.

    Raises:
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if it is not valid.
        UsageError: E212, if it names no cluster.
    """
    if plan.cluster is None:
        raise UsageError(
            "the plan names no cluster, so its step time cannot be computed.\n"
            "Plan again with --devices or --cluster.",
            code="E212",
        )
    prove(graph, plan)
    return plan.cluster


def prove(graph: Graph, plan: Plan) -> None:
    """Raise unless a plan is valid for a graph, and what it cuts follows from its decision.

    Raises:
        MismatchError: E503, if the plan is for another graph.
        InvalidPlanError: E410, if it is not valid.
    """
    check_fingerprint(plan, graph)
    # Compared once: of a million ops a fingerprint takes seconds.
    plan = dataclasses.replace(plan, graph_fingerprint=None)
    check_plan(graph, plan)
    check_cut(graph, plan)


def _partition_problems(graph: Graph, plan: Plan, partition: Partition) -> Iterator[str]:
    loops = partition.loops
    if loops is None:
        yield f"partition.loops: it does not say along which loops ops are cut.\n{_AGAIN}"
        return
    calls = {op.name: op for op in graph.ops if not op.is_source}
    axes = len(partition.mesh.shape)
    for name, row in loops.items():
        if name not in calls or len(row) != axes:
            yield f"partition.loops: {shown(name)} is not a call that can be cut along {list(row)}"
            return
    if not (0 <= partition.relay_axes <= axes and partition.reuse >= 0):
        yield f"partition: relay_axes {partition.relay_axes}, reuse {partition.reuse}"
        return
    sharding, plain = sharding_of(partition), None
    try:
        if partition.submeshes > 1:
            made = partition_for_submeshes(graph, sharding, partition.submeshes).partition
        else:
            plain = spmd_partition(
                graph, sharding, in_turn=partition.in_turn, reuse=partition.reuse,
                relay_axes=partition.relay_axes, sums_in_place=partition.sums_in_place,
            )  # fmt: skip
            made = plain.partition
    except PardnnError as error:
        yield f"partition: {error.message}\n{_AGAIN}"
        return
    assert made is not None
    if partition.submeshes > 1:
        for name in ("in_turn", "reuse", "relay_axes", "sums_in_place"):
            if getattr(partition, name):
                found = getattr(partition, name)
                yield f"partition.{name} is {found}; a plan with submeshes never sets it"
    owned = functools.partial(_owned, calls, partition)
    yield from _differences("partition", partition.ops, made.ops, owned)
    if plain is not None:
        yield from _other_places(plan, plain)


def _owned(calls: Mapping[str, Op], partition: Partition, local: Op) -> str:
    """Return what a local op must make, if it is one of an op of the graph, in words."""
    name, _, position = local.name.rpartition("@")
    op, device = calls.get(name), int(position)
    found = f" ({'device' if partition.submeshes == 1 else 'position'} {device}"
    for tensor in op.outputs if op else ():
        boxes = boxes_of(tensor, partition.sharding[tensor.name], partition.mesh)
        found += f", box {list(map(list, (boxes or ())[device]))} of {tensor.name!r:.60}"
    return f"{found})" if op else f"{found},{_made(local)[2:]}"


def _other_places(plan: Plan, derived: Plan) -> Iterator[str]:
    """Yield ops and receives that are on another device than the cut says."""
    for name, device in derived.placement.items():
        if plan.placement.get(name, device) != device:
            yield (
                f"placement: {shown(name)} belongs to device {device}, not {plan.placement[name]}"
            )
    into = {(m.tensor, m.source, m.target): m.into for m in derived.messages}
    for i, m in enumerate(plan.messages):
        key = m.tensor, m.source, m.target
        if key not in into:
            yield f"messages[{i}]: no op of the cut needs {shown(m.tensor)} on device {m.target}"
        elif into[key] != m.into:
            yield f"messages[{i}]: {shown(m.tensor)} is received into {m.into}, not {into[key]}"


def _pieces_problems(graph: Graph, pieces: Pieces) -> Iterator[str]:
    """Compare with the batch cut with an accumulator for each piece, one for all, and totals."""
    count = len(pieces.points) - 1
    names = {op.name for op in pieces.ops}
    found: list[list[str]] = []
    for accumulators, totals in ((None, False), (1, False), (None, True)):
        try:
            derived = cut_batch(graph, count, accumulators, totals=totals)
        except PardnnError as error:
            yield f"pieces: {error.message}\n{_AGAIN}"
            return
        if (derived.points, dict(derived.batch)) != (pieces.points, dict(pieces.batch)):
            yield (
                f"pieces: points {list(pieces.points)} and the dims of the batch do not match "
                f"{count} pieces, which begin at {list(derived.points)}"
            )
            return
        differences = list(_differences("pieces", pieces.ops, derived.ops, _made))
        if not differences:
            return
        found.insert(0 if names == {op.name for op in derived.ops} else 1, differences)
    yield from found[0]


def _made(op: Op) -> str:
    """Return what an op makes, in words."""
    made = ", ".join(f"{t.name!r:.60} of shape {list(t.shape or ())}" for t in op.outputs)
    return f" (it makes {made})" if made else ""


def _differences(
    what: str, ops: Sequence[Op], derived: Sequence[Op], where: Callable[[Op], str]
) -> Iterator[str]:
    """Yield how ops differ from those that follow from the decision."""
    by_name = {op.name: op for op in derived}
    names = [op.name for op in ops]
    foreign = [name for name in names if name not in by_name]
    missing = by_name.keys() - set(names)
    if foreign:
        yield f"{what}: op {shown(foreign[0])} does not follow from what the plan decides"
    if missing:
        yield f"{what}: op {shown(min(missing))} is missing"
    if foreign or missing:
        return
    for op in ops:
        expected = by_name[op.name]
        if not _is_same(op, expected):
            yield f"{what}: op {shown(op.name)}{where(expected)}: {_field(op, expected)}"
    moved = next((a for a, b in zip(ops, derived, strict=True) if a.name != b.name), None)
    if moved is not None:
        yield f"{what}: op {shown(moved.name)} is at another position in the list"


def _is_same(op: Op, expected: Op) -> bool:
    """Whether two ops are equal where it matters; as text, 1, 1.0, true and -0.0 differ."""
    if op != expected:  # lists where others have tuples are the same
        return _text(_deciding(op)) == _text(_deciding(expected))
    return _text(op.arguments) == _text(expected.arguments)


def _deciding(op: Op) -> dict[str, Any]:
    """Return an op without its source line: a line added above a step changes no plan."""
    return {key: value for key, value in op_to_dict(op).items() if key not in ("source", "module")}


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True)


def _field(op: Op, expected: Op) -> str:
    """Return where two ops differ first, and how."""
    path, found, wanted = _first(_deciding(op), _deciding(expected), "")
    return f"{path[1:]} is {_value(found)}, expected {_value(wanted)}"


def _value(data: Any) -> str:
    return "absent" if data is None else f"{data!r:.120}"


def _first(found: Any, wanted: Any, path: str) -> tuple[str, Any, Any]:
    """Return the path to the first difference, and both values there."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        mine, theirs = cast("dict[str, Any]", found), cast("dict[str, Any]", wanted)
        pairs = [(f".{key}", mine.get(key), theirs.get(key)) for key in sorted({*mine, *theirs})]
    elif isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        rows = itertools.zip_longest(cast("list[Any]", found), cast("list[Any]", wanted))
        pairs = [(f"[{i}]", a, b) for i, (a, b) in enumerate(rows)]
    else:
        return path, found, wanted
    for step, a, b in pairs:
        if _text(a) != _text(b):
            return _first(a, b, path + step)
    return path, found, wanted
