"""A snapshot of containers tells whatever changed, and holds again once it was looked at."""

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest

from pardnn.backends.torch.user_step.dict_versions import HAS_TAGS
from pardnn.backends.torch.user_step.guards import item
from pardnn.backends.torch.user_step.guards.attribute import AttributeGuards
from pardnn.backends.torch.user_step.guards.item import ItemGuard, Snapshot


def _any(_key: Any) -> bool:
    return True


def made() -> tuple[list[Any], list[ItemGuard]]:
    """Tables compared whole, in part, by their length, and empty ones."""
    holders = [
        {"a": 1, "b": 2.5}, OrderedDict(x=None, y="text"), {}, [1, 2], deque([3]),
        {"kept": 1, "free": 2}, {"one": 1}, {"last": True},
    ]  # fmt: skip
    used: list[Callable[[Any], bool] | None] = [
        _any, _any, _any, _any, _any, lambda key: key == "kept", None, _any,
    ]  # fmt: skip
    keys = [["a", "b"], ["x", "y"], [], [0, 1], [], ["kept"], ["one"], ["last"]]
    guards = [ItemGuard(str(i), *each) for i, each in enumerate(zip(holders, keys, used))]  # noqa: B905
    return holders, guards


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "another value": lambda h: h[0].update(a=3),
    "True for 1": lambda h: h[0].update(a=True),
    "of an ordered dictionary": lambda h: h[1].update(y="other"),
    "another order": lambda h: h[0].update(a=h[0].pop("a")),
    "a key renamed": lambda h: h[0].update(c=h[0].pop("b")),
    "the last key gone": lambda h: h[7].clear(),
    "no longer empty": lambda h: h[2].update(new=1),
    "an item of a list": lambda h: h[3].__setitem__(1, 5),
    "a list grew": lambda h: h[3].append(5),
    "a deque shrank": lambda h: h[4].pop(),
    "in part": lambda h: h[5].update(kept=2),
    "without new items": lambda h: h[6].update(one=2),
}


@pytest.fixture(params=[True, False], ids=["by tags", "compared"])
def _tags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With version tags of dictionaries, where Python has them, and without."""
    monkeypatch.setattr(item, "HAS_TAGS", request.param and HAS_TAGS)


@pytest.mark.usefixtures("_tags")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    holders, guards = made()
    snapshot = Snapshot(guards)
    assert snapshot.holds()
    CHANGES[name](holders)
    assert not snapshot.holds()
    assert [change for guard in guards for change in guard.changes()]
    assert not Snapshot(guards).holds()


NO_CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "an equal number": lambda h: h[0].update(b=float("2.5")),
    "an equal text": lambda h: h[1].update(y="".join(["te", "xt"])),
    "what is not used": lambda h: h[5].update(free=3),
    "a new item that is not used": lambda h: h[5].update(more=3),
    "a new item where none counts": lambda h: h[6].update(more=3),
}


@pytest.mark.usefixtures("_tags")
@pytest.mark.parametrize("name", NO_CHANGES)
def test_what_is_no_change_is_looked_at_once(name: str) -> None:
    holders, guards = made()
    NO_CHANGES[name](holders)
    assert not [change for guard in guards for change in guard.changes()]
    assert Snapshot(guards).holds()


def test_an_attribute_is_guarded_by_value_or_by_which_object_it_is() -> None:
    holder = types.SimpleNamespace(sizes=[1, 2], groups=[1, 2])
    guards = AttributeGuards()
    guards.add("sizes", lambda: holder.sizes)
    guards.add("groups", lambda: holder.groups, is_same=True)
    assert guards.changes() == []
    holder.sizes, holder.groups = [1, 2], [1, 2]
    assert [change.name for change in guards.changes()] == ["groups"]
    holder.sizes = [1, 3]
    assert [change.name for change in guards.changes()] == ["sizes", "groups"]
