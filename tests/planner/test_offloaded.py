"""Plans with optimizer state on the host: as little as makes a step fit."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pardnn
from pardnn.api import advice
from pardnn.api.advice import planned
from pardnn.api.draw import draw_plan
from pardnn.api.simulate import simulate
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, InvalidPlanError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor
from pardnn.place.recompute import search
from pardnn.plan.check import check_plan
from pardnn.plan.constraints import Constraint
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import check_state_kept
from pardnn.planner import make_plan
from pardnn.planner.costs import costs_for
from pardnn.planner.offload import cut as offload_cut
from pardnn.planner.offload.fewest import fewest
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from tests.long_cases import long_but
from tests.strategies import examples

pytestmark = pytest.mark.jit

MIB = 1 << 20


def states(sizes: list[int]) -> Graph:
    """A step that adds one number to each of some states, one after the other."""
    one = Tensor(name="x", bytes=4, shape=(1,), dtype="float32")
    ops = [Op(name="x", kind="input", outputs=(one,))]
    for i, size in enumerate(sizes):
        made = Tensor(name=f"s{i}", bytes=4 * size, shape=(size,), dtype="float32")
        ops.append(Op(name=f"s{i}", kind="state", memory="residual", group=f"g{i}",
                      outputs=(made,)))  # fmt: skip
    for i, size in enumerate(sizes):
        made = Tensor(name=f"t{i}", bytes=4 * size, shape=(size,), dtype="float32",
                      alias_of=f"s{i}")  # fmt: skip
        args = {"args": [{"tensor": f"s{i}"}, {"tensor": "x"}]}
        ops.append(Op(name=f"t{i}", kind="aten.add_.Tensor", inputs=(f"s{i}", "x"),
                      memory="reference", group=f"g{i}", outputs=(made,), arguments=args,
                      seconds={"accelerator": 1e-3}))  # fmt: skip
    return build_graph("states", ops)


def offloaded(graph: Graph, memory: int, devices: int = 1) -> Plan:
    cluster = Cluster.uniform(devices, memory=memory)
    return pardnn.plan(graph, cluster, "heft", reserve=0.0, offload=True)


def test_a_step_fits_that_did_not() -> None:
    graph = states([MIB] * 4)  # 16 MiB
    cluster = Cluster.uniform(1, memory=9 * MIB)
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, cluster, reserve=0.0)
    plan = offloaded(graph, 9 * MIB)
    assert plan.offload is not None
    assert len(plan.offload) == 3  # one is there at a time beside the one that stays
    assert plan.predicted is not None
    copies = 6 * (10e-6 + 4 * MIB / 12e9)
    assert plan.predicted.makespan_s == pytest.approx(4e-3 + copies)
    assert "optimizer state on the host: 12 MiB in 3 tensors" in plan.notes
    check_plan(graph, plan_from_json(plan_to_json(plan)))
    assert plan_to_json(offloaded(graph, 9 * MIB)) == plan_to_json(plan)
    simulated = simulate(graph, plan)
    assert simulated.makespan_s == pytest.approx(plan.predicted.makespan_s)
    assert "<svg" in draw_plan(graph, plan, costs_for(graph, cluster))


def test_nothing_goes_to_the_host_where_a_step_fits() -> None:
    assert offloaded(states([MIB] * 4), 17 * MIB).offload is None


def test_state_that_lies_on_the_host_stays_there() -> None:
    graph = states([MIB] * 4)
    plan = offloaded(graph, 9 * MIB)
    roomy = Cluster.uniform(1, memory=64 * MIB)
    there = pardnn.state_in_place(graph, plan)
    assert pardnn.plan(graph, roomy, "heft", reserve=0.0, state=there).offload == plan.offload
    moved = pardnn.plan(graph, roomy, "heft", reserve=0.0)
    with pytest.raises(InvalidPlanError, match="the host of device 0"):
        check_state_kept(graph, moved, there)


def test_state_on_the_host_that_another_graph_returns_is_to_be_moved() -> None:
    graph = states([MIB] * 4)
    there = pardnn.state_in_place(graph, offloaded(graph, 9 * MIB))
    returned = Op(name="loss", kind=LOSS_KIND, inputs=("x",), arguments={"result": ["t0", "t1"]})
    other = build_graph("returning", [*graph.ops, returned])
    with pytest.raises(InfeasibleError, match="has to be on its device"):
        pardnn.plan(other, Cluster.uniform(1, memory=64 * MIB), "heft", reserve=0.0, state=there)


def test_shards_of_cut_states_go_to_the_host_as_few_as_are_needed() -> None:
    graph = states([MIB] * 4)  # 8 MiB a device, cut in two
    tight, roomy = (Cluster.uniform(2, memory=size * MIB) for size in (5, 64))
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, tight, "tofu", reserve=0.0)
    made = pardnn.plan(graph, tight, "tofu", reserve=0.0, offload=True)
    plan = plan_from_json(plan_to_json(made))
    assert plan.partition is not None
    assert plan.offload == ("s0@0", "s0@1", "s1@0", "s1@1", "s2@0", "s2@1")
    assert "optimizer state on the host: 12 MiB in 6 shards" in plan.notes  # one is there at a time
    check_plan(graph, plan)
    assert plan.predicted is not None
    assert max(plan.predicted.peak_bytes) <= 5 * MIB
    seconds = simulate(graph, plan).makespan_s
    assert seconds == pytest.approx(plan.predicted.makespan_s)
    there = pardnn.state_in_place(graph, plan)
    again = pardnn.plan(graph, roomy, "tofu", reserve=0.0, state=there)
    assert again.offload == plan.offload
    assert pardnn.plan(graph, roomy, "tofu", reserve=0.0, offload=True).offload is None
    with pytest.raises(InfeasibleError, match="with optimizer state on the host"):
        pardnn.plan(graph, Cluster.uniform(2, memory=MIB), "tofu", reserve=0.0, offload=True)


def test_shards_that_lie_on_devices_stay_there() -> None:
    before, graph = states([MIB]), states([MIB] * 4)
    roomy, tight = (Cluster.uniform(2, memory=size * MIB) for size in (64, 5))
    there = pardnn.state_in_place(before, pardnn.plan(before, roomy, "tofu", reserve=0.0))
    plan = pardnn.plan(graph, tight, "tofu", reserve=0.0, offload=True, state=there)
    assert plan.offload == ("s1@0", "s1@1", "s2@0", "s2@1", "s3@0", "s3@1")
    with pytest.raises(InfeasibleError, match="with optimizer state on the host"):
        pardnn.plan(graph, Cluster.uniform(2, memory=3 * MIB), "tofu", reserve=0.0, offload=True,
                    state=there)  # fmt: skip


def test_no_cut_that_leaves_state_on_the_host_is_an_error_of_the_plan() -> None:
    def none(_problem: Problem, _names: Any) -> Outcome:
        raise InfeasibleError("the state would move")

    graph, cluster = states([MIB]), Cluster.uniform(2)
    problem = Problem(graph, cluster, costs_for(graph, cluster, None), PlanOptions())
    with pytest.raises(InfeasibleError, match="no cut for more memory leaves the state"):
        offload_cut.decide_cut_offloaded(problem, ["tofu"], none, stays=["s0"])


def test_a_cut_that_several_limits_give_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, least = list[Plan](), offload_cut._least

    def noted(problem: Problem, base: Outcome, kept: set[str]) -> Outcome:
        assert base.sharded is not None
        searched.append(dataclasses.replace(base.sharded.plan, cluster=None))
        return least(problem, base, kept)

    monkeypatch.setattr(offload_cut, "_least", noted)
    cluster = Cluster.uniform(2, memory=5 * MIB)
    pardnn.plan(states([MIB] * 4), cluster, "tofu", reserve=0.0, offload=True)
    assert searched
    assert all(one != other for one, other in itertools.combinations(searched, 2))


def trained(layers: int, count: int) -> Graph:
    """A step of layers whose gradients read their inputs, and of states, of 4000 bytes each."""

    def op(name: str, *inputs: str, kind: str = "aten.mul.Tensor", alias: str = "") -> Op:
        made = Tensor(name=name, bytes=4000, shape=(1000,), dtype="float32", alias_of=alias or None)
        args = [*({"tensor": each} for each in inputs), *([0.5] if alias else [])]
        return Op(name=name, kind=kind, inputs=inputs, outputs=(made,), arguments={"args": args},
                  seconds={"accelerator": 1e-3})  # fmt: skip

    def source(name: str, kind: str) -> Op:
        return dataclasses.replace(op(name, kind=kind), arguments={}, seconds=None)

    states = [dataclasses.replace(source(f"s{i}", "state"), memory="residual", group=f"g{i}")
              for i in range(count)]  # fmt: skip
    updates = [
        dataclasses.replace(op(f"t{i}", f"s{i}", kind="aten.mul_.Tensor", alias=f"s{i}"),
                            memory="reference", group=f"g{i}") for i in range(count)]  # fmt: skip
    forward = [op(f"f{i}", f"f{i - 1}", f"f{i - 1}") for i in range(1, layers + 1)]
    gradients = [f"f{layers}", *(f"b{i}" for i in reversed(range(layers)))]
    backward = [op(name, before, f"f{layers - 1 - i}")
                for i, (before, name) in enumerate(itertools.pairwise(gradients))]  # fmt: skip
    ops = [source("f0", "input"), *states, *updates, *forward, *backward]
    return build_graph("trained", ops)


def cut(graph: Graph, memory: int, *, recompute: bool = True, offload: bool = True) -> Plan:
    cluster = Cluster.uniform(2, memory=memory)
    return pardnn.plan(graph, cluster, "tofu", reserve=0.0, recompute=recompute, offload=offload)


def test_second_calls_and_state_on_the_host_do_together_what_neither_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each device has 2000 bytes of each tensor, and two states that go to the host."""
    monkeypatch.setattr(search, "MOST_ROUNDS", 5)
    graph = trained(layers=3, count=2)
    with pytest.raises(InfeasibleError):
        cut(graph, 9000, offload=False)
    with pytest.raises(InfeasibleError):
        cut(graph, 9000, recompute=False)
    plan = cut(graph, 9000)
    assert plan.recompute
    assert plan.offload
    check_plan(graph, plan)
    with pytest.raises(InfeasibleError) as failure:
        cut(graph, 7999)
    assert failure.value.details["bytes"] == 8000, "not the plan that came nearest"


def whole(
    graph: Graph, memory: int, *, recompute: bool = True, offload: bool = True, pieces: Any = None
) -> Plan:
    cluster = Cluster.uniform(1, memory=memory)
    return pardnn.plan(graph, cluster, "heft", reserve=0.0, recompute=recompute, offload=offload,
                       microbatches=pieces)  # fmt: skip


@pytest.mark.long
def test_beside_second_calls_as_few_states_are_on_the_host_as_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each whole search takes as long as a hundred placements, so there is one, with none there."""
    monkeypatch.setattr(search, "MOST_ROUNDS", 5)
    searched = list[int]()

    def noted(problem: Problem, *args: Any) -> Outcome:
        searched.append(sum(op.name.endswith("<host") for op in problem.graph.ops))
        return recomputed_once(problem, *args)

    recomputed_once = make_plan.decide_recomputed
    monkeypatch.setattr(make_plan, "decide_recomputed", noted)
    graph = trained(layers=6, count=6)
    least = {}
    for options in ((True, False), (False, True), (True, True)):
        recompute, offload = options
        for least[options] in range(3000, 60_000, 2000):
            try:
                whole(graph, least[options], recompute=recompute, offload=offload)
            except InfeasibleError:
                continue
            break
    assert least[True, True] < min(least[True, False], least[False, True])
    moved = []
    for limit in range(least[True, True], least[False, True], 4000):
        searched.clear()
        plan = whole(graph, limit)
        check_plan(graph, plan)
        assert plan.recompute
        moved.append(len(plan.offload or ()))
        assert searched == [0]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < moved[0]


def test_without_state_that_may_go_second_calls_are_looked_for_alone() -> None:
    """SGD has none: a step that does not fit is refused, one that does is planned."""
    graph = trained(layers=6, count=0)
    with pytest.raises(InfeasibleError, match="E301"):
        whole(graph, 8_000)
    plans = [whole(graph, 24_000, offload=offload) for offload in (False, True)]
    assert plans[0].recompute
    assert plans[0].recompute == plans[1].recompute
    assert not plans[1].offload


def test_what_is_faster_of_second_calls_and_state_on_the_host_is_taken() -> None:
    """A copy takes 10 us and a call 1 ms, so where the host is enough, no op runs twice."""
    graph = trained(layers=3, count=6)
    for memory in range(10_000, 60_000, 4000):
        try:
            alone = whole(graph, memory, recompute=False)
        except InfeasibleError:
            continue
        both = whole(graph, memory)
        assert both.predicted is not None
        assert alone.predicted is not None
        assert both.predicted.makespan_s <= alone.predicted.makespan_s
        assert not both.recompute
        return
    raise AssertionError("nothing fits")


def test_a_copy_in_another_place_is_found_in_a_cut_plan() -> None:
    plan = pardnn.plan(states([MIB] * 4), Cluster.uniform(2, memory=5 * MIB), "tofu", reserve=0.0,
                       offload=True)  # fmt: skip
    first = plan.order[0]
    late = (*(name for name in first if name != "s0@0<host"), "s0@0<host")
    early = ("s0@0>host", *(name for name in first if name != "s0@0>host"))
    for row in (late, early):
        spoilt = dataclasses.replace(plan, order=(row, *plan.order[1:]), predicted=None)
        with pytest.raises(InvalidPlanError):
            check_plan(states([MIB] * 4), spoilt)


def test_what_does_not_fit_on_the_host_either_is_told() -> None:
    with pytest.raises(InfeasibleError, match="E301"):
        offloaded(states([MIB] * 4), 3 * MIB)


@examples(12)
@given(
    sizes=st.lists(st.integers(1, 50_000), min_size=1, max_size=6),
    devices=st.integers(1, 3),
    parts=st.lists(st.floats(0.1, 1.0), min_size=2, max_size=3),
)
def test_plans_fit_and_more_memory_is_never_slower(
    sizes: list[int], devices: int, parts: list[float]
) -> None:
    graph, before = states(sizes), float("inf")
    for part in sorted(parts):
        limit = int(part * 4 * sum(sizes)) + 4
        try:
            plan = offloaded(graph, limit, devices)
        except InfeasibleError:
            assert before == float("inf"), "a larger limit fits no more"
            assert limit < 4 * max(sizes) + 4 or devices > 1
            continue
        check_plan(graph, plan)
        assert plan.predicted is not None
        assert max(plan.predicted.peak_bytes) <= limit
        if devices == 1:
            assert plan.predicted.makespan_s <= before
            before = plan.predicted.makespan_s


def test_an_error_names_the_option_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "SECONDS", 60.0)
    graph, cluster = states([MIB] * 4), Cluster.uniform(1, memory=9 * MIB)
    with pytest.raises(InfeasibleError, match="--offload"):
        planned(graph, cluster, PlanOptions(reserve=0.0))
    small = Cluster.uniform(1, memory=3 * MIB)
    with pytest.raises(InfeasibleError) as failure:
        planned(graph, small, PlanOptions(reserve=0.0))
    assert "--offload" not in str(failure.value)


@pytest.mark.parametrize(
    "demanded",
    [
        (pardnn.pin("s0", 1), pardnn.pin("s3", 0)),
        (pardnn.forbid(0, what="s1"),),
        (pardnn.together("s0", "s1"),),
        (pardnn.apart("s0", "s1"),),
    ],
    ids=lambda demanded: demanded[0].kind,
)
@pytest.mark.parametrize("algorithm", long_but(["auto"], ["auto", "heft"]))
def test_constraints_hold_beside_it(demanded: tuple[Constraint, ...], algorithm: str) -> None:
    graph, cluster = states([MIB] * 4), Cluster.uniform(2, memory=5 * MIB)
    options = {"algorithm": algorithm, "reserve": 0.0, "constraints": demanded}
    with pytest.raises(InfeasibleError):
        pardnn.plan(graph, cluster, **options)
    plan = pardnn.plan(graph, cluster, offload=True, **options)
    assert plan.offload
    assert plan.constraints == demanded
    check_plan(graph, plan)


@pytest.mark.parametrize("most", range(1, 10))
def test_no_fewer_states_on_the_host_would_do(most: int) -> None:
    """Beside all numbers of them, one after the other."""
    for least in range(most + 2):
        asked: list[int] = []

        def tried(count: int, least: int = least, asked: list[int] = asked) -> Any:
            asked.append(count)
            if count < least and count == most:
                raise InfeasibleError("not with all of them either")
            return count if count >= least else None

        if least > most:
            with pytest.raises(InfeasibleError, match="not with all"):
                fewest(tried, most)
            continue
        assert fewest(tried, most) == least
        assert len(asked) == len(set(asked)) <= 2 + most.bit_length()
