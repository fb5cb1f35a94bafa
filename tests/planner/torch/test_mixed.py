"""Mixed plans: ops cut inside of submeshes, pieces and layers placed on them."""

import dataclasses
import functools
import math
import re
import unittest.mock
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster, Device, Link
from pardnn.cost.costs import preset_costs
from pardnn.errors import InfeasibleError, UsageError
from pardnn.explain.case import opened
from pardnn.explain.cuts import other_cuts
from pardnn.explain.submeshes import mixed_of
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.graph.layers import is_within, layers_of, origin
from pardnn.plan.check import plan_problems
from pardnn.plan.constraints import Constraint
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.partitioned_graph import FETCH
from pardnn.plan.plan import Plan, graph_in_pieces, planned_graph
from pardnn.plan.state_in_place import StateInPlace
from pardnn.plan.state_layout import state_layout
from pardnn.planner.check_cut import check_cut, cut_problems
from pardnn.planner.make_plan import make_plan
from pardnn.planner.microbatches.best import TooManyPiecesError
from pardnn.planner.microbatches.in_pieces import problem_in_pieces
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide_best
from pardnn.planner.submesh import columns, decide, spread
from pardnn.planner.submesh.columns import columns_of, estimated_columns
from pardnn.planner.submesh.decide import Mix
from pardnn.planner.submesh.near import decide_mixed_near
from pardnn.planner.submesh.spread import cut_of_submesh
from pardnn.planner.submesh.submeshes import part_of, submesh_sizes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss


@functools.cache
def graph(width: int = 64, tokens: int = 16, batch: int = 4, depth: int = 4) -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (torch.empty(batch, tokens, width) for _ in range(2))
    return capture(step, model, optimizer, x, y)


def islands(count: int, size: int, inner: float = 300e9, outer: float = 2e9) -> Cluster:
    """Return islands of fast links, joined by slow ones."""
    devices = tuple(Device(name=f"gpu:{i}") for i in range(count * size))
    links = tuple(
        Link(source=f"gpu:{i}", target=f"gpu:{j}", latency=1e-6,
             bandwidth=inner if i // size == j // size else outer)
        for i in range(count * size) for j in range(i)
    )  # fmt: skip
    return Cluster(devices=devices, links=links)


@functools.cache
def planned(algorithm: str = "megatron*1f1b", pieces: int | None = 2) -> Plan:
    return pardnn.plan(graph(), islands(2, 2), algorithm, reserve=0.0, costs="v100",
                       microbatches=pieces)  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "pieces"), [("megatron*1f1b", 2), ("tofu*pardnn", 4), ("zero-3*heft", None)]
)
def test_each_op_runs_on_one_submesh_and_survives_its_file(
    algorithm: str, pieces: int | None
) -> None:
    plan = planned(algorithm, pieces)
    assert plan.partition is not None
    assert (plan.partition.mesh.size, plan.partition.submeshes) == (2, 2)
    assert (plan.pieces is None) == (pieces is None)
    assert plan.algorithm == algorithm
    used: set[int] = set()
    for op in graph_in_pieces(graph(), plan).ops:
        first = plan.placement[f"{op.name}@0"]
        used.add(first // 2)
        assert first % 2 == 0
        assert plan.placement.get(f"{op.name}@1", first + 1) == first + 1
    assert used == {0, 1}
    again = plan_from_json(plan_to_json(plan))
    assert plan_to_json(again) == plan_to_json(plan)
    assert plan_problems(graph(), again) == []
    check_cut(graph(), again)


def test_a_tensor_of_state_lies_on_one_submesh() -> None:
    plan = planned()
    for name, shards in state_layout(graph(), plan).items():
        assert len(shards) == 2, name
        assert shards[1].device == shards[0].device + 1
        assert shards[0].device % 2 == 0


def _moved(plan: Plan, name: str, device: int) -> Plan:
    """Return a plan with an op at the end of another device's list."""
    rows = [[op for op in row if op != name] for row in plan.order]
    rows[device].append(name)
    return dataclasses.replace(
        plan, placement={**plan.placement, name: device}, order=tuple(map(tuple, rows))
    )


@pytest.mark.parametrize("shift", [1, 2])
def test_a_local_op_elsewhere_than_its_mesh_is_refused(shift: int) -> None:
    plan = dataclasses.replace(planned(), predicted=None)
    name = next(op.name for op in planned_graph(graph(), plan).ops if op.name.endswith("@0@1"))
    device = (plan.placement[name] + shift) % 4
    problems = plan_problems(graph(), _moved(plan, name, device))
    assert problems
    assert name in problems[0]


def test_a_wrong_number_of_submeshes_is_refused() -> None:
    plan = planned()
    assert plan.partition is not None
    for count in (0, 1, 3, 4):
        partition = dataclasses.replace(plan.partition, submeshes=count)
        (problem,) = plan_problems(graph(), dataclasses.replace(plan, partition=partition))
        assert f"{count} x 2 devices" in problem


def test_other_ops_than_follow_from_the_decision_are_refused() -> None:
    plan = dataclasses.replace(planned(), predicted=None)
    assert plan.partition is not None
    ops = list(plan.partition.ops)
    at = next(i for i, op in enumerate(ops) if op.kind == "aten.gelu.default")
    ops[at] = dataclasses.replace(ops[at], kind="aten.relu.default")
    for partition, word in (
        (dataclasses.replace(plan.partition, ops=tuple(ops)), "relu"),
        (dataclasses.replace(plan.partition, in_turn=True), "in_turn"),
        (dataclasses.replace(plan.partition, reuse=3), "reuse"),
        (dataclasses.replace(plan.partition, sums_in_place=True), "sums_in_place"),
    ):
        spoilt = dataclasses.replace(plan, partition=partition)
        problems = [*plan_problems(graph(), spoilt), *cut_problems(graph(), spoilt)]
        assert word in problems[0]


def test_pieces_that_are_not_the_batch_are_refused_before_their_partition() -> None:
    plan = planned()
    assert plan.pieces is not None
    pieces = dataclasses.replace(plan.pieces, points=(0, 1, 4))
    (problem, *_) = plan_problems(graph(), dataclasses.replace(plan, pieces=pieces))
    assert "piece" in problem


def test_a_column_is_what_the_slowest_position_does() -> None:
    """Naive twin: a loop over local ops, messages one after the other."""
    cluster = islands(2, 2)
    problem = Problem(graph(), cluster, preset_costs(graph(), "v100"), PlanOptions(reserve=0.0))
    _, cut = problem_in_pieces(problem, 2, 1)
    sharding = cut_of_submesh(problem, cut, "tofu", 2)
    made, local, costs, column = columns_of(problem, cut, sharding)
    seconds = costs.on("accelerator")
    at = {op.name: i for i, op in enumerate(local.ops)}
    maker = {t.name: (at[op.name], t) for op in local.ops for t in op.outputs}
    assert column.costs.on("accelerator").shape == (len(cut.graph.ops),)
    for number, op in enumerate(cut.graph.ops):
        rows = [[i for i in range(len(local.ops)) if (made.of[i], made.position[i]) == (number, p)]
                for p in range(2)]  # fmt: skip
        busy = [sum(seconds[i] for i in row) for row in rows]
        received = []
        for row in rows:
            total = 0.0
            for i in row:
                for name in local.ops[i].inputs:
                    j, tensor = maker[name]
                    if made.position[j] != made.position[i]:
                        total += cluster.seconds(made.position[j], made.position[i], tensor.bytes)
            received.append(total)
        expected = max(busy) + max(received)
        assert column.costs.on("accelerator")[number] == pytest.approx(expected)
        for tensor, own in zip(op.outputs, column.graph.ops[number].outputs, strict=True):
            sizes = [maker[f"{tensor.name}@{p}"][1].bytes for p in range(2)
                     if f"{tensor.name}@{p}" in maker]  # fmt: skip
            assert own.bytes == max(sizes)
    assert column.cluster.num_devices == 2
    assert column.cluster.arrays.bandwidth[0, 1] == 2e9


@pytest.mark.parametrize(("cut", "times"), [("tofu", 1.0), ("megatron", 1.0), ("tofu", 1.4)])
def test_a_mixed_plan_is_given_up_before_its_partition(
    cut: str, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns compute for as long as a known plan takes, by a bound or a low estimate."""
    cluster = islands(2, 2)
    problem = Problem(graph(), cluster, preset_costs(graph(), "v100"), PlanOptions(reserve=0.0))
    pieces, within = problem_in_pieces(problem, 2, 1)
    sharding = cut_of_submesh(problem, within, cut, 2)
    inside = dataclasses.replace(within, cluster=part_of(cluster, range(2)))
    column = columns_of(problem, within, sharding).column
    seconds = float(column.costs.on("accelerator").sum())
    estimated = estimated_columns(inside, sharding)
    assert inside.least_cut_s <= estimated <= seconds
    partition = unittest.mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(columns, "partition_for_submeshes", partition)
    below = times * estimated / 2
    with pytest.raises(TooManyPiecesError if times == 1 else AssertionError):
        decide._mixed(problem, Mix(cut, "pardnn", 2, 2), lambda _: (pieces, within), decide_best,
                      below)  # fmt: skip
    search = unittest.mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(decide, "cut_of_submesh", search)
    with pytest.raises(TooManyPiecesError):
        decide._mixed(problem, Mix(cut, "pardnn", 2, 2), lambda _: (pieces, within), decide_best,
                      inside.least_cut_s / 2)  # fmt: skip


@pytest.mark.parametrize(("below", "times"), [(math.inf, 4), (1.0, 1)])
def test_columns_that_come_far_above_a_known_plan_are_placed_once(
    below: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Problem(
        graph(), Cluster.uniform(2, memory=1 << 30), preset_costs(graph(), "v100"), below=below
    )
    place = unittest.mock.Mock(return_value=Outcome("", None, 0, 1.0, 0, 0.0))  # type: ignore[arg-type]
    for name, made in (("_step_of", None), ("_spread", Outcome("", None, 0, 2.0, 0, 0.0))):  # type: ignore[arg-type]
        monkeypatch.setattr(spread, name, unittest.mock.Mock(return_value=made))
    monkeypatch.setattr(spread, "completed", lambda _, __, best: best)
    spread.best_spread(column, unittest.mock.Mock(), column, None, place)
    assert place.call_count == times


def test_columns_that_do_not_fit_are_not_placed_under_less_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    column = Problem(graph(), Cluster.uniform(2, memory=1 << 30), preset_costs(graph(), "v100"))
    place = unittest.mock.Mock(side_effect=[InfeasibleError("full"), AssertionError])
    monkeypatch.setattr(spread, "_step_of", lambda *_: None)
    with pytest.raises(InfeasibleError, match="full"):
        spread.best_spread(column, unittest.mock.Mock(), column, None, place)


def test_submeshes_are_alike() -> None:
    assert submesh_sizes(islands(2, 4)) == [2, 4]
    assert submesh_sizes(Cluster.uniform(6, bandwidth=1e9)) == [2, 3]
    assert submesh_sizes(Cluster.uniform(5, bandwidth=1e9)) == []
    assert submesh_sizes(islands(4, 3)) == [3, 6]
    cluster = islands(2, 2)
    small = (*cluster.devices[:3], dataclasses.replace(cluster.devices[3], memory=1 << 20))
    assert submesh_sizes(dataclasses.replace(cluster, devices=small)) == []


def test_a_part_of_a_cluster_has_its_slowest_links() -> None:
    cluster = islands(2, 2)
    slow = Link(source="gpu:1", target="gpu:3", bandwidth=1e6, latency=1e-3)
    links = tuple(x for x in cluster.links if {x.source, x.target} != {"gpu:1", "gpu:3"})
    cluster = dataclasses.replace(cluster, links=(*links, slow))
    wide, one = part_of(cluster, (0, 2), 2).arrays, part_of(cluster, (0, 2)).arrays
    assert (wide.bandwidth[0, 1], wide.latency[0, 1]) == (1e6, 1e-3)
    assert (one.bandwidth[0, 1], one.latency[0, 1]) == (2e9, 1e-6)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"policy": "fifo"}, "E201"),
        ({"constraints": (pardnn.pin("layer:model.0", 0, 1),)}, "E246"),
    ],
)
def test_what_mixed_plans_cannot_do_is_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        pardnn.plan(graph(), islands(2, 2), "megatron*1f1b", costs="v100", **options)
    assert caught.value.code == code


def steered(*constraints: Constraint, algorithm: str = "tofu*heft") -> Plan:
    return pardnn.plan(graph(), islands(2, 2), algorithm, reserve=0.0, costs="v100",
                       constraints=constraints)  # fmt: skip


def devices(plan: Plan, layer: str) -> set[int]:
    """Return the devices of all that works for a layer, read off the local ops' names."""
    inside = {op.name for op, of in zip(graph().ops, layers_of(graph()), strict=True)
              if is_within(of, layer)}  # fmt: skip
    return {device for name, device in plan.placement.items() if origin(name) in inside}


def test_ops_cut_inside_of_submeshes_are_where_constraints_let_all_their_devices() -> None:
    pinned = steered(pardnn.pin("layer:model.0", 2, 3), pardnn.pin("layer:model.3", 0, 1, 2))
    assert devices(pinned, "model.0") == {2, 3}
    assert devices(pinned, "model.3") == {0, 1}
    assert set(steered(pardnn.forbid(1)).placement.values()) == {2, 3}
    apart = steered(pardnn.apart("layer:model.0", "layer:model.1"))
    assert not devices(apart, "model.0") & devices(apart, "model.1")
    met = pardnn.pin("layer:model.0", 2, 3), pardnn.together("layer:model.0", "layer:model.3")
    assert devices(steered(*met), "model.3") == {2, 3}


def test_the_checker_tells_which_of_them_a_mixed_plan_breaks() -> None:
    plan = steered(pardnn.pin("layer:model.0", 2, 3), pardnn.pin("x", 0, 1))
    assert plan_problems(graph(), plan) == []
    for wrong in (
        pardnn.pin("layer:model.0", 2),
        pardnn.forbid(3, what="layer:model.0"),
        pardnn.together("layer:model.0", "x"),
        pardnn.apart("layer:model.0", "layer:model.0.up"),
    ):
        broken = dataclasses.replace(plan, constraints=(wrong,))
        assert any(f"{wrong}' is broken" in each for each in plan_problems(graph(), broken))


def test_auto_cuts_inside_of_submeshes_where_layouts_and_devices_are_demanded() -> None:
    weight = "model.0.up.weight"
    pin, layout = pardnn.pin("layer:model.0", 2, 3), pardnn.fix_layout(weight, 1)
    plan = steered(pin, layout, algorithm="auto")
    assert plan.algorithm == "tofu*pardnn"
    assert plan.partition is not None
    assert plan.partition.sharding[weight] == ("Shard(1)",)
    assert devices(plan, "model.0") == {2, 3}
    one_device = pardnn.pin("layer:model.0", 2)
    with pytest.raises(InfeasibleError, match="these 2 constraints cannot hold together:") as odd:
        steered(one_device, pardnn.pin("layer:model.1", 0, 1), layout, algorithm="auto")
    assert odd.value.code == "E303"
    assert "model.1" not in odd.value.message
    assert steered(one_device, algorithm="auto").partition is None


def test_another_layout_that_a_constraint_forbids_is_told_so() -> None:
    weight = "model.0.up.weight"
    case = opened(graph(), steered(pardnn.fix_layout(weight, 1)), "v100")
    others = other_cuts(case, [weight], mixed_of(case))
    why = [each.why or "" for each in others if "cut again" in each.what]
    assert why
    assert all(each.startswith("constraint: layout") for each in why)


def test_a_recipe_that_cuts_otherwise_than_is_demanded_is_told_from_the_search() -> None:
    layout = pardnn.fix_layout("model.0.up.weight", 1)
    with pytest.raises(InfeasibleError, match=r"Use tofu\*pardnn, which does, or auto"):
        steered(layout, algorithm="megatron*heft")
    plan = steered(layout, algorithm="tofu*pardnn")
    assert plan.partition is not None
    assert plan.partition.sharding["model.0.up.weight"] == ("Shard(1)",)


def test_constraints_that_no_submesh_meets_are_told() -> None:
    other = pardnn.pin("layer:model.1", 0, 1)
    for odd in (
        [pardnn.pin("layer:model.0", 1, 2)],
        [pardnn.pin("layer:model.0", 0, 1), pardnn.pin("layer:model.0.up", 2, 3)],
        [pardnn.fix_layout("model.0.up.weight", 0, axis=1)],
    ):
        with pytest.raises(InfeasibleError, match="cannot hold .*inside submeshes") as caught:
            steered(*odd, other)
        assert caught.value.code == "E303"
        assert "model.1" not in caught.value.message
    with pytest.raises(InfeasibleError, match="devices of a submesh, such as 2, 3:"):
        steered(pardnn.pin("layer:model.0", "gpu:3"))
    assert devices(steered(pardnn.pin("layer:model.0", 2, 3)), "model.0") == {2, 3}


def test_pieces_are_a_constraint_of_mixed_plans_or_a_preference() -> None:
    def made(*constraints: Constraint) -> Plan:
        return pardnn.plan(graph(), islands(2, 2), "megatron*1f1b", reserve=0.0, costs="v100",
                           constraints=constraints)  # fmt: skip

    demanded = made(pardnn.fix_pieces(2))
    assert demanded.placement == planned().placement
    assert plan_problems(graph(), demanded) == []
    preferred = made(pardnn.prefer(pardnn.fix_pieces(2), price_s=1.0))
    assert preferred.pieces == demanded.pieces
    with pytest.raises(InfeasibleError, match=r"E303 this constraint cannot hold:\n +300 pieces"):
        made(pardnn.fix_pieces(300))


def test_devices_without_submeshes_and_unknown_parts_are_refused() -> None:
    with pytest.raises(
        UsageError, match="3 devices do not form two or more equal submeshes"
    ) as caught:
        pardnn.plan(graph(), Cluster.uniform(3), "tofu*pardnn", costs="v100")
    assert caught.value.code == "E250"
    for name in ("tofu*nothing", "heft*tofu", "tofu*tofu", "*1f1b"):
        with pytest.raises(UsageError, match="megatron\\*1f1b") as caught:
            pardnn.plan(graph(), islands(2, 2), name, costs="v100")
        assert caught.value.code == "E210"
    plain = build_graph("plain", [dataclasses.replace(op, arguments=None) for op in graph().ops])
    with pytest.raises(UsageError, match="does not say what its ops call"):
        pardnn.plan(plain, islands(2, 2), "tofu*pardnn", costs="v100")


def test_what_other_steps_hold_leaves_a_mixed_plan_less_room() -> None:
    """As the next plan of a step that ran already needs it, for a batch of another size."""
    alone = planned().predicted
    assert alone is not None
    size, held = max(alone.peak_bytes), 4096
    devices = tuple(
        dataclasses.replace(device, memory=size + held) for device in islands(2, 2).devices
    )
    cluster = dataclasses.replace(islands(2, 2), devices=devices)
    state = StateInPlace(held={}, num_devices=4, other_bytes=(0, held, 0, held))
    options = PlanOptions(algorithm="megatron*1f1b", microbatches=2, reserve=0.0, costs="v100")
    costs = preset_costs(graph(), "v100", ("accelerator",))
    plan, _ = make_plan(Problem(graph(), cluster, costs, options, state))
    assert plan.partition is not None
    assert plan.predicted is not None
    found = zip(plan.predicted.peak_bytes, state.other_bytes, strict=True)
    assert all(peak + other <= size + held for peak, other in found)
    full = dataclasses.replace(state, other_bytes=(0, size, 0, 0))
    with pytest.raises(InfeasibleError, match="E301"):
        make_plan(Problem(graph(), cluster, costs, options, full))


def started(start: Plan, cluster: Cluster, step: Graph | None = None, **options: Any) -> Plan:
    return pardnn.plan(step or graph(), cluster, reserve=0.0, costs="v100", start=start, **options)


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.makespan_s


def test_a_mixed_plan_to_start_from_is_kept_or_becomes_faster() -> None:
    start = planned("tofu*pardnn", None)
    found = started(start, islands(2, 2))
    assert found.algorithm == start.algorithm
    assert seconds(found) <= seconds(start)
    assert found.partition == start.partition
    assert "ops stay on their devices" in " ".join(found.notes)
    costs = preset_costs(graph(), "v100", ("accelerator",))
    problem = Problem(graph(), islands(2, 2), costs, PlanOptions(reserve=0.0), start=start)

    def nothing(*_: Any) -> Any:
        raise InfeasibleError("no placement of columns")

    kept = decide_mixed_near(problem, nothing, nothing)
    assert kept.sharded is not None
    assert kept.sharded.plan.order == start.order
    assert kept.sharded.plan.placement == start.placement
    with pytest.raises(UsageError, match="cuts ops inside submeshes") as caught:
        started(start, islands(2, 2), algorithm="heft")
    assert caught.value.code == "E249"


def test_a_mixed_plan_is_repaired_for_other_devices_limits_steps_and_demands() -> None:
    wide = pardnn.plan(graph(), islands(3, 2), "tofu*pardnn", reserve=0.0, costs="v100")
    fewer = started(wide, islands(2, 2))
    assert fewer.partition is not None
    assert wide.partition is not None
    assert fewer.partition.submeshes == 2
    weights = [op.name for op in graph().ops if op.kind == "parameter"]
    laid = [plan.partition.sharding for plan in (wide, fewer) if plan.partition]
    assert all(laid[0][name] == laid[1][name] for name in weights)
    assert "on devices that are gone" in " ".join(fewer.notes)
    longer = started(wide, islands(3, 2), graph(depth=5))
    assert longer.partition is not None
    assert all(longer.partition.sharding[name] == laid[0][name] for name in weights)
    known = re.search(r"of (\d+) ops stay on their devices; (\d+) others", str(longer.notes))
    assert known is not None
    assert int(known[1]) > 2 * int(known[2]) > 0
    laid_out = started(wide, islands(3, 2), constraints=[pardnn.fix_layout(weights[0], 1)])
    assert laid_out.partition is not None
    assert laid_out.partition.sharding[weights[0]] == ("Shard(1)",)
    pinned = started(wide, islands(3, 2), constraints=[pardnn.pin("layer:model.3", 0, 1)])
    assert devices(pinned, "model.3") == {0, 1}
    alone = started(wide, Cluster.uniform(3))
    assert "planned from scratch" in " ".join(alone.notes)


def test_a_mixed_plan_to_start_from_may_be_edited() -> None:
    """As other plans: an op is placed elsewhere by hand, and the messages no longer fit."""
    start = planned("tofu*pardnn", None)
    name = next(name for name in start.placement if name.startswith("addmm@"))
    placement = {**start.placement, name: (start.placement[name] + 2) % 4}
    found = started(dataclasses.replace(start, placement=placement), islands(2, 2))
    assert found.partition is not None
    assert plan_problems(graph(), found) == []


def test_a_mixed_plan_to_start_from_fits_a_new_limit() -> None:
    start = planned("tofu*pardnn", None)
    assert start.predicted is not None
    limit = max(start.predicted.peak_bytes) * 9 // 10
    small = tuple(dataclasses.replace(each, memory=limit) for each in islands(2, 2).devices)
    found = started(start, dataclasses.replace(islands(2, 2), devices=small))
    assert found.predicted is not None
    assert max(found.predicted.peak_bytes) <= limit
    assert found.partition is not None


def test_auto_takes_a_mixed_plan_where_it_is_fastest() -> None:
    """Two samples on four devices: pieces alone leave two idle, a cut of all sends much."""
    wide, cluster = graph(1024, 256, 2, 2), islands(2, 2)
    found = pardnn.plan(wide, cluster, costs="v100", reserve=0.0, microbatches=2)
    assert found.partition is not None
    assert found.partition.submeshes == 2
    assert found.predicted is not None
    others = [
        pardnn.plan(wide, cluster, name, costs="v100", reserve=0.0, microbatches=pieces).predicted
        for name, pieces in (("tofu", None), ("modulo", 2), ("data-parallel", None))
    ]
    for other in others:
        assert other is not None
        assert found.predicted.makespan_s < other.makespan_s
    tried = [each.algorithm for each in found.tried if "submeshes of 2" in each.algorithm]
    assert "2 pieces, submeshes of 2: megatron*pardnn" in tried


def test_the_same_problem_gives_the_same_plan() -> None:
    planned.cache_clear()
    first = plan_to_json(planned("tofu*pardnn", 2))
    planned.cache_clear()
    assert plan_to_json(planned("tofu*pardnn", 2)) == first


def test_a_mixed_plan_takes_about_as_long_as_its_columns() -> None:
    """Between the work of one column shared by both submeshes, and all of it on one."""
    wide, cluster = graph(1024, 512, 2), islands(2, 2)
    problem = Problem(wide, cluster, preset_costs(wide, "v100"), PlanOptions(reserve=0.0))
    _, cut = problem_in_pieces(problem, 2, 1)
    sharding = cut_of_submesh(problem, cut, "megatron", 2)
    busy = float(columns_of(problem, cut, sharding).column.costs.on("accelerator").sum())
    mixed = pardnn.plan(wide, cluster, "megatron*pardnn", reserve=0.0, costs="v100",
                        microbatches=2)  # fmt: skip
    assert mixed.predicted is not None
    assert 0.9 * busy / 2 < mixed.predicted.makespan_s < busy


@pytest.mark.parametrize("target", [[], "t", None, 3, {}, {"tensor": [1]}])
def test_an_update_of_what_is_no_tensor_is_refused(target: Any) -> None:
    """Found by fuzzing: it ended as an internal error."""
    plan = planned("tofu*pardnn", 2)
    assert plan.partition is not None
    ops = list(plan.partition.ops)
    slices = [i for i, op in enumerate(ops) if op.kind == FETCH and op.inputs]
    ops[slices[0]] = dataclasses.replace(
        ops[slices[0]], kind="pardnn.update", arguments={"args": [target, [], target]}
    )
    partition = dataclasses.replace(plan.partition, ops=tuple(ops))
    assert plan_problems(graph(), dataclasses.replace(plan, partition=partition, predicted=None))
