"""Whether any of many dictionaries has changed, told by CPython 3.11's version tags.

Problem: a step's guards have some 1,500 dictionaries, and comparing their items misses the cache
with every key, every value and every table.
Idea: CPython 3.11 numbers the changes of all dictionaries, and each keeps the number of its last
change (PEP 509, `ma_version_tag`); TorchDynamo's guards rely on it, too. A dictionary with the same
tag is the same, item by item.

`torch._C._dynamo.guards.dict_version` reads one tag per call, and 1,500 calls take half the time of
comparing. NumPy reads all of them at once from memory, one line each. So this file depends on one
offset of one version of CPython, and checks it at import. 3.13 writes attributes without changing
the tag, and 3.14 has none: on versions other than 3.11 everything is compared.

The same read covers the words by which other objects hold guarded values: an object its class, a
cell its content, a function its code and defaults, a list its items. Such a word proves that an
object is still the same only while that object is kept alive: once it is freed, another may take
its address.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from pardnn.backends.torch.memory_words import TYPE_OFFSET, WORD, WORD_BYTES, Words

#: Bytes from the start of a dictionary to its tag: after the header and the number of its items.
_OFFSET = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)


class DictVersions:
    """The version tags of some dictionaries, none known at first, and other words.

    Args:
        holders: The dictionaries. They are kept alive, since tags are read from their memory.
        others: Addresses of other words, and their expected values; kept alive by the caller.
    """

    def __init__(
        self, holders: Sequence[dict[Any, Any]], others: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._holders = list(holders)
        self._tags = np.array(list(map(id, self._holders)), dtype=np.int64) + _OFFSET
        self._size = WORD_BYTES * len(self._tags)
        self._known = bytearray(self._size)  # no tag is 0
        self.expect(others)

    def expect(self, others: Sequence[tuple[int, int]]) -> None:
        """Expect other words in addition to the known tags."""
        words = np.array(others, dtype=np.uint64).reshape(-1, 2)
        self._words = Words(np.concatenate([self._tags, words[:, 0].astype(np.int64)]))
        self._known[self._size :] = words[:, 1].tobytes()

    def differ(self) -> bool:
        """Look; return whether any tag or word differs from the last accepted one."""
        return self._words.read() != self._known

    def changed(self) -> tuple[int, ...]:
        """Return the indices of the holders whose tags differed at the last look."""
        count = len(self._tags)
        known = np.frombuffer(bytes(self._known[: self._size]), dtype=np.uint64)
        return tuple((self._words.found[:count] != known).nonzero()[0].tolist())

    def are_others_same(self) -> bool:
        """Whether all words beside the tags were as expected at the last look."""
        return self._words.found[len(self._tags) :].tobytes() == self._known[self._size :]

    def accept(self) -> None:
        """Accept the dictionaries as of the last look."""
        self._known[: self._size] = self._words.found[: len(self._tags)].tobytes()


def _has_tags() -> bool:
    """Whether this Python keeps version tags of dictionaries at `_OFFSET`."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return False
    probe: dict[str, int] = {}
    tags = []
    for change in (lambda: probe.update(a=1), lambda: probe.update(a=2), probe.clear):
        change()
        tags.append(WORD.from_address(id(probe) + _OFFSET).value)
        if len(probe) > 1 or WORD.from_address(id(probe) + _OFFSET).value != tags[-1]:
            return False
    return tags[0] < tags[1] < tags[2]


#: Whether `DictVersions` works on this Python.
HAS_TAGS = _has_tags()


def class_address(value: Any) -> int:
    """Return where an object holds its class."""
    return id(value) + TYPE_OFFSET


def attribute_address(value: Any, key: str) -> int | None:
    """Return where a cell or function holds an attribute; None if unknown."""
    place = _PLACES.get((type(value), key))
    return None if place is None else id(value) + place


def list_words(value: list[Any], length: int) -> list[tuple[int, int]]:
    """Return address and expected word of a list's length, and of the pointer to its items."""
    pointer = id(value) + _ITEMS
    return [(id(value) + _LENGTH, length), (pointer, WORD.from_address(pointer).value)]


def _words_of(value: Any) -> list[int]:
    count = type(value).__basicsize__ // WORD_BYTES
    return list((WORD * count).from_address(id(value)))


def _place(value: Any, word: int) -> int | None:
    """Return the only offset at which an object has a word; None unless there is just one."""
    found = [WORD_BYTES * i for i, each in enumerate(_words_of(value)) if each == word]
    return found[0] if len(found) == 1 else None


def _places() -> dict[tuple[type, str], int]:
    def probe(_a: Any = object(), *, _b: Any = object()) -> None:  # noqa: B008
        pass

    cell = types.CellType(object())
    found = {(types.CellType, "cell_contents"): _place(cell, id(cell.cell_contents))}
    for key in ("__code__", "__defaults__", "__kwdefaults__"):
        found[types.FunctionType, key] = _place(probe, id(getattr(probe, key)))
    return {key: place for key, place in found.items() if place is not None}


#: Length of a list, and pointer to its items, as CPython 3.11 has them.
_LENGTH, _ITEMS = object.__basicsize__, object.__basicsize__ + WORD_BYTES
_PLACES = _places() if HAS_TAGS else {}
