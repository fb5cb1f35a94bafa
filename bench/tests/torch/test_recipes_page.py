"""The page of the cuts of experts: one row for each step, and what is counted from them."""

from __future__ import annotations

import pytest

from bench.recipes.main import measure, page
from pardnn.planner.algorithms import CUTS


@pytest.mark.long
def test_a_row_has_every_cut_and_none_is_faster_than_auto() -> None:
    row = measure("ResNet", "2", "300 GB/s") | {"cpu_s": 1.0}
    assert row.keys() >= {*CUTS, "tofu", "auto-whole", "auto"}
    timed = [row[name] for name in (*CUTS, "tofu", "auto-whole") if isinstance(row[name], float)]
    assert len(timed) > 4
    assert row["auto"] <= min(timed)
    text = page([row], 1, "python -m bench recipes").splitlines()
    head, line, cells = text[4:7]
    assert head.count("|") == line.count("|") == cells.count("|")
    assert "in which a cut that was timed is faster than `auto`: 0" in text[-1]


def test_a_faster_cut_would_be_counted() -> None:
    row = {"model": "m", "devices": "2", "links": "l", "ops": 1, "cpu_s": 1.0, "tofu": 3.0}
    row |= {"auto-whole": 4.0, "auto": 2.0, "zero-1": 1.0, "taken": "zero-2"}
    text = page([row], 1, "")
    assert "in 1 of 1 rows" in text
    assert "at most 1.50 times" in text
    assert "faster than `auto`: 1" in text
