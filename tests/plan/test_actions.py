"""Actions as text, by hand and back."""

import pytest

from pardnn.errors import FileError
from pardnn.plan.actions import (
    Action,
    Allocate,
    Compute,
    Free,
    Receive,
    Send,
    Wait,
    action_text,
    actions_text,
    parse_actions,
)

LINES: list[tuple[Action, str]] = [
    (Compute("a b"), 'C "a b"'),
    (Allocate(3), "A 3"),
    (Receive(0), "R 0"),
    (Send(12), "S 12"),
    (Wait(1), "W 1"),
    (Free(("x", 'y "z"')), 'F "x" "y \\"z\\""'),
]


@pytest.mark.parametrize(("action", "line"), LINES)
def test_a_line(action: Action, line: str) -> None:
    assert action_text(action) == line
    assert parse_actions(line) == (action,)


def test_all_lines_and_back() -> None:
    actions = tuple(action for action, _ in LINES)
    assert actions_text(actions) == "\n".join(line for _, line in LINES)
    assert parse_actions(actions_text(actions) + "\n") == actions


@pytest.mark.parametrize("line", ["", "X 1", "R x", "F", 'C "a" "b"', "C 1", 'F "a" 2', "C"])
def test_what_is_no_action_is_refused_with_its_line(line: str) -> None:
    if not line:
        assert parse_actions(line) == ()
        return
    with pytest.raises(FileError, match="line 2: "):
        parse_actions(f'C "a"\n{line}')
