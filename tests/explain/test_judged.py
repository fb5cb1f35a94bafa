"""What `explain` judges is what `plan`, `check` and `simulate` say of a plan edited by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.cluster import Sharing as DeviceSharing
from pardnn.explain.anew import explain_memory, options_of, with_devices, with_memory
from pardnn.explain.case import opened
from pardnn.explain.cuts import other_cuts
from pardnn.explain.layer import halved
from pardnn.explain.moved import judged, moved, moves
from pardnn.explain.op import explain_device, explain_op
from pardnn.explain.subjects import subject_of
from pardnn.explain.submeshes import cut_anew, mixed_of, on_submesh, together
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.ordering.fit import fit_schedule
from pardnn.plan.check import plan_problems
from pardnn.plan.file import stamped
from pardnn.planner.check_cut import check_cut
from pardnn.shard.sharding import Sharding
from pardnn.sim.engine import simulate
from testbed import hand_graphs
from tests.explain.edited import plan_of
from tests.strategies import examples, graphs, random_graph

CLUSTER = pardnn.Cluster.uniform(3, bandwidth=8.0, latency=0.25)


def case_of(graph, cluster=CLUSTER, algorithm="round-robin", **options):
    options = {"reserve": 0.0, **options}
    return opened(graph, pardnn.plan(graph, cluster, algorithm=algorithm, **options))


@examples(6)
@given(graphs(), st.integers(0, 99), st.sampled_from([None, 40, 200]))
def test_a_move_is_judged_as_the_edited_plan_is(graph, seed, room):
    case = case_of(graph)
    if room is not None:
        size = max(case.peak_bytes) + room
        cluster = with_memory(case.cluster, f"{size}B")
        plan = dataclasses.replace(case.plan, cluster=cluster, checksum=None)
        case = opened(graph, plan)
    op = seed % len(graph.ops)
    for device in range(3):
        place = moved(case, [op], device)
        found = judged(case, place)
        if found.makespan_s is None:
            assert max(found.peak_bytes) > min(case.usable)
            continue
        edited = plan_of(case, found.plan, found.makespan_s)
        assert plan_problems(graph, edited) == []
        said = pardnn.simulate(graph, edited)
        assert said.makespan_s == found.makespan_s
        assert said.peak_bytes == found.peak_bytes
        assert said.transfer_bytes == found.transfer_bytes
        assert edited.placement[graph.ops[op].name] == device


def test_times_are_without_what_devices_share():
    graph = random_graph(3, 40)
    alone = pardnn.plan(graph, CLUSTER, algorithm="round-robin", reserve=0.0)
    sharing = DeviceSharing(slowdown=(1.0, 2.0, 3.0))
    shared = pardnn.plan(
        graph, dataclasses.replace(CLUSTER, sharing=sharing), algorithm="round-robin", reserve=0.0
    )
    one, other = opened(graph, alone), opened(graph, shared)
    assert other.timeline.makespan == one.timeline.makespan == alone.predicted.makespan_s
    assert shared.predicted.makespan_s > one.timeline.makespan
    assert one.notes == ()
    assert f"predicts {shared.predicted.makespan_s:.6g} s" in other.notes[0]
    found = [explain_memory(each, "1GiB", "round-robin").anew for each in (one, other)]
    assert [each.makespan_s for each in found[0]] == [each.makespan_s for each in found[1]]


@pytest.mark.jit
@examples(8)
@given(graphs(), st.integers(0, 99))
def test_waits_fill_the_idle_time_and_chains_lead_to_second_0(graph, seed):
    case = case_of(graph)
    for device in range(3):
        found = explain_device(case, device)
        assert sum(each.seconds for each in found.waits) == pytest.approx(found.idle_s, abs=1e-9)
        assert found.busy_s + found.idle_s == pytest.approx(case.timeline.makespan)
        assert sum(each.seconds for each in found.layers) == pytest.approx(found.busy_s)
        live = sum(each.bytes for each in found.memory.held)
        assert live == found.memory.peak_bytes == case.peak_bytes[device]
    name = graph.ops[seed % len(graph.ops)].name
    (call,) = explain_op(case, subject_of(case, name)).calls
    ends = [call.start_s, *(link.start_s for link in call.chain)]
    assert [link.finish_s for link in call.chain] == ends[:-1]
    assert ends[-1] == 0
    assert all(link.finish_s > link.start_s for link in call.chain)


def test_a_device_that_is_always_busy_idles_for_no_time():
    """Its seconds, added in the order of the file, are more than the step, by the last bit."""
    ops = [
        Op(name=name, kind="f", inputs=reads, outputs=(Tensor(name=name, bytes=4),),
           seconds={"accelerator": took})
        for name, reads, took in (("c", ("b",), 8.1), ("b", ("a",), 2.4), ("a", (), 1.3))
    ]  # fmt: skip
    case = case_of(build_graph("busy", ops), pardnn.Cluster.uniform(1), "single")
    found = explain_device(case, 0)
    assert found.busy_s > case.timeline.makespan
    assert found.idle_s == 0


def test_nothing_is_waited_for_that_takes_no_time():
    case = case_of(hand_graphs.mlp(64, 64, 64, 64), algorithm="single")
    first, second = (explain_op(case, subject_of(case, name)).calls[0] for name in ("h", "a"))
    assert first.start_s == 0
    assert first.chain == ()
    assert [(link.op, link.ops) for link in second.chain] == [("h", 1)]


def test_half_a_layer_is_the_graph_with_that_layer_half_as_large():
    graph = hand_graphs.mlp(64, 64, 64, 64)
    ops = [dataclasses.replace(op, seconds={"accelerator": 0.002}) for op in graph.ops]
    case = case_of(build_graph("mlp", ops))
    inside = np.array([op.name in ("w1", "h", "dw1") for op in ops])
    line, peaks = halved(case, inside)

    def half(op):
        outputs = (dataclasses.replace(t, bytes=t.bytes // 2, shape=None) for t in op.outputs)
        return dataclasses.replace(op, seconds={"accelerator": 0.001}, outputs=tuple(outputs))

    smaller = [half(op) if is_in else op for op, is_in in zip(ops, inside, strict=True)]
    other = build_graph("mlp", smaller)
    again = opened(other, stamped(dataclasses.replace(case.plan, predicted=None), other))
    assert again.timeline.makespan == line.makespan < case.timeline.makespan
    assert again.peak_bytes == peaks


@pytest.mark.jit
def test_a_limit_is_planned_anew_as_the_planner_does():
    graph = hand_graphs.mlp(64, 64, 64, 64)
    cluster = pardnn.Cluster.uniform(2, memory="100KiB")
    case = case_of(graph, cluster, "heft")
    (now, more) = explain_memory(case, "+60KiB", "heft").anew
    larger = pardnn.plan(graph, with_memory(cluster, "+60KiB"), algorithm="heft", reserve=0.0)
    assert now.makespan_s == case.timeline.makespan
    assert more.makespan_s == larger.predicted.makespan_s
    assert more.peak_bytes == larger.predicted.peak_bytes
    (now, less) = explain_memory(case, "20KiB", "heft").anew
    assert now.fits
    assert not less.fits
    assert "does not fit" in less.why
    assert options_of(case, None).algorithm == "auto-whole"


def test_a_device_more_is_like_the_others():
    assert [d.name for d in with_devices(CLUSTER, "+2").devices[3:]] == ["gpu:3", "gpu:4"]
    with pytest.raises(pardnn.PardnnError, match="E242"):
        with_devices(CLUSTER, "2")
    first, *others = CLUSTER.devices
    unlike = dataclasses.replace(CLUSTER, devices=(dataclasses.replace(first, speed=2.0), *others))
    with pytest.raises(pardnn.PardnnError, match="not all alike"):
        with_devices(unlike, "+1")
    with pytest.raises(pardnn.PardnnError, match="no device has a memory limit"):
        with_memory(CLUSTER, "+1GiB")
    with pytest.raises(pardnn.PardnnError, match=r"\+0 changes nothing"):
        with_devices(CLUSTER, "+0")
    limited = pardnn.Cluster.uniform(2, memory="1GiB")
    with pytest.raises(pardnn.PardnnError, match="1024MiB changes nothing"):
        with_memory(limited, "1024MiB")


def test_pieces_and_second_calls_move_as_well():
    graph = hand_graphs.mlp(64, 64, 64, 64)
    cluster = pardnn.Cluster.uniform(2, memory="1GiB")
    plan = pardnn.plan(graph, cluster, algorithm="heft", microbatches=2)
    case = opened(graph, plan)
    found = explain_op(case, subject_of(case, "h"))
    assert [call.op for call in found.calls] == ["h@0", "h@1"]
    for device in range(2):
        place = moved(case, subject_of(case, "h").ops, device)
        judgement = judged(case, place)
        edited = plan_of(case, judgement.plan, judgement.makespan_s)
        assert plan_problems(graph, edited) == []
    assert all(each.fits for each in moves(case, subject_of(case, "h@1").ops))


@pytest.mark.jit
def test_other_cuts_are_planned():
    graph = hand_graphs.mlp(512, 512, 512, 512)
    cluster = pardnn.Cluster.uniform(2, memory="1GiB")
    case = opened(graph, pardnn.plan(graph, cluster, algorithm="tofu", objective="bytes"))
    found = explain_op(case, subject_of(case, "w1"))
    assert set(found.layouts) == {"w1"}
    now = tuple(found.layouts["w1"])
    others = [each for each in found.alternatives if each.fits]
    assert others
    assert all(str(now) not in each.what for each in others)
    assert all(len(each.peak_bytes) == 2 for each in others)


@pytest.mark.jit
def test_a_move_that_its_own_order_has_no_memory_for_keeps_near_that_order():
    """An order made anew costs 14 % of this step, which is no fault of the move."""
    graph = random_graph(5, 16)
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(2), algorithm="contiguous", reserve=0.0)
    limited = pardnn.Cluster.uniform(2, memory=max(plan.predicted.peak_bytes))
    case = opened(graph, dataclasses.replace(plan, cluster=limited, checksum=None))
    place = moved(case, subject_of(case, "op6").ops, 1)
    found = judged(case, place)
    anew = fit_schedule(case.planned, case.machine, place, case.usable)
    assert found.makespan_s < 0.95 * simulate(case.planned, case.machine, anew).makespan
    edited = plan_of(case, found.plan, found.makespan_s)
    assert plan_problems(graph, edited) == []


@pytest.mark.jit
def test_other_cuts_of_a_batch_in_pieces_are_judged_in_pieces():
    graph, cluster = hand_graphs.mlp(64, 64, 64, 64), pardnn.Cluster.uniform(2)
    plan = pardnn.plan(graph, cluster, "tofu", "bytes", microbatches=2, costs="v100")
    case = opened(graph, plan)
    for name in ("w1", "h", "h@1@0"):
        found = explain_op(case, subject_of(case, name))
        times = [each.makespan_s for each in found.alternatives if each.makespan_s is not None]
        assert found.layouts == {name[:2].rstrip("@"): ("Shard(1)",)}
        assert min(times) > case.timeline.makespan  # the whole batch takes 0.4 of that


@pytest.mark.jit
@pytest.mark.parametrize("pieces", [None, 2])
def test_ops_in_submeshes_move_to_others_and_are_cut_otherwise(pieces):
    graph, cluster = hand_graphs.mlp(64, 64, 64, 64), pardnn.Cluster.uniform(4)
    plan = pardnn.plan(graph, cluster, "tofu*pardnn", microbatches=pieces, costs="v100")
    case = opened(graph, plan)
    mixed, edited = mixed_of(case), []
    for name in ("w1", "h", "dw1"):
        subject = subject_of(case, name)
        goes = together(mixed, subject.ops)
        for submesh in range(2):
            found = judged(case, on_submesh(mixed, goes, submesh))
            edited.append((found, plan_of(case, found.plan, found.makespan_s)))
            devices = {edited[-1][1].placement[case.planned.ops[i].name] for i in subject.ops}
            assert devices == {2 * submesh, 2 * submesh + 1}
    layouts = dict.fromkeys(case.plan.partition.sharding, (None,))
    other, found = cut_anew(case, mixed, Sharding(mixed.made.partition.mesh, layouts, {}))
    edited.append((found, plan_of(other, found.plan, found.makespan_s)))
    for found, each in edited:
        assert plan_problems(graph, each) == []
        check_cut(graph, each)
        said = pardnn.simulate(graph, each, costs="v100")
        assert said.makespan_s == found.makespan_s
        assert said.peak_bytes == found.peak_bytes


@pytest.mark.jit
def test_alternatives_in_submeshes_are_told_by_their_devices():
    graph, cluster = hand_graphs.mlp(64, 64, 64, 64), pardnn.Cluster.uniform(4)
    case = opened(graph, pardnn.plan(graph, cluster, "tofu*pardnn", costs="v100"))
    found = explain_op(case, subject_of(case, "w1"))
    assert found.moves_with
    assert all(each.judged for each in found.alternatives)
    texts = [each.what for each in found.alternatives]
    assert len([text for text in texts if text in ("on gpu:0, gpu:1", "on gpu:2, gpu:3")]) == 1
    assert any("everything else unchanged" in text for text in texts)
    assert any("everything else cut again" in text for text in texts)


def test_cuts_beside_second_calls_are_not_judged():
    graph, cluster = hand_graphs.mlp(64, 64, 64, 64), pardnn.Cluster.uniform(2)
    case = opened(graph, pardnn.plan(graph, cluster, "tofu", "bytes", costs="v100"))
    case = dataclasses.replace(case, plan=dataclasses.replace(case.plan, recompute=("h@0",)))
    [found] = other_cuts(case, ["w1"])
    assert not found.judged


def test_costs_that_are_not_the_plans_are_told():
    graph = hand_graphs.mlp(1024, 1024, 1024, 1024)
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(2), algorithm="heft", costs="v100")
    assert not opened(graph, plan).notes
    assert opened(graph, plan).costs.source == "v100"
    assert "other costs (v100)" in opened(graph, plan, "k80").notes[0]


@pytest.mark.jit
def test_second_calls_move_with_their_op():
    ops, names = [], ["x", *(f"f{i}" for i in range(1, 7))]
    for name, before in zip(names, [None, *names], strict=False):
        kind = "input" if before is None else "aten.mm.default"
        ops.append(Op(name=name, kind=kind, inputs=(before,) if before else (),
                      outputs=(Tensor(name=name, bytes=10),),
                      seconds={"accelerator": 1.0}))  # fmt: skip
    last = names[-1]
    for i in range(6, 0, -1):
        ops.append(Op(name=f"g{i}", kind="aten.mm.default", inputs=(last, f"{names[i - 1]}"),
                      outputs=(Tensor(name=f"g{i}", bytes=10),),
                      seconds={"accelerator": 1.0}))  # fmt: skip
        last = f"g{i}"
    graph = build_graph("chain", ops)
    cluster = pardnn.Cluster.uniform(2, memory=50)
    plan = pardnn.plan(graph, cluster, reserve=0.0, recompute=True, algorithm="heft")
    case = opened(graph, plan)
    again = plan.recompute[0].op
    found = explain_op(case, subject_of(case, again))
    assert [call.op for call in found.calls] == [again, f"{again}~2"]
    for device in range(2):
        judgement = judged(case, moved(case, subject_of(case, again).ops, device))
        if judgement.makespan_s is not None:
            edited = plan_of(case, judgement.plan, judgement.makespan_s)
            assert plan_problems(graph, edited) == []
            assert pardnn.simulate(graph, edited).makespan_s == judgement.makespan_s
