"""Bounds never pass a proven optimum, and see what max(critical path, work / K) does not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.baselines import exact
from pardnn.place.baselines.exact import optimum
from pardnn.place.colocation import closed_arrays
from pardnn.sim.bounds import (
    MAX_SPLITS,
    critical_path_seconds,
    cut_seconds,
    degree_of_parallelism,
    heads_and_tails,
    interval_seconds,
    lower_bound_seconds,
    work_seconds,
    work_shares,
)
from pardnn.sim.machine import fastest_seconds
from tests.place.machines import cluster_of, machine_for
from tests.reference import bounds as naive
from tests.reference.pardnn import least_makespan
from tests.strategies import FAMILIES, Row, examples, graphs, ops_of, random_graph

TYPES = ("accelerator", "cpu")


@examples(40)
@given(
    graph=graphs(max_ops=6, types=TYPES),
    speeds=st.sampled_from([(1.0,), (1.0, 2.0)]),
    types=st.sampled_from([TYPES[:1], TYPES]),
    bandwidth=st.sampled_from([16.0, 64.0]),
    closed=st.booleans(),
)
def test_below_the_optimum(
    graph: Graph,
    speeds: tuple[float, ...],
    types: tuple[str, ...],
    bandwidth: float,
    closed: bool,
) -> None:
    machine = machine_for(graph, cluster_of(2, speeds=speeds, types=types, bandwidth=bandwidth))
    arrays = closed_arrays(graph) if closed else graph.arrays
    best = least_makespan(graph, machine, arrays.group.tolist())
    assert lower_bound_seconds(arrays, machine) <= best


@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_below_the_optimum_of_more_inputs_than_are_tried(more: int) -> None:
    """Messages take for ever, so one device makes all inputs of one second, then the op."""
    count = MAX_SPLITS + more
    rows = [Row("input", quarters=4, bytes=1 << 20) for _ in range(count)]
    graph = build_graph("star", ops_of([*rows, Row(reads=tuple(range(count)), quarters=4)]))
    machine = machine_for(graph, cluster_of(2, bandwidth=1.0))
    head = heads_and_tails(graph.arrays, machine)[0]
    assert head[-1] == min(count, MAX_SPLITS)
    assert lower_bound_seconds(graph.arrays, machine) <= count + 1


@pytest.mark.parametrize("seed", range(24))
def test_below_what_the_solver_proves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cp = pytest.importorskip("pardnn.solvers.cp", exc_type=ImportError)
    monkeypatch.setattr(exact, "ask", lambda _, problem, **__: cp.solve(problem))
    graph = random_graph(seed, 10, FAMILIES[seed % len(FAMILIES)])
    k = 2 + seed % 2
    machine = machine_for(graph, cluster_of(k, bandwidth=[16.0, 64.0, 256.0][seed % 3]))
    arrays = closed_arrays(graph)
    nothing = np.empty((0, 2), dtype=np.int64)
    residual = sum(t.bytes for op in graph.ops if op.memory == "residual" for t in op.outputs)
    for limit in (None, residual * 2 // 3 + 1):
        found = optimum(arrays, machine, [limit] * k, nothing, seconds=20.0)
        if found is None:
            continue
        assert found.is_proven
        bound = lower_bound_seconds(arrays, machine, [limit] * k)
        assert bound <= found.lower_bound_s + 1e-9
        assert bound >= max(critical_path_seconds(arrays, machine), work_seconds(machine)) - 1e-9


@given(graph=graphs(max_ops=12, memory=False, shuffled=True))
def test_intervals_by_hand(graph: Graph) -> None:
    machine = machine_for(graph, cluster_of(3))
    a = graph.arrays
    share = work_shares(machine)[0]
    head, tail = heads_and_tails(a, machine)
    seconds = fastest_seconds(machine)
    assert (head >= 0).all()
    # By hand: all pairs of a head and a tail, for the quantiles are a part of them.
    sums = (
        r + q + share[(head >= r) & (tail >= q)].sum()
        for r in [0.0, *head.tolist()]
        for q in [0.0, *tail.tolist()]
        if share[(head >= r) & (tail >= q)].sum() > 0
    )
    assert interval_seconds(head, tail, share) == pytest.approx(max(sums, default=0.0))
    assert cut_seconds(a, machine, share) <= seconds.sum() + 1e-9  # all on one device


def test_an_interval_with_less_than_a_second_of_work_counts() -> None:
    """Two ops of a quarter of a second on two devices, one after the other: 1/4 + 1/8.

    After the first and before the second, 1/2 in sum, there is nothing to do.
    """
    head, tail, share = np.array([0.0, 0.25]), np.array([0.25, 0.0]), np.array([0.125, 0.125])
    assert interval_seconds(head, tail, share) == 0.375


@given(
    graph=graphs(max_ops=10, shuffled=True),
    latency=st.sampled_from([0.0, 0.25]),
    bandwidth=st.sampled_from([2.0, 8.0, 64.0]),
)
def test_heads_and_tails_are_the_least_over_all_subsets_of_inputs(
    graph: Graph, latency: float, bandwidth: float
) -> None:
    cluster = cluster_of(2, latency=latency, bandwidth=bandwidth)
    machine = machine_for(graph, cluster)
    arrays = graph.arrays._replace(group=np.zeros_like(graph.arrays.group))
    arrays.group.setflags(write=False)
    seconds, link = fastest_seconds(machine).tolist(), (latency, 1 / bandwidth)
    head, tail = heads_and_tails(arrays, machine)
    assert head.tolist() == naive.heads(graph, seconds, link)
    assert tail.tolist() == naive.heads(graph, seconds, link, backwards=True)


@given(graph=graphs(max_ops=10, shuffled=True), speeds=st.sampled_from([(1.0,), (1.0, 2.0)]))
def test_parts_are_those_between_ops_ordered_with_all_others(
    graph: Graph, speeds: tuple[float, ...]
) -> None:
    machine = machine_for(graph, cluster_of(2, speeds=speeds))
    seconds = fastest_seconds(machine)
    for share in work_shares(machine):
        expected = naive.cut_seconds(graph, seconds.tolist(), share.tolist())
        assert cut_seconds(graph.arrays, machine, share) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_chains_of_forks(seed: int) -> None:
    """Forks of random widths and depths, one after the other, with joins between them."""
    rng, rows = np.random.default_rng(seed), [Row(quarters=3)]
    for _ in range(4):
        fork, ends = len(rows) - 1, []
        for _ in range(int(rng.integers(1, 4))):
            at = fork
            for _ in range(int(rng.integers(1, 3))):
                rows.append(Row(reads=(at,), quarters=int(rng.integers(1, 9))))
                at = len(rows) - 1
            ends.append(at)
        rows.append(Row(reads=tuple(ends), quarters=int(rng.integers(1, 9))))
    graph = build_graph("forks", ops_of(rows))
    machine = machine_for(graph, cluster_of(3))
    share = work_shares(machine)[0]
    expected = naive.cut_seconds(graph, fastest_seconds(machine).tolist(), share.tolist())
    assert cut_seconds(graph.arrays, machine, share) == pytest.approx(expected)


def test_a_join_pays_for_work_or_for_messages() -> None:
    # Two ops of 1 s and a third that reads both: 2 s of work before it, or a message of 0.75 s.
    graph = build_graph("join", ops_of([Row(bytes=32), Row(bytes=32), Row(reads=(0, 1))]))
    machine = machine_for(graph, cluster_of(2))
    head, _ = heads_and_tails(graph.arrays, machine)
    assert head.tolist() == [0.0, 0.0, 1.75]
    assert lower_bound_seconds(graph.arrays, machine) == pytest.approx(2.75)
    assert least_makespan(graph, machine, range(3)) == 2.75


def test_parts_between_joins_add_up() -> None:
    # Twice three ops of 1 s between joins of 1 s, on two devices without latency.
    rows = [Row(bytes=0)]
    for _ in range(2):
        fork = len(rows) - 1
        rows += [Row(reads=(fork,), bytes=0)] * 3
        rows.append(Row(reads=(fork + 1, fork + 2, fork + 3), bytes=0))
    graph = build_graph("twice", ops_of(rows))
    machine = machine_for(graph, cluster_of(2, latency=0.0))
    assert max(critical_path_seconds(graph.arrays, machine), work_seconds(machine)) == 5.0
    assert lower_bound_seconds(graph.arrays, machine) == pytest.approx(3 + 1.5 + 1.5)


def test_a_dangling_path_is_no_part() -> None:
    # 10 s beside the second fork: the parts must not count it twice.
    rows = [Row(bytes=0), Row(reads=(0,), quarters=40, bytes=0), Row(reads=(0,), bytes=0)]
    rows += [Row(reads=(2,), quarters=8, bytes=0)] * 3
    graph = build_graph("dangling", ops_of(rows))
    machine = machine_for(graph, cluster_of(2, latency=0.0))
    assert lower_bound_seconds(graph.arrays, machine) <= least_makespan(graph, machine, range(6))


def test_residuals_that_do_not_share_a_device_pay_for_the_message() -> None:
    rows = [Row("parameter", bytes=64), Row("parameter", bytes=64), Row(reads=(0,), bytes=32)]
    graph = build_graph("apart", ops_of([*rows, Row(reads=(1, 2))]))
    machine = machine_for(graph, cluster_of(2))
    group = np.array([0, 1, 0, 1])
    group.setflags(write=False)  # as all arrays of graphs: else kernels are compiled once more
    arrays = graph.arrays._replace(group=group)
    bounds = [lower_bound_seconds(arrays, machine, [limit] * 2) for limit in (128, 127)]
    assert bounds[1] == pytest.approx(bounds[0] + 0.75)


def test_large_graphs_leave_messages_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(3, 8, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(2))
    full = lower_bound_seconds(graph.arrays, machine)
    monkeypatch.setattr("pardnn.sim.bounds.MANY_OPS", 1)
    simple = max(critical_path_seconds(graph.arrays, machine), work_seconds(machine))
    assert simple <= lower_bound_seconds(graph.arrays, machine) <= full


def test_bound_is_below_the_optimum() -> None:
    for seed in range(10):
        graph = random_graph(seed, 6, FAMILIES[seed % 5], memory=False)
        machine = machine_for(graph, cluster_of(2, speeds=(1.0, 2.0)))
        best = least_makespan(graph, machine, range(len(graph.ops)))
        assert lower_bound_seconds(graph.arrays, machine) <= best * (1 + 1e-12)


def test_degree_of_parallelism_by_hand() -> None:
    """All work over that of the longest path (thesis, 6.2.2): 2 + 3 + 4 + 1 over 2 + 4 + 1."""
    rows: list[tuple[str, str, float]] = [
        ("a", "", 2.0), ("b", "a", 3.0), ("c", "a", 4.0), ("d", "bc", 1.0),
    ]  # fmt: skip
    graph = build_graph("fork", [
        Op(name=name, kind="op", inputs=tuple(inputs), seconds={"accelerator": seconds},
           outputs=(Tensor(name=name, bytes=8),))
        for name, inputs, seconds in rows
    ])  # fmt: skip
    found = degree_of_parallelism(graph.arrays, machine_for(graph, cluster_of(2)))
    assert found == pytest.approx(10 / 7)


def test_seconds_whose_inverse_is_not_finite_have_bounds() -> None:
    graph = build_graph("little", [Op(name="a", kind="op", seconds={"accelerator": 1e-310})])
    machine = machine_for(graph, cluster_of(2))
    with np.errstate(over="raise"):
        shares = work_shares(machine._replace(seconds=np.full_like(machine.seconds, 1e-310)))
    assert np.isfinite(shares).all()
