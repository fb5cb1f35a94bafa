"""The ways of large graphs, taken by small ones: thresholds are set so low that all are large."""

from typing import Any

import numpy as np
import pytest

from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn import pardnn, step1_makespan, step2_memory
from pardnn.place.pardnn.problem import Problem
from pardnn.place.pardnn.step1_makespan import (
    emulated,
    improved,
    is_short,
    partition,
    timeline_of,
)
from pardnn.place.pardnn.step2_memory import Task, fit_memory
from pardnn.place.pardnn.swaps import swap_clusters
from pardnn.sim.bounds import work_seconds
from pardnn.sim.engine import run_lists
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, machine_for, problem_for
from tests.strategies import FAMILIES, random_graph


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pardnn, step1_makespan, step2_memory):
        monkeypatch.setattr(module, "MANY_OPS", 4)


def _graph(seed: int) -> Graph:
    """Its ops stand in any order."""
    graph = random_graph(seed, 12, FAMILIES[seed % 6])
    order = np.random.default_rng(seed).permutation(len(graph.ops))
    return build_graph("shuffled", [graph.ops[i] for i in order])


def _least(graph: Graph) -> int:
    """About the bytes that two devices need."""
    alone = pardnn.place_pardnn(graph, machine_for(graph, cluster_of(1)), [None]).plan
    return int(peaks(graph.arrays, alone).max() * 0.85)


def test_a_plan_is_short_above_the_thresholds_alone() -> None:
    problem = problem_for(_graph(1), 2)
    work = work_seconds(problem.machine)
    sized = [
        problem._replace(arrays=_Sized(n))  # pyright: ignore[reportArgumentType]
        for n in (50_000, 50_001, 100_000, 100_001)
    ]
    assert [is_short(each, work * 1.005) for each in sized] == [False, True, True, True]
    assert [is_short(each, work * 1.02) for each in sized] == [False, False, False, True]


class _Sized:
    def __init__(self, num_ops: int) -> None:
        self.num_ops = num_ops


@pytest.mark.usefixtures("_large")
def test_one_device_runs_without_a_gap() -> None:
    """And the candidates are those of a small graph: HEFT, clusters, and what improves them."""
    for seed in range(4):
        problem = problem_for(_graph(seed), 2)
        candidates, seconds = partition(problem)
        spans = [candidate.makespan for candidate in candidates]
        assert spans == sorted(spans)
        assert {"single", "heft", "clusters", "list_scheduling"} <= seconds.keys()
        assert 0 <= max(seconds.values()) < 60
        (single,) = [c for c in candidates if not c.place.any() and _is_in_file_order(problem, c)][
            :1
        ]
        start, end = single.schedule.start[single.order], single.schedule.finish[single.order]
        assert start[0] == 0
        assert start[1:].tolist() == end[:-1].tolist()
        assert (end - start).tolist() == problem.seconds[single.order].tolist()
        for candidate in candidates:
            timeline = timeline_of(problem, candidate)
            assert timeline.makespan == candidate.makespan


def _is_in_file_order(problem: Problem, candidate: step1_makespan.Candidate) -> bool:
    return candidate.order.tolist() == problem.arrays.topological.tolist()


@pytest.mark.jit
@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("attempt_ops", [4, 60_000])
def test_plans_of_large_graphs_are_valid_and_fit(
    attempt_ops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step2_memory, "ATTEMPT_OPS", attempt_ops)
    limited = 0
    for seed in range(5):
        graph = _graph(seed)
        machine = machine_for(graph, cluster_of(2))
        free = pardnn.place_pardnn(graph, machine, [None] * 2).plan
        assert np.isfinite(run_lists(graph.arrays, machine, free).makespan)
        enough = pardnn.place_pardnn(graph, machine, [10**9] * 2)
        assert enough.moved_ops == 0
        assert "memory" not in enough.seconds_by_step
        assert (enough.plan.place == free.place).all()
        limit = _least(graph)
        try:
            plan = pardnn.place_pardnn(graph, machine, [limit] * 2).plan
        except InfeasibleError:
            continue
        assert (peaks(graph.arrays, plan) <= limit).all()
        assert np.isfinite(run_lists(graph.arrays, machine, plan).makespan)
        limited += 1
    assert limited > 1


@pytest.mark.jit
@pytest.mark.usefixtures("_large")
def test_repair_of_the_fastest_is_the_last_word_if_it_costs_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other start is worked on, but where repair costs much."""
    tried: list[int] = []
    monkeypatch.setattr(step2_memory, "fit_candidate", lambda *_, **__: tried.append(1))
    graph = _graph(5)
    problem, written = problem_for(graph, 2, with_views=True), first_overwrites(graph)
    candidates, _ = partition(problem)
    monkeypatch.setattr(step2_memory, "REPAIR_COSTS", 0.0)
    tried.clear()
    assert fit_memory(Task(problem, problem, [10**6] * 2, written), candidates) is not None
    assert tried
    monkeypatch.setattr(step2_memory, "REPAIR_COSTS", 1.1)
    tried.clear()
    assert fit_memory(Task(problem, problem, [10**6] * 2, written), candidates) is not None
    assert not tried


@pytest.mark.jit
def test_ops_of_small_graphs_stand_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        graph = _graph(seed)
        machine = machine_for(graph, cluster_of(2))
        found = pardnn.place_pardnn(graph, machine, [None] * 2).plan
        assert np.isfinite(run_lists(graph.arrays, machine, found).makespan)
        with monkeypatch.context() as patch:
            patch.setattr(pardnn, "MANY_OPS", len(graph.ops))  # as many are few
            again = pardnn.place_pardnn(graph, machine, [None] * 2).plan
        assert all(np.array_equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.jit
def test_every_candidate_of_a_small_graph_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[np.ndarray] = []
    monkeypatch.setattr(
        step2_memory, "fit_candidate", lambda _a, _m, place, *_, **__: tried.append(place)
    )
    graph = _graph(4)
    problem = problem_for(graph, 2, with_views=True)
    candidates, _ = partition(problem)
    task = Task(problem, problem, [10**6] * 2, first_overwrites(graph))
    assert fit_memory(task, candidates) is not None
    assert [place.tolist() for place in tried] == [c.place.tolist() for c in candidates]
    monkeypatch.setattr(step2_memory, "START_OPS", 2 * problem.arrays.num_ops)
    tried.clear()
    fit_memory(task, candidates)
    assert len(tried) == 2


def test_list_scheduling_starts_from_clusters_heft_and_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[step1_makespan.Candidate] = []

    def recorded(_: Problem, start: step1_makespan.Candidate, __: np.ndarray):
        starts.append(start)
        return start

    monkeypatch.setattr(step1_makespan, "improved", recorded)
    problem = problem_for(random_graph(1, 12, "layered", memory=False), 2)
    candidates, _ = partition(problem)
    assert len(starts) == 3
    assert all(any(start is found for found in candidates) for start in starts)
    assert all(start.place.any() for start in starts)
    alone = problem_for(random_graph(1, 12, "layered", memory=False), 1)
    starts.clear()
    assert len(partition(alone)[0]) == 2
    assert not starts


@pytest.mark.usefixtures("_large")
def test_of_large_graphs_the_faster_start_alone_is_improved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HEFT's or the clusters', which differ in these."""
    monkeypatch.setattr(step1_makespan, "MAX_OPS", 4)
    starts: list[step1_makespan.Candidate] = []

    def recorded(_: Problem, start: step1_makespan.Candidate, __: np.ndarray):
        starts.append(start)
        return start

    monkeypatch.setattr(step1_makespan, "improved", recorded)
    differ = 0
    for seed in range(6):
        starts.clear()
        candidates, _ = partition(problem_for(random_graph(seed, 14, FAMILIES[seed % 6]), 3))
        one_device, *others = sorted(candidates, key=lambda found: int(found.place.any()))
        assert not one_device.place.any()
        (start,) = starts
        assert start.makespan == min(other.makespan for other in others)
        differ += len({other.makespan for other in others}) > 1
    assert differ > 2


@pytest.mark.parametrize(("switched", "rounds"), [(0, 1), (1, step1_makespan.SWITCH_PATIENCE + 1)])
def test_switches_end_where_they_gain_nothing(
    switched: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 8 devices there could be 8 rounds."""
    calls: list[np.ndarray] = []

    def switch(_: Problem, place: np.ndarray) -> tuple[np.ndarray, int]:
        calls.append(place)
        return place, switched

    monkeypatch.setattr(step1_makespan, "switch_critical_path", switch)
    partition(problem_for(random_graph(2, 12, "layered", memory=False), 8))
    assert len(calls) == rounds


@pytest.mark.parametrize(("within", "most", "refined"), [(0, 4, 0), (np.inf, 4, 1), (0, 50, 1)])
def test_clusters_of_large_graphs_that_are_far_behind_are_not_refined(
    within: float, most: int, refined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times the makespan of HEFT that clusters may take, and ops above which that counts."""
    for name, value in (("MANY_OPS", most), ("MAX_OPS", most), ("REFINED_WITHIN", within)):
        monkeypatch.setattr(step1_makespan, name, value)
    asked: list[np.ndarray] = []

    def swap(*given: Any) -> np.ndarray:
        asked.append(given[-1])
        return swap_clusters(*given)

    monkeypatch.setattr(step1_makespan, "swap_clusters", swap)
    partition(problem_for(random_graph(2, 14, "layered", memory=False), 3))
    assert len(asked) == refined


@pytest.mark.parametrize(("work", "passes"), [(7, 7), (100, step1_makespan.MAX_PASSES)])
def test_passes_are_bounded_by_work_and_by_number(
    work: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as each is faster than the one before it; work in passes over the graph."""
    problem = problem_for(random_graph(2, 12, "layered", memory=False))
    monkeypatch.setattr(step1_makespan, "PASS_OPS", work * problem.arrays.num_ops)
    start = emulated(problem, np.zeros(problem.arrays.num_ops, dtype=np.int64))
    made: list[float] = []

    def faster(*_: Any) -> step1_makespan.Candidate:
        made.append(start.makespan * 0.9 ** (len(made) + 1))
        assert len(made) <= passes
        return start._replace(makespan=made[-1])

    monkeypatch.setattr(step1_makespan, "_one_pass", faster)
    anywhere = np.full(len(problem.runs), -1)
    assert improved(problem, start, anywhere).makespan == made[-1]
    assert len(made) == passes


@pytest.mark.jit
def test_no_starts_are_worked_on_far_from_a_plan_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked: list[int] = []
    monkeypatch.setattr(step2_memory, "_attempt", lambda *_: worked.append(1))
    graph = _graph(4)
    problem = problem_for(graph, 2, with_views=True)
    candidates, _ = partition(problem)
    task = Task(problem, problem, [10**6] * 2, first_overwrites(graph))
    plan = fit_memory(task, candidates)
    assert plan is not None
    assert worked
    makespan = run_lists(problem.arrays, problem.machine, plan).makespan
    for share, is_near in ((0.49, False), (0.51, True)):
        worked.clear()
        assert fit_memory(task, candidates, below=share * makespan) is not None
        assert bool(worked) == is_near
