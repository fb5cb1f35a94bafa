"""Plans with microbatches: what is chosen, what the checker finds, and what is refused."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pardnn
from pardnn.api import advice, run
from pardnn.api.advice import planned as advised
from pardnn.api.draw import draw_plan, schedule_grid
from pardnn.backends.torch.capture.capture import capture
from pardnn.cli.options import plan_options
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, PardnnError, UsageError
from pardnn.graph.ir import Graph, Op
from pardnn.plan.check import plan_problems
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.plan.pieces import INTO, Pieces
from pardnn.plan.plan import Plan, planned_graph
from pardnn.planner.costs import costs_for
from pardnn.planner.finished import finished
from pardnn.planner.make_plan import make_plan
from pardnn.planner.microbatches.decide import in_stages
from pardnn.planner.microbatches.in_pieces import completed, polished_pieces, problem_in_pieces
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.search import portfolio
from tests.backends.torch import models


def deep() -> models.Entry:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return models.classify_step, (
        model,
        optimizer,
        torch.randn(4096, 64),
        torch.randint(4, (4096,)),
    )


@functools.cache
def graph() -> Graph:
    step, args = deep()
    return capture(step, *args)


@functools.cache
def planned(microbatches: Any, algorithm: str = "heft", devices: int = 2) -> Plan:
    cluster = Cluster.uniform(devices, bandwidth=300e9)
    return pardnn.plan(graph(), cluster, algorithm, reserve=0.0, costs="v100",
                       microbatches=microbatches)  # fmt: skip


def test_a_plan_says_how_many_pieces_and_survives_its_file() -> None:
    plan = planned(4)
    assert plan.notes == ("batch in 4 pieces",)
    assert plan.pieces is not None
    assert plan.pieces.points == (0, 1024, 2048, 3072, 4096)
    again = plan_from_json(plan_to_json(plan))
    assert plan_problems(graph(), again) == []
    assert plan_to_json(again) == plan_to_json(plan)


def test_the_schedule_stands_as_a_grid() -> None:
    """Forward, gradients and the update of each piece in the order of time; the first stage has no
    gradients of activations.
    """
    plan = planned(4, "1f1b")
    lines = schedule_grid(graph(), plan, 100, costs_for(graph(), plan.cluster, "v100"))
    assert len(lines) == 2
    assert max(map(len, lines)) <= 100
    cells = [line.split()[1:] for line in lines]
    first, last = ("".join(cell[0] for cell in row) for row in cells)
    assert last.index("F") < last.index("B") < last.index("W") < last.rindex("U")
    assert first.index("F") < first.index("W") < first.rindex("U")
    assert "B" not in first
    assert {f"{what}{piece}" for what in "FW" for piece in range(4)} <= set(cells[0]) & set(
        cells[1]
    )
    assert schedule_grid(graph(), plan, 20, costs_for(graph(), plan.cluster, "v100")) == []


def test_one_device_holds_less_in_pieces() -> None:
    whole, cut = (planned(n, "single", 1).predicted for n in (None, 8))
    assert whole is not None
    assert cut is not None
    assert cut.peak_bytes[0] < whole.peak_bytes[0]


def test_stages_of_pieces_fit_where_the_whole_batch_does_not() -> None:
    """As tight as one piece after the other allows, and each device does all pieces of its own."""
    cluster = Cluster.uniform(2, bandwidth=300e9, memory="3MiB")
    with pytest.raises(PardnnError, match="E301|fit"):
        pardnn.plan(graph(), cluster, "contiguous", reserve=0.0, costs="v100")
    plan = pardnn.plan(graph(), cluster, "contiguous", reserve=0.0, costs="v100", microbatches=8)
    assert all(
        plan.placement[f"{name}@0"] == plan.placement[f"{name}@7"] for name in ("addmm", "tanh_4")
    )


@functools.cache
def staged(memory: str | None) -> Plan:
    cluster = Cluster.uniform(2, bandwidth=300e9, memory=memory)
    return pardnn.plan(graph(), cluster, "modulo", reserve=0.0, costs="v100", microbatches=8)


@pytest.mark.long
def test_layers_become_stages_whose_order_keeps_to_the_limit() -> None:
    """Told nothing but the graph: blocks of layers, and each product adds to one accumulator."""
    plan = staged("3MiB")
    assert plan_problems(graph(), plan) == []
    assert plan.algorithm == "modulo"
    assert plan.predicted is not None
    assert max(plan.predicted.peak_bytes) <= 3 << 20
    layers = [plan.placement["addmm@0"], plan.placement["addmm_6@0"]]
    assert len(set(layers)) == 2
    assert added(plan, 7).outputs[0].alias_of == added(plan, 6).outputs[0].name
    by_hand = pardnn.plan(
        graph(), Cluster.uniform(2, bandwidth=300e9, memory="3MiB"), "contiguous", reserve=0.0,
        costs="v100", microbatches=8,
    ).predicted  # fmt: skip
    assert by_hand is not None
    assert plan.predicted.makespan_s < by_hand.makespan_s


def added(plan: Plan, piece: int) -> Op:
    """A product of the last layer but one that adds itself to an accumulator."""
    ops = {op.name: op for op in pieces_of(plan).ops}
    name = next(op.name for op in ops.values() if op.kind == INTO[PRODUCT])
    return ops[f"{name.rpartition('@')[0]}@{piece}"]


@pytest.mark.parametrize("piece", [1, 7])
def test_a_product_that_adds_to_another_sum_is_found(piece: int) -> None:
    plan = staged("3MiB")
    op, args = added(plan, piece), call(added(plan, piece))["args"]
    other = {"tensor": next(o for o in pieces_of(plan).ops if o.kind == PRODUCT).outputs[0].name}
    for wrong in ([other, *args[1:]], [args[0], args[2], args[1]], [*args[:2], other]):
        inputs = tuple(each["tensor"] for each in wrong)
        assert faulty(plan, op, inputs=inputs, arguments={"args": wrong})[0].startswith("pieces:")
    assert faulty(plan, op, outputs=(dataclasses.replace(op.outputs[0], alias_of=None),))
    assert faulty(plan, op, kind=PRODUCT)


def test_auto_is_no_slower_than_the_whole_batch() -> None:
    found, whole = planned("auto").predicted, planned(None).predicted
    assert found is not None
    assert whole is not None
    assert found.makespan_s <= whole.makespan_s


def test_planning_is_reproducible() -> None:
    assert plan_to_json(planned(3)) == plan_to_json(planned.__wrapped__(3))


PRODUCT = "aten.mm.default"


def op_named(plan: Plan, end: str) -> Op:
    return next(op for op in planned_graph(graph(), plan).ops if op.name.endswith(end))


def faulty(plan: Plan, op: Op, **changes: Any) -> list[str]:
    assert plan.pieces is not None
    ops = tuple(dataclasses.replace(o, **changes) if o is op else o for o in plan.pieces.ops)
    pieces = dataclasses.replace(plan.pieces, ops=ops)
    return plan_problems(graph(), dataclasses.replace(plan, pieces=pieces))


def swapped(args: list[Any]) -> dict[str, Any]:
    return {"args": [args[1], args[0], *args[2:]]}


def pieces_of(plan: Plan) -> Pieces:
    assert plan.pieces is not None
    return plan.pieces


def call(op: Op) -> dict[str, Any]:
    assert op.arguments is not None
    return op.arguments


FAULTS: dict[str, Callable[[Plan], list[str]]] = {
    "other samples": lambda p: faulty(
        p, (op := op_named(p, ":slice@1")),
        arguments={"args": [call(op)["args"][0], [[0, 1024], [0, 64]]]},
    ),
    "another order of sums": lambda p: faulty(
        p, (op := op_named(p, ":add@2")), arguments=swapped(call(op)["args"])
    ),
    "a part twice": lambda p: faulty(
        p, (op := op_named(p, ":add@2")), inputs=(op.inputs[0], op.inputs[1][:-1] + "1"),
        arguments={"args": [{"tensor": op.inputs[0]}, {"tensor": op.inputs[1][:-1] + "1"}]},
    ),
    "another call": lambda p: faulty(p, op_named(p, "tanh@0"), kind="aten.sigmoid.default"),
    "another number": lambda p: faulty(
        p, (op := op_named(p, "nll_loss_backward@1")),
        arguments={"args": [*call(op)["args"][:4], 3, *call(op)["args"][5:]]},
    ),
    "another piece": lambda p: faulty(
        p, (op := op_named(p, "tanh@1")), inputs=(op.inputs[0][:-1] + "0",),
        arguments={"args": [{"tensor": op.inputs[0][:-1] + "0"}]},
    ),
    "no batch": lambda p: plan_problems(
        graph(), dataclasses.replace(
            p, pieces=dataclasses.replace(pieces_of(p), points=(0, 1024, 2048, 3072, 4095))
        ),
    ),
    "an empty piece": lambda p: plan_problems(
        graph(), dataclasses.replace(
            p, pieces=dataclasses.replace(pieces_of(p), points=(0, 1024, 1024, 3072, 4096))
        ),
    ),
    "a missing op": lambda p: plan_problems(
        graph(), dataclasses.replace(
            p, pieces=dataclasses.replace(
                pieces_of(p), ops=tuple(o for o in pieces_of(p).ops if o.name != "tanh@0")
            ),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_checker_finds(name: str) -> None:
    assert plan_problems(graph(), planned(4)) == []
    problems = FAULTS[name](planned(4))
    assert problems
    assert problems[0].startswith("pieces:")


def test_refusals_name_what_clashes() -> None:
    with pytest.raises(UsageError, match="of at least 1"):
        PlanOptions(microbatches=0)
    with pytest.raises(UsageError, match="number or auto"):
        plan_options(microbatches="many")
    assert plan_options(microbatches="auto").microbatches == "auto"
    with pytest.raises(PardnnError, match="4096 samples|4096") as caught:
        planned(5000)
    assert caught.value.code == "E226"


def test_it_is_verified_by_its_losses_and_drawn() -> None:
    """Sums in pieces round otherwise, and Adam makes much of that: the state has no tolerance."""
    state = {"tensors": 2, "differing": 1, "largest_difference": 1.0, "worst": "w"}
    plan = planned(4)
    assert run._compared(graph(), plan, [1.0], [1.0], state)["verified"]
    assert not run._compared(graph(), planned(None), [1.0], [1.0], state)["verified"]
    went_on = run._compared(graph(), planned(None), [1.0], [1.0], state, kept_bits=False)
    assert went_on["verified"], "the checkpoint that it went on from was of a cut plan"
    assert plan.cluster is not None
    costs = costs_for(graph(), plan.cluster, "v100")
    assert "<svg" in draw_plan(graph(), plan, costs)


@pytest.mark.long
def test_what_does_not_fit_is_told_that_pieces_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "SECONDS", 600.0)  # other work on the machine is no matter here
    whole = pardnn.plan(graph(), Cluster.uniform(1), "single", reserve=0.0, costs="v100").predicted
    assert whole is not None
    cluster = Cluster.uniform(1, memory=whole.peak_bytes[0] * 6 // 10)
    options = PlanOptions(algorithm="single", reserve=0.0, costs="v100")
    with pytest.raises(InfeasibleError) as error:
        advised(graph(), cluster, options)
    tried = [each for each in error.value.details["try"] if "--microbatches" in each]
    assert len(tried) == 1
    found = pardnn.plan(
        graph(),
        cluster,
        "single",
        reserve=0.0,
        costs="v100",
        microbatches=int(tried[0].split()[-1]),
        recompute="re" in tried[0],
    )
    assert found.pieces is not None


def test_local_search_improves_stages_within_the_limit() -> None:
    alone = planned(4, "single", devices=1).predicted
    assert alone is not None
    cluster = Cluster.uniform(3, memory=int(0.9 * alone.peak_bytes[0]))
    options = PlanOptions(microbatches="auto", costs="v100", reserve=0.0)
    problem = Problem(graph(), cluster, costs_for(graph(), cluster, "v100"), options)
    pieces, inner = problem_in_pieces(problem, 4, 1)
    stages = completed(problem, inner, pieces, in_stages(problem, inner))
    found = [polished_pieces(problem, stages) for _ in range(2)]
    assert found[0].makespan_s < 0.99 * stages.makespan_s
    plans = [finished(problem, each)[0] for each in found]
    assert plan_problems(graph(), plans[0]) == []
    assert plan_to_json(plans[0]) == plan_to_json(plans[1])
    assert plans[0].pieces == pieces


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"recompute": True}])
@pytest.mark.parametrize("algorithm", ["modulo", "heft"])
def test_constraints_hold_of_every_piece_and_second_call(options, algorithm: str) -> None:
    demanded = [pardnn.pin("layer:model.1", 1), pardnn.apart("layer:model.2", "layer:model.3")]
    plan = pardnn.plan(
        graph(), Cluster.uniform(2), algorithm, costs="v100", constraints=demanded, **options
    )
    names = [name for name in plan.placement if name.startswith("tanh_1")]
    assert len(names) >= options.get("microbatches", 1)
    assert plan.constraints == tuple(demanded)
    assert plan_problems(graph(), plan) == []


@functools.cache
def with_states() -> Graph:
    step, (model, _, x, y) = deep()
    return capture(step, model, torch.optim.Adam(model.parameters()), x[:8], y[:8])


@pytest.mark.parametrize("pieces", [None, 2])
def test_constraints_that_only_state_on_the_host_leaves_room_for(pieces: int | None) -> None:
    """All layers on one device, which the state alone would fill."""
    alone = pardnn.plan(with_states(), Cluster.uniform(1), "single", costs="v100").predicted
    assert alone is not None
    cluster = Cluster.uniform(2, memory=int(0.6 * alone.peak_bytes[0]))
    demanded = (pardnn.together("layer:model"), pardnn.pin("layer:model.2", 1))
    options = {"reserve": 0.0, "costs": "v100", "microbatches": pieces, "constraints": demanded}
    with pytest.raises(InfeasibleError):
        pardnn.plan(with_states(), cluster, "heft", **options)
    plan = pardnn.plan(with_states(), cluster, "heft", offload=True, **options)
    assert plan.offload
    assert plan_problems(with_states(), plan) == []
    assert {plan.placement[name] for name in plan.offload} == {1}


def test_an_interrupted_search_keeps_the_best_plan_of_a_cut_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages are found, and their pieces not placed otherwise yet."""
    decide = portfolio.decide

    def interrupted(problem: Problem, algorithm: str, **known: Any) -> portfolio.Outcome:
        if algorithm == "gpipe":
            raise KeyboardInterrupt
        return decide(problem, algorithm, **known)

    monkeypatch.setattr(portfolio, "decide", interrupted)
    cluster = Cluster.uniform(2, bandwidth=300e9)
    options = PlanOptions(microbatches=4, reserve=0.0, costs="v100")
    problem = Problem(graph(), cluster, costs_for(graph(), cluster, "v100"), options)
    plan, result = make_plan(problem, keep_best=True)
    assert (plan.algorithm, plan.pieces and len(plan.pieces.points)) == ("modulo", 5)
    assert plan_problems(graph(), plan, cluster) == []
    assert any("interrupted" in note for note in result.notes)
