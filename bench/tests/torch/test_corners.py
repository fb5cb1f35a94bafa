"""The page of the corners, and the bound beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pardnn
from bench.recipes.bounds import most_in_pieces
from bench.recipes.corners import page
from pardnn import backends
from pardnn.cluster import Cluster
from testbed import small_models

RESULTS = Path(__file__).parents[2] / "results"


def report(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "update": "plain", "ops": 1, "command": "", "date": "", "cores": 1, "version": "",
        "total": 12, "whole_s": 1.0, "bound": 3.9, "serial_of_pieces": {"1": 1.0, "4": 1.25},
        "rows": list(rows),
    }  # fmt: skip


def row(name: str, speedup: float | None, **more: Any) -> dict[str, Any]:
    found = {"update": "plain", "links": "300 GB/s", "limit": "none", "algorithm": name}
    found |= {"speedup": speedup, "seconds": 1 / (speedup or 1.0), "pieces": 4, "taken": "pardnn"}
    return found | {"cpu_s": 3.0} | more


def test_a_faster_recipe_is_named() -> None:
    tried = {"zb-v": {"speedup": 3.5, "pieces": 8, "why": None}}
    text = page(report(row("auto", 3.2, tried=tried), row("tofu", 3.3)))
    assert "2 plans of other algorithms in 1 corner," in text
    assert "`tofu` at 300 GB/s, no limit, `zb-v` at 300 GB/s, no limit." in text
    assert "| `zb-v` |  |  |  | 3.500 (8) |" in text
    assert "| `tofu` |  |  |  | 3.300* (4) |" in text
    assert "3.200 of more than 3.95 asked, not met" in text
    assert "4.000 times as fast as one device that does the same 4 pieces" in text


def test_none_is_faster_and_what_does_not_fit_is_said() -> None:
    given_up = {"speedup": None, "pieces": 1, "why": "device 0 computes for 2 s"}
    tried = {"megatron": given_up, "zero-1": given_up | {"why": "too large"}}
    text = page(report(row("auto", 3.99, tried=tried), row("auto-whole", None)))
    assert "faster than that of `auto`: none." in text
    assert "| `megatron` |  |  |  | slower |" in text
    assert "| `zero-1` |  |  |  | - |" in text
    assert "| `auto-whole` |  |  |  | -* |" in text
    assert "3.990 of more than 3.95 asked, met" in text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*_corners.json")), ids=lambda path: path.stem)
def test_a_page_is_what_its_rows_say(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page(found)


@pytest.mark.long
def test_no_plan_in_pieces_is_beyond_the_bound() -> None:
    graph = backends.capture_factory(small_models.gpt2)
    bound, serial = most_in_pieces(graph, "v100", 2)
    assert 1.0 < bound < 2.001  # some op in pieces takes a little less than whole
    assert serial[1] < serial[2]
    for pieces in (2, 4):
        plan = pardnn.plan(
            graph, Cluster.uniform(2, latency=0.0), "pardnn", costs="v100", microbatches=pieces
        )
        assert plan.predicted is not None
        assert serial[1] / plan.predicted.makespan_s <= bound
