"""Plans that cut ops, from the door: search, spread, check, judge; what does not fit says so."""

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

import pardnn
from pardnn.api.convert import ConvertOptions, convert
from pardnn.cluster import Cluster, Device, Link
from pardnn.errors import InfeasibleError, InvalidPlanError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.file import write_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.file import write_plan
from pardnn.plan.plan import Plan, planned_graph
from pardnn.planner.algorithms import CUTS, SHARDED
from pardnn.planner.compare import compare
from pardnn.planner.costs import costs_for
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.sharded import complete
from pardnn.planner.sharded.decide import may_shard
from pardnn.planner.sharded.memory import memory_goals
from pardnn.planner.sharded.shares import whole_shares
from pardnn.report.results import CompareResult
from pardnn.report.text import result_text
from tests.shard.spmd.test_relays import levels


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name=name, bytes=4 * shape[0] * shape[1], shape=shape, dtype="float32")


def chain(batch: int = 64, width: int = 64, layers: int = 3) -> Graph:
    """Matrix products in a row."""
    ops = [Op(name="x", kind="input", outputs=(tensor("x", batch, width),))]
    last = "x"
    for n in range(layers):
        weight, result = f"w{n}", f"h{n}"
        args = {"args": [{"tensor": last}, {"tensor": weight}]}
        made = tensor(weight, width, width)
        ops += [
            Op(name=weight, kind="parameter", outputs=(made,), memory="residual"),
            Op(name=f"mm{n}", kind="aten.mm.default", inputs=(last, weight), arguments=args,
               outputs=(tensor(result, batch, width),), module=f"layers.{n}"),
        ]  # fmt: skip
        last = result
    return build_graph("chain", ops)


@pytest.mark.jit
@pytest.mark.parametrize("algorithm", SHARDED)
def test_every_algorithm_gives_a_checked_plan(algorithm: str) -> None:
    graph = chain()
    plan = pardnn.plan(graph, Cluster.uniform(4), algorithm, "bytes", costs="k80")
    assert plan_problems(graph, plan) == []
    assert plan.algorithm == algorithm
    assert plan.partition is not None
    found = pardnn.simulate(graph, plan, costs="k80")
    assert plan.predicted is not None
    assert found.makespan_s == plan.predicted.makespan_s
    assert found.peak_bytes == plan.predicted.peak_bytes
    assert found.transfer_bytes == plan.predicted.transfer_bytes
    if algorithm in {*CUTS} - {"zero-3"}:
        return  # some weights are whole
    # A quarter of the weights each, and no more than the goal.
    goals = memory_goals(graph, planned_graph(graph, plan), plan.partition.mesh)
    assert max(found.peak_bytes) <= max(goals)


@pytest.mark.jit
def test_relays_are_tried_from_where_direct_fetches_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, plain, tried = chain(), complete.spmd_partition, list[tuple[int, int]]()

    def partitioned(*args: Any, reuse: int, relay_axes: int, **more: Any) -> Plan:
        tried.append((relay_axes, reuse))
        return plain(*args, reuse=reuse, relay_axes=relay_axes, **more)

    monkeypatch.setattr(complete, "spmd_partition", partitioned)
    monkeypatch.setattr(complete, "memory_goals", lambda *_: [1] * 8)
    pardnn.plan(graph, levels(1e9, 1e10, 1e10), "spartan", costs="k80")
    near, number = complete.NEAR_OPS, len(graph.ops)
    assert [reuse for axes, reuse in tried if not axes] == [number, near, 0]
    assert [reuse for axes, reuse in tried if axes] == [0]


@pytest.mark.jit
def test_auto_cuts_ops_where_that_is_faster() -> None:
    large = chain(batch=8192, width=4096)
    plan = pardnn.plan(large, Cluster.uniform(4), costs="k80")
    assert plan.algorithm == "tofu"
    alone = pardnn.plan(large, Cluster.uniform(4), "single", costs="k80")
    assert plan.predicted is not None
    assert alone.predicted is not None
    assert plan.predicted.makespan_s < 0.5 * alone.predicted.makespan_s
    slow = pardnn.plan(large, Cluster.uniform(4, bandwidth=1e6, latency=1.0), costs="k80")
    assert slow.predicted is not None
    assert slow.predicted.transfer_bytes == 0  # by rows: every device has all weights


def test_auto_whole_cuts_no_op() -> None:
    large = chain(batch=8192, width=4096)
    plan = pardnn.plan(large, Cluster.uniform(4), "auto-whole", costs="k80")
    assert plan.partition is None
    assert set(plan.placement) == {op.name for op in large.ops}


def test_the_same_seed_gives_the_same_plan() -> None:
    plans = [pardnn.plan(chain(), Cluster.uniform(4), "tofu", costs="k80") for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_limit_that_nothing_meets_names_device_op_and_bytes() -> None:
    cluster = Cluster.uniform(2, memory=4096)
    with pytest.raises(InfeasibleError, match=r"cut over 2 devices, device [01] holds [0-9.]+ KiB"):
        pardnn.plan(chain(), cluster, "tofu", costs="k80")


@pytest.mark.jit
@pytest.mark.parametrize("algorithm", SHARDED)
def test_where_a_link_is_missing_the_plan_does_without_or_is_refused(algorithm: str) -> None:
    """On a row a - b - c - d, with links between neighbours; most ended as invalid plans once."""
    pairs = ("ab", "ba", "bc", "cb", "cd", "dc")
    links = tuple(Link(source=one, target=other, bandwidth=1e9) for one, other in pairs)
    cluster = Cluster(devices=tuple(Device(name=name) for name in "abcd"), links=links)
    graph = chain(batch=8, width=8, layers=2)
    refused = None
    try:
        plan = pardnn.plan(graph, cluster, algorithm, "bytes", costs="k80")
    except InfeasibleError as error:
        refused = error
    else:
        assert plan_problems(graph, plan, cluster) == []
    if refused is not None:
        assert refused.code == "E301"
        assert "the cluster has no link between them" in refused.message
        assert abs(refused.details["from"] - refused.details["to"]) > 1


@pytest.mark.jit
def test_a_limit_is_kept() -> None:
    graph = chain(batch=256, width=256, layers=4)
    free = pardnn.plan(graph, Cluster.uniform(4), "tofu", "bytes", costs="k80")
    assert free.predicted is not None
    limit = max(free.predicted.peak_bytes)
    plan = pardnn.plan(graph, Cluster.uniform(4, memory=limit), "tofu", reserve=0.0, costs="k80")
    assert plan.predicted is not None
    assert max(plan.predicted.peak_bytes) <= limit


@pytest.mark.jit
def test_a_tenth_is_spared_unless_said_otherwise() -> None:
    """All on one device takes 64 KiB of weights and more: in nine tenths it fits, in less not."""
    graph = chain(batch=8)
    free = pardnn.plan(graph, Cluster.uniform(1), "single", costs="k80")
    assert free.predicted is not None
    (peak,) = free.predicted.peak_bytes
    limit = -(-peak * 10 // 9)
    plan = pardnn.plan(graph, Cluster.uniform(1, memory=limit), "single", costs="k80")
    assert plan.reserve == 0.1
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, Cluster.uniform(1, memory=limit - 2), "single", costs="k80")
    pardnn.plan(graph, Cluster.uniform(1, memory=peak), "single", costs="k80", reserve=0.0)


def test_a_graph_without_calls_cannot_be_cut() -> None:
    graph = chain()
    bare = build_graph("bare", [dataclasses.replace(op, arguments=None) for op in graph.ops])
    assert not may_shard(bare, Cluster.uniform(2))
    with pytest.raises(UsageError, match="no `arguments`"):
        pardnn.plan(bare, Cluster.uniform(2), "tofu", costs="k80")


@pytest.mark.parametrize("algorithm", SHARDED)
def test_one_device_is_a_mesh_too(algorithm: str) -> None:
    graph = chain()
    plan = pardnn.plan(graph, Cluster.uniform(1), algorithm, costs="k80")
    assert plan_problems(graph, plan) == []
    assert plan.messages == ()


def test_compare_keeps_its_table_whatever_fails(monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise InvalidPlanError("two ops at one place")

    monkeypatch.setitem(SHARDED, "spartan", broken)
    graph, cluster = chain(), Cluster.uniform(2)
    options = PlanOptions(costs="k80")
    problem = Problem(graph, cluster, costs_for(graph, cluster, "k80"), options)
    rows = compare(problem, ["data-parallel", "spartan", "heft"])
    assert [row.fits for row in rows] == [True, False, True]
    assert rows[1].error == "E410 two ops at one place"
    said = io.StringIO()
    Console(file=said, width=200).print(result_text(CompareResult(rows=rows)))
    assert "spartan: E410 two ops at one place" in said.getvalue()


def unlike(*devices: tuple[float, int | None], bandwidth: float = 21e9) -> Cluster:
    """Devices by speed and memory."""
    return dataclasses.replace(
        Cluster.uniform(len(devices), bandwidth=bandwidth),
        devices=tuple(
            Device(name=f"d{n}", speed=speed, memory=memory)
            for n, (speed, memory) in enumerate(devices)
        ),
    )


@pytest.mark.jit
@pytest.mark.parametrize(
    "speeds", [(1.0, 0.25), (0.25, 1.0, 1.0), (1.0, 1.0, 0.9), (1.0, 0.1), (1.0, 0.5, 1.0, 0.5)]
)
def test_unlike_devices_get_unequal_shares(speeds: tuple[float, ...]) -> None:
    """A step takes what it takes on one device, over the sum of the speeds: 6 % more at most."""
    graph, cluster = chain(batch=4096, width=1024), unlike(*[(speed, None) for speed in speeds])
    plan, alone = (pardnn.plan(graph, cluster, name, costs="k80") for name in ("tofu", "single"))
    assert plan.predicted is not None
    assert alone.predicted is not None
    assert plan_problems(graph, plan, cluster) == []
    ratio = alone.predicted.makespan_s / plan.predicted.makespan_s
    assert 0.94 * sum(speeds) <= ratio <= sum(speeds)
    assert plan.partition is not None
    fractions = plan.partition.mesh.fractions()
    assert fractions == pytest.approx([speed / sum(speeds) for speed in speeds], rel=0.25)


def test_a_cut_never_loses_to_one_device_that_fits() -> None:
    cluster = unlike((1.0, None), (0.25, None), bandwidth=1e6)
    graph = chain(batch=64, width=64)
    plan, alone = (pardnn.plan(graph, cluster, name, costs="k80") for name in ("tofu", "single"))
    assert plan.algorithm == "single"
    assert plan.predicted == alone.predicted
    assert any("tofu keeps everything on the fastest device" in note for note in plan.notes)


@pytest.mark.jit
def test_what_a_small_device_has_no_memory_for_the_others_hold() -> None:
    graph = chain(batch=256, width=256, layers=4)
    equal = pardnn.plan(graph, unlike((1.0, None), (1.0, None)), "tofu", "bytes", costs="k80")
    assert equal.predicted is not None
    most = max(equal.predicted.peak_bytes)
    limit = 3 * most // 4
    cluster = unlike((1.0, int(1.4 * most)), (1.0, limit))
    for objective in ("seconds", "bytes"):
        plan = pardnn.plan(graph, cluster, "tofu", objective, reserve=0.0, costs="k80")
        assert plan_problems(graph, plan, cluster) == []
        assert plan.partition is not None
        large, small = plan.partition.mesh.fractions()
        assert large > small
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes[1] <= limit < plan.predicted.peak_bytes[0]


def test_shares_are_whole_numbers_of_small_sums() -> None:
    assert whole_shares([0.8, 0.2], 16) == (13, 3)
    assert whole_shares([0.5, 0.5], 16) == (1, 1)
    assert whole_shares([4 / 9, 4 / 9, 1 / 9], 64) == (29, 28, 7)
    assert whole_shares([0.999, 0.001], 16) == (15, 1)
    assert whole_shares([0.98, 0.01, 0.01], 16) == (15, 1, 1)


@pytest.mark.jit
def test_one_device_that_fits_is_taken_where_a_cut_does_not() -> None:
    graph, cluster = chain(batch=256, width=256), unlike((1.0, None), (1.0, 4096))
    plan = pardnn.plan(graph, cluster, "tofu", reserve=0.0, costs="k80")
    assert set(plan.placement.values()) == {0}
    assert any("no plan fits. With every op cut over 2 devices" in note for note in plan.notes)
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, unlike((1.0, 4096), (0.5, 4096)), "tofu", costs="k80")


def test_stated_seconds_are_shared_out() -> None:
    stated = [
        dataclasses.replace(op, seconds=None if op.is_source else {"accelerator": 1.0})
        for op in chain().ops
    ]
    graph = build_graph("stated", stated)
    plan = pardnn.plan(graph, Cluster.uniform(4), "tofu", "bytes")
    assert plan.predicted is not None
    assert 0.75 <= plan.predicted.makespan_s < 0.76  # three ops of a second, a quarter each


def test_a_cut_plan_is_no_placement(tmp_path) -> None:
    graph = chain()
    plan = pardnn.plan(graph, Cluster.uniform(2), "tofu", "bytes", costs="k80")
    write_graph(graph, tmp_path / "g.json")
    write_plan(plan, tmp_path / "p.json")
    options = ConvertOptions(graph_file=tmp_path / "g.json")
    with pytest.raises(UsageError, match="cuts every op over all devices"):
        convert(tmp_path / "p.json", tmp_path / "out", options)
