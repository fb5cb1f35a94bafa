"""Differences of plans: an edit made by hand is found, and judged as the edited plan is."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.explain.case import opened
from pardnn.explain.differences import _reordered, _rewritten, differences
from pardnn.explain.moved import judged, moved
from pardnn.explain.subjects import subject_of
from pardnn.explain.submeshes import mixed_of, on_submesh, together
from pardnn.graph.build import build_graph
from pardnn.plan.rewritten.recompute import SecondCall
from testbed import hand_graphs
from tests.explain.edited import plan_of
from tests.strategies import examples, graphs

CLUSTER = pardnn.Cluster.uniform(3, bandwidth=8.0, latency=0.25)


@examples(6)
@given(graphs(), st.integers(0, 99), st.integers(0, 2))
def test_a_move_made_by_hand_is_found_and_judged_alone(graph, seed, device):
    plan = pardnn.plan(graph, CLUSTER, algorithm="round-robin", reserve=0.0)
    case = opened(graph, plan)
    op = seed % len(graph.ops)
    found = judged(case, moved(case, [op], device))
    other = plan_of(case, found.plan, found.makespan_s)
    result = differences(graph, plan, graph, other)
    gone = {name for name, place in plan.placement.items() if other.placement[name] != place}
    assert sum(each.ops for each in result.moved) == len(gone)
    assert result.before.makespan_s == plan.predicted.makespan_s
    assert result.after.makespan_s == found.makespan_s
    assert result.same == (not gone and other.order == plan.order
                           and other.messages == plan.messages)  # fmt: skip
    if not gone:
        assert result.moved == ()
        return
    (group,) = result.moved  # one layer, one device to another
    assert group.alone.makespan_s == result.together.makespan_s == found.makespan_s
    assert group.alone.peak_bytes == result.after.peak_bytes
    assert group.target == (case.devices[device],)


@pytest.mark.jit
def test_moves_to_other_submeshes_are_found_and_judged_alone():
    graph, cluster = hand_graphs.mlp(64, 64, 64, 64), pardnn.Cluster.uniform(4)
    plan = pardnn.plan(graph, cluster, "tofu*pardnn", microbatches=2, costs="v100")
    case = opened(graph, plan)
    mixed = mixed_of(case)
    goes = together(mixed, subject_of(case, "h@1").ops)
    places = [judged(case, on_submesh(mixed, goes, submesh)) for submesh in range(2)]
    before, after = (plan_of(case, each.plan, each.makespan_s) for each in places)
    found = differences(graph, before, graph, after, costs="v100")
    (group,) = found.moved
    assert group.names == ("h",)
    assert group.source[:2] == ("gpu:0", "gpu:1")
    assert group.target[-2:] == ("gpu:2", "gpu:3")
    assert group.alone.makespan_s == found.together.makespan_s <= found.after.makespan_s
    assert differences(graph, before, graph, before, costs="v100").same
    cut = pardnn.plan(graph, cluster, "tofu", microbatches=2, costs="v100")
    other = differences(graph, before, graph, cut, costs="v100")
    assert not other.moved
    assert "inside submeshes" in other.notes[0]


def test_equal_plans_are_the_same():
    graph = hand_graphs.mlp(64, 64, 64, 64)
    plan = pardnn.plan(graph, CLUSTER, algorithm="heft")
    other = dataclasses.replace(plan, algorithm="by hand", notes=("a note",), checksum=None)
    found = differences(graph, plan, graph, other)
    assert found.same
    assert not (found.moved)
    assert not (found.sent)
    assert not (any(found.reordered))


def test_moves_are_told_by_layer_the_most_useful_first():
    graph = hand_graphs.mlp(512, 512, 512, 512)
    ops = [dataclasses.replace(op, module=f"net.{1 + ('2' in op.name)}") for op in graph.ops]
    graph = build_graph("mlp", ops)
    cluster = pardnn.Cluster.uniform(2)
    plans = [pardnn.plan(graph, cluster, algorithm=name) for name in ("round-robin", "single")]
    found = differences(graph, plans[0], graph, plans[1])
    assert {each.layer for each in found.moved} <= {"net.1", "net.2"}
    effects = [each.alone.change_s for each in found.moved]
    assert effects == sorted(effects)
    assert found.sent
    assert {each.after for each in found.sent} == {0}
    assert found.after.transfer_bytes == 0


def test_plans_of_different_graphs_are_matched_by_name():
    graph = hand_graphs.mlp(64, 64, 64, 64)
    other = build_graph("mlp", [op for op in graph.ops if op.name != "w1.new"])
    plans = [pardnn.plan(each, CLUSTER, algorithm="single") for each in (graph, other)]
    found = differences(graph, plans[0], other, plans[1])
    assert (found.only_before, found.only_after, found.moved) == (("w1.new",), (), ())
    assert not found.same
    back = differences(other, plans[1], graph, plans[0])
    assert back.only_after == ("w1.new",)
    with pytest.raises(pardnn.PardnnError, match="E503"):
        differences(graph, plans[0], graph, plans[1])


@pytest.mark.jit
def test_tensors_that_lie_otherwise_and_pieces():
    graph = hand_graphs.mlp(512, 512, 512, 512)
    cluster = pardnn.Cluster.uniform(2, memory="1GiB")
    cut, rows = (pardnn.plan(graph, cluster, algorithm=a) for a in ("tofu", "zero-3"))
    found = differences(graph, cut, graph, rows)
    assert {each.tensor: (each.before, each.after) for each in found.relaid} == {
        name: (tuple(words), tuple(rows.partition.sharding[name]))
        for name, words in cut.partition.sharding.items()
        if tuple(words) != tuple(rows.partition.sharding[name])
    }
    halves = [pardnn.plan(graph, cluster, algorithm=a, microbatches=2) for a in ("tofu", "zero-3")]
    relaid = differences(graph, halves[0], graph, halves[1]).relaid
    assert relaid
    for each in relaid:  # a tensor in pieces is told once
        name = each.tensor if each.tensor in halves[0].partition.sharding else f"{each.tensor}@0"
        layouts = [tuple(plan.partition.sharding[name]) for plan in halves]
        assert [each.before, each.after] == layouts
    pieces = pardnn.plan(graph, cluster, algorithm="heft", microbatches=2)
    whole = pardnn.plan(graph, cluster, algorithm="round-robin")
    for one, other in ((cut, whole), (whole, pieces), (pieces, whole)):
        found = differences(graph, one, graph, other)
        assert not found.same
        assert found.together is None
        assert all(each.alone is None for each in found.moved)
    assert differences(graph, pieces, graph, pieces).same
    note = "the first plan has the batch in 2 pieces, the second has the batch whole"
    assert note in differences(graph, pieces, graph, whole).notes


def test_second_calls_and_state_on_the_host_are_told():
    plan = pardnn.plan(hand_graphs.mlp(8, 8, 8, 8), pardnn.Cluster.uniform(2), algorithm="single")
    rewritten = dataclasses.replace(
        plan, recompute=(SecondCall(op="a", number=2, readers=("b",)),), offload=("m", "v")
    )
    assert _rewritten(plan) == "has the batch whole"
    assert _rewritten(rewritten) == (
        "has the batch whole and calls 1 op a second time and has 2 optimizer states on the host"
    )


def test_clusters_that_differ_are_told():
    graph = hand_graphs.mlp(64, 64, 64, 64)
    plans = [pardnn.plan(graph, pardnn.Cluster.uniform(k), algorithm="heft") for k in (2, 3)]
    found = differences(graph, plans[0], graph, plans[1])
    assert "the clusters differ; each plan is simulated on its own" in found.notes
    assert len(found.before.devices) == 2


def test_a_turn_is_changed_by_the_fewest_ops_that_explain_it():
    assert _reordered("abcde", "abcde") == 0
    assert _reordered("abcde", "eabcd") == 1
    assert _reordered("abxc", "cbay") == 2
