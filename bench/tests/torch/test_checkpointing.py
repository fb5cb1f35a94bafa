"""The page of second calls beside gradient checkpointing."""

from __future__ import annotations

import pytest

from bench.recompute import checkpointing


@pytest.mark.long
def test_a_row_is_under_the_experts_peak_and_says_what_both_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointing, "LIMITS", (1.0,))
    monkeypatch.setattr(checkpointing, "BATCHES", ())
    monkeypatch.setattr(checkpointing, "TOKENS", 32)
    limits: list[int | None] = []
    planned = checkpointing.planned

    def seen(graph, memory):
        limits.append(memory)
        found = planned(graph, memory)
        assert found is not None
        assert memory is None or found.peak_bytes[0] <= memory
        return found

    monkeypatch.setattr(checkpointing, "planned", seen)
    (row,) = checkpointing.rows_of(checkpointing.models(2)[1], 8)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    expert, own = (float(cell.removesuffix("%")) for cell in cells[4:6])
    assert expert > 0
    assert own <= expert
    assert [limit is None for limit in limits] == [True, True, False]
