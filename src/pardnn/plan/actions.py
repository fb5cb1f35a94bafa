"""What a rank does, one small action at a time. A list of them prints and parses back.

| action | prints | meaning |
| --- | --- | --- |
| Compute | `C "h"` | run the op |
| Allocate | `A 3` | allocate the receive buffer of message 3 |
| Receive | `R 3` | post the receive |
| Send | `S 3` | start the send |
| Wait | `W 3` | wait until message 3 has arrived, or has left |
| Free | `F "x" "v"` | drop the tensors that share one storage |

Messages are numbered in one global order, and every rank posts its sends and receives in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pardnn.errors import FileError


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the op named `op`."""

    op: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocate the receive buffer of a message."""

    message: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of a message."""

    message: int


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending a message."""

    message: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a message, on either side."""

    message: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop every tensor of one storage."""

    tensors: tuple[str, ...]


Action = Compute | Allocate | Receive | Send | Wait | Free

_MESSAGE_ACTIONS = {"A": Allocate, "R": Receive, "S": Send, "W": Wait}
_LETTER = {kind: letter for letter, kind in _MESSAGE_ACTIONS.items()}


def action_text(action: Action) -> str:
    """Return the action as one short line."""
    if isinstance(action, Compute):
        return f"C {json.dumps(action.op)}"
    if isinstance(action, Free):
        return "F " + " ".join(json.dumps(name) for name in action.tensors)
    return f"{_LETTER[type(action)]} {action.message}"


def actions_text(actions: Sequence[Action]) -> str:
    """Return one action per line."""
    return "\n".join(action_text(action) for action in actions)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Parse what `actions_text` printed.

    Raises:
        FileError: E407, with the line's number.
    """
    return tuple(_parse(line, i) for i, line in enumerate(text.split("\n"), start=1) if line)


def _parse(line: str, number: int) -> Action:
    letter, _, rest = line.partition(" ")
    try:
        if letter in _MESSAGE_ACTIONS:
            return _MESSAGE_ACTIONS[letter](int(rest))
        names = tuple(json.loads("[" + rest.replace('" "', '", "') + "]"))
        if letter == "F" and names and all(isinstance(name, str) for name in names):
            return Free(names)
        if letter == "C" and len(names) == 1 and isinstance(names[0], str):
            return Compute(names[0])
    except ValueError:
        pass
    raise FileError(f"line {number}: {line!r:.80} is not an action", code="E407")
