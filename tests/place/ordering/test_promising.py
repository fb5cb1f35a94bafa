"""Of more placements than can be tried, those whose first schedules are short."""

from typing import Any

import numpy as np
import pytest

from pardnn.place.ordering import order_search
from pardnn.place.ordering.order_search import FEW, PROBES, Placed, promising


def test_the_shortest_are_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedules(step: Placed, choices: Any) -> list[Any]:
        assert choices == PROBES
        return [order_search.Scheduled(step.bound, 0.0, np.empty(0), np.empty(0, dtype=np.int64))]

    def kept(*seconds: float) -> list[float]:
        nothing: list[Any] = [None] * (len(Placed._fields) - 1)
        return [step.bound for step in promising([Placed(*nothing, each) for each in seconds])]

    monkeypatch.setattr(order_search, "by_modulo", schedules)
    assert kept(3.0, 1.0, np.inf, 2.0, 1.0) == [1.0, 1.0]
    assert kept(np.inf, 7.0) == [7.0, np.inf]


def test_first_looks_are_a_part_of_what_is_tried() -> None:
    assert set(PROBES) <= set(FEW)
