"""Rules of the checker that hold for any plan: on the tiny plan of two devices."""

import dataclasses
from pathlib import Path

import pytest

from pardnn.cluster import MAX_DEVICES, Cluster, Device, Rate
from pardnn.graph.build import build_graph
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph
from pardnn.plan.actions import actions_text
from pardnn.plan.check import dry_run, plan_problems
from pardnn.plan.file import read_plan, stamped
from pardnn.plan.lower import Lowered, lower
from pardnn.plan.plan import Plan


@pytest.fixture
def example(tiny: Path) -> tuple[Graph, Plan]:
    return read_graph(tiny / "graph.json"), read_plan(tiny / "plan.json")


def test_offsets_in_a_storage_mean_nothing_in_a_copy_of_a_view(
    example: tuple[Graph, Plan],
) -> None:
    """What finds elements by their address runs where the storage is, not where a view was sent."""
    graph, plan = example
    ops = list(graph.ops)
    number = next(i for i, op in enumerate(ops) if op.name == "b")
    ops[number] = dataclasses.replace(ops[number], kind="aten.as_strided.default")
    wrong = build_graph("strided", ops)
    read = ops[number].inputs[0]
    problems = plan_problems(wrong, plan)
    told = f"op 'b' addresses the storage of {read!r} on device 1, but that storage is on device 0"
    assert problems == [told]


def test_what_the_plan_is_not_for_is_said_alone(example: tuple[Graph, Plan]) -> None:
    graph, plan = example
    other = build_graph("other", [dataclasses.replace(op, workspace=1) for op in graph.ops])
    assert plan_problems(graph, stamped(plan, graph)) == []
    assert plan_problems(other, stamped(plan, graph)) == [
        "graph_fingerprint: the plan was made for another graph"
    ]


@pytest.mark.parametrize("more", [0, 1])
def test_there_are_so_many_devices_at_most(example: tuple[Graph, Plan], more: int) -> None:
    graph, plan = example
    rows = (*plan.order, *((),) * (MAX_DEVICES - 2 + more))
    told = [f"order has {MAX_DEVICES + 1} devices; at most {MAX_DEVICES} are possible"]
    assert plan_problems(graph, dataclasses.replace(plan, order=rows)) == told * more


@pytest.mark.parametrize(("left_out", "count"), [((), None), (("R 0", "W 0", "S 0"), 0)])
def test_a_message_is_posted_by_both_ends(
    example: tuple[Graph, Plan], left_out: tuple[str, ...], count: int | None
) -> None:
    """Ranks that forget a message altogether wait for nothing."""
    lowered = lower(*example)
    ranks = tuple(
        tuple(a for a in rank if actions_text([a]) not in left_out) for rank in lowered.ranks
    )
    told = [f"message 0 is posted {count} times, not once by each end"]
    found = list(dry_run(Lowered(lowered.messages, ranks)))
    assert found == ([] if count is None else told)


@pytest.mark.parametrize("more", [-1, 1])
def test_the_cluster_of_the_plan_counts_where_none_is_given(
    example: tuple[Graph, Plan], more: int
) -> None:
    graph, plan = example
    plan = dataclasses.replace(plan, cluster=Cluster.uniform(2 + more))
    assert plan_problems(graph, plan) == [f"order has 2 devices, the cluster {2 + more}"]
    assert plan_problems(graph, plan, Cluster.uniform(2)) == []


@pytest.mark.parametrize(
    ("op", "device", "told"),
    [
        ("b", -1, "op 'b' is on device -1, but there are 2"),
        ("b", 2, "op 'b' is on device 2, but there are 2"),
        ("z", 0, "op 'z' is not in the graph"),
    ],
)
def test_an_op_is_on_a_device_that_is_there(
    example: tuple[Graph, Plan], op: str, device: int, told: str
) -> None:
    graph, plan = example
    wrong = dataclasses.replace(plan, placement={**plan.placement, op: device})
    assert plan_problems(graph, wrong) == [f"placement: {told}"]


def test_an_op_is_on_a_device_of_a_type_that_runs_it(example: tuple[Graph, Plan]) -> None:
    """Of two types, it is the one of the op's own device that counts."""
    graph, plan = example
    devices = tuple(Device(name=kind, type=kind) for kind in ("tpu", "gpu"))
    cluster = Cluster(devices=devices, default_link=Rate(bandwidth=1e9, latency=0.0))
    ops = [
        dataclasses.replace(op, seconds={"gpu": 1.0} if op.name in ("a", "b") else None)
        for op in graph.ops
    ]
    told = ["placement: op 'a' cannot run on device 0 of type 'tpu'"]
    assert plan_problems(build_graph("typed", ops), plan, cluster) == told


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (("x", "w", "h", "v", "a", "c", "u", "c"), ["order: op 'c' is listed twice"]),
        (
            ("x", "w", "h", "v", "a", "c", "c"),
            ["order: op 'c' is listed twice", "order: op 'u' is missing"],
        ),
    ],
)
def test_an_op_stands_once_in_the_order(
    example: tuple[Graph, Plan], first: tuple[str, ...], told: list[str]
) -> None:
    graph, plan = example
    assert plan_problems(graph, dataclasses.replace(plan, order=(first, ("b",)))) == told
