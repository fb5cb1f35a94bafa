"""Rules of the checker that hold for any plan: on the tiny plan of two devices."""

import dataclasses
from pathlib import Path

import pytest

from pardnn.cluster import MAX_DEVICES, Cluster
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
    told = [f"message 0 is posted {count} times, not by its two ends"]
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
