"""Baselines: valid plans, HEFT, ETF, m-TOPO and clustering against naive twins."""

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn import solvers
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, PardnnError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph
from pardnn.place.baselines import single
from pardnn.place.baselines.heft import heft_timeline, place_heft
from pardnn.place.baselines.linear_clustering import linear_clusters
from pardnn.place.baselines.m_etf import etf_timeline
from pardnn.place.baselines.m_sct import favourite_children, linear_program
from pardnn.place.baselines.m_topo import filled, op_bytes
from pardnn.place.baselines.metis import assigned
from pardnn.place.colocation import closed_arrays, speed_shares
from pardnn.place.decision import Decision
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.planner.algorithms import ALGORITHMS, SOLVER_BASED
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.levels import bottom_levels, slowest_link
from pardnn.sim.machine import Machine, fastest_seconds, serial_seconds
from tests.place.machines import cluster_of, clusters, limited, machine_for
from tests.place.pardnn.test_pardnn import one_device_peak
from tests.reference.pardnn import levels, op_successors
from tests.strategies import FAMILIES, Row, examples, graphs, ops_of, random_graph

TYPES = ("accelerator", "cpu")


def needs(module: str) -> pytest.MarkDecorator:
    """Not imported here: two solvers in one process may clash, which is why each has its own."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


BASELINES = sorted(ALGORITHMS.keys() - SOLVER_BASED - {"pardnn", "modulo"})
#: A search: a graph takes it a minute in plain Python.
MODULO = pytest.param("modulo", marks=pytest.mark.jit)


def place(name: str, graph: Graph, machine: Machine, capacities: list[int | None]) -> Decision:
    return ALGORITHMS[name](graph, machine, capacities, seed=0)


@pytest.mark.parametrize("name", [*BASELINES, MODULO])
@examples(10)
@given(
    graph=graphs(max_ops=14, types=TYPES),
    cluster=clusters(),
    tightness=st.sampled_from([None, 1.0, 0.6]),
)
def test_plans_are_valid_and_within_the_limit(
    name: str, graph: Graph, cluster: Cluster, tightness: float | None
) -> None:
    limit = None if tightness is None else max(1, int(one_device_peak(graph) * tightness))
    machine = machine_for(graph, cluster)
    try:
        plan = place(name, graph, machine, [limit] * cluster.num_devices).plan
    except InfeasibleError:
        assert tightness is not None
        return
    assert plan_problems(graph, plan_from_arrays(graph, plan), limited(cluster, limit)) == []
    makespan = simulate(graph, machine, plan).makespan
    assert makespan >= lower_bound_seconds(graph.arrays, machine) * (1 - 1e-12)


@pytest.mark.parametrize("name", BASELINES)
def test_one_device_is_one_device(name: str) -> None:
    graph = random_graph(3, 40, "transformer")
    machine = machine_for(graph, cluster_of(1))
    plan = place(name, graph, machine, [None]).plan
    assert simulate(graph, machine, plan).makespan == pytest.approx(serial_seconds(machine))


def before(graph: Graph) -> list[dict[int, int]]:
    """Bytes over each edge that enters an op, -1 for order alone."""
    predecessors: list[dict[int, int]] = [{} for _ in graph.ops]
    for i, row in enumerate(op_successors(graph)):
        for j, size in row.items():
            predecessors[j][i] = size
    return predecessors


def comm(machine: Machine, p: int, d: int, size: int) -> float:
    return 0.0 if p == d else machine.latency[p, d] + max(size, 0) / machine.bandwidth[p, d]


def naive_heft(
    graph: Graph, machine: Machine, group: Sequence[int], rank: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Ops by rank, each where it finishes first."""
    predecessors = before(graph)
    free = [0.0] * machine.num_devices
    device, finish = [-1] * len(graph.ops), [0.0] * len(graph.ops)
    for op in rank:
        fixed = {
            device[i] for i in range(len(graph.ops)) if device[i] >= 0 and group[i] == group[op]
        }
        ends = {}
        for d in fixed or range(machine.num_devices):
            begin = max([free[d], *(finish[i] + comm(machine, device[i], d, size)
                                    for i, size in predecessors[op].items())])  # fmt: skip
            ends[d] = begin + machine.seconds[machine.device_class[d], op]
        device[op] = min(ends, key=lambda d: (ends[d], d))
        finish[op] = free[device[op]] = ends[device[op]]
    return device, finish


@given(graph=graphs(max_ops=14), cluster=clusters(serial=False))
def test_heft(graph: Graph, cluster: Cluster) -> None:
    cluster = cluster_of(cluster.num_devices, speeds=(1.0, 2.0))
    machine = machine_for(graph, cluster)
    arrays = closed_arrays(graph)
    found, timeline = heft_timeline(arrays, machine)
    levels_of = bottom_levels(arrays, machine)
    position = {op: i for i, op in enumerate(arrays.topological.tolist())}
    rank = sorted(range(len(graph.ops)), key=lambda op: (-levels_of[op], position[op]))
    device, finish = naive_heft(graph, machine, arrays.group.tolist(), rank)
    assert found.tolist() == device
    assert timeline.finish.tolist() == finish


def naive_etf(
    graph: Graph, machine: Machine, group: Sequence[int], position: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Among all ready ops and devices the pair that starts first, without limits."""
    predecessors = before(graph)
    n, k = len(graph.ops), machine.num_devices
    free = [0.0] * k
    device, finish = [-1] * n, [0.0] * n
    for _ in range(n):
        pairs = []
        for op in range(n):
            if device[op] >= 0 or any(device[i] < 0 for i in predecessors[op]):
                continue
            fixed = {device[i] for i in range(n) if device[i] >= 0 and group[i] == group[op]}
            for d in fixed or range(k):
                arrivals = [
                    finish[i] + comm(machine, device[i], d, s) for i, s in predecessors[op].items()
                ]
                pairs.append((max([free[d], *arrivals]), position[op], d, op))
        begin, _, d, op = min(pairs)
        device[op], finish[op] = d, begin + machine.seconds[machine.device_class[d], op]
        free[d] = finish[op]
    return device, finish


@given(graph=graphs(max_ops=12, shuffled=True), k=st.integers(1, 3))
def test_etf(graph: Graph, k: int) -> None:
    machine = machine_for(graph, cluster_of(k))
    arrays = closed_arrays(graph)
    nobody = np.full(arrays.num_ops, -1)
    found, timeline = etf_timeline(arrays, machine, [None] * k, nobody)
    position = np.argsort(arrays.topological)
    device, finish = naive_etf(graph, machine, arrays.group.tolist(), position.tolist())
    assert found.tolist() == device
    assert timeline.finish.tolist() == finish


def test_etf_goes_elsewhere_when_a_device_is_full() -> None:
    graph = random_graph(2, 60, "transformer")
    machine = machine_for(graph, cluster_of(3))
    limit = int(one_device_peak(graph) * 0.6)
    plan = place("m-etf", graph, machine, [limit] * 3).plan
    assert plan_problems(graph, plan_from_arrays(graph, plan), limited(cluster_of(3), limit)) == []
    with pytest.raises(InfeasibleError):
        place("heft", graph, machine, [limit // 2] * 3)


def test_heft_goes_elsewhere_only_when_a_device_is_full() -> None:
    pair = [Row(role="parameter", bytes=100, quarters=0)]
    rows = [*pair, *pair, Row(reads=(0,), bytes=1), Row(reads=(1,), bytes=1, quarters=1)]
    graph = build_graph("two parameters", ops_of(rows))
    machine = machine_for(graph, cluster_of(2))
    roomy = place_heft(graph, machine, [None, None]).plan
    assert roomy.place[:2].tolist() == [0, 0]
    tight = place_heft(graph, machine, [150, 150]).plan
    assert sorted(tight.place[:2].tolist()) == [0, 1]


def test_a_device_waits_for_the_favourite_child() -> None:
    # Device 0 is free at 1 s. Op 4 could start there at 1.375 s, op 3, the child of op 0, at
    # 1.875 s: half of its inputs is there already.
    rows = [
        Row(bytes=64),
        Row(),
        Row(reads=(1,), quarters=2),
        Row(reads=(0, 2)),
        Row(reads=(1,)),
    ]
    graph = build_graph("wait", ops_of(rows))
    machine = machine_for(graph, cluster_of(2))
    nobody = np.full(5, -1)
    plain = etf_timeline(graph.arrays, machine, [None] * 2, nobody)[1]
    assert plain.start.tolist() == [0.0, 0.0, 1.0, 2.25, 1.375]
    children = np.array([3, -1, -1, -1, -1])
    device, waiting = etf_timeline(graph.arrays, machine, [None] * 2, children)
    assert device.tolist() == [0, 1, 1, 0, 1]
    assert waiting.start.tolist() == [0.0, 0.0, 1.0, 1.875, 1.5]


@given(graph=graphs(max_ops=14), k=st.integers(1, 4))
def test_m_topo_fills_to_the_cap(graph: Graph, k: int) -> None:
    machine = machine_for(graph, cluster_of(k))
    arrays = closed_arrays(graph)
    device = filled(arrays, machine)
    size = op_bytes(arrays)
    by_group = np.bincount(arrays.group, weights=size)
    held = np.bincount(device, weights=size, minlength=k)
    assert (held <= by_group.sum() // k + by_group.max()).all()
    groups, first = np.unique(arrays.group[arrays.topological], return_index=True)
    in_turn = device[arrays.topological[np.sort(first)]]
    assert (np.diff(in_turn) >= 0).all()
    assert len(groups) == len(in_turn)


@given(graph=graphs(max_ops=14))
def test_linear_clusters_are_longest_paths(graph: Graph) -> None:
    machine = machine_for(graph, cluster_of(3))
    arrays = closed_arrays(graph)
    of = linear_clusters(arrays, machine).tolist()
    seconds, link = fastest_seconds(machine).tolist(), slowest_link(machine)
    apart = [-1] * len(of)
    successors = op_successors(graph)
    for cluster in range(max(of) + 1):
        taken = {i for i in range(len(of)) if of[i] < cluster}
        bottom = levels(graph, seconds, link, apart, taken)[1]
        longest = max(bottom.values())
        members = {i for i in bottom if of[i] == cluster}
        groups = {arrays.group[i] for i in members}
        assert {i for i in range(len(of)) if arrays.group[i] in groups} == members
        assert any(bottom[i] == pytest.approx(longest) for i in members)
        if len(groups) == len(members):  # without groups a cluster is one path of that length
            path = max(members, key=lambda i: (bottom[i], len(successors[i])))
            assert bottom[path] == pytest.approx(longest)


def test_contiguous_blocks_have_equal_work() -> None:
    graph = random_graph(1, 200, "chain", memory=False)
    machine = machine_for(graph, cluster_of(4))
    plan = place("contiguous", graph, machine, [None] * 4).plan
    work = np.bincount(plan.place, weights=fastest_seconds(machine), minlength=4)
    assert work.max() - work.min() <= 2 * fastest_seconds(machine).max()
    assert (np.diff(plan.place[graph.arrays.topological]) >= 0).all()


def test_a_faster_device_gets_more_and_a_cpu_for_few_ops_little() -> None:
    graph = random_graph(0, 40, "chain", memory=False)
    machine = machine_for(graph, cluster_of(2, speeds=(1.0, 3.0)))
    assert speed_shares(machine).tolist() == pytest.approx([0.25, 0.75])
    times = np.bincount(place("contiguous", graph, machine, [None] * 2).plan.place,
                        weights=machine.seconds[0])  # fmt: skip
    assert times[1] > 2 * times[0]
    assert speed_shares(machine_for(graph, cluster_of(1))).tolist() == [1.0]
    host = [
        dataclasses.replace(op, seconds={"cpu": 1.0} if i % 20 == 9 else op.seconds)
        for i, op in enumerate(graph.ops)
    ]
    graph = build_graph("host", host)
    machine = machine_for(graph, cluster_of(3, types=("accelerator", "accelerator", "cpu")))
    share = speed_shares(machine)
    assert share[2] < 0.1
    assert share[0] == share[1]


@pytest.mark.jit
def test_islands_keep_their_messages() -> None:
    # Two islands of two; a message between them takes 100 times as long.
    graph = random_graph(5, 200, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(4, bandwidth=1024.0, latency=0.01))
    far = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]], dtype=bool)
    machine = machine._replace(
        latency=np.where(far, 1.0, machine.latency),
        bandwidth=np.where(far, 10.24, machine.bandwidth),
    )
    a = closed_arrays(graph)
    for name in ("pardnn", "heft"):
        plan = place(name, graph, machine, [None] * 4).plan
        inside = ~far[plan.message_source, plan.message_target]
        makespan = simulate(graph, machine, plan).makespan
        assert inside.sum() > (~inside).sum(), name
        assert lower_bound_seconds(a, machine) <= makespan < serial_seconds(machine), name


def test_round_robin_deals() -> None:
    graph = random_graph(1, 50, "layered", memory=False)
    plan = place("round-robin", graph, machine_for(graph, cluster_of(3)), [None] * 3).plan
    assert plan.place[graph.arrays.topological].tolist() == [i % 3 for i in range(50)]


def test_single_takes_the_fastest_device_that_holds_it() -> None:
    graph = random_graph(1, 12, "layered")
    machine = machine_for(graph, cluster_of(2, speeds=(1.0, 2.0)))
    assert set(place("single", graph, machine, [None, None]).plan.place) == {1}
    assert set(place("single", graph, machine, [None, 1]).plan.place) == {0}
    with pytest.raises(InfeasibleError, match="no single device"):
        place("single", graph, machine, [1, 1])


def test_single_asks_once_for_devices_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, asked = random_graph(1, 20, "layered"), list[int]()
    monkeypatch.setattr(single, "fit_schedule", lambda _, __, place, ___: asked.append(place[0]))
    with pytest.raises(InfeasibleError, match="no single device"):
        place("single", graph, machine_for(graph, cluster_of(3)), [1, 2, 1])
    assert asked == [0, 1]
    asked.clear()
    with pytest.raises(InfeasibleError, match="no single device"):
        place("single", graph, machine_for(graph, cluster_of(2, speeds=(1.0, 2.0))), [1, 1])
    assert asked == [1, 0]


def test_program_of_m_sct_by_hand() -> None:
    # A fork 0 -> 1, 0 -> 2: one child may be the favourite, at most.
    problem = linear_program(
        np.array([[0, 1], [0, 2]]), np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0])
    )
    assert problem["row_lower"] == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0]
    assert problem["index"][:3] == [3, 2, 0]
    assert problem["value"][:3] == [1.0, -1.0, -4.0]
    assert problem["index"][6:8] == [0, 1]
    assert problem["start"][-1] == len(problem["index"]) == 14


@needs("highspy")
def test_m_sct_favours_the_heavy_child() -> None:
    graph = random_graph(3, 60, "layered", memory=False)
    machine = machine_for(graph, cluster_of(3))
    children = favourite_children(graph.arrays, machine)
    successors = op_successors(graph)
    some = [op for op in range(len(graph.ops)) if children[op] >= 0]
    assert some
    assert all(children[op] in successors[op] for op in some)
    chosen = children[some].tolist()
    assert len(set(chosen)) == len(chosen)
    plan = place("m-sct", graph, machine, [None] * 3).plan
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster_of(3)) == []


@needs("pymetis")
def test_metis_cuts_little() -> None:
    graph = random_graph(3, 120, "out-tree")
    cluster = cluster_of(3)
    machine = machine_for(graph, cluster)
    cut = {}
    for name in ("metis", "round-robin"):
        plan = place(name, graph, machine, [None] * 3).plan
        assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []
        cut[name] = len(plan.message_tensor)
    assert cut["metis"] < cut["round-robin"] / 2


def test_parts_that_talk_get_the_fast_link() -> None:
    graph = random_graph(3, 40, "chain", memory=False)
    machine = machine_for(graph, cluster_of(3))
    latency = np.full((3, 3), 10.0)
    np.fill_diagonal(latency, 0.0)
    latency[0, 2] = latency[2, 0] = 0.1
    part = np.arange(40) % 2  # parts 0 and 1 talk, part 2 is empty
    device = assigned(graph.arrays, machine._replace(latency=latency), part)
    assert set(device.tolist()) == {0, 2}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [BASELINES, pytest.param(["modulo"], marks=pytest.mark.jit)])
def test_the_same_twice(family: str, names: list[str]) -> None:
    graph = random_graph(5, 30, family)
    machine = machine_for(graph, cluster_of(3))
    for name in names:
        one, two = (place(name, graph, machine, [None] * 3).plan for _ in range(2))
        assert all(np.array_equal(x, y) for x, y in zip(one, two, strict=True))


def test_answers_of_solvers_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(3, 20, "layered", memory=False)
    machine = machine_for(graph, cluster_of(2))
    variables = len(op_edges(graph.arrays)) + 21
    for name, wrong in [
        ("m-sct", {"status": "Infeasible"}),
        ("m-sct", {"x": [0.0]}),
        ("m-sct", {"x": [0.0] * 1000}),
        ("m-sct", {"x": None}),
        ("m-sct", {"x": [float("nan")] * variables}),
        ("m-sct", {"x": ["0"] * variables}),
        ("m-sct", {"x": [[]] * variables}),
        ("metis", {}),
        ("metis", {"part": [0]}),
        ("metis", {"part": [7] * 20}),
        ("metis", {"part": [-1] * 20}),
        ("metis", {"part": [0.5] * 20}),
        ("metis", {"part": [True] * 20}),
        ("exact", {"place": [0] * 20, "start": [0] * 20}),
        ("exact", {"place": [0] * 20, "start": [float("nan")] * 20, "bound": 0}),
        ("exact", {"place": [2] * 20, "start": [0] * 20, "bound": 0}),
        ("exact", {"place": {}, "start": [0] * 20, "bound": 0}),
        ("exact", {"place": [0] * 20, "start": [0] * 20, "bound": "0"}),
    ]:
        module = sys.modules[ALGORITHMS[name].__module__]
        monkeypatch.setattr(module, "ask", lambda *_, answer=wrong, **__: answer)
        with pytest.raises(PardnnError, match="wrong answer"):
            place(name, graph, machine, [None] * 2)


def test_solvers_that_are_missing_crash_or_hang(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "highspy.py").write_text("raise ImportError('none here')\n")
    with pytest.raises(UsageError, match=r"highspy.*\n.*pip install 'pardnn\[exact\]'"):
        solvers.ask("lp", {}, seconds=60, extra="exact")
    (tmp_path / "highspy.py").write_text("import os; os._exit(139)\n")
    with pytest.raises(PardnnError, match="exit status 139"):
        solvers.ask("lp", {}, seconds=60, extra="exact")
    (tmp_path / "highspy.py").write_text("import time; time.sleep(60)\n")
    with pytest.raises(PardnnError, match="did not answer within 2 s"):
        solvers.ask("lp", {}, seconds=2, extra="exact")


def test_a_graph_too_large_for_the_solver_is_refused() -> None:
    graph = random_graph(1, 5_001, "chain", memory=False)
    machine = machine_for(graph, cluster_of(2))
    for name, advice in [("m-sct", "m-etf"), ("exact", "auto")]:
        with pytest.raises(UsageError, match=rf"5001.*\n.*{advice}"):
            place(name, graph, machine, [None] * 2)
