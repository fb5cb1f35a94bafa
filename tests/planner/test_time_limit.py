"""A time limit holds inside of every algorithm: what is quick answers, and the plan says so."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pardnn import solvers, time_limit
from pardnn.api.advice import planned
from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError
from pardnn.graph.file import read_graph
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan, Tried
from pardnn.planner.algorithms import AUTO
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search import portfolio
from pardnn.report.results import PlanResult
from tests.place.machines import cluster_of
from tests.strategies import random_graph

GRAPH = read_graph(Path(__file__).parents[1] / "data" / "fuzz" / "graph.json")
HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)\n"


def made(algorithm: str, seconds: float, memory: int | None = None) -> tuple[Plan, PlanResult]:
    cluster = Cluster.uniform(2, memory=memory)
    options = PlanOptions(algorithm=algorithm, time_limit=seconds)
    return make_plan(Problem(GRAPH, cluster, costs_for(GRAPH, cluster), options))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the time is asked for before a limit of 100 s passes: the only entry."""
    times, count = [0], itertools.count()
    monkeypatch.setattr(
        "pardnn.time_limit.monotonic", lambda: 0.0 if next(count) < times[0] else 200.0
    )
    return times


@pytest.mark.jit
@pytest.mark.parametrize("algorithm", ["tofu", "zero-3", "equal-chop", "megatron"])
def test_a_cut_that_takes_too_long_leaves_a_quick_placement(
    algorithm: str, asked: list[int]
) -> None:
    asked[0] = 8
    plan, result = made(algorithm, 100)
    assert plan.algorithm in AUTO
    assert plan.keeps_bits
    assert f"{algorithm} was cut off by the time limit of 100 s" in result.notes
    assert plan.tried[0] == Tried(
        algorithm=algorithm, makespan_s=None, why="cut off by the time limit"
    )
    assert plan_from_json(plan_to_json(plan)).tried == plan.tried


@pytest.mark.jit
def test_wherever_the_limit_passes_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    number, cut_off = 1.0, 0
    while True:
        count = itertools.count()
        monkeypatch.setattr(
            "pardnn.time_limit.monotonic", lambda c=count, n=number: 200.0 * (next(c) >= n)
        )
        plan, _ = made("auto", 100)
        said = {each.why for each in plan.tried}
        if said.isdisjoint((portfolio.CUT_OFF, portfolio.NOT_TRIED)):
            break
        cut_off += portfolio.CUT_OFF in said
        number *= 1.7
    assert cut_off > 5


@pytest.mark.jit
def test_a_limit_that_has_passed_is_said_of_all_that_is_left() -> None:
    plan, _ = made("auto", 0)
    why = {each.algorithm: each.why for each in plan.tried}
    assert next(iter(why)) == "pardnn"
    assert why.pop("pardnn") is None
    assert set(why.values()) == {"not tried: the time limit had passed"}
    assert {"heft", "tofu"} <= why.keys()


@pytest.mark.jit
def test_nothing_that_fits_in_time_is_an_error_of_its_own(asked: list[int]) -> None:
    asked[0] = 8
    with pytest.raises(time_limit.OutOfTimeError, match=r"E710 tofu found no plan(?s:.*)tofu; p"):
        made("tofu", 100, memory=16)


def test_the_search_for_advice_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_for_ever(*_: object) -> list[str]:
        while True:
            time_limit.check_time()

    monkeypatch.setattr("pardnn.api.advice.suggestions", asks_for_ever)
    began = time.monotonic()
    with pytest.raises(InfeasibleError, match="E301"):
        planned(GRAPH, Cluster.uniform(2, memory=16), PlanOptions(algorithm="heft", time_limit=0.5))
    assert time.monotonic() - began < 30


def test_the_search_for_advice_is_cut_off_and_keeps_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a U-Net, cut over 16 devices, it took two minutes."""

    def asks_for_ever(*_: object) -> Iterator[str]:
        yield "--max-memory 1KiB"
        while True:
            time_limit.check_time()

    monkeypatch.setattr("pardnn.api.advice.suggestions", asks_for_ever)
    monkeypatch.setattr("pardnn.api.advice.MOST_SECONDS", 0.1)
    with pytest.raises(InfeasibleError, match=r"Try: --max-memory 1KiB (?s:.*)ended after 0\.1 s"):
        planned(GRAPH, Cluster.uniform(2, memory=16), PlanOptions(algorithm="heft"))


@pytest.mark.jit
@pytest.mark.parametrize(
    ("algorithm", "module"), [("m-sct", "highspy"), ("metis", "pymetis"), ("exact", "ortools")]
)
@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)\n", "failed with exit status -9"),
        ("import os; os.write(3, b'{'); os._exit(0)\n", "failed with exit status 0"),
        (HANGS, "did not answer within"),
    ],
)
def test_a_solver_asked_for_by_name_is_replaced(
    algorithm: str, module: str, does: str, told: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("pardnn.place.baselines.exact.GRACE_S", 0.1)
    (tmp_path / f"{module}.py").write_text(does)
    monkeypatch.setattr("pardnn.planner.search.polished.polish_best", lambda *a, **_: (a[2][0], 0))
    options = PlanOptions(algorithm=algorithm, time_limit=0.5 if does == HANGS else 60.0)
    graph = random_graph(3, 20, "layered", memory=False)
    problem = Problem(graph, cluster_of(2), graph_costs(graph), options)
    began = time.monotonic()
    _, result = make_plan(problem)
    assert time.monotonic() - began < 50
    assert f"{algorithm}: the solver" in result.notes[0]
    assert told in result.notes[0]
    assert "; this is the best plan of the other algorithms" in result.notes[0]


def test_a_solver_gets_no_more_time_than_is_left(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "highspy.py").write_text(HANGS)
    with (
        time_limit.time_limit(0.5),
        pytest.raises(time_limit.OutOfTimeError, match=r"E710 the solver 'lp' did .* 0.\d* s"),
    ):
        solvers.ask("lp", {}, seconds=600, extra="exact")
    with time_limit.time_limit(-1), pytest.raises(time_limit.OutOfTimeError, match="cut off"):
        solvers.ask("lp", {}, seconds=600, extra="exact")


def test_an_inner_limit_does_not_outlast_an_outer_one() -> None:
    with time_limit.time_limit(1.0):
        with time_limit.time_limit(100.0):
            assert time_limit.seconds_left() <= 1.0
        with time_limit.no_time_limit():
            time_limit.check_time()
            assert time_limit.seconds_left() > 1e9
        with time_limit.time_limit(None):
            assert time_limit.seconds_left() <= 1.0
    assert time_limit.seconds_left() > 1e9
