"""Learning rate schedules that a step steps itself: called for real after each step.

Problem: `scheduler.step()` computes the next rates in Python with any function of the user's,
    branches on counts and replaces lists.

Idea: the graph contains none of it. While the step is traced, the call is only recorded, and each
rank makes it after each step, with its arguments: the metric of `ReduceLROnPlateau`, an epoch. The
graph reads the rates at the next call. Numbers that the call would change must not be read after it
in the same step: they are replaced by `_Gone`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.ops.host_scalars import HostNode, symbol
from pardnn.backends.torch.user_step.held_numbers import numbers_by_name
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.slots import Slot

#: Called with the name of a schedule, and the arguments of a call of its `step`.
Tell = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
#: Numbers that schedules change: those of every schedule, and of `ReduceLROnPlateau`.
_CHANGED = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter")


def schedules_of(objects: ObjectGraph) -> dict[str, LRScheduler]:
    """Return the schedules in an object graph by name."""
    found = ((entry.name, entry.value) for entry in objects.stateful)
    return {name: value for name, value in found if isinstance(value, LRScheduler)}


def schedule_numbers(objects: ObjectGraph) -> frozenset[str]:
    """Return the names of the counts and rates of schedules, which differ at each step."""
    schedules = tuple(schedules_of(objects))
    prefixes = tuple(f"{name}.{key}" for name in schedules for key in _CHANGED)
    within = [each for each in objects.contents if each[0].startswith(schedules)]
    return frozenset(n for n in numbers_by_name(within, {}) if n.startswith(prefixes))


@contextlib.contextmanager
def schedules_noted(objects: ObjectGraph, locator: Locator, tell: Tell) -> Iterator[list[str]]:
    """Note calls of `scheduler.step()` instead of making them while the context is open.

    Args:
        objects: The object graph of the step.
        locator: Finds the user's line.
        tell: Called at a call with arguments.

    Yields:
        Names of the schedules that were stepped, in order.
    """
    noted: list[str] = []
    kept: list[tuple[Slot, Any]] = []
    schedules = schedules_of(objects)
    for name, schedule in schedules.items():
        schedule.__dict__["step"] = _note(name, schedule, noted, kept, locator, tell)
    try:
        yield noted
    finally:
        for slot, value in reversed(kept):
            slot.set(value)
        for schedule in schedules.values():
            schedule.__dict__.pop("step", None)


def _note(
    name: str,
    schedule: LRScheduler,
    noted: list[str],
    kept: list[tuple[Slot, Any]],
    locator: Locator,
    tell: Tell,
) -> Any:
    with_arguments: set[bool] = set()

    def step(*args: Any, **kwargs: Any) -> None:
        with_arguments.add(bool(args or kwargs))
        if len(with_arguments) > 1:
            raise unsupported.schedule_with_arguments(name, locator.line())
        noted.append(name)
        if args or kwargs:
            tell(name, args, kwargs)
        gone = symbol(_Gone(name, locator))
        for slot in _changed_by(schedule):
            kept.append((slot, slot.get()))
            slot.set(_replaced(slot.get(), gone))

    return step


def _changed_by(schedule: LRScheduler) -> Iterator[Slot]:
    """Yield the places of numbers that a schedule may change."""
    for key in schedule.__dict__:
        if key in _CHANGED:
            yield Slot(schedule, key)
    for group in schedule.optimizer.param_groups:
        yield from (Slot(group, key) for key in group if key != "params")


def _replaced(value: Any, gone: Any) -> Any:
    """Return a value with `gone` for each number."""
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, gone) for item in value)
    is_number = isinstance(value, float | torch.SymFloat | torch.SymInt) or type(value) is int
    return gone if is_number else value


class _Gone(HostNode):
    """A number that a schedule stepped earlier would have changed: it can't be read."""

    def __init__(self, schedule: str, locator: Locator) -> None:
        super().__init__(self, None, float)
        self._schedule, self._locator = schedule, locator
        self.hints: Mapping[Any, Any] = {}
        self.is_index_asked = False

    @property
    def operand(self) -> Any:
        """Raise: a call takes the number."""
        raise unsupported.read_after_schedule(self._schedule, self._locator.line())

    def _call(self, function: str, *others: HostNode) -> HostNode:
        raise unsupported.read_after_schedule(self._schedule, self._locator.line())

    def guard_scalar(self, node: HostNode, *, is_truth: bool = False) -> Any:
        """Raise: Python needs the number."""
        raise unsupported.read_after_schedule(self._schedule, self._locator.line())


def stepped(schedules: Iterable[str]) -> dict[str, Any]:
    """Return what the graph's loss op says about schedules."""
    names = list(schedules)
    return {"schedules": names} if names else {}
