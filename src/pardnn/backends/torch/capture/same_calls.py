"""Whether two traces of a step are the same, call by call, so that every step does the same.

Numbers are compared by their value in the trace, however they were computed: traces with literals
are compared with traces that have symbols in their place.

Complexity: O(calls), and the length of their arguments.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pardnn.backends.torch.capture.trace_ir import ITEM, Call, Value
from pardnn.backends.torch.ops.codec import literal
from pardnn.backends.torch.ops.host_scalars import SCALAR_FUNCTIONS


def traces_differ(
    one: Sequence[Call], other: Sequence[Call], hints: Mapping[Value, Any]
) -> tuple[Call | None, Call | None] | None:
    """Return the first calls that differ between two traces; None if none does.

    A host scalar counts as its number in the trace, however it was computed.

    Args:
        one: Calls of the one trace.
        other: Calls of the other one.
        hints: Numbers of host scalars of both.
    """
    hints = _known_numbers([*one, *other], hints)
    positions: dict[Value, Any] = {}
    other_positions: dict[Value, Any] = {}
    rows = itertools.zip_longest(_on_tensors(one, hints), _on_tensors(other, hints))
    for a, b in rows:
        if a is None or b is None:
            return a, b
        for value in a.outputs:
            positions[value] = len(positions)
        for value in b.outputs:
            other_positions[value] = len(other_positions)
        if comparable(a, positions, hints) != comparable(b, other_positions, hints):
            return a, b
    return None


def _known_numbers(calls: Iterable[Call], hints: Mapping[Value, Any]) -> dict[Value, Any]:
    """Return numbers that are known although a choice by data makes them.

    Such a choice is between equal numbers, as for a count that is 0 and set to 0. What Python
    computes from these is known, too.

    Args:
        calls: The calls of one or more traces.
        hints: Numbers that do not depend on data.
    """
    found = dict(hints)
    for call in calls:
        if not call.kind.startswith("scalar.") or call.outputs[0] in found:
            continue
        operands = [found.get(x, x) if isinstance(x, Value) else x for x in call.args]
        is_choice = call.kind == "scalar.where"
        if any(isinstance(x, Value) for x in operands[is_choice:]):
            continue
        if is_choice:
            if literal(operands[1]) == literal(operands[2]):
                found[call.outputs[0]] = operands[1]
            continue
        with contextlib.suppress(ArithmeticError, ValueError, TypeError):
            found[call.outputs[0]] = SCALAR_FUNCTIONS[call.kind.partition(".")[2]](*operands)
    return found


def _on_tensors(calls: Sequence[Call], hints: Mapping[Value, Any]) -> list[Call]:
    """Return the calls without those of host scalars with known numbers, and what only they read.

    Args:
        calls: The calls of a trace.
        hints: Numbers of host scalars.
    """
    rest = [call for call in calls if not call.outputs or call.outputs[0] not in hints]
    asked = {value for call in rest for value in call.inputs}
    of_known = {value for call in calls for value in call.inputs} - asked
    return [call for call in rest if call.kind != ITEM or call.outputs[0] not in of_known]


def is_part_of(calls: Sequence[Call], hints: Mapping[Value, Any], first: Sequence[Call]) -> bool:
    """Whether the calls that take numbers are, in order, among those of a first step.

    Args:
        calls: The calls of the step that repeats.
        hints: Numbers of its host scalars.
        first: Calls of the first step, with plain numbers.
    """
    rest = iter([comparable(call, {}, {})[:2] for call in first])
    return all(comparable(call, {}, hints)[:2] in rest for call in calls if _takes(call, hints))


def _takes(call: Call, hints: Mapping[Value, Any]) -> bool:
    """Whether a call on tensors takes numbers, all of which are known."""
    numbers = [value for value in call.inputs if value.geometry is None]
    on_tensors = not call.kind.startswith("scalar.")
    return on_tensors and bool(numbers) and all(value in hints for value in numbers)


def comparable(call: Call, positions: Mapping[Value, Any], hints: Mapping[Value, Any]) -> Any:
    """Return kind, arguments, results and content of a call, to compare it across traces.

    Args:
        call: A call of a trace.
        positions: The positions of values in it; missing ones are equal to each other.
        hints: Numbers of its host scalars.
    """
    arguments = (
        _with_positions(call.args, positions, hints),
        _with_positions(list(call.kwargs.items()), positions, hints),
    )
    content = call.arguments if call.kind == "constant" else None
    return call.kind, arguments, [value.geometry for value in call.outputs], content


def _with_positions(data: Any, positions: Mapping[Value, Any], hints: Mapping[Value, Any]) -> Any:
    """Return arguments with values replaced by their positions, to compare across traces."""
    if isinstance(data, Value):
        return literal(hints[data]) if data in hints else ("value", positions.get(data, -1))
    if isinstance(data, list | tuple):
        return [_with_positions(item, positions, hints) for item in data]
    return literal(data)  # nan equals itself, and 1 is not True
