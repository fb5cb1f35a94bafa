"""State that the last graph of a step does not read: an earlier graph says where it is.

A tensor that the user, or the last call, has put in the place of one of the state is not that
state: no rank keeps it for a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.reached import replaced, unreached
from pardnn.backends.torch.user_step.sources import Source
from pardnn.plan.state_layout import places_of


class Bound(NamedTuple):
    """A program and the binding of its sources."""

    program: Program
    binding: Binding


class LeftUnread:
    """Which state the graph of a call leaves unread; what was found is kept for further calls.

    Args:
        held: Returns what the ranks hold of a live tensor, None if they keep none of it; None if
            that is unknown.

    Attributes:
        replaced: Names of such state that has another tensor in its place.
    """

    def __init__(self, held: Callable[[Any], object] | None) -> None:
        self._held, self.replaced = held, list[str]()
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
            sources = before.binding.sources
            found = names - unreached(names, sources, now.binding.objects())
            found = {name for name in found if sources[name].get() is not None}
            self.replaced = sorted(name for name in found if self._is_new(sources[name]))
            self._of, self._found = (state, known, names), found.difference(self.replaced)
        return self._found

    def _is_new(self, source: Source) -> bool:
        is_gradient = source.parameter is not None  # each call makes it anew
        return self._held is not None and not is_gradient and self._held(source.get()) is None


def moved(now: Bound, before: Bound) -> list[str]:
    """Return the names of state of which an earlier graph does not say any more where it is.

    Args:
        now: The last graph.
        before: The earlier one.
    """
    state, known = now.program.state, before.program.state
    others = replaced(state, before.binding.sources, now.binding.sources)
    return [n for n in state if n in others or places_of(state[n]) != places_of(known.get(n, ()))]
