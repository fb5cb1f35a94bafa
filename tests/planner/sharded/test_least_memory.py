"""What devices hold at least under a cut: never more than any of its plans, and near to them."""

import dataclasses
import itertools
import random

import pytest

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import plan_arrays, planned_graph
from pardnn.planner.algorithms import SHARDED
from pardnn.planner.sharded.least_memory import least_of_partitions, least_peaks
from pardnn.planner.sharded.memory import held_bytes, no_partition_fits
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.strategy import strategies
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.sim.peak import peaks
from testbed.hand_graphs import Steps, mlp


def lows_and_peaks(graph, sharding):
    """Bounds before and after partitioning, and peaks of all partitions, by device."""
    legal = legalize(graph, sharding)
    held, least = held_bytes(graph, legal), least_peaks(graph, legal)
    lows, found = [[sum(both) for both in zip(held, least, strict=True)]], []
    for reuse, in_turn in ((len(graph.ops), False), (2, False), (0, False), (0, True)):
        plan = spmd_partition(graph, legal, reuse=reuse, in_turn=in_turn)
        local = planned_graph(graph, plan)
        arrays = plan_arrays(local, plan)
        found.append(peaks(local.arrays, arrays).tolist())
        lows.append(least_of_partitions(local, arrays).tolist())
    return lows, found


def views():
    """A step whose views are larger than what they view, and parts of it, read late."""
    s = Steps()
    s.source("x", (8, 12), "input")
    s.source("w", (12, 12))
    s.mm("h", "x", "w")
    s.call("row", "aten.sum.dim_IntList", ["h", [0], True], (1, 12))
    s.call("rows", "aten.expand.default", ["row", [8, 12]], (8, 12), alias="row")
    s.call("part", "aten.slice.Tensor", ["h", 1, 0, 4], (8, 4), alias="h")
    s.call("a", "aten.relu.default", ["h"], (8, 12))
    s.call("b", "aten.mul.Tensor", ["a", "rows"], (8, 12))
    s.call("c", "aten.relu.default", ["part"], (8, 4))
    s.mm("dw", s.t("x.t", "x", of="h"), "b", of="h")
    s.mm("e", s.t("b.t", "b"), "c")
    s.update("w", "dw")
    return with_strides(s.graph(), rows=(0, 1), part=(12, 1))


def with_strides(graph, **strides):
    """Return the graph with strided tensors; transposed ones are by nature."""

    def strided(t, op):
        stride = (1, t.shape[0]) if op.kind == "aten.t.default" else strides.get(t.name)
        return dataclasses.replace(t, strides=stride)

    ops = [
        dataclasses.replace(op, outputs=tuple(strided(t, op) for t in op.outputs))
        for op in graph.ops
    ]
    return build_graph("views", ops)


def random_sharding(graph, shape, rng):
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    layouts = {
        name: tuple(rng.choice([None, *range(len(t.shape))]) for _ in shape)
        for name, t in tensors.items()
    }
    axes = {
        op.name: tuple(
            rng.choice([None, *(each.loop for each in strategies(call_of(op, tensors)))])
            for _ in shape
        )
        for op in graph.ops
        if not op.is_source
    }
    return Sharding(make_mesh(shape), layouts, axes)


@pytest.mark.parametrize("graph", [mlp(8, 12, 16, 4), views()], ids=["mlp", "views"])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_no_plan_of_a_cut_holds_less(graph, shape):
    rng = random.Random(0)
    for _ in range(5):
        lows, found = lows_and_peaks(graph, random_sharding(graph, shape, rng))
        for low, row in itertools.product(lows, found):
            assert all(size <= peak for size, peak in zip(low, row, strict=True))


def test_activations_of_a_device_are_counted():
    graph = mlp(32, 12, 16, 4)
    legal = legalize(graph, SHARDED["data-parallel"](graph, Cluster.uniform(2)))
    # Half of x, of h and a for their gradients, of dy, and of da, which is made of it.
    assert least_peaks(graph, legal) == [4 * 16 * (12 + 16 + 16 + 4 + 16)] * 2


def one_storage():
    s = Steps()
    s.call("h", "aten.relu.default", [s.source("x", (8, 8))], (8, 8))
    s.mm("y", "h", s.t("h.t", "h"))
    return with_strides(s.graph()), Sharding(make_mesh((2,)), {}, {})


def larger_than_its_storage():
    s = Steps()
    s.call("h", "aten.relu.default", [s.source("x", (1, 64))], (1, 64))
    s.call("rows", "aten.expand.default", ["h", [8, 64]], (8, 64), alias="h")
    s.call("y", "aten.relu.default", ["rows"], (8, 64))
    return with_strides(s.graph(), rows=(0, 1)), Sharding(make_mesh((2,)), {}, {})


def read_as_one_part_of_two():
    s = Steps()
    s.call("h", "aten.relu.default", [s.source("x", (8, 16))], (8, 16))
    for made, read in ("kx", "yh", "zk"):
        s.call(made, "aten.relu.default", [read], (8, 16))
    rows, columns = dict.fromkeys("xh", (0,)), dict.fromkeys("kyz", (1,))
    loops = {"h": ("i0",), "k": ("i1",), "y": ("i1",), "z": ("i1",)}
    return s.graph(), Sharding(make_mesh((2,)), rows | columns, loops)


@pytest.mark.parametrize(
    ("case", "least"),
    [
        (one_storage, 2 * 256),  # h, and its view once; x or y
        (larger_than_its_storage, 2048),  # y; rows are a view of 256 bytes
        (read_as_one_part_of_two, 3 * 256),  # k; the part of h that y reads; y
    ],
)
def test_what_is_sure_to_be_held_is_counted_once(case, least):
    graph, sharding = case()
    assert least_peaks(graph, legalize(graph, sharding)) == [least] * 2


def fetched_early_and_late():
    """Both devices need columns of h, cut by rows, before and after what takes most memory."""
    s = Steps()
    s.call("h", "aten.relu.default", [s.source("x", (8, 16))], (8, 16))
    s.call("y", "aten.relu.default", ["h"], (8, 16))
    s.call("a", "aten.relu.default", [s.source("b", (8, 64))], (8, 64))
    s.call("c", "aten.relu.default", ["a"], (8, 64))
    s.call("z", "aten.mul.Tensor", ["h", "y"], (8, 16))
    s.call("k", "aten.relu.default", ["h"], (8, 16))
    rows, columns = dict.fromkeys("xhabck", (0,)), dict.fromkeys("yz", (1,))
    loops = dict.fromkeys("hack", ("i0",)) | dict.fromkeys("yz", ("i1",))
    return s.graph(), Sharding(make_mesh((2,)), rows | columns, loops)


def test_another_partition_may_fit():
    graph, sharding = fetched_early_and_late()
    legal = legalize(graph, sharding)
    found = []
    for reuse in (len(graph.ops), 0):
        plan = spmd_partition(graph, legal, reuse=reuse)
        local = planned_graph(graph, plan)
        found.append((local, plan_arrays(local, plan)))
    most, least = (int(peaks(local.arrays, arrays).max()) for local, arrays in found)
    assert least < most
    local, arrays = found[0]
    bound = int(least_of_partitions(local, arrays).max())
    assert not no_partition_fits(local, arrays, [most] * 2)
    assert not no_partition_fits(local, arrays, [least] * 2)
    assert not no_partition_fits(local, arrays, [bound, None])
    assert no_partition_fits(local, arrays, [bound - 1] * 2)
