"""The page of mixed plans says what its rows say."""

from __future__ import annotations

from typing import Any

from bench.recipes.mixed import findings, islands, kind_of, page


def row(**more: Any) -> dict[str, Any]:
    found = {"samples": "2", "size": "2", "across": "2 GB/s", "cut": 4.0, "placed": 3.0}
    return found | {"mixed": 2.0, "auto": 2.0, "taken": "`tofu*pardnn`", "cpu_s": 1.0} | more


def test_a_kind_is_told_by_the_name_of_what_was_tried() -> None:
    assert kind_of("4 pieces, submeshes of 2: megatron*1f1b") == "mixed"
    assert kind_of("data-parallel*megatron") == "cut"
    assert kind_of("tofu") == "cut"
    assert kind_of("8 pieces, stages") == "placed"


def test_findings_count_what_is_faster() -> None:
    rows = [row(), row(mixed=2.5), row(mixed=None, auto=3.5), row(mixed=3.0)]
    won, slower = findings(rows)
    assert "in 2 of 4 rows, at most 1.50 times" in won
    assert slower.endswith("took: 1.")
    text = page(rows, 5, "bench")
    assert "4 of 5 rows" in text
    assert "| 2 | 2 x 2 | 2 GB/s | 4000.000 | 3000.000 | - | 3500.000 |" in text


def test_islands_are_joined_by_slow_links() -> None:
    bandwidth = islands(2, 2e9).arrays.bandwidth
    assert bandwidth[0, 1] == bandwidth[2, 3] == 300e9
    assert bandwidth[1, 2] == bandwidth[0, 3] == 2e9
