"""Restoring the content of the objects of a step, and finding what the step has changed."""

from __future__ import annotations

import enum
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.refusals.random_states import RandomState
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.object_graph import PLAIN
from pardnn.backends.torch.user_step.slots import (
    Attributes,
    GlobalName,
    Slot,
    dotted,
    items_of,
    slot_of,
)

_SYMBOLS = (torch.SymFloat, torch.SymInt)
_NUMBERS = (int, float, *_SYMBOLS)
#: Containers whose own answers count: nobody can change their classes.
_DICTS, _LISTS = frozenset({dict, OrderedDict, defaultdict}), frozenset({list, deque})


def restore(contents: Sequence[tuple[str, Any, Any]]) -> None:
    """Restore the content of every container and object that has changed.

    Args:
        contents: `ObjectGraph.contents` of the walk before the step.
    """
    for _, holder, content in contents:
        if is_as_noted(holder, content):
            continue
        if isinstance(holder, types.CellType):
            holder.cell_contents = content
        elif isinstance(holder, GlobalName):
            items_of(holder.namespace)[holder.name] = content
        elif isinstance(holder, list | deque):
            holder.clear()
            holder.extend(content)
        else:
            items = items_of(holder)
            items.clear()
            items.update(content)


def is_as_noted(holder: Any, content: Any) -> bool:
    """Whether a holder has the same objects as in an entry of `ObjectGraph.contents`."""
    now = _content(holder)
    if isinstance(holder, types.CellType | GlobalName):
        return now is not None and now is content
    return now is not None and _same(now, content)


def _content(holder: Any) -> Any:
    if isinstance(holder, types.CellType):
        return holder.cell_contents
    if isinstance(holder, GlobalName):
        return items_of(holder.namespace).get(holder.name)
    items = items_of(holder)
    return dict(items) if isinstance(items, Attributes) else items


def _same(now: Any, then: Any) -> bool:
    """Whether two contents hold the same objects in the same order."""
    if _is_untouched(now, then):
        return True
    if isinstance(then, dict) and isinstance(now, dict):
        pairs = zip(now.items(), then.items(), strict=False)
        return len(now) == len(then) and all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(then, list) and isinstance(now, list | deque):
        return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=False))
    return now is then


def _is_untouched(now: Any, then: Any) -> bool:
    """Whether a container is unchanged, compared in C; False also for unusual ones.

    Args:
        now: The container.
        then: A copy of it from before.
    """
    kind = dict if type(now) in _DICTS else list if type(now) in _LISTS else None
    if type(then) is not kind or len(now) != len(then):
        return False
    is_same = all(map(operator.is_, now, then))
    return is_same and (kind is list or all(map(operator.is_, now.values(), then.values())))


def first_change(
    contents: Sequence[tuple[str, Any, Any]], known: Collection[int] = ()
) -> str | None:
    """Return the name of a holder whose objects have changed; None if there is none.

    Replacing one tensor by another does not count.

    Args:
        contents: `ObjectGraph.contents` of an earlier walk.
        known: Ids of new values that do not count either.
    """
    for name, holder, then in contents:
        now = _content(holder)
        if isinstance(holder, types.CellType | GlobalName):
            now, then = [now], [then]
        new, old = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (now, then))
        for key in dict.fromkeys((*old, *new)):
            pair = new.get(key), old.get(key)
            is_one = _stands_for(*pair) or id(pair[0]) in known
            if not (key in new and key in old and is_one):
                is_variable = isinstance(holder, types.CellType | GlobalName)
                return name if is_variable else dotted(name, key)
    return None


def _stands_for(now: Any, then: Any) -> bool:
    if now is then or (isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor)):
        return True
    return type(now) is type(then) and isinstance(then, PLAIN) and now == then


class Changed(NamedTuple):
    """A plain value that has changed.

    Attributes:
        slot: Its place; None for a container whose size has changed.
        then: The value before; None if there was none.
        now: The value after.
        is_new: Whether there was no value before.
    """

    slot: Slot | None
    then: Any
    now: Any
    is_new: bool = False


def is_arithmetic(change: Changed) -> bool:
    """Whether a change could be one of a number by arithmetic."""
    before = isinstance(change.then, _NUMBERS) and not isinstance(change.then, bool)
    after = isinstance(change.now, _NUMBERS) and not isinstance(change.now, bool)
    return change.slot is not None and before and after


def is_flag(change: Changed) -> bool:
    """Whether a place that held a bool holds another, or one that only a run knows."""
    is_one = isinstance(change.now, bool | torch.SymBool)
    return change.slot is not None and type(change.then) is bool and is_one


def is_filled(change: Changed) -> bool:
    """Whether a place that held None now holds a number that the step computes from others."""
    if change.slot is None or change.then is not None or change.is_new:
        return False
    if not isinstance(change.slot.holder, list):  # a number computed from constants then stays
        node = node_of(change.now)
        return node is not None and node.hint is None
    return isinstance(change.now, _NUMBERS) and not isinstance(change.now, bool)


def changes(
    contents: Sequence[tuple[str, Any, Any]],
    differs: Callable[[Any, Any], bool] | None = None,
) -> dict[str, Changed]:
    """Return the plain values, and the containers by their size, that have changed.

    Tensors are compared elsewhere. Objects that were replaced by others do not count, since steps
    keep results in attributes.

    Args:
        contents: `ObjectGraph.contents` of the walk before the step.
        differs: Compares a value with the one before; `differ` by default.

    Returns:
        By name.
    """
    compare = differs or differ
    return {name: each for entry in contents for name, each in _changes_of(*entry, compare)}


def _changes_of(
    name: str, holder: Any, then: Any, differs: Callable[[Any, Any], bool]
) -> Iterator[tuple[str, Changed]]:
    """Yield what has changed in one entry of `ObjectGraph.contents`."""
    now = _content(holder)
    if isinstance(holder, types.CellType | GlobalName):
        if differs(now, then):
            yield name, Changed(slot_of(holder, None), then, now)
    elif _is_untouched(now, then):
        return
    elif isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            if isinstance(key, torch.Tensor):
                continue
            missing = (key in then) != (key in now)
            if isinstance(state := now.get(key), RandomState) and state.is_set:
                continue
            if missing or differs(now[key], then[key]):
                was, new = then.get(key), now.get(key)
                change = Changed(slot_of(holder, key), was, new, is_new=key not in then)
                yield dotted(name, key), change
    elif len(now) != len(then):
        yield name, Changed(None, then, now)
    else:
        for i, (new, old) in enumerate(zip(now, then, strict=True)):
            if differs(new, old):
                yield dotted(name, i), Changed(slot_of(holder, i), old, new)


def differ(now: Any, then: Any) -> bool:
    """Whether a plain value has been replaced by another one."""
    symbols = (torch.SymFloat, torch.SymInt, torch.SymBool)
    if isinstance(now, symbols) or isinstance(then, symbols):
        return now is not then
    if isinstance(now, tuple) and isinstance(then, tuple):
        return len(now) != len(then) or any(map(differ, now, then))
    if isinstance(now, enum.Enum) and isinstance(then, enum.Enum):
        return now is not then
    if not isinstance(now, PLAIN) and not isinstance(then, PLAIN):
        return False
    return type(now) is not type(then) or (now != then and now == now)
