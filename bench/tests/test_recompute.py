"""The page of second calls: our search beside CP-SAT, and its sweep."""

from __future__ import annotations

import pytest

from bench.recompute.cp_sat import solved
from bench.recompute.main import case_of, rows_of, swept
from pardnn.place.recompute.retention import cost_of, empty_schedule
from pardnn.place.recompute.search import retention
from testbed.recompute_graphs import random_layers, unet_step

pytestmark = pytest.mark.jit


def test_a_u_net_is_solved_to_the_optimum() -> None:
    case = case_of(unet_step(3))
    nodes, limit = case.orders[0], int(0.7 * case.peak)
    own = retention(nodes, limit, work=10_000_000)
    schedule = empty_schedule(nodes)
    assert cost_of(nodes, own[0], limit, schedule).peak <= limit
    best = solved(nodes, limit, start=(own[0], schedule.stage), seconds=20, workers=1)
    assert best.seconds is not None
    assert own[1].seconds <= best.seconds + 1e-9
    assert best.bound <= best.seconds + 1e-9


def test_no_answer_of_a_sweep_is_over_its_limit_or_slower_than_one_of_a_smaller() -> None:
    assert swept(case_of(random_layers(30))).endswith("| 0 | 0")


def test_rows_have_a_cell_for_each_column() -> None:
    assert all(row.count("|") == 7 for row in rows_of(case_of(unet_step(2)), 0, 1))
