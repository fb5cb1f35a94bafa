"""Guards on single containers: which items they held, and whether they still hold them."""

from __future__ import annotations

import ctypes
import enum
import itertools
import operator
import os
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.memory_words import WORD, WORD_BYTES
from pardnn.backends.torch.user_step.dict_versions import (
    HAS_TAGS,
    DictVersions,
    list_words,
)
from pardnn.backends.torch.user_step.object_graph import PLAIN
from pardnn.backends.torch.user_step.slots import behind_view, dotted

#: Types compared by value; all others are compared by identity, or walked.
VALUES = (
    *PLAIN, complex, bytes, range, slice, frozenset, enum.Enum, torch.dtype, torch.device,
    torch.memory_format, torch.layout, torch.Size,
)  # fmt: skip
ABSENT = object()
_NOTHING: Mapping[Any, Any] = types.MappingProxyType({})


class Change:
    """A guarded value that has changed since capture.

    Attributes:
        name: Dotted path from the step's parameters, such as "model.dropout.p".
        then: The value at capture.
        now: The value at this call.
        place: Where it is held, `held_numbers.place`; None if it has no place of its own.
    """

    __slots__ = ("name", "now", "place", "then")

    def __init__(
        self, name: str, then: Any, now: Any, place: tuple[int, Any] | None = None
    ) -> None:
        self.name, self.then, self.now, self.place = name, then, now, place


class ItemGuard:
    """A guard on one container: its items under `keys`, and the length of a list.

    Args:
        name: Dotted path to it; empty for globals.
        holder: A dictionary, list or deque.
        keys: The keys of the items to compare.
        is_used: Whether a new item under a key is a change; None: new items never are.
        left: What else the step may find under keys: values that it leaves there itself.
        same: Keys under which an equal object is a change, too.
        is_ordered: Whether another order of a dictionary's keys is a change, including keys whose
            items are not compared.
    """

    __slots__ = (
        "get", "holder", "is_used", "is_whole", "keys", "left", "name", "order", "same", "size",
        "then",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        holder: Any,
        keys: Sequence[Any],
        is_used: Callable[[Any], bool] | None = None,
        left: Mapping[Any, Any] = _NOTHING,
        same: Collection[Any] = (),
        *,
        is_ordered: bool = False,
    ) -> None:
        self.name, self.holder, self.keys, self.is_used = name, holder, list(keys), is_used
        self.same, self.order = same, list(holder) if is_ordered and len(holder) > 1 else []
        self.size = len(holder)
        # Whether all items of a dictionary are compared in this order, and new ones are changes.
        self.is_whole = (
            isinstance(holder, dict)
            and is_used is not None
            and 0 < self.size == len(self.keys)
            and all(map(operator.is_, dict.keys(holder), self.keys))
        )
        # An itemgetter of one key would not return a tuple.
        self.get = operator.itemgetter(*self.keys, self.keys[0]) if self.keys else None
        self.then = self.get(holder)[:-1] if self.get else ()
        held = dict(zip(self.keys, self.then, strict=True)) if left else {}
        self.left = {key: (value, held[key]) for key, value in left.items() if key in held}

    def changes(self) -> list[Change]:
        """Return the items whose values changed."""
        items, at = items_by_key(self.holder), id(behind_view(self.holder))
        found = [
            Change(dotted(self.name, key), Held(then), Held(items.get(key)))
            for key, then in zip(self.keys, self.then, strict=True)
            if key in self.same and items.get(key, ABSENT) is not then
        ] if self.same else []  # fmt: skip
        found += [
            Change(_item_name(self.name, key), then, items.get(key), (at, key))
            for key, then in zip(self.keys, self.then, strict=True)
            if (not self.same or key not in self.same)
            and differ(items.get(key, ABSENT), then)
            and all(differ(items.get(key, ABSENT), each) for each in self.left.get(key, ()))
        ]
        if self.order and list(items) != self.order:
            now, then = set(items), set(self.order)
            if [key for key in items if key in then] != [key for key in self.order if key in now]:
                found.append(Change(f"the order of {self.name}", "that of capture", "another"))
        if not found:
            self._renew(items)
        if self.is_used is None:
            return found
        if isinstance(self.holder, list | deque):
            if len(items) != self.size:
                found.append(Change(f"len({self.name})", self.size, len(items)))
            return found
        known = set(self.keys)
        found += [
            Change(_item_name(self.name, key), None, item)
            for key, item in items.items()
            if key not in known and self.is_used(key)
        ]
        if not found and items.keys() == known and any(map(differ, items, self.keys)):
            found.append(Change(f"the order of {self.name}", "that of capture", "another"))
        self.size = self.size if found else len(items)
        return found

    def accept(self, now: Mapping[int, Any]) -> None:
        """Expect new objects where they are in the places of old ones, given by id."""
        if not any(id(then) in now for then in self.then):
            return
        items = items_by_key(self.holder)
        self.then = tuple(
            exchanged(then, items.get(key), now)
            for key, then in zip(self.keys, self.then, strict=True)
        )
        self.left = {
            key: tuple(exchanged(each, items.get(key), now) for each in pair)
            for key, pair in self.left.items()
        }

    def _renew(self, items: Mapping[Any, Any]) -> None:
        """Hold the current objects of equal plain values, so that the next check finds them."""
        self.order = list(items) if self.order else []
        self.then = tuple(
            items[key] if isinstance(then, VALUES) else then
            for key, then in zip(self.keys, self.then, strict=True)
        )


def exchanged(then: Any, held: Any, now: Mapping[int, Any]) -> Any:
    """Return what a guard is to expect: what is held, if that stands for what was held.

    Args:
        then: What was held at capture.
        held: What is held now.
        now: New objects by the ids of those in whose places they are.
    """
    return held if id(then) in now and now[id(then)] is held else then


class Held:
    """A value of which only the identity matters."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__} of its own"


def holding(value: Any) -> Held:
    """Return an object, to be compared by identity alone."""
    return Held(value)


def _item_name(name: str, key: Any) -> str:
    """Return the path of an item; optimizer state is kept by parameter, which has no short text."""
    if isinstance(key, bytes):  # from the environment
        return f"{name}[{os.fsdecode(key)!r}]"
    return f"{name} of a parameter" if isinstance(key, torch.Tensor) else dotted(name, key)


def items_by_key(holder: Any) -> Mapping[Any, Any]:
    """Return the items of a dictionary, list or deque by key or index."""
    return dict(enumerate(holder)) if isinstance(holder, list | deque) else holder


def differ(now: Any, then: Any) -> bool:
    """Whether values differ: plain ones by value and type, containers by item, others by identity.

    Tensors differ if they are different objects, since what a graph reads is bound to the object.
    """
    if now is then:
        return False
    if type(now) is not type(then):
        return True
    if isinstance(then, tuple | list):
        return len(now) != len(then) or any(map(differ, now, then))
    if isinstance(then, dict):
        return list(now) != list(then) or any(differ(now[key], then[key]) for key in then)
    if isinstance(then, Held):
        return now.value is not then.value
    if isinstance(then, VALUES) and not _has_more(then):
        if now == then:  # of zeros, the signs
            return isinstance(then, float | complex) and repr(now) != repr(then)
        return not (now != now and then != then)
    return now is not then


def may_hold(value: Any) -> bool:
    """Whether a value may hold others; enum members may, and are compared as well."""
    return not isinstance(value, VALUES) or hasattr(value, "__dict__")


def _has_more(value: Any) -> bool:
    """Whether a number or text has attributes, in which an equal one may differ."""
    return hasattr(value, "__dict__") and not isinstance(value, enum.Enum)


def any_key(_key: Any) -> bool:
    """Accept every item."""
    return True


class Snapshot:
    """All guards on containers: words of memory, or a few loops, show that nothing has changed.

    A dictionary with the version tag of the last look is not searched, nor is a list with the same
    words. Others are compared, and so is everything if this Python has no tags.

    Args:
        guards: The guards; the first look compares their dictionaries.
        pointers: Addresses of other words that are read as well, and their expected values.

    Attributes:
        is_rest_same: Whether all `pointers` were found at the last look.
    """

    def __init__(
        self, guards: Sequence[ItemGuard], pointers: Sequence[tuple[int, int]] = ()
    ) -> None:
        tagged = [(d, g) for g in guards if HAS_TAGS and (d := _dictionary(g.holder)) is not None]
        # In order of address, each page of memory is visited only once.
        tagged.sort(key=lambda each: id(each[0]))
        self._tagged = [guard for _, guard in tagged]
        is_tagged = set(map(id, self._tagged))
        untagged = [guard for guard in guards if id(guard) not in is_tagged]
        lists = [guard for guard in untagged if HAS_TAGS and isinstance(guard.holder, list)]
        is_told = set(map(id, lists))
        rest = [guard for guard in untagged if id(guard) not in is_told]
        self._lists, self._of_lists = lists, _Items(lists)
        self._untagged = _Items(rest) if rest else None
        # Often the same few change at every call, such as the globals of the user's loop.
        self._changed: tuple[int, ...] = ()
        self._of_changed = _Items(())
        self.is_rest_same = False
        self._tags = DictVersions([holder for holder, _ in tagged])
        self.expect(pointers)

    def release(self) -> None:
        """Hold only what the guards themselves hold: their dictionaries are compared anew."""
        self._changed, self._of_changed = (), _Items(())

    def expect(self, pointers: Sequence[tuple[int, int]]) -> None:
        """Expect other words in addition to the tags, and the lists as they are held."""
        heads = [word for guard in self._lists for word in list_words(guard.holder, guard.size)]
        self._tags.expect([*heads, *pointers] if HAS_TAGS else [])
        self._items = [view for guard in self._lists for view in _item_words(guard)]
        words = (id(item) for guard in self._lists for item in guard.then)
        self._addresses = b"".join(map(WORD, words))

    def holds(self) -> bool:
        """Whether every guarded item is the same object as before, and no container has grown."""
        # Read before anything is compared, so that no change goes unnoticed.
        self.is_rest_same = is_same = HAS_TAGS
        if self._tags.differ():
            self.is_rest_same = is_same = self._tags.are_others_same()
            if changed := self._tags.changed():
                if changed != self._changed:
                    self._changed = changed
                    self._of_changed = _Items([self._tagged[index] for index in changed])
                if not self._of_changed.hold():
                    return False
                self._tags.accept()
        # Items of a list are read only if its length and its memory are the known ones.
        is_other = not is_same or b"".join(self._items) != self._addresses
        if is_other and not self._of_lists.hold():
            return False
        return self._untagged is None or self._untagged.hold()


def _dictionary(holder: Any) -> dict[Any, Any] | None:
    """Return a dictionary, or the one behind the attributes of a class."""
    found = behind_view(holder)
    return found if isinstance(found, dict) else None


def _item_words(guard: ItemGuard) -> Iterator[ctypes.Array[Any]]:
    """Yield the memory in which a list holds its guarded items, in one piece if all are."""
    _, (_, first) = list_words(guard.holder, guard.size)
    if guard.keys == list(range(len(guard.holder))):
        yield (WORD * len(guard.keys)).from_address(first)
        return
    for index in guard.keys:
        if index < len(guard.holder):
            yield (WORD * 1).from_address(first + WORD_BYTES * index)


class _Items:
    """The items of some guards as flat lists, to be compared by a few loops in C.

    Most containers of a model are empty hook tables, and most others are compared whole.
    """

    def __init__(self, guards: Sequence[ItemGuard]) -> None:
        sized = [guard for guard in guards if guard.is_used is not None]
        self._empty = [guard.holder for guard in sized if not guard.size]
        self._sized = [guard.holder for guard in sized if guard.size]
        self._sizes = [guard.size for guard in sized if guard.size]
        whole = [guard for guard in guards if guard.is_whole]
        self._whole = [guard.holder for guard in whole]
        # The order is that of capture; an OrderedDict's may differ from that of `dict.keys`.
        self._whole_keys = [key for guard in whole for key in guard.keys]
        self._whole_then = [item for guard in whole for item in guard.then]
        ordered = [guard for guard in guards if guard.order]
        self._ordered, self._orders = [g.holder for g in ordered], [g.order for g in ordered]
        kept = [guard for guard in guards if guard.get is not None and not guard.is_whole]
        self._getters, self._holders = [g.get for g in kept], [g.holder for g in kept]
        self._then = [item for guard in kept for item in (*guard.then, guard.then[0])]
        self._has_items = bool(self._whole or self._holders)

    def hold(self) -> bool:
        """Whether every item is the same object as before, and no container has grown."""
        if any(self._empty) or list(map(len, self._sized)) != self._sizes:
            return False
        if self._ordered and list(map(list, self._ordered)) != self._orders:
            return False
        if not self._has_items:
            return True
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
