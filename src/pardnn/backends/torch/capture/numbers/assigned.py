"""Plain values that a step assigns: `self.stage = "b"`, a member of an enumeration, a flag.

Problem: what the first trace assigns is there before the second one, which becomes the graph. The
assignment would never arrive in the user's object, and later steps would go the old way.

Idea: the values are put back after the first trace, so that the next one assigns them again. They
are constants of the graph and told after each step; the guards of the next call see the new value.
Objects that the step reaches are assigned by the name of a place that holds them.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.numbers.left_behind import of_optimizers
from pardnn.backends.torch.capture.restore import Changed, changes, differ, restore
from pardnn.backends.torch.capture.source_updates import StepTrace
from pardnn.backends.torch.ops.codec import encode
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.held_numbers import (
    missing_slots,
    named_places,
    place,
    slot_of_name,
)
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.slots import items_of

_SHARED = (
    torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.BuiltinFunctionType,
    enum.Enum,
)  # fmt: skip


class Assigned(NamedTuple):
    """A value that a step assigns.

    Attributes:
        change: The place, and its values before and after.
        content: The new value as data, see `runtime.filled_containers`; None if it cannot be told.
    """

    change: Changed
    content: dict[str, Any] | None


def assigned_values(objects: ObjectGraph) -> dict[str, Assigned]:
    """Return what a step has assigned, by the names of the places.

    Numbers are followed elsewhere, see `selection`, as are settings of optimizers.

    Args:
        objects: The object graph before the step.
    """
    found: dict[str, Assigned] = {}
    is_bound = of_optimizers(objects)
    for name, change in changes(objects.contents, _differ).items():
        if change.slot is None or isinstance(change.then, torch.Tensor) or "<" in name:
            continue
        if is_bound(name) or (_is_number(change.then) and _is_number(change.now)):
            continue
        if not _is_there(change):  # deleted
            continue
        if change.is_new and (not isinstance(change.slot.key, str) or "." in change.slot.key):
            continue
        content = None if type(change.now) in (int, float) else _content(change.now, objects)
        if content is not None and not _is_place_of(name, change, objects):
            found[name] = Assigned(change, None)
        elif content is not None or (_is_shared(change.now) and _is_shared(change.then)):
            found[name] = Assigned(change, content)
    return found


class Assignments:
    """What the first step assigns, put back for the traces that follow.

    Args:
        first: Trace of the first step.
        walk: Returns the object graph of the step.
    """

    def __init__(self, first: StepTrace, walk: Callable[[], ObjectGraph]) -> None:
        self._first, self._walk = first, walk
        self._settled: dict[str, Assigned] = {}
        # The others lie in containers that the step only fills, and are gone again.
        there = {n: a for n, a in first.assigned.items() if _is_there(a.change)}
        first.assigned = there
        for change, _ in there.values():
            if change.is_new:
                items_of(change.slot.holder).pop(change.slot.key)
            else:
                change.slot.set(change.then)
        for name, flag in first.trainable.items():
            first.sources[name].get().requires_grad_(not flag)

    def settle(self, settled: ObjectGraph, trace: StepTrace | None = None) -> bool:
        """Let the traces that follow begin with the values which no trace but the first assigns.

        Such is `self.kind = "causal"` where a mask is made at its first use.

        Args:
            settled: What the traces begin with; it is restored, and changed.
            trace: Of a later step; None if it failed for want of a value.

        Returns:
            Whether there are any.
        """
        again = trace.assigned if trace else {}
        known = self._settled.keys() | again.keys()
        left = {name: each for name, each in self._first.assigned.items() if name not in known}
        if left:
            restore(settled.contents)
            for change, _ in left.values():
                change.slot.set(change.now)
            settled.contents[:] = self._walk().contents
            self._settled |= left
        return bool(left)

    def tell(self, trace: StepTrace) -> None:
        """Note what the step assigns among its effects.

        Args:
            trace: Of the step that repeats.

        Raises:
            UnsupportedError: E804, if it is not what the first one assigns.
        """
        first = self._first
        changed = [n for n in trace.assigned if n not in first.assigned or n in self._settled]
        assigned = self._settled | dict(trace.assigned)
        changed += [
            n
            for n, each in assigned.items()
            if each.content is None or each.content != first.assigned.get(n, each).content
        ]
        changed += [n for n in first.trainable if n not in trace.trainable]
        changed += [n for n in trace.trainable if n not in first.trainable]
        if changed:
            raise unsupported.changed_state(changed)
        for name, each in assigned.items():
            trace.effects.noted.append({"assign": [name, each.content]})
        for name, flag in trace.trainable.items():
            trace.effects.noted.append({"trainable": [name, flag]})


def assigns(trace: StepTrace) -> bool:
    """Whether a step assigns values."""
    return bool(trace.assigned or trace.trainable)


def trainable_flags(trace: StepTrace) -> dict[str, bool]:
    """Return `requires_grad` of each parameter of a trace, by name."""
    named = ((n, s.get()) for n, s in trace.sources.items() if s.kind == "parameter")
    return {n: t.requires_grad for n, t in named if isinstance(t, torch.Tensor) and t.is_leaf}


def _differ(now: Any, then: Any) -> bool:
    return differ(now, then) or (now is not then and _is_shared(now) and _is_shared(then))


def _is_shared(value: Any) -> bool:
    """Whether a value is told by a place which holds it, or holds another of its kind."""
    return isinstance(value, _SHARED)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or node_of(value) is not None


def _is_there(change: Changed) -> bool:
    """Whether a place still holds the new value."""
    assert change.slot is not None
    try:
        return change.slot.get() is change.now
    except (KeyError, IndexError):
        return False


def _is_place_of(name: str, change: Changed, objects: ObjectGraph) -> bool:
    """Whether a rank finds the place of a change by its name; two may have one name."""
    assert change.slot is not None
    if change.is_new:
        found = missing_slots([name], objects, {}).get(name)
    else:
        found = slot_of_name(objects, name)
    return found is not None and place(found) == place(change.slot)


def _content(value: Any, objects: ObjectGraph) -> dict[str, Any] | None:
    """Return a value as data; None if it is none that is assigned."""
    if isinstance(value, enum.Enum):
        kind = type(value)
        of = next((n for n, _, x in named_places(objects) if x is kind or type(x) is kind), None)
        return None if of is None else {"member": [of, value.name]}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": encode(value, str)}
    if type(value) in (tuple, torch.Size):
        items = [_content(item, objects) for item in value]
        kind = "tuple" if type(value) is tuple else "size"
        return None if None in items else {kind: items}
    if _is_shared(value):
        of = next((n for n, _, x in named_places(objects) if x is value and "<" not in n), None)
        return None if of is None else {"place": of}
    return None
