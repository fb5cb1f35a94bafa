"""Polish: never worse, valid, within the limit, the same twice; its search against a naive run."""

import dataclasses
import math
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.errors import InfeasibleError, InvalidPlanError
from pardnn.graph.build import build_graph
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph, Op
from pardnn.place.baselines.round_robin import place_round_robin
from pardnn.place.baselines.single import place_single
from pardnn.place.colocation import closed_arrays
from pardnn.place.pardnn import place_pardnn
from pardnn.place.polish.blocks import give, move_block, path_through_block
from pardnn.place.polish.effort import Gains
from pardnn.place.polish.neighbourhood import State, Task, changed, fill_kernel, state_of, task_of
from pardnn.place.polish.polish import _found, end_of, polish, polish_best
from pardnn.place.polish.search import search_kernel
from pardnn.place.polish.slots import best_slot
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import PlanArrays, plan_from_arrays
from pardnn.planner import algorithms
from pardnn.planner.algorithms import ALGORITHMS, AUTO_SMALL, OF_PERIOD, SOLVER_BASED, STAGED
from pardnn.planner.compare import compare
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search import portfolio
from pardnn.planner.search.portfolio import decide, decide_best
from pardnn.sim.engine import simulate
from pardnn.sim.machine import Machine
from pardnn.sim.peak import residual_bytes
from pardnn.sim.period import period
from pardnn.time_limit import time_limit
from tests.place.machines import cluster_of, clusters, limited, machine_for
from tests.place.pardnn.test_pardnn import one_device_peak
from tests.reference.pardnn import op_successors
from tests.strategies import FAMILIES, Row, examples, graphs, ops_of, random_graph

MODULES = {"metis": "pymetis", "m-sct": "highspy"}
TYPES = ("accelerator", "cpu")


def test_a_plan_whose_order_breaks_the_graphs_is_refused() -> None:
    """The kernels look along the order for what a move changes: they would read beyond its end."""
    one_second = {"accelerator": 1.0}
    first = Op(name="a", kind="aten.relu.default", seconds=one_second)
    second = Op(name="b", kind="aten.relu.default", after=("a",), seconds=one_second)
    graph = build_graph("g", [first, second])
    cluster = Cluster.uniform(2)
    plan = place_round_robin(graph, machine_for(graph, cluster), [None] * 2).plan
    plan = plan._replace(
        place=np.zeros(2, dtype=np.int64), order_ptr=np.array([0, 2, 2]), order_op=np.array([1, 0])
    )
    with pytest.raises(InvalidPlanError, match="op 1 before op 0"):
        polish(graph, machine_for(graph, cluster), plan, [None] * 2)


@examples(10)
@given(
    graph=graphs(max_ops=12, types=TYPES),
    cluster=clusters(),
    tightness=st.sampled_from([None, 1.0, 0.7]),
    by_period=st.booleans(),
)
def test_never_worse_valid_and_within_the_limit(
    graph: Graph, cluster: Cluster, tightness: float | None, by_period: bool
) -> None:
    limit = None if tightness is None else max(1, int(one_device_peak(graph) * tightness))
    capacities = [limit] * cluster.num_devices
    machine = machine_for(graph, cluster)
    try:
        plan = place_pardnn(graph, machine, capacities).plan
    except InfeasibleError:
        return
    better = polish(graph, machine, plan, capacities, work=800, by_period=by_period)
    assert plan_problems(graph, plan_from_arrays(graph, better), limited(cluster, limit)) == []
    if by_period:
        before, after = (period(graph.arrays, machine, p).seconds for p in (plan, better))
    else:
        before, after = (simulate(graph, machine, p).makespan for p in (plan, better))
    assert after <= before


@pytest.mark.jit
@pytest.mark.parametrize("begin", [None, (0.0, 1.5, 4.0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_search_knows_of_times_is_what_a_simulation_finds(
    family: str, begin: tuple[float, ...] | None
) -> None:
    graph, at = random_graph(2, 40, family), None if begin is None else np.array(begin)
    machine, arrays, task, state = round_robin_searched(graph, 3, at)
    seed, before = 7, end_of(task, state)
    for _ in range(30):  # whatever was tried and undone last, all times must be right
        seed = search_kernel(task, state, 200, 0.05, seed)
        fresh = state_of(state.place, state.order, 3)
        fill_kernel(task, fresh)
        for op in range(arrays.num_ops):
            slots = [*range(fresh.position[op])][::-3]
            for to in slots[:2]:
                low = _earliest(arrays, fresh, op)
                if to >= low and len(np.flatnonzero(arrays.group == arrays.group[op])) == 1:
                    x = _last_before(fresh, to, (fresh.place[op] + 1) % 3)
                    changed(task, fresh, op, (fresh.place[op] + 1) % 3, x, to)
        again = state_of(fresh.place, fresh.order, 3)
        fill_kernel(task, again)
        for name in State._fields[1:11]:
            assert np.array_equal(getattr(again, name), getattr(fresh, name)), name
        finish, tail = naive_times(graph, machine, again.place, again.order.tolist(), task)
        assert again.finish.tolist() == finish
        assert again.tail.tolist() == tail
    assert end_of(task, state) <= before


def round_robin_searched(
    graph: Graph, k: int, begin: np.ndarray | None = None
) -> tuple[Machine, GraphArrays, Task, State]:
    """What the search is given when it begins at a round robin plan."""
    machine, arrays = machine_for(graph, cluster_of(k)), closed_arrays(graph)
    plan = place_round_robin(graph, machine, [None] * k).plan
    order = np.argsort(simulate(graph, machine, plan).dispatch)
    task, state = task_of(arrays, machine, begin=begin), state_of(plan.place, order, k)
    fill_kernel(task, state)
    return machine, arrays, task, state


def _earliest(arrays: GraphArrays, state: State, op: int) -> int:
    inputs = arrays.tensor_op[arrays.input_tensor[arrays.input_ptr[op] : arrays.input_ptr[op + 1]]]
    after = arrays.after_op[arrays.after_ptr[op] : arrays.after_ptr[op + 1]]
    return max((int(state.position[i]) + 1 for i in [*inputs, *after]), default=0)


def _last_before(state: State, to: int, device: int) -> int:
    queue = [int(op) for op in state.order[:to] if state.place[op] == device]
    return queue[-1] if queue else -1


def naive_times(
    graph: Graph, machine: Machine, place: np.ndarray, order: list[int], task: Task
) -> tuple[list[float], list[float]]:
    """Finish of each op, and the seconds from its start to the end, by definition."""
    begin, after = task.begin.tolist(), task.after.tolist()
    successors = op_successors(graph)
    n = len(order)
    seconds = [float(machine.seconds[machine.device_class[place[op]], op]) for op in range(n)]
    finish, tail = [0.0] * n, [0.0] * n

    def comm(i: int, j: int, size: int) -> float:
        p, d = place[i], place[j]
        return 0.0 if p == d else machine.latency[p, d] + max(size, 0) / machine.bandwidth[p, d]

    for at, op in enumerate(order):
        queue = [finish[i] for i in order[:at] if place[i] == place[op]]
        arrived = [
            finish[i] + comm(i, op, successors[i][op]) for i in range(n) if op in successors[i]
        ]
        finish[op] = max([begin[place[op]], *queue, *arrived]) + seconds[op]
    for at in range(n - 1, -1, -1):
        op = order[at]
        queue = [tail[j] for j in order[at + 1 :] if place[j] == place[op]]
        rest = [comm(op, j, size) + tail[j] for j, size in successors[op].items()]
        tail[op] = max([after[place[op]], *queue, *rest]) + seconds[op]
    return finish, tail


@examples(10)
@given(graph=graphs(max_ops=10, memory=False), seed=st.integers(1, 99), k=st.integers(2, 3))
def test_a_slot_promises_no_less_than_a_simulation_finds(graph: Graph, seed: int, k: int) -> None:
    for begin in (None, np.array([0.0, 2.5, 1.0][:k])):
        *_, task, state = round_robin_searched(graph, k, begin)
        for op in range(len(graph.ops)):
            before = end_of(task, state)
            path, d, x, to, seed = best_slot(task, state, op, 0.0, seed)
            if d >= 0:
                changed(task, state, op, d, x, to)
                assert end_of(task, state) <= max(before, path)


@pytest.mark.jit
def test_a_slot_in_ones_own_queue_does_not_count_the_op_twice() -> None:
    # On one device every order takes as long.
    rows = [Row(role="input", quarters=quarters) for quarters in (4, 20, 8, 12)]
    *_, task, state = round_robin_searched(build_graph("one queue", ops_of(rows)), 1)
    for op in range(len(rows)):
        path, d, x, to, _ = best_slot(task, state, op, 0.0, 1)
        assert (path, d) == (11.0, 0)
        assert (x, to) != (state.before[op], state.position[op])


@examples(6)
@given(graph=graphs(max_ops=12), k=st.integers(2, 3))
def test_serial_links_are_simulated(graph: Graph, k: int) -> None:
    cluster = cluster_of(k, serial=True, bandwidth=8.0)
    machine = machine_for(graph, cluster)
    plan = place_round_robin(graph, machine, [None] * k).plan
    better = polish(graph, machine, plan, [None] * k, work=800)
    assert plan_problems(graph, plan_from_arrays(graph, better), cluster) == []
    before, after = (simulate(graph, machine, p).makespan for p in (plan, better))
    assert after <= before


def test_a_time_limit_ends_the_search() -> None:
    graph = random_graph(3, 60, "layered")
    machine = machine_for(graph, cluster_of(3))
    plan = place_round_robin(graph, machine, [None] * 3).plan
    with time_limit(0.0):
        assert polish(graph, machine, plan, [None] * 3) is plan


@pytest.mark.jit
def test_a_bad_plan_becomes_good() -> None:
    graph = random_graph(1, 80, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(3))
    plan = place_round_robin(graph, machine, [None] * 3).plan
    better = polish(graph, machine, plan, [None] * 3, work=40_000)
    before, after = (simulate(graph, machine, p).makespan for p in (plan, better))
    assert after < before * 0.85


@pytest.mark.jit
def test_the_same_seed_gives_the_same_plan() -> None:
    graph = random_graph(3, 60, "layered")
    machine = machine_for(graph, cluster_of(3))
    plan = place_round_robin(graph, machine, [None] * 3).plan
    one, two = (polish(graph, machine, plan, [None] * 3, seed=5, work=8000) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(one, two, strict=True))


@pytest.mark.jit
@pytest.mark.parametrize("family", FAMILIES)
def test_auto_is_never_worse_than_what_it_ran(family: str) -> None:
    graph = random_graph(4, 40, family)
    cluster, costs = cluster_of(3), graph_costs(graph)
    problem = Problem(graph, cluster, costs, PlanOptions(algorithm="auto", reserve=0.0))
    _, result = make_plan(problem)
    for name in AUTO_SMALL:
        found = decide(problem, name)
        assert result.makespan_s <= found.makespan_s


def test_what_is_far_from_a_plan_that_is_there_is_not_polished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[int] = []

    def polished(_graph, _machine, plans, *_, **__):
        starts.append(len(plans))
        return plans[0], 0

    monkeypatch.setattr("pardnn.planner.search.polished.polish_best", polished)
    graph = random_graph(4, 40, "in-tree")
    problem = Problem(graph, cluster_of(3), graph_costs(graph), PlanOptions(reserve=0.0))
    names = ["heft", "single"]
    fast, slow = sorted(decide(problem, name).makespan_s for name in names)
    for below in (slow * 1.01, slow, fast):
        found = decide_best(dataclasses.replace(problem, below=below), names, polish=True)
        assert found.makespan_s == fast
    assert starts == [2, 1]


@pytest.mark.parametrize(
    ("slow", "few"),
    [(["2.0 1f1b", "9.0 zb-v"], 99), (["8.0 1f1b", "9.0 zb-v"], 99), (["8.0 zb-v"], 9), ([], 99)],
)
def test_local_search_begins_from_the_best_two_and_the_best_stages(
    slow: list[str], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, made = random_graph(4, 40, "in-tree"), ["1.0 pardnn", "1.0 single", *slow, "3.0 heft"]
    problem = Problem(graph, cluster_of(3), graph_costs(graph), PlanOptions(reserve=0.0))
    of = {}
    for each in made:
        seconds, name = each.split()
        outcome = decide(problem, "single" if name in STAGED else name)
        of[name] = outcome._replace(algorithm=name, makespan_s=float(seconds))
    starts: list[PlanArrays] = []

    def polished(_graph, _machine, plans, *_, **__):
        starts.extend(plans)
        return plans[0], 0

    monkeypatch.setattr("pardnn.planner.search.polished.polish_best", polished)
    monkeypatch.setattr(portfolio, "decide", lambda _problem, name, **_: of[name])
    monkeypatch.setattr(portfolio, "_bound", lambda _problem: 0.0)
    monkeypatch.setattr("pardnn.planner.search.polished.FEW_OPS", few)
    decide_best(problem, [*of], polish=True)
    stages = [of["1f1b"]] if "1f1b" in of else []
    expected = sorted([of["pardnn"], of["heft"], *stages], key=lambda found: found.makespan_s)
    assert [id(plan) for plan in starts] == [id(found.plan) for found in expected]


@pytest.mark.jit
def test_auto_asks_the_solvers_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(name for name in ("metis", "m-sct") if find_spec(MODULES[name]))
    known = {name: (100, MODULES[name]) for name in MODULES} | {"none": (9, "no")}
    monkeypatch.setattr(algorithms, "AUTO_SOLVERS", known)
    assert algorithms.solvers_to_try("auto", 40, 3) == names
    assert algorithms.solvers_to_try("auto", 101, 3) == ()
    assert algorithms.solvers_to_try("auto", 40, 4) == ()
    assert algorithms.solvers_to_try("heft", 40, 3) == ()
    graph = random_graph(4, 40, "in-tree")
    cluster, costs = cluster_of(3), graph_costs(graph)
    problem = Problem(graph, cluster, costs, PlanOptions(reserve=0.0))
    worst = decide_best(problem, ["single"])
    best = decide_best(problem, ["single"], solvers=names)
    others = [decide(problem, name) for name in names]
    assert best.makespan_s == min(o.makespan_s for o in (worst, *others))
    assert not names or best.makespan_s < worst.makespan_s


def test_compare_has_a_row_for_what_cannot_run() -> None:
    graph = random_graph(4, 40, "layered")
    rows = compare(Problem(graph, cluster_of(2), graph_costs(graph)), ["exact", "heft"])
    assert [row.fits for row in rows] == [False, True]
    assert "refuses more than 30" in (rows[0].error or "")
    assert "exact" in ALGORITHMS


@pytest.mark.jit
def test_the_best_of_two_starts() -> None:
    graph = random_graph(1, 80, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(3))
    plans = [place(graph, machine, [None] * 3).plan for place in (place_pardnn, place_round_robin)]
    better, origin = polish_best(graph, machine, plans, [None] * 3, work=40_000)
    assert origin in (0, 1)
    assert plan_problems(graph, plan_from_arrays(graph, better), cluster_of(3)) == []
    times = [simulate(graph, machine, p).makespan for p in (*plans, better)]
    assert times[2] <= min(times)


@pytest.mark.parametrize(
    ("known", "works", "few", "gains"),
    [
        (math.inf, [9, 9, 18, 18], 80, False),
        (math.inf, [9, 9, 18], 80, True),  # both became the same plan
        (math.inf, [9, 18], 79, True),  # the second is far above what the first became
        (math.inf, [9], 79, False),
        (0.92, [9, 18], 79, True),
        (0.9, [9, 9], 80, False),
    ],
)
def test_half_of_the_work_is_for_plans_that_are_near_and_of_large_graphs_improve(
    monkeypatch: pytest.MonkeyPatch, known: float, works: list[int], few: int, gains: bool
) -> None:
    graph = random_graph(1, 80, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(3))
    plans = [place(graph, machine, [None] * 3).plan for place in (place_pardnn, place_round_robin)]
    plans.sort(key=lambda plan: simulate(graph, machine, plan).makespan)
    best, other = plans
    spent: list[int] = []

    def improved(job, found, _seed, work, *, near=False, **_):
        spent.append(work)
        # Of large graphs the second part moves ops alone.
        assert near == (work == 18 and few < 80)
        return _found(job, best if gains and found.plan is other else found.plan), Gains(1)

    monkeypatch.setattr("pardnn.place.polish.polish._improved", improved)
    monkeypatch.setattr("pardnn.place.polish.polish.FEW_OPS", few)
    starts = [other, other] if gains else plans
    known_s = known * simulate(graph, machine, best).makespan
    better, origin = polish_best(graph, machine, starts, [None] * 3, work=36, known_s=known_s)
    assert spent == works
    assert origin == 0
    assert simulate(graph, machine, better).makespan <= simulate(graph, machine, best).makespan


def test_the_second_best_plan_of_the_first_part_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(1, 80, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(3))
    given = [place(graph, machine, [None] * 3).plan for place in (place_pardnn, place_round_robin)]
    given.append(place_single(graph, machine, [None] * 3).plan)
    given.sort(key=lambda plan: simulate(graph, machine, plan).makespan)
    best, middle, worst = given

    def improved(job, found, _seed, work, **_):
        return _found(job, best if work == 18 and found.plan is worst else found.plan), Gains(1)

    monkeypatch.setattr("pardnn.place.polish.polish._improved", improved)
    better, origin = polish_best(graph, machine, [middle, worst], [None] * 3, work=36)
    assert origin == 1
    assert simulate(graph, machine, better).makespan <= simulate(graph, machine, best).makespan


def test_auto_runs_every_algorithm_that_needs_no_solver() -> None:
    # The thesis alone is there to compare with: `pardnn` starts from its clusters and goes on.
    others = SOLVER_BASED | {"pardnn-thesis", *OF_PERIOD}
    assert set(AUTO_SMALL) == ALGORITHMS.keys() - others


@pytest.mark.jit
@pytest.mark.parametrize("family", FAMILIES)
def test_the_search_keeps_residual_bytes_within_their_room(family: str) -> None:
    graph = random_graph(5, 60, family)
    machine, arrays, _, state = round_robin_searched(graph, 3)
    residual = residual_bytes(arrays, np.arange(arrays.num_ops))
    live = np.bincount(state.place, weights=residual, minlength=3).astype(np.int64)
    room = live + residual.max() // 2
    seed, devices = 3, set()
    for _ in range(20):
        seed = search_kernel(task_of(arrays, machine, room), state, 2000, 0.2, seed)
        now = np.bincount(state.place, weights=residual, minlength=3).astype(np.int64)
        assert (now <= room).all()
        devices.add(tuple(state.place))
        for group in np.unique(arrays.group):
            assert len(set(state.place[arrays.group == group])) == 1
    assert len(devices) > 1


@pytest.mark.jit
def test_blocks_go_where_no_op_can_go_alone() -> None:
    # Moving one op of a chain costs two messages that take longer than the whole step.
    rows = [Row(role="input", bytes=0)]
    rows += [Row(reads=(max(0, i - 2),), bytes=4000) for i in range(1, 11)]
    graph = build_graph("two chains", ops_of(rows))
    machine = machine_for(graph, cluster_of(2, bandwidth=128.0))
    arrays = closed_arrays(graph)
    state = state_of(np.zeros(arrays.num_ops, dtype=np.int64), arrays.topological, 2)
    search_kernel(task_of(arrays, machine), state, 20_000, 0.01, 1)
    assert sorted(np.bincount(state.place, minlength=2)) == [5, 6]


@pytest.mark.jit
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_evaluated_as_it_is_simulated(family: str) -> None:
    graph = random_graph(4, 40, family)
    _, arrays, task, state = round_robin_searched(graph, 3)
    judged_ops = 0
    for op in range(arrays.num_ops):
        if len(np.flatnonzero(arrays.group == arrays.group[op])) > 1:
            continue
        d = int(state.place[op] + 1) % 3
        fresh = state_of(state.place, state.order, 3)
        fill_kernel(task, fresh)
        fresh.block[0], fresh.dirty[op] = op, True
        path = path_through_block(task, fresh, 1, d)
        fresh.dirty[op] = False
        if not np.isfinite(path):
            continue
        give(task, fresh, 0, 1, d)
        seconds = task.seconds[task.device_class[d], op]
        assert path == pytest.approx(fresh.finish[op] + fresh.tail[op] - seconds, rel=1e-12)
        judged_ops += 1
    assert judged_ops > 0


@pytest.mark.jit
def test_a_block_that_makes_the_step_too_slow_goes_back() -> None:
    graph = random_graph(4, 60, "fork-join", memory=False)
    _, arrays, task, state = round_robin_searched(graph, 3)
    fill_kernel(task, state)
    moved = 0
    for seed in range(1, 200):
        op, limit = seed % arrays.num_ops, state.finish.max() * 1.02
        before = state.place.copy()
        move_block(task, state, op, limit, seed * 7919)
        moved += bool((state.place != before).sum() > 1)
        fresh = state_of(state.place, state.order, 3)
        fill_kernel(task, fresh)
        np.testing.assert_allclose(state.finish, fresh.finish)
        np.testing.assert_allclose(state.tail, fresh.tail)
        assert state.finish.max() <= limit
    assert moved > 5
