"""Search: cases worked by hand, exhaustive search, and what a valid sharding is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster, Device, Link, Rate
from pardnn.errors import UsageError
from pardnn.graph.ir import writes
from pardnn.plan.mesh import make_mesh, owned_boxes
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.per_device import local_ops
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING
from pardnn.shard.search.communication_bytes import is_call, sharding_bytes, total_bytes
from pardnn.shard.search.cost_tables import CostTables
from pardnn.shard.search.objective_bytes import BytesObjective
from pardnn.shard.search.problem import make_problem
from pardnn.shard.search.recursion import best_state, expanded
from pardnn.shard.search.tofu import find_sharding, search
from testbed.hand_graphs import Steps, chain, conv1d, matmul, mlp
from testbed.naive_bytes import least_bytes, naive_bytes
from tests.strategies import examples

#: Under the hook that checks shapes each of these takes seconds.
pytestmark = pytest.mark.jit

MESHES = {2: make_mesh((2,)), 4: make_mesh((2, 2)), 8: make_mesh((2, 2, 2))}
#: The classes of the step when a tensor and its gradient have one layout.
MLP_CLASSES = {"a": "h", "da": "h", "dh": "h", "a.t": "h'", "x.t": "x'", "w2.t": "w2'", "dy": "y"}
MLP_CLASSES |= {"target": "y", "dw1": "w1", "dw2": "w2", "w1.new": "w1", "w2.new": "w2"}


@pytest.mark.parametrize(
    ("graph", "devices", "elements"),
    [
        (matmul(64, 128, 256), 2, 8_192),
        (matmul(64, 128, 256), 4, 24_576),
        (matmul(64, 128, 256), 8, 40_960),
        (matmul(128, 128, 128), 2, 16_384),
        (matmul(128, 128, 128), 4, 32_768),
        (matmul(128, 128, 128), 8, 57_344),
        (mlp(32, 256, 512, 128), 2, 28_672),
        (mlp(32, 256, 512, 128), 4, 86_016),
        (mlp(4096, 128, 128, 128), 2, 81_920),
        (mlp(4096, 128, 128, 128), 4, 245_760),
        (mlp(256, 256, 1024, 64), 2, 180_224),
        (mlp(256, 256, 1024, 64), 4, 540_672),
        (mlp(64, 128, 512, 512), 4, 245_760),
        (conv1d(8, 16, 32, 64, 3), 2, 1_536),
        (chain(4, 4, 12, 20), 4, 176),
        (chain(8, 12, 4, 4), 4, 128),
        (chain(16, 16, 128, 256), 8, 12_032),
    ],
)
def test_cases_worked_by_hand(graph, devices, elements):
    found = find_sharding(graph, MESHES[devices])
    assert found.cost == 4 * elements
    assert found.is_exact
    assert total_bytes(graph, found.sharding) == 4 * elements


@pytest.mark.parametrize("level", [TRAINING, REPEATED])
def test_coarsening_a_training_step_loses_nothing(level):
    for sizes, elements in [((32, 256, 512, 128), 86_016), ((64, 128, 512, 512), 245_760)]:
        graph = mlp(*sizes)
        tables = CostTables(make_problem(graph, level), BytesObjective(), (2, 2))
        assert best_state(tables).cost == 4 * elements


def test_coarsening_finds_gradients_state_and_chains():
    classes = make_problem(mlp(8, 4, 6, 10), TRAINING).classes
    for name, root in MLP_CLASSES.items():
        assert classes.root[name] == classes.root[root.removesuffix("'")], name
    assert classes.root["x"] != classes.root["h"] != classes.root["y"]


def test_column_then_row():
    found = search(mlp(32, 256, 512, 128), make_mesh((2,)))
    assert found.layouts["w1"] == (1,)
    assert found.layouts["w2"] == (0,)
    assert found.layouts["h"] == found.layouts["a"] == (1,)


SMALL = st.sampled_from([4, 8, 16])
ANY = st.integers(4, 9)


@examples(12)
@given(st.lists(SMALL, min_size=3, max_size=4))
def test_chains_of_powers_of_two_equal_exhaustive_search(sizes):
    graph = chain(*sizes)
    assert find_sharding(graph, MESHES[4]).cost == least_bytes(graph, MESHES[4])


@examples(12)
@given(st.lists(ANY, min_size=3, max_size=4))
def test_one_step_equals_exhaustive_search(sizes):
    graph = chain(*sizes)
    assert find_sharding(graph, MESHES[2]).cost == least_bytes(graph, MESHES[2])


@pytest.mark.parametrize("sizes", [(4, 8, 4, 8), (8, 4, 4, 4), (4, 4, 8, 4)])
def test_training_steps_equal_exhaustive_search(sizes):
    graph = mlp(*sizes)
    best = least_bytes(graph, MESHES[4], lambda name: MLP_CLASSES.get(name, name))
    found = find_sharding(graph, MESHES[4])
    assert found.cost <= best
    coarsened = CostTables(make_problem(graph, TRAINING), BytesObjective(), (2, 2))
    assert best_state(coarsened).cost == best


@examples(12)
@given(st.tuples(ANY, ANY, ANY, ANY), st.sampled_from([(2,), (3,), (2, 2), (2, 3)]), st.integers(0))
def test_bytes_equal_those_counted_element_by_element(sizes, shape, seed):
    graph, mesh = mlp(*sizes), make_mesh(shape)
    sharding = _random(graph, mesh, seed)
    assert total_bytes(graph, sharding) == naive_bytes(graph, sharding)


def _random(graph, mesh, seed):
    """A sharding with choices at random, found as the best under random costs."""

    class Chance(BytesObjective):
        rng = np.random.default_rng(seed)

        def communication(self, requests):
            return [self.rng.random((len(r.strategies), len(r.owned))) for r in requests]

    problem = make_problem(graph, NEEDED)
    tables = CostTables(problem, Chance(), mesh.shape)
    return expanded(problem, best_state(tables).state, mesh, graph)


@examples(12)
@given(st.tuples(ANY, ANY, ANY, ANY), st.sampled_from([(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]))
def test_shardings_are_valid(sizes, shape):
    graph, mesh = mlp(*sizes), make_mesh(shape)
    assert_valid(graph, search(graph, mesh))


def assert_valid(graph, sharding):
    """Every tensor has a block everywhere, every op its local ops, writes are local."""
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    for name, tensor in tensors.items():
        assert owned_boxes(tensor.shape, sharding.layouts[name], sharding.mesh) is not None
    for op in graph.ops:
        if not is_call(op):
            continue
        found = local_ops(call_of(op, tensors), sharding.axes[op.name], sharding.mesh)
        assert found is not None
        for name in writes(op):
            owned = owned_boxes(tensors[name].shape, sharding.layouts[name], sharding.mesh)
            for local, box in zip(found, owned, strict=True):
                assert local.results[0].box == box
                assert not any(local.results[0].reducers)


def test_short_dims_stay_whole():
    found = search(matmul(2, 3, 64), MESHES[8])
    assert found.layouts["x"].count(None) == 1
    assert None not in found.layouts["w"]


def test_a_cluster_is_split_into_prime_factors():
    assert search(matmul(64, 64, 64), Cluster.uniform(6)).mesh.shape == (3, 2)


def test_the_slowest_links_are_on_the_first_axis():
    devices = tuple(Device(name=f"d{i}") for i in range(6))
    near = [(i, j) for i in range(6) for j in range(i) if i // 3 == j // 3]
    links = tuple(Link(source=f"d{i}", target=f"d{j}", bandwidth=1e11) for i, j in near)
    cluster = Cluster(devices=devices, links=links, default_link=Rate(bandwidth=1e9))
    assert mesh_of(cluster).shape == (2, 3)


def test_ops_without_description_are_counted_whatever_their_tensors_are_called():
    g = Steps()
    x, w = g.source("x", (8, 4), "input"), g.source("w", (4, 6))
    y = g.mm("y", x, w)
    z = g.call("z", "nobody::knows.default", [y, y], (8, 6))
    g.call("last", "nobody::knows.default", [z, z], (8, 6))
    graph = g.graph()
    found = find_sharding(graph, MESHES[4])
    assert found.cost == total_bytes(graph, found.sharding)
    each = sharding_bytes(graph, found.sharding)
    assert each["z"] == each["last"] == 4 * 3 * 8 * 6


def test_unknown_objective():
    with pytest.raises(UsageError, match="bytes"):
        search(matmul(8, 8, 8), MESHES[2], "joules")
