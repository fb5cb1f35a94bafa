"""Ranks agree on what they have read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pardnn.backends.torch.checkpoint.phases import Phases
from pardnn.backends.torch.comm.world import World
from pardnn.errors import PardnnError


@pytest.mark.parametrize(
    ("told", "fails"), [(["a"], False), (["a", "a", "a"], False), (["a", "a", "b"], True)]
)
def test_ranks_that_read_different_things_are_told_so(
    monkeypatch: pytest.MonkeyPatch, told: list[str], fails: bool
) -> None:
    phases = Phases(World(0, 1, torch.device("cpu"), 1.0), "load/1", "loading 'runs/a'")
    rows: list[dict[str, Any]] = [{"value": each} for each in told]
    monkeypatch.setattr(phases, "_gathered", lambda row: rows)
    if not fails:
        phases.agree(lambda: "a", "they differ")
        return
    with pytest.raises(PardnnError, match="they differ") as error:
        phases.agree(lambda: "a", "they differ")
    assert error.value.code == "E521"
