"""Guards on the content of sets, byte arrays and NumPy arrays, which have no items by key.

Problem: comparing contents costs time in proportion to their size, and a step that merely can reach
a data set never reads it.

Idea: the smallest are always compared, 1 MiB in all. Of the others, capture finds those that the
step reads (`capture.assigned.large_contents`); they are compared as well. Of the rest only the
extent is, since a step may ask for the length of its data.

Complexity: O(bytes compared) per call; 3 ms for 16 MiB.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import numpy as np

from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.object_graph import PLAIN
from pardnn.backends.torch.user_step.references import BYTES

#: Limit for all that is compared whether or not a step reads it.
_MAX_BYTES = 1 << 20
_Held = tuple[str, Any]


class ContentGuards:
    """Guards on the content of sets, byte arrays and NumPy arrays; the smallest ones come first.

    Attributes:
        large: Names and values of what is compared only if the step reads it.
    """

    def __init__(self) -> None:
        self._added: list[_Held] = []
        self._guards: list[tuple[str, Any, Any]] = []
        self._extents: list[tuple[str, Any, Any]] = []
        self.large: list[_Held] = []

    def add(self, name: str, value: Any) -> None:
        """Add a value, to be guarded by `hold`.

        Args:
            name: Dotted path to it.
            value: A value for which `has_content` or `has_order` is true.
        """
        if not getattr(type(value), "is_pardnn_recorder", False):
            self._added.append((name, value))

    def hold(self, read: Collection[str]) -> None:
        """Guard what was added as it is now.

        Args:
            read: Names of the large contents that the step reads.
        """
        found = sorted(self._added, key=lambda each: _size_of(each[1]))
        sums = itertools.accumulate(_size_of(value) for _, value in found)
        for (name, value), total in zip(found, sums, strict=True):
            if total > _MAX_BYTES and not is_trusted(value):
                self.large.append((name, value))
            if total <= _MAX_BYTES or name in read:
                self._guards.append((name, value, content_of(value)))
            else:
                self._extents.append((name, value, _extent_of(value)))

    def changes(self) -> list[Change]:
        """Return the values whose content has changed."""
        found: list[Change] = []
        for name, value, then in self._guards:
            if content_of(value) != then:
                kind = type(value).__name__
                other = "order" if isinstance(value, OrderedDict) else "content"
                found.append(Change(name, f"a {kind}", f"a {kind} of other {other}"))
        for name, value, then in self._extents:
            if (now := _extent_of(value)) != then:
                found.append(Change(f"the extent of {name}", then, now))
        return found


def has_content(value: Any) -> bool:
    """Whether a value is compared by its content."""
    return isinstance(value, (set, np.ndarray, *BYTES))


def has_order(value: Any) -> bool:
    """Whether `move_to_end` may reorder a container's keys without changing an item."""
    return isinstance(value, OrderedDict) and all(isinstance(key, PLAIN) for key in value)


def content_of(value: Any) -> Any:
    """Return the compared content of a value; for an ordered dictionary, the order."""
    if isinstance(value, OrderedDict):
        return list(value)
    if not isinstance(value, np.ndarray):
        return frozenset(value) if isinstance(value, set) else bytes(value)
    return value.shape, value.dtype, list(value.flat) if value.dtype == object else value.tobytes()


def is_trusted(value: Any) -> bool:
    """Whether the user has said that an array does not change."""
    return isinstance(value, np.ndarray) and value.flags.owndata and not value.flags.writeable


def size_of(value: Any) -> int:
    """Return the bytes that a content takes."""
    if isinstance(value, np.ndarray | memoryview):
        return value.nbytes
    return ctypes.sizeof(value) if isinstance(value, _OF_CTYPES) else sys.getsizeof(value)


#: All values of `ctypes` share one class.
_OF_CTYPES = BYTES[-1]


def _size_of(value: Any) -> int:
    """Return what counts against the limit: keys in order are compared with the items anyway."""
    return 0 if isinstance(value, OrderedDict) else size_of(value)


def _extent_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, is_trusted(value)
    return size_of(value) if isinstance(value, _OF_CTYPES) else len(value)
