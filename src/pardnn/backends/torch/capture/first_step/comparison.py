"""Whether the first step does what every later one does.

Problem: the graph is the step that repeats, and the first step is run by it, too: from the states
as they begin. Some optimizers do something else at first: ADOPT only takes the square of the first
gradient, others copy it without an average. From no first values would the repeating calls give
that.

Idea: all calls that the repeating step makes, the first one makes as well. It makes others besides,
which create the states; but it writes parameters and buffers as often. Left out are the calls of
which other rules say that they give the same bits: on momentum that starts as a copy of the
gradient, on gradients that are added up, those that undo, and copies of what is told.

Complexity: O(calls).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from pardnn.backends.torch.capture.first_step.initial_state import is_copied_gradient
from pardnn.backends.torch.capture.refusals.first_step import (
    irregular_initial_state,
    takes_another_way,
)
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.to_graph import comparable
from pardnn.backends.torch.capture.trace_ir import Call, Storage
from pardnn.graph.ir import SOURCE_KINDS


def check_first_step(first: StepTrace, trace: StepTrace, live: Collection[Call]) -> None:
    """Reject a step whose first call cannot be run as the later ones.

    Args:
        first: Trace of the first step.
        trace: Of the step that repeats, from the first values.
        live: Its calls that the graph keeps.

    Raises:
        UnsupportedError: E806.
    """
    call = other_call(first, trace, live)
    if call is not None:
        raise takes_another_way(call.source)


def check_carried(trace: StepTrace, irregular: Mapping[str, str], left: Collection[str]) -> None:
    """Reject a step whose first call makes states that it leaves to another path: by a count, say.

    Args:
        trace: Of the step that repeats, from the first values.
        irregular: Why states have no first value, by name.
        left: Names of what its graph does not hand on.

    Raises:
        UnsupportedError: E806.
    """
    states = {name for name, source in trace.sources.items() if source.kind == "state"}
    lost = sorted(states.intersection(irregular, left))
    if lost and trace.tracer.scalars.conditions:
        raise irregular_initial_state(lost[0], irregular[lost[0]])


def other_call(first: StepTrace, trace: StepTrace, live: Collection[Call]) -> Call | None:
    """Return a call of the repeating step that the first one does not make; None if there is none.

    Args:
        first: Trace of the first step.
        trace: Of the step that repeats, from the first values.
        live: Its calls that the graph keeps.
    """
    counts = Counter(_key(call, {}) for call in first.tracer.calls)
    counts.update(Counter(_key(call, {})[:1] for call in first.tracer.calls))
    apart, hints = _started_by_rule(first, trace), trace.tracer.scalars.hints
    for call in trace.tracer.calls[: trace.length]:
        is_left_out = call.kind in SOURCE_KINDS or call.view or call.kept
        is_left_out |= call in trace.tracer.undoing
        if is_left_out or call not in live or not apart.isdisjoint(_storages(call)):
            continue
        is_number = any(value.geometry is None for value in call.outputs)
        if is_number or not _storages(call, of_results=False):
            continue  # numbers alone, which the first step may have as literals
        key = _key(call, hints)
        is_known = all(v in hints for v in call.inputs if v.geometry is None)
        for each in (key[:1], key) if is_known else (key[:1],):
            counts[each] -= 1
            if counts[each] < 0:
                return call
    return _written_otherwise(first, trace)


def _written_otherwise(first: StepTrace, trace: StepTrace) -> Call | None:
    """Return a call that writes a parameter or buffer, which the first step writes more often."""
    steps, others = _own_calls(first), _own_calls(trace)
    for name, source in trace.sources.items():
        then, now = first.values.get(name), trace.values[name]
        if source.kind not in ("parameter", "buffer") or then is None:
            continue
        if then.storage is None or now.storage is None:
            continue
        before = sum(call in steps for call in then.storage.writes)
        if before > sum(call in others for call in now.storage.writes):
            return now.storage.writes[-1] if now.storage.writes else now.call
    return None


def _own_calls(trace: StepTrace) -> set[Call]:
    """Return the calls that a step itself makes."""
    return {*trace.tracer.calls[: trace.length]} - trace.tracer.undoing


def _started_by_rule(first: StepTrace, trace: StepTrace) -> set[Storage]:
    """Return the storages of gradients, and of momentum that starts as a copy of one."""
    copies = {
        name
        for name, value in first.created.items()
        if is_copied_gradient(value) and _initial(trace, name) == 0.0
    }
    found = (
        trace.values[name].storage
        for name, source in trace.sources.items()
        if source.parameter is not None or name in copies
    )
    return {storage for storage in found if storage is not None}


def _initial(trace: StepTrace, name: str) -> Any:
    value = trace.values.get(name)
    return None if value is None else (value.call.arguments or {}).get("initial")


def _storages(call: Call, *, of_results: bool = True) -> set[Storage]:
    values = (value.storage for value in (*call.inputs, *(call.outputs if of_results else ())))
    return {storage for storage in values if storage is not None}


def _key(call: Call, hints: Any) -> tuple[str, ...]:
    """Return what a call does: its kind and the shapes of its results, and with its arguments."""
    kind, arguments, geometries, content = comparable(call, {}, hints)
    return f"{kind} {geometries}", f"{arguments} {content}"
