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
        self._known = bytes(self._words.found)  # zeros; no tag is 0

    def differ(self) -> bool:
        """Look at the tags; return whether any is another one than when accepted last."""
        return self._words.read() != self._known

    def changed(self) -> tuple[int, ...]:
        """Return the indices of the holders whose tags differed at the last look."""
        known = np.frombuffer(self._known, dtype=np.uint64)
        return tuple((self._words.found != known).nonzero()[0].tolist())

    def accept(self) -> None:
        """Take the dictionaries for known as they were at the last look."""
        self._known = bytes(self._words.found)


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
