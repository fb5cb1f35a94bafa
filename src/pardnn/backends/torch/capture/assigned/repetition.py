"""Whether another trace, from other objects, shows the same step."""

from __future__ import annotations

from typing import Any

from pardnn.backends.torch.capture.numbers.effects import check_same_effects
from pardnn.backends.torch.capture.same_calls import traces_differ
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import Call, Value, storages_read
from pardnn.backends.torch.ops.codec import literal
from pardnn.errors import UnsupportedError
from pardnn.graph.ir import SOURCE_KINDS


def is_repeated(trace: StepTrace, again: StepTrace) -> bool:
    """Whether another trace has the same calls, the same effects and the same counted numbers.

    What it asks of numbers must be guarded by the one that is kept: `elif self.n >= 4` is only
    reached from another state.
    """
    hints = {**trace.tracer.scalars.hints, **again.tracer.scalars.hints}
    if traces_differ(_used_calls(trace), _used_calls(again), hints) is not None:
        return False
    try:
        check_same_effects(trace.effects, again.effects)
    except UnsupportedError:
        return False
    expressions: dict[Any, int] = {}
    if not _asked(again, expressions) <= _asked(trace, expressions):
        return False
    one, other = (each.changed.keys() - each.assigned.keys() for each in (trace, again))
    return one == other


def _used_calls(trace: StepTrace) -> list[Call]:
    """Return the calls of a step, without the sources that none of them uses."""
    calls = trace.tracer.calls[: trace.length]
    used = {value.storage for call in calls for value in (*call.inputs, *call.returns) if value}
    used |= storages_read(calls)
    return [c for c in calls if c.kind not in SOURCE_KINDS or c.outputs[0].storage in used]


def _asked(trace: StepTrace, expressions: dict[Any, int]) -> set[Any]:
    """Return what a trace asks of host scalars, and the outcomes.

    Args:
        trace: A trace.
        expressions: Numbers for expressions, shared by the traces that are compared.
    """
    scalars = trace.tracer.scalars
    if not (scalars.conditions or scalars.guards):
        return set()
    known: dict[Value, int] = {}
    for call in trace.tracer.calls:
        if call.outputs and call.outputs[0].kind is not None:
            arguments = [known.get(x) if isinstance(x, Value) else literal(x) for x in call.args]
            key = call.kind, call.name if call.kind in SOURCE_KINDS else "", repr(arguments)
            known[call.outputs[0]] = expressions.setdefault(key, len(expressions))
    asked = {(known.get(x), repr(outcome)) for x, (outcome, _) in scalars.conditions.items()}
    return asked | {(known.get(x), guard) for x, guard in scalars.guards.items()}
