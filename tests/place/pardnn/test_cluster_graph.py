"""Clusters as nodes of a graph against sums over all ops."""

from itertools import pairwise

import numpy as np

from pardnn.place.pardnn.cluster_graph import cluster_graph_of
from pardnn.place.pardnn.problem import Clusters, problem_of
from pardnn.sim.levels import slowest_link
from tests.place.machines import problem_for, uneven_machine
from tests.reference.mapping import Mapping, Paths
from tests.strategies import FAMILIES, random_graph

CLUSTERS = 5


def test_nodes_and_edges_are_those_of_the_definitions() -> None:
    """Clusters of any ops: several of one read the same tensor, and spans begin at any level."""
    read_twice = 0
    for seed in range(30):
        graph = random_graph(seed, 14, FAMILIES[seed % 6])
        rng, machine = np.random.default_rng(seed), uneven_machine(graph, 2, seed)
        problem = problem_of(problem_for(graph).arrays, machine)
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
            assert found.inside[:, c].tolist() == machine.seconds[:, here].sum(axis=1).tolist()
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
