"""`acyclic`: data goes one way between devices, from step to step as well."""

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.csr import op_edges
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.baselines.acyclic import blocks, components, place_acyclic
from pardnn.place.colocation import closed_arrays
from pardnn.sim.machine import machine_of
from pardnn.sim.period import period
from tests.place.machines import cluster_of, machine_for
from tests.strategies import graphs


@given(
    pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20),
    count=st.integers(8, 9),
)
def test_components_are_those_of_networkx_in_topological_order(
    pairs: list[tuple[int, int]], count: int
) -> None:
    found = components(np.array(pairs, dtype=np.int64).reshape(-1, 2), count)
    graph = nx.DiGraph(pairs)
    graph.add_nodes_from(range(count))
    expected = {frozenset(each) for each in nx.strongly_connected_components(graph)}
    groups = {frozenset(np.flatnonzero(found == c).tolist()) for c in range(found.max() + 1)}
    assert groups == expected
    assert all(found[before] <= found[after] for before, after in pairs)


@given(
    work=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    share=st.sampled_from([[1.0], [0.5, 0.5], [0.25, 0.75], [0.5, 0.25, 0.25]]),
)
def test_the_slowest_block_is_as_fast_as_can_be(work: list[int], share: list[float]) -> None:
    found = blocks(np.array(work, dtype=np.float64), np.array(share))
    assert (np.diff(found) >= 0).all()

    def slowest(ends: tuple[int, ...]) -> float:
        edges = itertools.pairwise((0, *ends, len(work)))
        return max(sum(work[a:b]) / part for (a, b), part in zip(edges, share, strict=True))

    cuts = itertools.combinations_with_replacement(range(len(work) + 1), len(share) - 1)
    ends = tuple(
        int(np.searchsorted(found, device, side="right")) for device in range(len(share) - 1)
    )
    assert slowest(ends) == pytest.approx(min(map(slowest, cuts)))


@given(graph=graphs(max_ops=12, memory=False), k=st.integers(1, 4))
def test_nothing_comes_back(graph: Graph, k: int) -> None:
    place = place_acyclic(graph, machine_for(graph, cluster_of(k)), [None] * k).plan.place
    arrays = closed_arrays(graph)
    pairs = op_edges(arrays)
    assert (place[pairs[:, 0]] <= place[pairs[:, 1]]).all()
    assert all(
        len({*place[arrays.group == each].tolist()}) == 1 for each in {*arrays.group.tolist()}
    )


def test_frozen_layers_run_ahead_of_trained_ones() -> None:
    """Four layers of 1 s, and two of 1 s with their gradients: the weights wait for these."""

    def op(name: str, *reads: str, group: str | None = None) -> Op:
        return Op(
            name=name, kind="op", inputs=reads, outputs=(Tensor(name=name, bytes=8),),
            seconds={"accelerator": 1.0}, group=group,
        )  # fmt: skip

    ops = [op("x"), *(op(f"f{i}", f"f{i - 1}" if i else "x") for i in range(3))]
    ops += [op("w", group="w"), op("y", "f2", "w"), op("dy", "y"), op("u", "dy", group="w")]
    graph, cluster = build_graph("head", ops), Cluster.uniform(2, bandwidth=1e9, latency=0.0)
    machine = machine_of(graph_costs(graph), cluster)
    plan = place_acyclic(graph, machine, [None] * 2).plan
    on = {op.name: int(plan.place[i]) for i, op in enumerate(graph.ops)}
    assert [on[name] for name in ("x", "f0", "f1", "f2")] == [0] * 4
    assert [on[name] for name in ("w", "y", "dy", "u")] == [1] * 4
    assert period(graph.arrays, machine, plan).seconds == pytest.approx(4.0, rel=1e-6)
