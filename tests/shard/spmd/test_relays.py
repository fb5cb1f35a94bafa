"""What several devices of a group need of another group crosses the slow link once."""

import dataclasses
import itertools

import pytest

import pardnn
from pardnn.cluster import Cluster, Link
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan, planned_graph
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.shard.spmd.relays import relay_axes, relays_of


def levels(*bandwidths: float) -> Cluster:
    """2^n devices: pairs with the last bandwidth, pairs of pairs with the one before, and so on."""
    count = len(bandwidths)
    cluster = Cluster.uniform(2**count)
    names = [device.name for device in cluster.devices]
    links = [
        Link(source=names[a], target=names[b], bandwidth=bandwidths[count - (a ^ b).bit_length()])
        for a, b in itertools.permutations(range(2**count), 2)
    ]
    return dataclasses.replace(cluster, links=tuple(links), default_link=None)


def tensor(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name=name, bytes=4 * rows * columns, shape=(rows, columns), dtype="float32")


def product(rows: int, inner: int, columns: int) -> Graph:
    args = {"args": [{"tensor": "x"}, {"tensor": "w"}]}
    ops = [
        Op(name="x", kind="input", outputs=(tensor("x", rows, inner),)),
        Op(name="w", kind="parameter", outputs=(tensor("w", inner, columns),), memory="residual"),
        Op(name="y", kind="aten.mm.default", inputs=("x", "w"), arguments=args,
           outputs=(tensor("y", rows, columns),)),
    ]  # fmt: skip
    return build_graph("product", ops)


def crossing(graph: Graph, plan: Plan, shape: tuple[int, ...]) -> list[int]:
    """Bytes of messages by the first mesh axis that they cross."""
    size = {t.name: t.bytes for op in planned_graph(graph, plan).ops for t in op.outputs}
    mesh, found = make_mesh(shape), [0] * len(shape)
    for m in plan.messages:
        pair = zip(mesh.coordinates(m.source), mesh.coordinates(m.target), strict=True)
        found[next(axis for axis, (a, b) in enumerate(pair) if a != b)] += size[m.tensor]
    return found


def test_a_weight_on_three_levels_crosses_each_level_as_often_as_groups_need_it() -> None:
    """w in eighths by rows, needed whole: of each half of the devices four eighths are missing.

    Over the top they go once into each half, 8, where each of eight devices took them, 32. Over the
    middle they go to the other pair of each half, 8, beside the two eighths that each device takes
    of the other pair, once per pair, 8. The rest stays in the pairs.
    """
    graph, shape = product(16, 64, 32), (2, 2, 2)
    loops = {"y": ("i", "i", "i")}
    sharding = Sharding(make_mesh(shape), dict.fromkeys("xwy", (0, 0, 0)), loops)
    eighth = 64 * 32 * 4 // 8
    found: dict[int, list[int]] = {}
    for axes in (0, 1, 2):
        plan = spmd_partition(graph, sharding, relay_axes=axes)
        assert plan_problems(graph, plan) == []
        found[axes] = [size // eighth for size in crossing(graph, plan, shape)]
    assert found[0] == [8 * 4, 8 * 2, 8]
    assert found[1] == [8, 32, 16]  # inside of a half each for itself
    assert found[2] == [8, 16, 32]
    for each in found.values():
        assert sum(each) == 8 * 7  # as much in all, over nearer links


def test_partial_sums_are_added_inside_of_a_group_before_they_cross() -> None:
    """Eight partial products of y, each device owner of an eighth: 7 eighths come in to each.

    Direct, four of them cross the top; added inside of a group first, one does, and one the middle.
    """
    graph, shape = product(16, 64, 32), (2, 2, 2)
    sharding = Sharding(make_mesh(shape), {"x": (1, 1, 1), "w": (0, 0, 0), "y": (0, 0, 0)},
                        {"y": ("k", "k", "k")})  # fmt: skip
    eighth = 16 * 32 * 4 // 8
    found: dict[int, list[int]] = {}
    for axes in (0, 1, 2):
        plan = spmd_partition(graph, sharding, relay_axes=axes)
        assert plan_problems(graph, plan) == []
        found[axes] = [size // eighth for size in crossing(graph, plan, shape)]
    assert found == {0: [8 * 4, 8 * 2, 8], 1: [8, 32, 16], 2: [8, 16, 32]}


@pytest.mark.jit
def test_no_level_carries_more_than_its_cut_costs() -> None:
    """Theorem 2 by the plan's own messages: what a level carries grows from the top down.

    Of each weight the first cut, into halves, costs one whole weight: half of it into either half.
    """
    shape = (2, 2, 2)
    for inner, columns in itertools.product((8, 16, 24, 40, 64), (8, 16, 32, 48, 56, 64, 96)):
        graph = product(16, inner, columns)
        sharding = Sharding(make_mesh(shape), dict.fromkeys("xwy", (0, 0, 0)), {"y": ("i",) * 3})
        direct = crossing(graph, spmd_partition(graph, sharding), shape)
        found = crossing(graph, spmd_partition(graph, sharding, relay_axes=2), shape)
        weight = 4 * inner * columns
        assert direct[0] == 4 * weight
        assert found[0] == weight
        assert found == sorted(found)


def test_what_is_received_in_turn_is_not_passed_on() -> None:
    """Two devices could wait for each other's turns."""
    graph, shape = product(16, 64, 32), (2, 2)
    sharding = Sharding(make_mesh(shape), dict.fromkeys("xwy", (0, 0)), {"y": ("i", "i")})
    plans = [spmd_partition(graph, sharding, relay_axes=axes, in_turn=True) for axes in (0, 1)]
    assert plans[0] == plans[1]


def test_levels_are_read_from_the_links() -> None:
    assert relay_axes(Cluster.uniform(8), make_mesh((2, 2, 2))) == 0
    assert relay_axes(levels(1e9, 1e10, 1e11), make_mesh((2, 2, 2))) == 2
    assert relay_axes(levels(1e9, 1e10, 1e10), make_mesh((2, 2, 2))) == 1
    assert relay_axes(levels(1e10, 1e10, 1e11), make_mesh((2, 2, 2))) == 2
    assert relay_axes(levels(1e9, 1e10), make_mesh((4,))) == 0


def test_relays_are_below_those_they_serve() -> None:
    mesh, box = make_mesh((2, 2, 2)), ((0, 1),)
    x = Tensor(name="x", bytes=32, shape=(8,), dtype="float32")
    sources = {device: [(0, box)] for device in range(1, 8)}
    found = relays_of(mesh, 2, x, sources)
    assert found == {
        (3, (0, box)): (2, box),
        (5, (0, box)): (4, box),
        (6, (0, box)): (4, box),
        (7, (0, box)): (6, box),
    }
    assert relays_of(mesh, 0, x, sources) == {}


def test_a_plan_takes_relays_where_they_are_faster() -> None:
    graph = product(4096, 1024, 1024)
    cluster = levels(1e9, 100e9)
    plan = pardnn.plan(graph, cluster, "zero-3", "bytes", costs="k80")
    whole = 4 * 1024 * 1024
    assert crossing(graph, plan, (2, 2))[0] == whole  # a half into each group; twice that before
    assert plan_problems(graph, plan, cluster) == []
    # Theorem 2, of the plan's own messages: no more over the top than below it.
    assert crossing(graph, plan, (2, 2))[0] <= crossing(graph, plan, (2, 2))[1]
