"""State that the last graph of a step does not read: an earlier graph says where it is."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.reached import replaced, unreached
from pardnn.plan.state_layout import places_of


class Bound(NamedTuple):
    """A program and the binding of its sources."""

    program: Program
    binding: Binding


class LeftUnread:
    """Which state the graph of a call leaves unread; what was found is kept for further calls."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = (None, None, None)
        self._found: set[str] = set()

    def names(self, now: Bound, before: Bound, gone: Set[str], *, is_asked: bool) -> set[str]:
        """Return the names of an earlier graph's state that exists and that the last one lacks.

        Args:
            now: The last graph.
            before: The earlier one.
            gone: Names of state that no call carries on.
            is_asked: Whether to look again at what the step reaches.
        """
        state, known = now.program.state, before.program.state
        names = set[str]() if state is known else known.keys() - gone - state.keys()
        if not names:
            return names
        last_state, last_known, last_names = self._of
        if is_asked or last_state is not state or last_known is not known or last_names != names:
            lost = unreached(names, before.binding.sources, now.binding.objects())
            self._of, self._found = (state, known, names), names - lost
        return self._found


def moved(now: Bound, before: Bound) -> list[str]:
    """Return the names of state of which an earlier graph does not say any more where it is.

    Args:
        now: The last graph.
        before: The earlier one.
    """
    state, known = now.program.state, before.program.state
    others = replaced(state, before.binding.sources, now.binding.sources)
    return [n for n in state if n in others or places_of(state[n]) != places_of(known.get(n, ()))]
