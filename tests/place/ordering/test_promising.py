"""Of more placements than can be tried, those whose first schedules are short."""

from typing import Any

import numpy as np
import pytest

from pardnn.place.ordering import order_search
from pardnn.place.ordering.order_search import FEW, PROBES, promising


def test_the_shortest_are_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedules(step: Any, choices: Any) -> list[Any]:
        assert choices == PROBES
        return [order_search.Scheduled(step, 0.0, np.empty(0), np.empty(0, dtype=np.int64))]

    monkeypatch.setattr(order_search, "by_modulo", schedules)
    assert promising([3.0, 1.0, np.inf, 2.0, 1.0]) == [1.0, 1.0]  # type: ignore[list-item]
    assert promising([np.inf, 7.0]) == [7.0, np.inf]  # type: ignore[list-item]


def test_first_looks_are_a_part_of_what_is_tried() -> None:
    assert set(PROBES) <= set(FEW)
