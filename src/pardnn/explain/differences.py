"""How two plans differ: what moved, and which of the moves matter.

Ops are matched by name. A group of moves is everything that goes from one device to another in one
layer. Each of the largest `JUDGED` groups is applied to the first plan by itself and evaluated like
any move (`explain.moved`). The effects need not add up: two groups that are slow alone may be fast
together, as the effect of all together, and the second plan itself, show.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import MismatchError, PardnnError
from pardnn.explain.case import Case, opened
from pardnn.explain.moved import alternative, judged, ordered_anew
from pardnn.explain.submeshes import mixed_of, on_submesh, together
from pardnn.graph.ir import Graph
from pardnn.graph.layers import block_of, origin
from pardnn.plan.plan import Plan, graph_in_pieces
from pardnn.report.differences import DiffResult, MovedOps, PlanFigures, Relaid, SentBy
from pardnn.report.explained import Alternative

#: Groups of moves that are judged alone: some milliseconds each for a thousand ops.
JUDGED = 24
#: Ops of a group that are named.
NAMED = 5

#: What helps where two plans are for two graphs.
_TWO_GRAPHS = "For plans of two graphs, name both: --graph GRAPH_OF_A --other-graph GRAPH_OF_B."

#: What makes a decision: plans that agree in these are the same.
_DECISION = (
    "graph_fingerprint", "cluster", "reserve", "placement", "order", "messages", "partition",
    "pieces", "offload", "recompute",
)  # fmt: skip


def differences(
    graph: Graph, plan: Plan, other_graph: Graph, other: Plan, costs: str | None = None
) -> DiffResult:
    """Compare two plans.

    Args:
        graph: Of the first plan.
        plan: The first one.
        other_graph: Of the second plan; the same graph or another one.
        other: The second one.
        costs: Of both, as for `plan`; None for those of the first plan.

    Raises:
        MismatchError: E503, if a plan is for another graph.
        InvalidPlanError: E410, if one is not valid.
        UsageError: E212, if one names no cluster.
    """
    try:
        a = opened(graph, plan, costs)
        b = opened(other_graph, other, a.choice if costs is None else costs)
    except MismatchError as error:
        if other_graph is not graph or plan.graph_fingerprint == other.graph_fingerprint:
            raise
        message = f"{error.message}\n{_TWO_GRAPHS}"
        raise MismatchError(message, code=error.code, details=error.details) from None
    names = [{op.name: None for op in case.graph.ops} for case in (a, b)]
    moved, together = _moves(a, b)
    return DiffResult(
        same=all(getattr(plan, name) == getattr(other, name) for name in _DECISION),
        before=_figures(a),
        after=_figures(b),
        moved=moved,
        together=together,
        unmoved=None if together is None else ordered_anew(a),
        reordered=tuple(_reordered(*rows) for rows in zip(plan.order, other.order, strict=False)),
        relaid=_relaid(a, b),
        sent=_sent(a, b),
        only_before=tuple(name for name in names[0] if name not in names[1]),
        only_after=tuple(name for name in names[1] if name not in names[0]),
        notes=_notes(a, b),
    )


def _figures(case: Case) -> PlanFigures:
    busy = case.timeline.busy(case.arrays.place, case.plan.num_devices)
    return PlanFigures(
        algorithm=case.plan.algorithm,
        devices=tuple(case.devices),
        ops=len(case.planned.ops),
        makespan_s=case.timeline.makespan,
        busy_s=tuple(busy.tolist()),
        peak_bytes=case.peak_bytes,
        usable_bytes=tuple(case.usable),
        transfer_bytes=case.transfer_bytes,
        messages=len(case.plan.messages),
    )


def _notes(a: Case, b: Case) -> tuple[str, ...]:
    notes = dict.fromkeys([*a.notes, *b.notes])
    if a.cluster != b.cluster:
        notes["the clusters differ; each plan is simulated on its own"] = None
    if a.costs.source != b.costs.source:
        notes[f"costs differ: {a.costs.source} and {b.costs.source}"] = None
    if (a.plan.partition is None) != (b.plan.partition is None):
        notes["one plan places whole ops, the other cuts every op over its devices"] = None
    elif (mixed_of(a) is None) != (mixed_of(b) is None):
        notes["one plan cuts every op over all devices, the other inside submeshes"] = None
    each = [_rewritten(case.plan) for case in (a, b)]
    if each[0] != each[1]:
        notes[f"the first plan {each[0]}, the second {each[1]}"] = None
    return tuple(notes)


def _rewritten(plan: Plan) -> str:
    """Return in words what a plan does to the step besides placing and cutting its ops."""
    pieces = 1 if plan.pieces is None else len(plan.pieces.points) - 1
    words = ["has the batch whole" if pieces == 1 else f"has the batch in {pieces} pieces"]
    calls, states = len(plan.recompute or ()), len(plan.offload or ())
    if calls:
        words.append(f"calls {calls} op{'s' * (calls > 1)} a second time")
    if states:
        words.append(f"has {states} optimizer state{'s' * (states > 1)} on the host")
    return " and ".join(words)


Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Layer, and the devices before and after."""


def _moves(a: Case, b: Case) -> tuple[tuple[MovedOps, ...], Alternative | None]:
    """Return the moves, those that gain most first, and all of them together."""
    whole, mixed = ([test(case) for case in (a, b)] for test in (_is_whole, mixed_of))
    if not all(whole) and None in mixed:
        return (), None
    before, after = _places(a), _places(b)
    groups: dict[Key, list[str]] = {}
    for name, layer in _layers(a).items():
        if name in after and before[name] != after[name]:
            groups.setdefault((layer, before[name], after[name]), []).append(name)
    placed, numbers = _placed_as(a, b), _numbers(a)
    sizes = {key: _size(a, names, numbers) for key, names in groups.items()}
    largest = sorted(groups, key=lambda key: (*(-size for size in sizes[key]), key))
    found: list[MovedOps] = []
    for i, key in enumerate(largest):
        ops = [number for name in groups[key] for number in numbers[name]]
        alone = None
        if placed is not None and i < JUDGED:
            alone = _applied(a, placed(ops), "only this move")
        found.append(_moved(a, b, key, groups[key], numbers, alone))
    found.sort(key=_effect)
    if placed is None or not groups:
        return tuple(found), None
    everything = placed(range(len(a.planned.ops)))
    return tuple(found), _applied(a, everything, "all moves together")


def _is_whole(case: Case) -> bool:
    """Whether a plan places whole ops."""
    return case.plan.partition is None


#: Places some ops, and all that must be with them, as another plan does.
_PlacedAs = Callable[[Sequence[int]], "Int64[ndarray, ' n']"]


def _placed_as(a: Case, b: Case) -> _PlacedAs | None:
    """Return a placement of a plan's ops like another plan's; None if their ops differ.

    Of plans that cut inside submeshes, the first one's cut stays.

    Args:
        a: The plan.
        b: The other one.
    """
    mixed, other = mixed_of(a), mixed_of(b)
    graph = a.planned if mixed is None else mixed.graph
    row = b.arrays.place if other is None else other.row
    names = [op.name for op in (b.planned if other is None else other.graph).ops]
    size = [1 if each is None else each.made.partition.mesh.size for each in (mixed, other)]
    if sorted(op.name for op in graph.ops) != sorted(names) or len(set(size)) > 1:
        return None
    if a.plan.num_devices != b.plan.num_devices:
        return None
    there = dict(zip(names, row.tolist(), strict=True))
    goal = np.array([there[op.name] for op in graph.ops], dtype=np.int64)

    def placed(ops: Sequence[int]) -> Int64[ndarray, " n"]:
        if mixed is not None:
            return on_submesh(mixed, together(mixed, ops), goal)
        return np.where(np.isin(a.groups, a.groups[list(ops)]), goal, a.arrays.place)

    return placed


def _applied(a: Case, place: Int64[ndarray, " n"], what: str) -> Alternative:
    """Judge the first plan with another placement.

    Args:
        a: The first plan.
        place: Of all its ops.
        what: Description, for people.
    """
    try:
        found = judged(a, place)
    except PardnnError as error:
        return Alternative(
            what=what, judged=True, fits=False, makespan_s=None, change_s=None, peak_bytes=None,
            transfer_bytes=None, why=error.message.splitlines()[0],
        )  # fmt: skip
    return alternative(a, what, found)


def _effect(each: MovedOps) -> tuple[bool, float, float]:
    """Sort key: largest gain first, then moves not evaluated or not fitting, largest first."""
    change = each.alone.change_s if each.alone is not None else None
    return change is None, 0.0 if change is None else change, -each.seconds


def _places(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the devices of each op of the graph: of all its pieces, shards and further calls."""
    place = case.arrays.place
    return {name: tuple(sorted(set(place[ops].tolist()))) for name, ops in _numbers(case).items()}


def _numbers(case: Case) -> dict[str, list[int]]:
    """Return what the planned graph has of each op, by its name in the graph, or in its pieces."""
    whole = {op.name for op in case.graph.ops}
    known = whole | {origin(op.name) for op in graph_in_pieces(case.graph, case.plan).ops}
    found: dict[str, list[int]] = {}
    for i, op in enumerate(case.planned.ops):
        name = op.name if op.name in whole else origin(op.name)
        if name in known:
            found.setdefault(name, []).append(i)
    return found


def _layers(case: Case) -> dict[str, str]:
    """Return the block of each op, by its name in the graph; a group's ops are in one block."""
    of_group: dict[int, str] = {}
    for group, layer in zip(case.groups.tolist(), case.layers, strict=True):
        of_group[group] = of_group.get(group) or layer
    return {
        name: block_of(of_group[int(case.groups[ops[0]])]) for name, ops in _numbers(case).items()
    }


def _size(case: Case, names: Sequence[str], numbers: dict[str, list[int]]) -> tuple[float, int]:
    """Return the seconds of some ops, and the bytes that they make."""
    a = case.planned.arrays
    ops = [i for name in names for i in numbers[name]]
    made = sum(
        int(a.tensor_bytes[t])
        for i in ops
        for t in range(a.output_ptr[i], a.output_ptr[i + 1])
        if a.tensor_alias[t] < 0
    )
    return float(case.seconds[ops].sum()), made


def _moved(
    a: Case, b: Case, key: Key, names: list[str], numbers: dict[str, list[int]],
    alone: Alternative | None,
) -> MovedOps:  # fmt: skip
    """Return a group of moves for the report.

    Args:
        a: The first plan.
        b: The second plan.
        key: Of the group.
        names: Its ops.
        numbers: From `_numbers`, of the first plan.
        alone: What it brings alone.
    """
    seconds, made = _size(a, names, numbers)
    by_time = sorted(names, key=lambda name: -float(a.seconds[numbers[name]].sum()))
    return MovedOps(
        layer=key[0],
        source=tuple(a.devices[d] for d in key[1]),
        target=tuple(b.devices[d] for d in key[2]),
        ops=len(names),
        names=tuple(by_time[:NAMED]),
        seconds=seconds,
        bytes=made,
        alone=alone,
    )


def _reordered(before: Sequence[str], after: Sequence[str]) -> int:
    """Return how many ops of both rows are not in a longest common order."""
    turn = {name: i for i, name in enumerate(after)}
    common = [turn[name] for name in before if name in turn]
    ends: list[int] = []
    for position in common:
        at = bisect.bisect_left(ends, position)
        ends[at : at + 1] = [position]
    return len(common) - len(ends)


def _relaid(a: Case, b: Case) -> tuple[Relaid, ...]:
    """Return the tensors with another layout, largest first."""
    numbers = _numbers(a)
    found = [
        Relaid(
            tensor=tensor.name,
            layer=a.layers[numbers[op.name][0]],
            bytes=tensor.bytes,
            before=a.layouts[tensor.name],
            after=b.layouts[tensor.name],
        )
        for op in a.graph.ops
        for tensor in op.outputs
        if tensor.name in a.layouts
        and a.layouts[tensor.name] != b.layouts.get(tensor.name, a.layouts[tensor.name])
    ]
    return tuple(sorted(found, key=lambda each: (-each.bytes, each.tensor)))


def _sent(a: Case, b: Case) -> tuple[SentBy, ...]:
    """Return the bytes sent by each block, where they changed, the largest change first."""
    before, after = _sent_bytes(a), _sent_bytes(b)
    found = [
        SentBy(layer=layer, before=before.get(layer, 0), after=after.get(layer, 0))
        for layer in dict.fromkeys([*before, *after])
        if before.get(layer, 0) != after.get(layer, 0)
    ]
    return tuple(sorted(found, key=lambda each: (-abs(each.after - each.before), each.layer)))


def _sent_bytes(case: Case) -> dict[str, int]:
    a, found = case.planned.arrays, dict[str, int]()
    for tensor in case.arrays.message_tensor.tolist():
        layer = block_of(case.layers[int(a.tensor_op[tensor])])
        found[layer] = found.get(layer, 0) + int(a.tensor_bytes[tensor])
    return found
