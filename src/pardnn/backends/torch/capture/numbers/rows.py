"""From a trace to its host program: conditions on numbers, and the numbers that the step computes.

See `ops.host_program`, which evaluates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pardnn.backends.torch.capture.numbers.scalar_trace import ScalarTrace
from pardnn.backends.torch.capture.trace_ir import Value
from pardnn.backends.torch.ops.codec import encode
from pardnn.backends.torch.ops.host_scalars import node_of


class _Rows:
    """Rows made so far; row k has the name "#k"."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._names: dict[Value, str] = {}

    def name_of(self, value: Any) -> str:
        """Return the name of a value of the trace: the input's, or its row's."""
        if not isinstance(value, Value):
            raise KeyError
        stack = [value]
        while stack:
            call = stack[-1].call
            if call.kind == "input":
                self._names[stack.pop()] = call.name
                continue
            missing = [v for v in call.inputs if v not in self._names]
            if missing:
                stack += missing
                continue
            made = stack.pop()
            if made not in self._names:
                args = [encode(arg, self._names.__getitem__) for arg in call.args]
                self.rows.append([call.kind.removeprefix("scalar."), *args])
                self._names[made] = f"#{len(self.rows) - 1}"
        return self._names[value]

    def truth(self, value: Value) -> str:
        """Add a row for whether a number is true, and return its name."""
        self.rows.append(["bool", {"tensor": self.name_of(value)}])
        return f"#{len(self.rows) - 1}"


def host_rows(
    scalars: ScalarTrace,
    guarded: Iterable[Value],
    writes: Mapping[str, Any],
    initial: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the host program of a trace as JSON; None if it is empty.

    Args:
        scalars: The scalars of the trace.
        guarded: Inputs whose guard is a condition of the program.
        writes: New values of the user's numbers, symbols and plain ones, by name.
        initial: First values of numbers that the first step creates, by name.
    """
    made = _Rows()
    conditions: list[list[Any]] = []
    for value in guarded:
        hint, guard = scalars.hints[value], scalars.guards[value]
        row = made.name_of(value) if guard == "exact" else made.truth(value)
        conditions.append([row, encode(hint if guard == "exact" else True, str), None])
    for value, (expected, source) in scalars.conditions.items():
        conditions.append([made.name_of(value), encode(expected, str), source])
    written = []
    for name, value in writes.items():
        node = node_of(value)
        written.append([name, encode(value if node is None else node.operand, made.name_of)])
    if not conditions and not written and not initial:
        return None
    return {
        "rows": made.rows,
        "conditions": conditions,
        "writes": written,
        "initial": {name: encode(value, str) for name, value in initial.items()},
    }
