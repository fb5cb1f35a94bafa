"""Host programs: arithmetic on Python numbers that every rank runs beside the graph.

Problem: a step computes with Python numbers (`i % 2 == 0`, `state["step"] += 1`), and the result
decides which calls it makes, or is a number for the next step. No tensor is involved.

Idea: the arithmetic is a list of rows in the graph's own arguments, which each rank evaluates from
the numbers that it reads at a call. Conditions must have the same outcome as at capture, otherwise
the graph does not fit the step; writes go into the user's objects after the step.

    rows        [["mod", {"tensor": "i"}, 2], ["eq", {"tensor": "#0"}, 0]]
    conditions  [["#1", true, "train.py:12"]]
    writes      [["trainer.calls", {"tensor": "#2"}]]
    initial     {"optimizer.state.w.step": 0}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import Reference, decode
from pardnn.backends.torch.ops.host_scalars import SCALAR_FUNCTIONS
from pardnn.errors import FileError, shown
from pardnn.graph.ir import Graph

_OPERATORS = {
    "add": "+", "and": "&", "eq": "==", "floordiv": "//", "ge": ">=", "gt": ">", "le": "<=",
    "lt": "<", "mod": "%", "mul": "*", "ne": "!=", "or": "|", "pow": "**", "sub": "-",
    "truediv": "/",
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A number that decided which calls the step makes.

    Attributes:
        row: Name of the number.
        expected: What it was at capture.
        source: "file.py:line" of the user's code; None if unknown.
    """

    row: str
    expected: Any
    source: str | None


@dataclass(frozen=True)
class HostProgram:
    """The host program of a graph.

    Attributes:
        rows: Function and operands; row k has the name "#k".
        conditions: The conditions in the order in which the step asked for them.
        writes: What the step writes: the name of a number of the user's objects, and an operand.
        initial: First values of numbers that the first step creates, by name.
        inputs: Names of the numbers that the program reads.
    """

    rows: tuple[tuple[str, list[Any]], ...] = ()
    conditions: tuple[Condition, ...] = ()
    writes: tuple[tuple[str, Any], ...] = ()
    initial: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the numbers that the program reads, each once."""
        operands = [item for _, args in self.rows for item in args]
        operands += [operand for _, operand in self.writes]
        operands += [Reference(condition.row) for condition in self.conditions]
        names = (str(item) for item in operands if isinstance(item, Reference))
        return tuple(dict.fromkeys(name for name in names if not name.startswith("#")))

    def run(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return each row's value by name; for one that cannot be computed, the exception.

        Args:
            numbers: The values of `inputs`.
        """
        found = dict(numbers)
        for k, (function, operands) in enumerate(self.rows):
            args = [found[x] if isinstance(x, Reference) else x for x in operands]
            failed = next((x for x in args if isinstance(x, Exception)), None)
            try:
                found[f"#{k}"] = failed or SCALAR_FUNCTIONS[function](*args)
            except (ArithmeticError, LookupError, ValueError, TypeError) as error:
                found[f"#{k}"] = error
        return found

    def broken(self, values: Mapping[str, Any]) -> Iterator[tuple[Condition, Any]]:
        """Yield the conditions whose outcome differs from that at capture, with the outcome.

        Args:
            values: The result of `run`.
        """
        for condition in self.conditions:
            if not same_number(values[condition.row], condition.expected):
                yield condition, values[condition.row]

    def written(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the new values of the numbers that the step writes, by name."""
        return {
            name: values[operand] if isinstance(operand, Reference) else operand
            for name, operand in self.writes
        }

    def text(self, operand: Any, depth: int = 6) -> str:
        """Return a row as Python would write it, for messages."""
        if isinstance(operand, list):
            return "[...]"
        if not isinstance(operand, Reference):
            return repr(operand)
        if not operand.startswith("#"):
            return shown(str(operand)).strip("'")
        function, args = self.rows[int(operand[1:])]
        parts = ["..." if depth == 0 else self.text(x, depth - 1) for x in args]
        if function in _OPERATORS and len(parts) == 2:
            nested = [f"({p})" if " " in p and p[0] != "(" else p for p in parts]
            return f"{nested[0]} {_OPERATORS[function]} {nested[1]}"
        return f"{function}({', '.join(parts)})"


def same_number(one: Any, other: Any) -> bool:
    """Whether two numbers are of one type and equal; nan is equal to itself."""
    return type(one) is type(other) and (one == other or (one != one and other != other))


def host_program(graph: Graph) -> HostProgram:
    """Return the host program of a graph; an empty one if it has none.

    Raises:
        FileError: E402, if it is not a program.
    """
    return read_program(graph.step_notes.get("host"))


def read_program(data: Mapping[str, Any] | None) -> HostProgram:
    """Return the host program in JSON data; for None, the empty one.

    Raises:
        FileError: E402, if it is not a program.
    """
    if data is None:
        return HostProgram()
    host = torch.device("cpu")
    try:
        rows = tuple((str(name), decode(list(args), host)) for name, *args in data["rows"])
        unknown = [name for name, _ in rows if name not in SCALAR_FUNCTIONS]
        if unknown:
            raise FileError(f"there is no host arithmetic {unknown[0]!r:.80}")
        conditions = [Condition(row, decode(x, host), at) for row, x, at in data["conditions"]]
        writes = [(name, decode(operand, host)) for name, operand in data["writes"]]
        initial = {name: decode(value, host) for name, value in data["initial"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"the graph's host program is not valid: {error!r:.200}") from error
    return HostProgram(rows, tuple(conditions), tuple(writes), initial)
