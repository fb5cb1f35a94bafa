"""Of more placements than can be tried, those whose first schedules are short."""

from typing import Any

import numpy as np
import pytest

from pardnn.place.ordering import order_search
from pardnn.place.ordering.order_search import FEW, PROBES, Placed, promising


def test_the_shortest_are_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedules(step: Placed, choices: Any, count: int) -> list[Any]:
        assert (choices, count) == (PROBES, 1)
        return [order_search.Scheduled(step.bound, 0.0, np.empty(0), np.empty(0, dtype=np.int64))]

    def kept(*seconds: float) -> list[float]:
        nothing: list[Any] = [None] * (len(Placed._fields) - 1)
        return [step.bound for step in promising([Placed(*nothing, each) for each in seconds])]

    monkeypatch.setattr(order_search, "by_modulo", schedules)
    assert kept(3.0, 1.0, np.inf, 2.0, 1.0) == [1.0, 1.0]
    assert kept(np.inf, 7.0) == [7.0, np.inf]


def test_first_looks_are_a_part_of_what_is_tried() -> None:
    assert set(PROBES) <= set(FEW)


@pytest.mark.jit  # types are stand-ins
@pytest.mark.parametrize(
    ("makespan", "left", "ends"),
    [
        (1.0, 500, "at the bound"),
        (1.0 + 5e-10, 500, "at the bound"),
        (1.1, 500, "changed"),
        (1.1, 36 + 320, "few"),  # what is left would be used up by all choices
        (1.1, 36 + 321, "changed"),
        (1.1, 20, "one placement"),  # of two there are 36 first schedules
        (np.inf, 500, "nothing"),
    ],
)
def test_what_is_left_of_a_budget_goes_to_the_best_placement(
    monkeypatch: pytest.MonkeyPatch, makespan: float, left: int, ends: str
) -> None:
    """First a few schedules of each placement; then all of the best, and changes of three."""
    asked, plan = list[Any](), object()
    steps = [
        Placed(*[None] * 2, np.zeros(10), *[None] * 5, bound) for bound in (1.0, 1.5)
    ]  # fmt: skip

    def schedules(step: Placed, choices: Any, count: int) -> list[Any]:
        asked.append((step.bound, list(choices)))
        return [order_search.Scheduled(step.bound, float(i), np.empty(0), np.empty(0, np.int64))
                for i in range(count)]  # fmt: skip

    def changed(step: Placed, one: Any, each: int, seed: int) -> Any:
        asked.append((step.bound, each, seed))
        return one

    def plans(step: Placed, machine: Any, found: list[Any], *_: Any) -> list[Any]:
        assert len(found) in (order_search.JUDGED, order_search.JUDGED + order_search.STARTS)
        if makespan == np.inf:
            return []
        extra = 0.0 if len(found) == order_search.JUDGED else -0.01
        return [(makespan * step.bound + extra, plan)]

    monkeypatch.setattr(order_search, "by_modulo", schedules)
    monkeypatch.setattr(order_search, "improved", changed)
    monkeypatch.setattr(order_search, "plans_of", plans)
    monkeypatch.setattr(order_search, "WORK", 10 * left)
    found = order_search.best_ordered(steps, None, [], None, seed=5)  # type: ignore[arg-type]
    assert found is (None if ends == "nothing" else plan)
    first = [(bound, FEW) for bound in (1.0, 1.5)]
    if ends == "one placement":
        first = [(bound, PROBES) for bound in (1.0, 1.5)] + first
    every = [
        (period, delay, slack)
        for period in order_search.PERIODS
        for delay in order_search.DELAYS
        for slack in order_search.SLACKS
    ]
    assert len(FEW) == 18
    assert len(every) == 320
    if ends == "changed":
        each = (left - 2 * 18 - 320) // 3
        first += [(1.0, every), *((1.0, each, seed) for seed in (5, 6, 7))]
    assert asked == first


@pytest.mark.jit
def test_probes_are_schedules_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 placements: 3 probes each leave 365 of 440, first schedules of the best two 329."""
    asked, plan = list[tuple[int, int]](), object()
    one = order_search.Scheduled(2.0, 0.0, np.empty(0), np.empty(0, np.int64))
    steps = [Placed(*[None] * 2, np.zeros(10), *[None] * 5, 1.0) for _ in range(25)]
    monkeypatch.setattr(order_search, "by_modulo", lambda *_: [one] * 4)
    monkeypatch.setattr(order_search, "plans_of", lambda *_: [(2.0, plan)])
    monkeypatch.setattr(order_search, "WORK", 10 * 440)

    def changed(step: Placed, one: Any, each: int, seed: int) -> Any:
        asked.append((each, seed))
        return one

    monkeypatch.setattr(order_search, "improved", changed)
    assert order_search.best_ordered(steps, None, [], None) is plan  # type: ignore[arg-type]
    assert asked == [((329 - 320) // 3, seed) for seed in range(3)]
