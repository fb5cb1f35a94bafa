"""Clusters as nodes of a graph against sums over all ops."""

from itertools import pairwise

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.pardnn import cluster_graph
from pardnn.place.pardnn.cluster_graph import cluster_graph_of
from pardnn.place.pardnn.problem import Clusters, Problem, problem_of
from pardnn.sim.levels import slowest_link
from tests.place.machines import cluster_of, machine_for, problem_for, uneven_machine
from tests.reference.mapping import Mapping, Paths
from tests.strategies import FAMILIES, random_graph

CLUSTERS = 5


def test_nodes_and_edges_are_those_of_the_definitions() -> None:
    """Clusters of any ops: several of one read the same tensor, and spans begin at any level."""
    read_twice = 0
    for seed in range(30):
        graph = random_graph(seed, 14, FAMILIES[seed % 6])
        rng, machine = np.random.default_rng(seed), uneven_machine(graph, 2, seed)
        machine.seconds[1, rng.random(len(graph.ops)) < 0.2] = np.inf  # what a class cannot run
        problem = problem_of(
            problem_for(graph).arrays._replace(group=np.arange(len(graph.ops))), machine
        )
        of = rng.integers(0, CLUSTERS, problem.arrays.num_ops)
        ends = [
            [int(rng.choice(members)) if len(members) else -1 for _ in "ht"]
            for members in (np.flatnonzero(of == c) for c in range(CLUSTERS))
        ]
        head, tail = np.array(ends).T
        twin = Mapping(graph, machine, slowest_link(machine),
                       Paths(of.tolist(), head.tolist(), tail.tolist()))  # fmt: skip
        found = cluster_graph_of(problem, Clusters(of, head, tail))
        number = {name: t for t, name in enumerate(twin.producer)}
        tops = set(twin.top.values())
        for c in range(CLUSTERS):
            start, end = twin.spans[c]
            assert found.begin[c] == sum(top < start for top in tops)
            assert found.end[c] == sum(top < end for top in tops)
            assert found.weight[c] == twin.work(c)
            assert found.potential[c] == twin.potential(c)
            here = [i for i in np.flatnonzero(of == c).tolist() if start <= twin.top[i] < end]
            able = np.where(np.isfinite(machine.seconds), machine.seconds, 0.0)
            assert found.inside[:, c].tolist() == able[:, here].sum(axis=1).tolist()
            into = [
                [home, number[name], tensor.bytes]
                for name, (home, tensor) in twin.producer.items()
                if c in twin.readers[name]
            ]
            out = [[reader, number[name], tensor.bytes]
                   for name, (home, tensor) in twin.producer.items() if home == c
                   for reader in twin.readers[name]]  # fmt: skip
            rows = found.into.edge[found.into.ptr[c] : found.into.ptr[c + 1]].tolist()
            assert sorted(rows) == sorted(into)
            rows = found.out.edge[found.out.ptr[c] : found.out.ptr[c + 1]].tolist()
            assert sorted(rows) == sorted(out)
            assert all(one[1] <= other[1] for one, other in pairwise(rows))
        reads = [(name, of[i]) for i, op in enumerate(graph.ops) for name in op.inputs]
        read_twice += len(reads) - len(set(reads))
    assert read_twice > 10


def _chain(num_ops: int, size: int = 0) -> tuple[Problem, Clusters]:
    """Ops of one second, each in a cluster of its own; a byte takes another second."""
    ops = [
        Op(name=f"o{i}", kind="op" if i else "input", inputs=(f"o{i - 1}",) if i else (),
           outputs=(Tensor(name=f"o{i}", bytes=size),), seconds={"accelerator": 1.0})
        for i in range(num_ops)
    ]  # fmt: skip
    graph = build_graph("chain", ops)
    machine = machine_for(graph, cluster_of(2, bandwidth=1.0, latency=0.0))
    ends = np.arange(num_ops)
    return problem_of(graph.arrays, machine), Clusters(ends, ends, ends)


def test_the_only_tensor_between_clusters_is_there() -> None:
    found = cluster_graph_of(*_chain(2, size=5))
    assert found.into.edge.tolist() == [[0, 0, 5]]
    assert found.out.edge.tolist() == [[1, 0, 5]]


@pytest.mark.parametrize("most", [6, 7])
def test_neighbouring_levels_are_one_where_there_are_many(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven levels, 0 to 6 s; with three bins, of levels 0, 1; 2, 3; 4, 5, 6.

    The op at 3 s may run from 3 to 4 s, or in the bin of 2 s to 4 s, beside one of another second.
    """
    monkeypatch.setattr(cluster_graph, "MAX_LEVELS", most)
    monkeypatch.setattr(cluster_graph, "LEVEL_BINS", 3)
    found = cluster_graph_of(*_chain(7))
    if most == 7:
        assert found.levels.tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert (found.begin[3], found.end[3], found.potential[3]) == (3, 4, 0.0)
        return
    assert found.levels.tolist() == [0, 2, 4]
    assert found.level.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert found.begin.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert (found.end[3], found.potential[3]) == (2, 1.0)
    assert found.inside[0, 3] == 1.0
