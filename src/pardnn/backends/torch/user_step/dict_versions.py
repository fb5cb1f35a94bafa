"""Whether any of many dictionaries was changed, by the version tags of CPython 3.11.

Problem: a step's guards hold some 1,500 dictionaries, and comparing what is in them misses the
cache with every key, every value and every table. Idea: CPython 3.11 numbers the changes of all
dictionaries, and each one keeps the number of its last (PEP 509, `ma_version_tag`); TorchDynamo's
guards rest on it, too. A dictionary whose tag is the same is the same, item by item.

`torch._C._dynamo.guards.dict_version` reads one tag a call, and 1,500 calls take half of what
comparing takes. NumPy reads all of them at once, from where they lie: one line of memory each. So
this file knows one offset of one version of CPython, and looks at import whether it holds. 3.13
writes attributes past the tag and 3.14 has none: elsewhere than on 3.11 nothing is known to be the
same, and all is compared.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pardnn.backends.torch.user_step.memory_words import WORD, Words

#: Bytes from the start of a dictionary to its tag: after the header and the number of its items.
_OFFSET = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)


class DictVersions:
    """The version tags of some dictionaries; at first none is known.

    Args:
        holders: They are kept alive: a tag is read from where its dictionary lies.
    """

    def __init__(self, holders: Sequence[dict[Any, Any]]) -> None:
        self._holders = list(holders)
        self._words = Words(np.array(list(map(id, self._holders)), dtype=np.int64) + _OFFSET)
        self.accept(np.zeros(len(self._holders), dtype=np.uint64))  # no tag is 0

    def read(self) -> np.ndarray:
        """Return the tags as they are now, one a holder."""
        return self._words.read()

    def differ(self, tags: np.ndarray) -> bool:
        """Whether any of the tags is another one than when they were accepted last."""
        return tags.tobytes() != self._known_bytes

    def changed(self, tags: np.ndarray) -> tuple[int, ...]:
        """Return the indices of the holders whose tags are others than when accepted last.

        Args:
            tags: Of `read`.
        """
        return tuple((tags != self._known).nonzero()[0].tolist())

    def accept(self, tags: np.ndarray) -> None:
        """Take the dictionaries for known as they were when `tags` were read."""
        self._known, self._known_bytes = tags, tags.tobytes()


def _has_tags() -> bool:
    """Whether this Python numbers the changes of dictionaries, where `_OFFSET` says."""
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


#: Whether `DictVersions` can be asked here.
HAS_TAGS = _has_tags()
