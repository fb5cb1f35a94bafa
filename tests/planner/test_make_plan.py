"""Planning behind the public door."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.file import digested_text
from pardnn.graph.ir import Graph, Op
from pardnn.kernels.compilations import COMPILATIONS
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.schedule import free_plan
from pardnn.place.pardnn import pardnn as placer
from pardnn.place.polish import polish, search
from pardnn.plan.plan import Plan, Predicted, plan_arrays
from pardnn.planner import make_plan, warm_up
from pardnn.planner.costs import stated_costs
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search import portfolio
from pardnn.sim.peak import peaks
from tests.long_cases import long_but
from tests.strategies import graphs

pytestmark = pytest.mark.jit


def test_the_warm_up_reaches_the_memory_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    fit_memory = placer.fit_memory

    def seen(*arguments: object) -> object:
        decision = fit_memory(*arguments)  # pyright: ignore[reportArgumentType]
        found.append(decision is not None)
        return decision

    monkeypatch.setattr(placer, "fit_memory", seen)
    warm_up.warm_up(["pardnn"], limited=False)
    assert found == []
    warm_up.warm_up(["pardnn"])
    assert found == [True]


def test_the_warm_up_loads_the_kernels_of_polish(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    for name in ("search_kernel", "fill_kernel"):
        monkeypatch.setattr(polish, name, lambda *arguments: called.append(arguments))
    warm_up.warm_up([], limited=False)
    assert called == []
    warm_up.warm_up([], limited=False, polished=True)
    assert len(called) == 2


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
    monkeypatch.setattr(warm_up.subprocess, "Popen", Child)
    monkeypatch.setattr(warm_up, "_is_cold", lambda _: False)
    monkeypatch.setattr(warm_up, "_load", lambda *_, **__: None)
    monkeypatch.setattr(warm_up, "_load_steps", lambda _: None)
    warm_up.warm_up(["pardnn"], polished=True)
    assert started == []
    monkeypatch.setattr(warm_up, "_is_cold", lambda _: True)
    monkeypatch.setattr(warm_up, "_date", lambda _: None)
    warm_up.warm_up(["heft", "m-etf"], limited=False)
    assert started == []
    warm_up.warm_up(["pardnn", "m-etf"], limited=False)
    assert [child.share for child in started] == [["plan", "simulate"]]
    started.clear()
    begun, told = COMPILATIONS.begun, []
    with COMPILATIONS.watched(told.append):
        warm_up.warm_up(["pardnn"], polished=True)
    assert (COMPILATIONS.begun - begun, told) == (3, [True, False])
    assert [child.share for child in started] == [
        ["plan", "overflow", "simulate"],
        ["memory"],
        ["polish"],
    ]
    assert all(child.events == ["waited"] for child in started)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_up, "_load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm_up.warm_up(["heft"], polished=True)
    assert started[-1].events == ["terminated", "waited"]


def test_a_cache_is_cold_until_its_kernel_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = search.search_kernel
    stats = kernel.stats._replace(cache_path=str(tmp_path))
    monkeypatch.setattr(type(kernel), "stats", property(lambda _: stats))
    assert warm_up._is_cold(kernel)
    kept = tmp_path / "search.search_kernel-1.py311.nbi"
    kept.touch()
    assert not warm_up._is_cold(kernel)
    # After another checkout of the same source numba uses what is kept, and does not write it anew.
    os.utime(kept, (0, 0))
    assert warm_up._is_cold(kernel)
    monkeypatch.setattr(Child, "started", [])
    monkeypatch.setattr(warm_up.subprocess, "Popen", Child)
    monkeypatch.setattr(warm_up, "_load_steps", lambda _: None)
    for _ in range(2):
        warm_up.warm_up([], limited=False, polished=True)
    assert [child.share for child in Child.started] == [["polish"]]


#: Prints the kernels that are compiled, or loaded, although all should be there already.
_LATE = """
import sys
import numpy as np
from testbed.large_graphs import DEVICES, layered, problem
from pardnn.planner.warm_up import warm_up
from pardnn.place.pardnn.pardnn import place_arrays
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.engine import run_lists
from pardnn.sim.peak import peaks

def loaded():
    kernels = {
        (name, number): len(value.overloads)
        for name, module in list(sys.modules.items())
        if name.startswith("pardnn.")
        for number, value in vars(module).items()
        if hasattr(value, "overloads")
    }
    return kernels

limited = sys.argv[1] == "limited"
warm_up(["pardnn"], limited=limited)
before, rng, none = loaded(), np.random.default_rng(0), np.empty((0, 2), dtype=np.int64)
for num_ops in (600, 61_000):  # the whole search; a fixed number of walks
    arrays, machine = problem(layered(num_ops, 2 * num_ops, rng), rng)
    limits = [None] * DEVICES
    plan = place_arrays(arrays, machine, limits, none).plan
    run_lists(arrays, machine, plan)
    lower_bound_seconds(arrays, machine)
    if limited:
        limits[::2] = [int(peaks(arrays, plan).max() / 2)] * (DEVICES // 2)
        moved = place_arrays(arrays, machine, limits, none).moved_ops
assert not limited or moved > 0
print(len(before), sorted(name for name, count in loaded().items() if before.get(name) != count))
"""


@pytest.mark.parametrize("limits", long_but({"limited"}, ["unlimited", "limited"]))
def test_nothing_is_left_to_compile_once_kernels_are_loaded(limits: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LATE, limits], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    known, _, late = done.stdout.partition(" ")
    assert int(known) > 60
    assert late.strip() == "[]"


def test_what_the_lower_bound_leaves_no_room_is_not_polished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, cluster = warm_up._warm_up_graph(), Cluster.uniform(2)
    asked: list[str] = []
    monkeypatch.setattr(portfolio, "polished", lambda *found: asked.append("polish") or found[1][0])
    monkeypatch.setattr(portfolio, "_better_of", lambda best, _, name: asked.append(name) or best)

    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(reserve=0.0))

    def planned() -> None:
        portfolio.decide_best(problem, ["heft"], polish=True, solvers=["metis"])

    monkeypatch.setattr(
        portfolio, "lower_bound_seconds", lambda *_: 1.0
    )  # all that is planned is faster
    planned()
    assert asked == []
    monkeypatch.setattr(portfolio, "lower_bound_seconds", lambda *_: 0.0)
    planned()
    assert asked == ["polish", "metis"]


def test_the_digest_of_an_op_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Twice was a third of the time of planning a chain of a million ops.
    counted: list[str] = []
    text = digested_text

    def counting(op: Op) -> str:
        counted.append(op.name)
        return text(op)

    monkeypatch.setattr("pardnn.graph.file.digested_text", counting)
    ops = [Op(name=name, kind="k", seconds={"accelerator": 1.0}) for name in "ab"]
    graph, options = build_graph("g", ops), PlanOptions(algorithm="single")
    make_plan.make_plan(Problem(graph, Cluster.uniform(2), graph_costs(graph), options))
    assert sorted(counted) == ["a", "b"]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [("v100", "v100"), ("cpu", "cpu"), ("cpu, v100", "v100"), ("v100, cpu", "v100"),
     ("measured", None), ("graph", None), (None, None)],
)  # fmt: skip
def test_the_preset_that_a_plan_was_made_with(costs: str | None, expected: str | None) -> None:
    predicted = Predicted(makespan_s=1.0, peak_bytes=(1,), transfer_bytes=0, costs=costs)
    assert stated_costs(Plan(placement={}, order=((),), predicted=predicted)) == expected
    assert stated_costs(Plan(placement={}, order=((),))) is None


@given(graph=graphs(max_ops=14), algorithm=st.sampled_from(["single", "pardnn", "heft"]))
def test_one_device_without_a_limit_holds_no_more_than_eager_execution(
    graph: Graph, algorithm: str
) -> None:
    plan = pardnn.plan(graph, Cluster.uniform(1), algorithm)
    alone = np.zeros(len(graph.ops), dtype=np.int64)
    eager = free_plan(graph.arrays, 1, alone, file_positions(graph.arrays))
    assert peaks(graph.arrays, plan_arrays(graph, plan))[0] <= peaks(graph.arrays, eager)[0]
