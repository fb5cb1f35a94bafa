"""The numbers, conditions and settings on which a graph relies, compared at every call."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version

from pardnn.backends.torch.ops.codec import decode
from pardnn.backends.torch.runtime.host_numbers import HostNumbers
from pardnn.backends.torch.user_step.dict_versions import HAS_TAGS
from pardnn.backends.torch.user_step.guards.item import ABSENT, Change
from pardnn.backends.torch.user_step.slots import Entry, Slot
from pardnn.graph.ir import Op


class GrantedValues:
    """What a graph assumes about numbers, compared with what the user's objects hold.

    Args:
        numbers: Inputs of the graph that are numbers.
        host: Reads the numbers that objects hold.
        settings: Name, place and captured value of each setting.
    """

    def __init__(
        self,
        numbers: Sequence[Op],
        host: HostNumbers,
        settings: Sequence[tuple[str, Entry, Any]],
    ) -> None:
        self._host = host
        # What a program makes of a float, x + 1.0, is another type if it gets an int.
        made_of = set(host.program.inputs)
        self._numbers = [(*_of_number(op), op.name in made_of) for op in numbers]
        self._of_batch: list[str] = []
        held = [(name, entry.slot, value) for name, entry, value in settings if entry.slot]
        self._settings = [(name, _plain(value)) for name, _, value in held]
        self._slots = [slot for _, slot, _ in held]
        self._getters = [_getter(slot) for slot in self._slots]
        self._equal = [ABSENT] * len(held)
        self._read: dict[str, Any] | None = None
        # The dictionaries from which all is read, if that can be told, and their versions then.
        self._holders: list[dict[Any, Any]] | None = None
        self._versions: list[int] = []
        self._at_versions: dict[str, Any] = {}

    def expect(self, sources: Collection[str]) -> None:
        """Assume that the batch gives each number that is not in `sources`."""
        names = {*self._host.program.inputs, *(name for name, *_ in self._numbers)}
        self._of_batch = sorted(names.difference(sources))
        holders = [slot.holder if isinstance(slot.holder, dict) else None for slot in self._slots]
        if HAS_TAGS and not self._of_batch and self._host.is_empty:
            holders += [self._host.dictionary(name) for name, *_ in self._numbers]
            found = {id(holder): holder for holder in holders if holder is not None}
            is_told = all(each is not None for each in holders)
            self._holders = list(found.values()) if is_told else None

    def take(self) -> dict[str, Any] | None:
        """Return the numbers that `changes` read, once; None if it was not called or found any."""
        read, self._read = self._read, None
        return read

    def changes(self, numbers: Mapping[str, Any]) -> Iterator[Change]:
        """Yield what differs from the values on which the graph relies.

        Args:
            numbers: The numbers of the batch, by name; all others are read where they are held.
        """
        self._read = None
        # Read before anything is compared, so that no change goes unnoticed.
        versions = None if self._holders is None else list(map(dict_version, self._holders))
        if versions == self._versions:
            self._read = self._at_versions
            return
        for name in self._of_batch:
            if name not in numbers:
                yield Change(name, "a number", None)
                return
        read: dict[str, Any] = {}
        for name, captured, guard, is_int, is_of_program in self._numbers:
            value = read[name] = numbers[name] if name in numbers else self._host.value(name)
            is_other = (guard == "exact" and value != captured) or (
                guard == "nonzero" and not value
            )
            if is_int and type(value) is not int:
                yield Change(f"the type of {name}", int, type(value))
                return
            if is_of_program and not is_int and isinstance(value, int):
                yield Change(f"the type of {name}", float, type(value))
                return
            if is_other or not isinstance(value, int | float):
                yield Change(name, captured, value)
                return
        found = [*self._host.read(numbers), *self._setting_changes()]
        yield from found
        if not found:
            self._read = read
            if versions is not None:
                self._versions, self._at_versions = versions, read

    def _setting_changes(self) -> list[Change]:
        values = list(map(operator.call, self._getters))
        # A setting is a plain value, so an object that was equal at the last call still is.
        if all(map(operator.is_, values, self._equal)):
            return []
        found = [
            Change(name, captured, value)
            for (name, captured), value in zip(self._settings, values, strict=True)
            if type(_plain(value)) is not type(captured) or _plain(value) != captured
        ]
        if not found:
            self._equal = values
        return found


def _plain(value: Any) -> Any:
    """Return an enum member as graphs have it, and any other value unchanged."""
    return value.value if isinstance(value, enum.Enum) else value


def _of_number(op: Op) -> tuple[str, Any, Any, bool]:
    """Return name, captured value, guard and whether it is an int."""
    arguments = op.arguments or {}
    is_int = op.outputs[0].dtype == "host.int"
    captured = decode(arguments.get("value"), torch.device("cpu"))
    return op.name, captured, arguments.get("guard"), is_int


def _getter(slot: Slot) -> Callable[[], Any]:
    if isinstance(slot.holder, dict) and not slot.path:
        return functools.partial(operator.getitem, slot.holder, slot.key)
    return slot.get
