"""Whether another trace, from other objects, shows the same step."""

from __future__ import annotations

from pardnn.backends.torch.capture.numbers.effects import check_same_effects
from pardnn.backends.torch.capture.same_calls import traces_differ
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import Call
from pardnn.errors import UnsupportedError
from pardnn.graph.ir import SOURCE_KINDS


def is_repeated(trace: StepTrace, again: StepTrace) -> bool:
    """Whether another trace has the same calls, the same effects and the same counted numbers."""
    hints = {**trace.tracer.scalars.hints, **again.tracer.scalars.hints}
    if traces_differ(_used_calls(trace), _used_calls(again), hints) is not None:
        return False
    try:
        check_same_effects(trace.effects, again.effects)
    except UnsupportedError:
        return False
    one, other = (each.changed.keys() - each.assigned.keys() for each in (trace, again))
    return one == other


def _used_calls(trace: StepTrace) -> list[Call]:
    """Return the calls of a step, without the sources that none of them uses."""
    calls = trace.tracer.calls[: trace.length]
    used = {value.storage for call in calls for value in (*call.inputs, *call.returns) if value}
    used |= {storage for call in calls for storage, _ in call.reads}
    return [c for c in calls if c.kind not in SOURCE_KINDS or c.outputs[0].storage in used]
