"""The page of `auto` beside all others says what its rows say."""

from __future__ import annotations

from typing import Any

from bench.recipes.zoo import CLUSTERS, cluster_of, faster, page

CASE = {"model": "GPT-2", "cluster": "2 x 8 H100", "limit": "2", "ops": 7, "limit_bytes": 1 << 20}


def row(algorithm: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    return CASE | {"algorithm": algorithm, "seconds": seconds, "planning_cpu_s": 3.0} | more


def auto(seconds: float | None, **tried: float) -> dict[str, Any]:
    return row("auto", seconds, tried=tried, taken="tofu", pieces=1)


def written(*rows: dict[str, Any]) -> str:
    made = {"command": "c", "date": "d", "cores": 2, "version": "v", "total": 9}
    return page({"rows": rows, **made})


def test_what_is_faster_than_auto_is_found_among_its_tries_and_beside_it() -> None:
    mine = auto(2.0, gpipe=4.0, heft=1.6)
    assert faster(mine, [row("gpipe", 1.0), row("zb-v", None)]) == {"gpipe": 2.0, "heft": 1.25}
    assert faster(auto(2.0), [row("tofu", 2.0)]) == {}
    assert set(faster(auto(None), [row("tofu", 2.0)])) == {"tofu"}


def test_the_page_counts_losses_and_compares_with_the_better_baseline() -> None:
    text = written(auto(2.0), row("auto-whole", 9.0), row("tofu", 3.0), row("gpipe", 1.0))
    assert "; 1 of 9 cases, 4 rows." in text
    assert "In 1 of 1 cases something is faster than `auto`" in text
    assert "2.000 times as long at most" in text
    assert "1.500 times as fast (geometric mean of 1 cases" in text
    none = written(auto(2.0), row("auto-whole", None))
    assert "In 0 of 1 cases" in none
    assert "geometric mean" not in none


def test_machines_are_joined_by_the_slower_link() -> None:
    a = cluster_of("2 x 8 H100", 1 << 30).arrays
    assert a.bandwidth[0, 7] == a.bandwidth[15, 8] == 450e9
    assert a.bandwidth[7, 8] == a.bandwidth[15, 0] == 50e9
    assert [cluster_of(name, None).num_devices for name in CLUSTERS] == [4, 8, 16]
