"""Guards on what no container holds: closure cells, slots and attributes read by a getter."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from pardnn.backends.torch.memory_words import WORD
from pardnn.backends.torch.user_step.guards.item import VALUES, Change, Held, differ, exchanged


class AttributeGuards:
    """Guards on closure cells, slots and attributes, which no container holds."""

    def __init__(self) -> None:
        self._names: list[tuple[str, bool, tuple[int, Any] | None]] = []
        self._getters: list[Callable[[], Any]] = []
        self._then: list[Any] = []
        self._addresses: list[int] = []

    def add(
        self,
        name: str,
        get: Callable[[], Any],
        *,
        is_same: bool = False,
        place: tuple[int, Any] | None = None,
        address: int = 0,
    ) -> None:
        """Guard what `get` returns.

        Args:
            name: Dotted path to it.
            get: Reads it.
            is_same: Whether an equal object in its place is a change, too.
            place: Where it is held, `held_numbers.place`.
            address: The address of the word that points to it.
        """
        self._names.append((name, is_same, place))
        self._getters.append(get)
        self._then.append(get())
        self._addresses.append(address)

    def pointers(self) -> list[tuple[int, int]]:
        """Return address and word of all attributes; without a default, the pointer is null."""
        held = zip(self._addresses, map(id, self._then), strict=True)
        return [(a, 0 if word == id(None) and not WORD.from_address(a).value else word)
                for a, word in held]  # fmt: skip

    def accept(self, now: Mapping[int, Any]) -> None:
        """Expect new objects where they are in the places of old ones, given by id."""
        held = zip(self._then, self._getters, strict=True)
        self._then = [x if id(x) not in now else exchanged(x, get(), now) for x, get in held]

    def changes(self) -> list[Change]:
        """Return what has changed."""
        if not self._getters:
            return []
        values = list(map(operator.call, self._getters))
        if all(map(operator.is_, values, self._then)):
            return []
        found: list[Change] = []
        held = zip(self._names, self._then, values, strict=True)
        for (name, is_same, place), then, now in held:
            if then is not now and is_same:
                found.append(Change(name, Held(then), Held(now)))
            elif differ(now, then):
                found.append(Change(name, then, now, place))
        if not found:  # hold equal plain values, so that the next check finds the same objects
            held = zip(self._then, values, strict=True)
            self._then = [now if isinstance(then, VALUES) else then for then, now in held]
        return found
