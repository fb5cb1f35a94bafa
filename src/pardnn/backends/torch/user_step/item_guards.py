"""Guards of single containers: which items they held, and whether they hold them still."""

from __future__ import annotations

import enum
import itertools
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.user_step.object_graph import PLAIN, dotted

#: Compared by value; all other types are compared by identity, or walked.
VALUES = (
    *PLAIN, complex, bytes, range, slice, frozenset, enum.Enum, torch.dtype, torch.device,
    torch.memory_format, torch.layout, torch.Size,
)  # fmt: skip
ABSENT = object()


class Change:
    """A guarded value that has changed since capture.

    Attributes:
        name: Dotted path from the step's parameters, such as "model.dropout.p".
        then: The value at capture.
        now: The value at this call.
    """

    __slots__ = ("name", "now", "then")

    def __init__(self, name: str, then: Any, now: Any) -> None:
        self.name, self.then, self.now = name, then, now


class ItemGuard:
    """A guard on one container: its items under `keys`, and the length of a list.

    Args:
        name: Dotted path to it; empty for globals.
        holder: A dictionary, list or deque.
        keys: Of the items to compare.
        is_used: Whether a new item under a key is a change; None: new items never are.
    """

    __slots__ = ("get", "holder", "is_used", "keys", "name", "size", "then")

    def __init__(
        self,
        name: str,
        holder: Any,
        keys: Sequence[Any],
        is_used: Callable[[Any], bool] | None = None,
    ) -> None:
        self.name, self.holder, self.keys, self.is_used = name, holder, list(keys), is_used
        self.size = len(holder)
        # An itemgetter of one key would not return a tuple.
        self.get = operator.itemgetter(*self.keys, self.keys[0]) if self.keys else None
        self.then = self.get(holder)[:-1] if self.get else ()

    def changes(self) -> list[Change]:
        """Return the items whose values changed."""
        items = items_by_key(self.holder)
        found = [
            Change(_item_name(self.name, key), then, items.get(key))
            for key, then in zip(self.keys, self.then, strict=True)
            if differ(items.get(key, ABSENT), then)
        ]
        if not found:
            self._renew(items)
        if self.is_used is None or len(items) == self.size:
            return found
        if isinstance(self.holder, list | deque):
            return [*found, Change(f"len({self.name})", self.size, len(items))]
        known = set(self.keys)
        found += [
            Change(_item_name(self.name, key), None, item)
            for key, item in items.items()
            if key not in known and not isinstance(item, torch.Tensor) and self.is_used(key)
        ]
        self.size = self.size if found else len(items)
        return found

    def _renew(self, items: Mapping[Any, Any]) -> None:
        """Hold the present objects of equal plain values, so that the next check finds them."""
        self.then = tuple(
            items[key] if isinstance(then, VALUES) else then
            for key, then in zip(self.keys, self.then, strict=True)
        )

    @property
    def is_whole(self) -> bool:
        """Whether all items of a dictionary are compared, and new ones are changes."""
        is_dict = isinstance(self.holder, dict) and self.is_used is not None
        return is_dict and bool(self.keys) and self.holder.keys() == set(self.keys)


class _Held:
    """A value of which only matters which object it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__} of its own"


def held_by(owner: Any, key: str) -> _Held:
    """Return which object an attribute holds, to be compared by identity alone."""
    return _Held(getattr(owner, key))


def holding(value: Any) -> _Held:
    """Return an object, to be compared by identity alone."""
    return _Held(value)


def _item_name(name: str, key: Any) -> str:
    """Return the path of an item; optimizer state is kept by parameter, which has no short text."""
    return f"{name} of a parameter" if isinstance(key, torch.Tensor) else dotted(name, key)


def items_by_key(holder: Any) -> Mapping[Any, Any]:
    """Return the items of a dictionary, list or deque by key or index."""
    return dict(enumerate(holder)) if isinstance(holder, list | deque) else holder


def differ(now: Any, then: Any) -> bool:
    """Whether values differ: plain ones by value and type, containers by item, others by identity.

    A tensor is another one if it is another object: what a graph reads is bound to the object.
    """
    if now is then:
        return False
    if type(now) is not type(then):
        return True
    if isinstance(then, tuple | list):
        return len(now) != len(then) or any(map(differ, now, then))
    if isinstance(then, dict):
        return list(now) != list(then) or any(differ(now[key], then[key]) for key in then)
    if isinstance(then, _Held):
        return now.value is not then.value
    if isinstance(then, VALUES):
        return bool(now != then) and not (now != now and then != then)
    return now is not then


class Snapshot:
    """All guards as flat lists: that nothing has changed is found by a few loops in C.

    Most containers of a model are empty tables of hooks, and most others are compared whole.
    """

    def __init__(self, guards: Sequence[ItemGuard]) -> None:
        sized = [guard for guard in guards if guard.is_used is not None]
        self._empty = [guard.holder for guard in sized if not guard.size]
        self._sized = [guard.holder for guard in sized if guard.size]
        self._sizes = [guard.size for guard in sized if guard.size]
        whole = [guard for guard in guards if guard.is_whole]
        self._whole = [guard.holder for guard in whole]
        # In the order of the dictionary: an OrderedDict has another one besides.
        self._whole_keys = [key for holder in self._whole for key in dict.keys(holder)]
        held = (dict(zip(guard.keys, guard.then, strict=True)) for guard in whole)
        self._whole_then = [
            then[key]
            for then, holder in zip(held, self._whole, strict=True)
            for key in dict.keys(holder)
        ]
        kept = [guard for guard in guards if guard.get is not None and not guard.is_whole]
        self._getters, self._holders = [g.get for g in kept], [g.holder for g in kept]
        self._then = [item for guard in kept for item in (*guard.then, guard.then[0])]

    def holds(self) -> bool:
        """Whether every guarded item is the object that it was, and no container grew."""
        if any(self._empty) or list(map(len, self._sized)) != self._sizes:
            return False
        flat, same = itertools.chain.from_iterable, operator.is_
        try:
            return (
                all(map(same, flat(map(dict.keys, self._whole)), self._whole_keys))
                and all(map(same, flat(map(dict.values, self._whole)), self._whole_then))
                and all(
                    map(same, flat(map(operator.call, self._getters, self._holders)), self._then)
                )
            )
        except LookupError:
            return False
