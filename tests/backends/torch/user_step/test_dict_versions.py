"""A version tag tells each change of a dictionary, and no other; without tags all is compared.

The tags and other words are copied to a buffer that does not lie among them.
"""

import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pardnn.backends.torch import memory_words
from pardnn.backends.torch.memory_words import WORD, WORD_BYTES, Words
from pardnn.backends.torch.user_step.dict_versions import HAS_TAGS, DictVersions
from pardnn.backends.torch.user_step.guards import item
from pardnn.backends.torch.user_step.guards.item import ItemGuard, Snapshot

has_tags = pytest.mark.skipif(not HAS_TAGS, reason="this Python has no version tags")


def test_python_3_11_has_tags() -> None:
    assert (sys.version_info[:2] == (3, 11)) == HAS_TAGS


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set": lambda d: d.__setitem__("a", 3),
    "set to an equal object": lambda d: d.__setitem__("b", float("2.5")),
    "new": lambda d: d.__setitem__("c", 3),
    "deleted": lambda d: d.__delitem__("a"),
    "updated": lambda d: d.update(a=5),
    "popped": lambda d: d.pop("a"),
    "an item popped": lambda d: d.popitem(),
    "default set": lambda d: d.setdefault("z", 1),
    "merged": lambda d: d.__ior__({"q": 1}),
    "cleared": lambda d: d.clear(),
    "updated by another": lambda d: d.update({"r": 1}),
}


@has_tags
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda given: defaultdict(int, given)])
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_told(kind: Any, name: str) -> None:
    still, holder = {"x": 1}, kind({"a": 1, "b": 2.5})
    versions = DictVersions([still, holder])
    assert versions.differ()
    assert versions.changed() == (0, 1)
    versions.accept()
    assert (holder["a"], len(holder), list(holder)) == (1, 2, ["a", "b"])
    assert not versions.differ()
    CHANGES[name](holder)
    assert versions.differ()
    assert versions.changed() == (1,)


@has_tags
def test_an_empty_dictionary_that_is_filled_by_another_is_told() -> None:
    holders: list[dict[Any, Any]] = [{}, {}, OrderedDict()]
    versions = DictVersions(holders)
    assert versions.differ()
    versions.accept()
    holders[0].update({"a": 1})
    holders[1] |= dict.fromkeys(range(9))
    holders[2].update(OrderedDict(a=1))
    assert versions.differ()
    assert versions.changed() == (0, 1, 2)


@has_tags
def test_an_attribute_that_is_set_is_told() -> None:
    holder = types.SimpleNamespace(a=1)
    versions = DictVersions([holder.__dict__])
    for value in range(40):  # the interpreter takes a shorter way after some
        versions.differ()
        versions.accept()
        holder.a = value + 1000
        assert versions.differ()


def test_none_at_all() -> None:
    versions = DictVersions([])
    assert not versions.differ()


@pytest.mark.parametrize("has", [False, True])
def test_a_change_between_guard_and_first_look_is_seen(
    has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item, "HAS_TAGS", has and HAS_TAGS)
    holder = {"a": 1}
    guard = ItemGuard("it", holder, ["a"], lambda _key: True)
    holder["a"] = 2
    snapshot = Snapshot([guard])
    assert not snapshot.holds()
    assert not snapshot.holds()  # it was not taken for known
    holder["a"] = 1
    assert snapshot.holds()


def test_what_changes_beside_the_guarded_items_is_compared_again() -> None:
    holders = [{"kept": 1, "free": 0}, {"kept": 1}]
    guards = [ItemGuard("it", holder, ["kept"]) for holder in holders]
    snapshot = Snapshot(guards)
    for call in range(5):
        holders[0]["free"] = call
        assert snapshot.holds()
    holders[1]["kept"] = 2
    assert not snapshot.holds()
    holders[1]["kept"], holders[0]["kept"] = 1, 2
    assert not snapshot.holds()


#: Bytes of a buffer for words.
_SIZE = 4096


def _around(buffer: bytearray, num_bytes: int) -> np.ndarray:
    """Return all memory around a buffer, which is not to be read."""
    middle = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    first = (middle - num_bytes // 2) // WORD_BYTES * WORD_BYTES
    return np.ctypeslib.as_array((WORD * (num_bytes // WORD_BYTES)).from_address(first))


def test_copies_are_not_among_the_words() -> None:
    memory = _around(bytearray(_SIZE), 1 << 30)
    found = memory_words._outside(memory, _SIZE)
    is_inside = np.may_share_memory(memory, np.frombuffer(found, dtype=np.uint8))
    assert not is_inside  # pytest would show, and so read, what is compared within an assertion


@pytest.mark.parametrize("num_bytes", [0, _SIZE, 1 << 45])
def test_a_buffer_has_its_size(num_bytes: int) -> None:
    memory = _around(bytearray(_SIZE), num_bytes)
    assert len(memory_words._outside(memory, _SIZE)) == _SIZE


@pytest.mark.parametrize("is_far", [False, True])
def test_any_buffer_compares_by_content(is_far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_far:
        mapped = memory_words._outside(_around(bytearray(_SIZE), 1 << 30), 2 * WORD_BYTES)
        monkeypatch.setattr(memory_words, "_outside", lambda _memory, _size: mapped)
    held = np.array([3, 5, 7], dtype=np.uint64)
    words = Words(held.ctypes.data + WORD_BYTES * np.array([2, 0], dtype=np.int64))
    known = bytearray(words.read())
    assert words.found.tolist() == [7, 3]
    assert words.read() == known
    held[0] = 4
    assert words.read() != known
    assert words.found.tolist() == [7, 4]
