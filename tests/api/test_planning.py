"""Planning behind the public door."""

import json
from pathlib import Path
from typing import ClassVar

import pytest

from pardnn.api import deciding, planning, warming
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.place import polish, polish_search
from pardnn.place.pardnn import algorithm

pytestmark = pytest.mark.jit


def test_the_warm_up_reaches_the_memory_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    fit_memory = algorithm.fit_memory

    def seen(*arguments: object) -> object:
        decision = fit_memory(*arguments)  # pyright: ignore[reportArgumentType]
        found.append(decision is not None)
        return decision

    monkeypatch.setattr(algorithm, "fit_memory", seen)
    planning.warm_up(["pardnn"], limited=False)
    assert found == []
    planning.warm_up(["pardnn"])
    assert found == [True]


def test_the_warm_up_loads_the_kernels_of_polish(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(polish, "search_kernel", lambda *arguments: called.append(arguments))
    planning.warm_up([], limited=False)
    assert called == []
    planning.warm_up([], limited=False, polished=True)
    assert len(called) == 1


class Child:
    """A process that is started."""

    started: ClassVar[list["Child"]] = []

    def __init__(self, command: list[str], **_: object) -> None:
        self.share = json.loads(command[-1])
        self.events: list[str] = []
        self.started.append(self)

    def terminate(self) -> None:
        self.events.append("terminated")

    def wait(self) -> None:
        self.events.append("waited")


def test_a_cold_cache_is_filled_by_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are started for a cold cache alone, and are ended with an interrupt."""
    started: list[Child] = []
    monkeypatch.setattr(Child, "started", started)
    monkeypatch.setattr(warming.subprocess, "Popen", Child)
    monkeypatch.setattr(warming, "_is_cold", lambda: True)
    monkeypatch.setattr(warming, "_load", lambda *_, **__: None)
    warming.warm_up(["heft", "m-etf"], limited=False)
    assert started == []
    warming.warm_up(["heft", "m-etf"], limited=False, polished=True)
    assert [child.share for child in started] == [[[], False, True], [["m-etf"], False, False]]
    assert all(child.events == ["waited"] for child in started)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warming, "_load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warming.warm_up(["heft"], polished=True)
    assert started[-1].events == ["terminated", "waited"]


def test_a_cache_is_cold_until_its_kernel_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = polish_search.search_kernel
    stats = kernel.stats._replace(cache_path=str(tmp_path))
    monkeypatch.setattr(type(kernel), "stats", property(lambda _: stats))
    assert warming._is_cold()
    (tmp_path / "polish_search.search_kernel-1.py311.nbi").touch()
    assert not warming._is_cold()


def test_what_the_lower_bound_leaves_no_room_is_not_polished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, cluster = warming._warm_up_graph(), Cluster.uniform(2)
    asked: list[str] = []
    monkeypatch.setattr(deciding, "_polished", lambda *found: asked.append("polish") or found[3][0])
    monkeypatch.setattr(
        deciding, "_better_of", lambda best, name, *_, **__: asked.append(name) or best
    )

    def planned() -> None:
        options = {"objective": "seconds", "reserve": 0.0, "seed": 0}
        deciding.decide_best(
            graph,
            cluster,
            graph_costs(graph),
            names=["heft"],
            improve=True,
            rivals=["metis"],
            **options,
        )

    monkeypatch.setattr(deciding, "_bound", lambda *_: 1.0)  # all that is planned is faster
    planned()
    assert asked == []
    monkeypatch.setattr(deciding, "_bound", lambda *_: 0.0)
    planned()
    assert asked == ["polish", "metis"]
