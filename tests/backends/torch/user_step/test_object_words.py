"""What words of memory tell of classes, cells, functions and lists is what comparing them tells."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pardnn.backends.torch.user_step.dict_versions import HAS_TAGS
from pardnn.backends.torch.user_step.guards import item, walk
from pardnn.backends.torch.user_step.guards.guards import Guards


class _Scale:
    factors = (2.0,)

    def __init__(self) -> None:
        self.sizes = [0.5, "a", 300]


class _Other(_Scale):
    pass


class _Case:
    """A step that reads a cell, a function's defaults, a list, a class and an optimizer."""

    def __init__(self) -> None:
        rate, self.scale = 0.5, _Scale()
        self.optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)

        def helper(x: Any, power: float = 2.5, *, shift: float = 1.5) -> Any:
            return x**power + shift + rate

        def set_rate(value: Any) -> None:
            nonlocal rate
            rate = value

        def step(scale: Any, optimizer: Any, x: Any) -> Any:
            optimizer.step()
            return helper(x) * scale.sizes[0] * scale.factors[0]

        self.helper, self.set_rate = helper, set_rate
        self.guards = Guards(step, (self.scale, self.optimizer, torch.zeros(2)), batch=[2])

    def changes(self) -> list[str]:
        return [change.name for change in self.guards.changes({2: torch.zeros(2)})]

    @property
    def is_told(self) -> bool:
        """Whether the last call was told by words alone that nothing but dictionaries changed."""
        return self.guards._snapshot.is_rest_same


@pytest.fixture(params=[True, False], ids=["by words", "compared"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(item, "HAS_TAGS", request.param and HAS_TAGS)
    if not request.param:
        monkeypatch.setattr(walk, "attribute_address", lambda _value, _key: None)
    return request.param and HAS_TAGS


def _wrapped(case: _Case) -> None:
    vars(case.optimizer)["step"] = lambda: None


CHANGES: dict[str, tuple[Callable[[_Case], Any], str]] = {
    "a cell": (lambda c: c.set_rate(0.75), "rate"),
    "code": (lambda c: setattr(c.helper, "__code__", (lambda x, power=1: 0).__code__.replace(
        co_freevars=("rate",))), "helper.__code__"),
    "a default": (lambda c: setattr(c.helper, "__defaults__", (3.0,)), "helper.__defaults__"),
    "no defaults": (lambda c: setattr(c.helper, "__defaults__", None), "helper.__defaults__"),
    "a class": (lambda c: setattr(c.scale, "__class__", _Other), "the class of scale"),
    "an item": (lambda c: c.scale.sizes.__setitem__(1, "b"), "scale.sizes.1"),
    "a list that grew": (lambda c: c.scale.sizes.append(1), "len(scale.sizes)"),
    "a list that shrank": (lambda c: c.scale.sizes.pop(), "scale.sizes.2"),
    "equal groups": (lambda c: setattr(c.optimizer, "param_groups", c.optimizer.param_groups[:]),
                     "optimizer.param_groups"),
    "equal state": (lambda c: setattr(c.optimizer, "state", type(c.optimizer.state)(dict)),
                    "optimizer.state"),
    "an optimizer's step": (_wrapped, "optimizer.step"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_after_calls_without_one(name: str, told: bool) -> None:
    change, expected = CHANGES[name]
    case = _Case()
    for _ in range(3):
        assert case.changes() == []
        assert case.is_told == told
    change(case)
    assert expected in case.changes()
    assert expected in case.changes()  # it was not taken for known


EQUAL: dict[str, Callable[[_Case], Any]] = {
    "a cell": lambda c: c.set_rate(float("0.5")),
    "an item": lambda c: c.scale.sizes.__setitem__(2, int("300")),
    "a list that is filled anew": lambda c: c.scale.sizes.__setitem__(
        slice(None), [*c.scale.sizes, *range(99)][:3]),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_an_equal_value_is_no_change_and_known_from_then_on(name: str, told: bool) -> None:
    case = _Case()
    for _ in range(5):  # each object may lie where one of before did
        EQUAL[name](case)
        assert case.changes() == []
    assert case.changes() == []
    assert case.changes() == []
    assert case.is_told == told
    case.set_rate(0.75)
    case.scale.sizes[2] = 301
    assert sorted(case.changes()) == ["rate", "scale.sizes.2"]


def test_an_attribute_of_a_class_is_told_by_its_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _Case()
    assert case.changes() == case.changes() == []
    monkeypatch.setattr(_Scale, "factors", (3.0,))
    (name,) = case.changes()
    assert name.endswith("factors")


def test_a_schedule_made_later_wraps_the_step_without_a_change() -> None:
    case = _Case()
    assert case.changes() == []
    schedule = torch.optim.lr_scheduler.StepLR(case.optimizer, 1)
    assert "step" in vars(case.optimizer)
    assert "optimizer.step" not in case.changes()
    del schedule
