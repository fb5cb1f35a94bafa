"""Swaps: by the sum of what balance and communication gain, as a naive twin computes it."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.pardnn.cluster_graph import ClusterGraph, cluster_graph_of
from pardnn.place.pardnn.mapping import can_run, map_clusters, placement
from pardnn.place.pardnn.problem import Clusters, Problem, problem_of
from pardnn.place.pardnn.slicing import slice_graph
from pardnn.place.pardnn.step1_makespan import emulated
from pardnn.place.pardnn.swaps import SWAP_CANDIDATES, swap_clusters
from tests.place.machines import cluster_of, machine_for, problem_for
from tests.reference.pardnn import swapped
from tests.strategies import FAMILIES, graphs, random_graph


def two_chains() -> tuple[Problem, Clusters]:
    """Two equal primaries of 11 s, and two equal secondaries that read and feed one each."""
    ops: list[Op] = []
    for p in "ab":
        ops += [
            _op(f"{p}0", 1, 9),
            _op(f"{p}1", 9, 0, f"{p}0"),
            _op(f"{p}2", 1, 0, f"{p}1", f"{p}3"),
        ]
        ops.insert(-1, _op(f"{p}3", 1, 9, f"{p}0"))
    graph = build_graph("two chains", ops)
    machine = machine_for(graph, cluster_of(2, bandwidth=1.0, latency=0.0))
    of = [{"a": 0, "b": 1}[op.name[0]] + 2 * (op.name[1] == "3") for op in graph.ops]
    number = {op.name: i for i, op in enumerate(graph.ops)}
    head = [number[name] for name in ("a0", "b0", "a3", "b3")]
    tail = [number[name] for name in ("a2", "b2", "a3", "b3")]
    return problem_of(graph.arrays, machine), Clusters(*map(np.array, (of, head, tail)))


def _op(name: str, seconds: float, size: int, *reads: str) -> Op:
    return Op(
        name=name,
        kind="aten.mm.default" if reads else "input",
        inputs=tuple(f"{read}.out" for read in reads),
        outputs=(Tensor(name=f"{name}.out", bytes=size),),
        seconds={"accelerator": float(seconds)},
    )


def test_equal_secondaries_on_the_wrong_devices_change_places() -> None:
    """Balance gains nothing, communication 36 s: 21 s a step become 12."""
    problem, clusters = two_chains()
    wrong = np.array([0, 1, 1, 0])
    graph = cluster_graph_of(problem, clusters)
    assert emulated(problem, placement(problem, clusters, wrong)).makespan == 21.0
    right = swap_clusters(problem, clusters, graph, wrong)
    assert right.tolist() == [0, 1, 0, 1]
    assert emulated(problem, placement(problem, clusters, right)).makespan == 12.0
    assert swap_clusters(problem, clusters, graph, right).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("turn", [1, 2, 5, 8, 9])
def test_the_eight_nearest_partners_are_tried(turn: int) -> None:
    """`c` of 8 s beside 101 s of others; of its nine partners one is shorter, by 4 s.

    They begin after `c`, so none of them takes `c` for a partner of its own.
    """
    partners = [f"o{i}" for i in range(1, 10)]
    ops = [
        _op("a0", 1, 0), _op("b0", 1, 0), _op("a1", 1, 0, "a0"), _op("a2", 100, 0, "a1"),
        _op("c", 8, 0, "a0"),
        *(_op(name, 4 if name == f"o{turn}" else 8, 0, "a1") for name in partners),
        _op("a3", 1, 0, "a2", "c", *partners),
    ]  # fmt: skip
    graph, numbers = build_graph("nine", ops), list(range(2, 12))
    machine = machine_for(graph, cluster_of(2, bandwidth=1.0, latency=0.0))
    problem, single = problem_of(graph.arrays, machine), list(range(4, 14))
    clusters = Clusters(
        np.array([0, 1, 0, 0, *numbers, 0]), np.array([0, 1, *single]), np.array([14, 1, *single])
    )
    device = np.array([0, 1, 0, *[1] * 9])
    swapped_ones = device.copy()
    if turn <= SWAP_CANDIDATES:
        swapped_ones[[2, 2 + turn]] = 1, 0
    found = swap_clusters(problem, clusters, cluster_graph_of(problem, clusters), device)
    assert found.tolist() == swapped_ones.tolist()


def test_what_gains_nothing_stays() -> None:
    """`c` and `o` take no time and read nothing that has bytes; nothing else runs beside `c`."""
    ops = [_op("a", 0, 0), _op("b", 1, 0)]
    ops += [_op(name, seconds, 0, "b") for name, seconds in (("d", 1), ("c", 0), ("o", 0))]
    graph = build_graph("nothing", ops)
    machine = machine_for(graph, cluster_of(2, bandwidth=1.0, latency=0.0))
    problem = problem_of(graph.arrays, machine)
    clusters = Clusters(*(np.array(x) for x in ([0, 1, 1, 2, 3], [0, 1, 3, 4], [0, 2, 3, 4])))
    device, g = np.array([0, 1, 0, 1]), cluster_graph_of(problem, clusters)
    assert swap_clusters(problem, clusters, g, device).tolist() == [0, 1, 0, 1]


def test_of_partners_that_are_as_good_the_nearest_is_taken() -> None:
    """`c` reads of device 1, `o` and `r` of device 0: either change spares 18 s of messages."""
    ops = [
        _op("a", 1, 0), _op("b", 1, 9), _op("p", 1, 9, "a"), _op("q", 1, 9, "a"),
        _op("c", 1, 0, "b"), _op("o", 1, 0, "p"), _op("r", 1, 0, "q"),
        _op("z", 1, 0, "c", "o", "r"),
    ]  # fmt: skip
    graph = build_graph("alike", ops)
    machine = machine_for(graph, cluster_of(2, bandwidth=1.0, latency=0.0))
    problem = problem_of(graph.arrays, machine)
    clusters = Clusters(
        np.array([0, 1, 0, 0, 2, 3, 4, 0]), np.array([0, 1, 4, 5, 6]), np.array([7, 1, 4, 5, 6])
    )
    device, g = np.array([0, 1, 0, 1, 1]), cluster_graph_of(problem, clusters)
    assert swap_clusters(problem, clusters, g, device).tolist() == [0, 1, 1, 0, 1]


def _levels(problem: Problem, clusters: Clusters, g: ClusterGraph) -> list[int]:
    """Return the level of each op; `ClusterGraph` has them cluster by cluster."""
    by_cluster = np.argsort(clusters.of, kind="stable")
    levels = np.empty(problem.arrays.num_ops, dtype=np.int64)
    levels[by_cluster] = g.level
    return levels.tolist()


def test_swaps_of_many_secondaries_are_those_of_the_definition() -> None:
    """Begun one after the other: those that begin earlier are passed by."""
    moved = 0
    for seed in range(24):
        graph = random_graph(seed, 26, FAMILIES[seed % len(FAMILIES)])
        problem = problem_for(graph, 2 + seed % 2)
        moved += assert_swaps(graph, problem, seed)
    assert moved > 4


@pytest.mark.parametrize("seed", range(16))
def test_swaps_between_unlike_devices_are_those_of_the_definition(seed: int) -> None:
    """Every pair of devices has a link of its own; some clusters cannot run everywhere.

    Clusters are drawn, so many begin within one span, some at its end, and some take no time.
    """
    rng, k, types = np.random.default_rng(seed), 2 + seed % 3, ("accelerator", "cpu")
    graph = random_graph(seed, 40, FAMILIES[seed % 5], memory=False, types=types)
    machine = machine_for(graph, cluster_of(k, speeds=(1.0, 2.0), types=types[: 1 + seed % 2]))
    machine = machine._replace(
        latency=np.where(np.eye(k), 0.0, rng.integers(0, 4, (k, k)) / 4),
        bandwidth=np.where(np.eye(k), np.inf, 2.0 ** rng.integers(3, 9, (k, k))),
    )
    problem, n = problem_of(graph.arrays, machine), graph.arrays.num_ops
    cuts = np.sort(rng.choice(np.arange(1, n), n // 2, replace=False))
    ends = [0, *cuts.tolist(), n]
    rows = [graph.arrays.topological[a:b] for a, b in itertools.pairwise(ends)]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    of = np.empty(n, dtype=np.int64)
    for c, row in enumerate(rows):
        of[row] = c
    clusters = Clusters(of, np.array([r[0] for r in rows]), np.array([r[-1] for r in rows]))
    device = np.array([rng.choice(np.flatnonzero(can)) for can in can_run(problem, clusters)])
    compare(graph, problem, clusters, device)


def assert_swaps(graph: Graph, problem: Problem, seed: int) -> int:
    """Compare with the naive twin, from devices drawn by a seed; return how many have moved."""
    k = problem.machine.num_devices
    clusters = slice_graph(problem, k)
    device, _ = map_clusters(problem, clusters)
    if seed > 0:
        device[k:] = np.random.default_rng(seed).integers(0, k, len(device) - k)
    return compare(graph, problem, clusters, device)


def compare(graph: Graph, problem: Problem, clusters: Clusters, device: np.ndarray) -> int:
    """Compare with the naive twin; return how many clusters have moved."""
    k, g = problem.machine.num_devices, cluster_graph_of(problem, clusters)
    spans = list(zip(g.begin.tolist(), g.end.tolist(), strict=True))
    levels = _levels(problem, clusters, g)
    expected = swapped(
        graph, problem.machine, clusters.of.tolist(), k, spans, levels, device.tolist()
    )
    found = swap_clusters(problem, clusters, g, device).tolist()
    assert found == expected
    return sum(a != b for a, b in zip(found, device.tolist(), strict=True))


@given(
    graph=graphs(min_ops=4, max_ops=14, memory=False),
    num_devices=st.integers(2, 3),
    seed=st.integers(0, 5),
)
def test_swaps_are_those_of_the_definition(graph: Graph, num_devices: int, seed: int) -> None:
    assert_swaps(graph, problem_for(graph, num_devices), seed)
