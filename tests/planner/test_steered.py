"""Layouts, pieces, preferences: plans meet them, the checker proves it, conflicts are minimal."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import pardnn
from pardnn.cli.main import app
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, InvalidPlanError, PardnnError, UsageError
from pardnn.graph.file import write_graph
from pardnn.graph.layers import origin
from pardnn.plan.constraints import Constraint, constraint_to_dict, read_constraints
from pardnn.plan.file import plan_from_json, plan_to_json
from pardnn.planner import make_plan, to_run
from pardnn.planner.microbatches import decide
from testbed.hand_graphs import mlp
from tests.place.machines import cluster_of
from tests.planner.test_constraints import _blocks

pytestmark = pytest.mark.jit


def _graph():
    """A step of two products with a batch that can be cut, captured by hand."""
    return mlp(64, 32, 48, 16)


def _weights() -> list[str]:
    return [op.outputs[0].name for op in _graph().ops if op.kind == "parameter"]


def _plan(demanded, devices: int = 2, algorithm: str = "auto", **options):
    cluster = Cluster.uniform(devices)
    return pardnn.plan(_graph(), cluster, algorithm, costs="k80", constraints=demanded, **options)


@pytest.fixture
def quick_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` tries one placement and one cut: what holds is the same, in less time."""
    monkeypatch.setattr(to_run, "algorithms_to_try", lambda *_: ("heft",))
    monkeypatch.setattr(make_plan, "is_polished", lambda *_: False)
    monkeypatch.setattr(to_run, "CUTS", ())
    monkeypatch.setattr(decide, "_recipes", lambda *_: [])


@pytest.mark.parametrize("algorithm", ["auto", "tofu", "equal-chop"])
@pytest.mark.parametrize("dim", [0, 1, "whole"])
def test_a_layout_is_met_whatever_the_search_would_rather_do(
    quick_auto, algorithm: str, dim
) -> None:
    weight = _weights()[0]
    plan = _plan([pardnn.fix_layout(weight, dim)], algorithm=algorithm)
    word = "Replicate()" if dim == "whole" else f"Shard({dim})"
    assert plan.partition is None or plan.partition.sharding[weight] == (word,)
    assert dim == "whole" or plan.partition is not None
    pardnn.check_plan(_graph(), plan)


def test_an_axis_alone_is_fixed_and_the_others_are_free(quick_auto) -> None:
    weight, other = _weights()[:2]
    demanded = [pardnn.fix_layout(weight, 1, "m1"), pardnn.fix_layout(other, "whole", 0)]
    plan = _plan(demanded, devices=4)
    assert plan.partition is not None
    assert plan.partition.sharding[weight][1] == "Shard(1)"
    assert plan.partition.sharding[other][0] == "Replicate()"


@pytest.mark.parametrize("algorithm", ["auto", "tofu"])
def test_layouts_hold_for_a_batch_in_pieces(quick_auto, algorithm: str) -> None:
    weight = _weights()[0]
    made = next(op.outputs[0].name for op in _graph().ops if weight in op.inputs)
    demanded = [pardnn.fix_layout(weight, 0), pardnn.fix_pieces(2)]
    plan = _plan(demanded, algorithm=algorithm)
    assert plan.partition is not None
    assert plan.partition.sharding[weight] == ("Shard(0)",)
    assert plan.pieces is not None
    names = [name for name in plan.partition.sharding if origin(name) == made]
    assert names == [f"{made}@0", f"{made}@1"]
    lies = plan.partition.sharding[names[0]][0]
    other = "Shard(0)" if lies == "Replicate()" else "Replicate()"
    layout = pardnn.fix_layout(made, 0 if other == "Shard(0)" else "whole")
    wrong = dataclasses.replace(plan, constraints=(layout,))
    with pytest.raises(InvalidPlanError, match=f"{made}@0' is"):
        pardnn.check_plan(_graph(), wrong)
    both = _plan([*demanded, layout], algorithm=algorithm)
    assert both.partition is not None
    assert {both.partition.sharding[name][0] for name in names} == {other}


def test_layouts_hold_beside_second_calls(quick_auto) -> None:
    weight = _weights()[0]
    plan = _plan([pardnn.fix_layout(weight, 0)], recompute=True)
    assert plan.partition is not None
    assert plan.partition.sharding[weight] == ("Shard(0)",)


def test_the_checker_proves_layouts(quick_auto) -> None:
    weight = _weights()[0]
    plan = _plan([pardnn.fix_layout(weight, 0)])
    assert plan_from_json(plan_to_json(plan)).constraints == plan.constraints
    wrong = dataclasses.replace(plan, constraints=(pardnn.fix_layout(weight, 1),))
    with pytest.raises(InvalidPlanError, match=r"is cut along dim 0 \(mesh axis m0\)"):
        pardnn.check_plan(_graph(), wrong)
    placed = dataclasses.replace(_plan((), algorithm="heft"), constraints=plan.constraints)
    with pytest.raises(InvalidPlanError, match="the plan cuts no op"):
        pardnn.check_plan(_graph(), placed)
    pinned = dataclasses.replace(plan, constraints=(pardnn.pin(weight, 0),))
    with pytest.raises(InvalidPlanError, match="the plan cuts every op over all devices"):
        pardnn.check_plan(_graph(), pinned)


@pytest.mark.parametrize("count", [1, 3])
def test_the_batch_is_in_so_many_pieces(quick_auto, count: int) -> None:
    plan = _plan([pardnn.fix_pieces(count)], algorithm="auto-whole")
    assert (1 if plan.pieces is None else len(plan.pieces.points) - 1) == count
    wrong = dataclasses.replace(plan, constraints=(pardnn.fix_pieces(count + 1),))
    with pytest.raises(InvalidPlanError, match=f"is broken: the batch is in {count}"):
        pardnn.check_plan(_graph(), wrong)


def test_more_pieces_than_samples_are_at_odds_with_the_step() -> None:
    with pytest.raises(InfeasibleError, match="this constraint cannot hold:\n.*65 pieces") as found:
        _plan([pardnn.fix_pieces(65)], algorithm="heft")
    assert found.value.code == "E303"


def _demand(rng: np.random.Generator, names: list[str]) -> Constraint:
    name, kind = str(rng.choice(names)), rng.integers(4)
    if kind == 0:
        return pardnn.fix_pieces(int(rng.integers(1, 4)))
    if kind == 1:
        return pardnn.pin(f"op:{name}", int(rng.integers(2)))
    return pardnn.fix_layout(name, ["whole", 0, 1][rng.integers(3)])


def _refused(demanded) -> list[dict] | None:
    try:
        _plan(demanded)
    except InfeasibleError as error:
        return error.details["constraints"] if error.code == "E303" else []
    return None


def test_without_any_one_of_a_conflict_the_others_hold(quick_auto) -> None:
    refused = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        demanded = [_demand(rng, _weights()) for _ in range(4)]
        listed = _refused(demanded)
        if listed is None:
            continue
        refused += 1
        kept = [next(e for e in demanded if constraint_to_dict(e) == one) for one in listed]
        assert _refused(kept) is not None
        for each in kept:
            assert _refused([e for e in kept if e is not each]) is None, (seed, kept)
    assert 2 < refused < 10


def test_what_cannot_hold_alone_is_named_alone() -> None:
    """Beside a constraint of another kind, which is none of the trouble."""
    products = [op.name for op in _graph().ops if op.inputs][:3]
    placed, weight = pardnn.apart(*products), _weights()[0]
    assert _refused([placed, pardnn.fix_layout(weight, 0)]) == [constraint_to_dict(placed)]
    written = next(op.outputs[0].name for op in _graph().ops if op.outputs[0].alias_of == weight)
    torn = [pardnn.fix_layout(weight, 0), pardnn.fix_layout(written, 1)]
    found = _refused([*torn, pardnn.pin(products[0], 0)])
    assert found is not None
    assert sorted(map(str, found)) == sorted(map(str, map(constraint_to_dict, torn)))


def test_layouts_of_one_storage_are_at_odds(quick_auto) -> None:
    """A weight and what the optimizer writes into it are laid out alike."""
    read, written = next(
        (op.inputs[0], op.outputs[0].name)
        for op in _graph().ops
        if op.outputs and op.outputs[0].alias_of == "w1"
    )
    demanded = [pardnn.fix_layout(read, 0), pardnn.fix_layout(f"tensor:{written}", 1)]
    with pytest.raises(InfeasibleError, match="these 2 constraints cannot hold together") as found:
        _plan([pardnn.fix_layout("w2", 0), *demanded])
    assert found.value.code == "E303"


def test_a_preference_is_met_where_it_costs_less_than_its_price(quick_auto) -> None:
    graph, cluster = _blocks(), cluster_of(2)
    free = pardnn.plan(graph, cluster)
    assert free.predicted is not None
    ends = [pardnn.pin("h1.in", 0), pardnn.pin("h1.out", 1)]
    forced = pardnn.plan(graph, cluster, constraints=ends)
    assert forced.predicted is not None
    loss = forced.predicted.makespan_s - free.predicted.makespan_s
    assert loss > 0
    for price in (0.4 * loss, 0.6 * loss, 2 * loss):
        preferences = [pardnn.prefer(each, price) for each in ends]
        plan = pardnn.plan(graph, cluster, constraints=preferences)
        assert plan.predicted is not None
        met = [plan.placement[each.what[0]] == each.devices[0] for each in ends]
        assert plan.constraints == tuple(preferences)
        unmet = price * met.count(False)
        assert plan.predicted.makespan_s + unmet <= min(
            free.predicted.makespan_s + 2 * price, forced.predicted.makespan_s
        ) * (1 + 1e-9)
        assert sum("preference met" in note for note in plan.notes) == met.count(True)
        assert sum("preference not met" in note for note in plan.notes) == met.count(False)
        pardnn.check_plan(graph, plan)


def test_a_cheap_preference_does_not_slow_a_step_along_with_a_dear_one(quick_auto) -> None:
    graph, cluster = _blocks(), cluster_of(2)
    dear = pardnn.prefer(pardnn.pin("h1.in", 0), 10.0)
    cheap = pardnn.prefer(pardnn.pin("h1.out", 1), 1e-6)
    alone = pardnn.plan(graph, cluster, constraints=[dear])
    both = pardnn.plan(graph, cluster, constraints=[cheap, dear])
    assert alone.predicted is not None
    assert both.predicted is not None
    assert both.placement["h1.in"] == 0
    assert both.predicted.makespan_s <= alone.predicted.makespan_s + 1e-6


def test_preferences_of_every_kind_decide_what_kind_of_plan_there_is(quick_auto) -> None:
    weight = _weights()[0]
    dear = [pardnn.prefer(pardnn.fix_layout(weight, 1), 1.0)]
    plan = _plan(dear)
    assert plan.partition is not None
    assert plan.partition.sharding[weight] == ("Shard(1)",)
    plan = _plan([pardnn.prefer(pardnn.fix_pieces(2), 1.0)])
    assert plan.pieces is not None
    odds = [pardnn.prefer(pardnn.fix_pieces(2), 1.0), *dear, pardnn.pin(weight, 1)]
    plan = _plan(odds)
    assert plan.placement[weight] == 1
    assert plan.pieces is not None


@pytest.mark.parametrize(
    ("constraint", "code", "message"),
    [
        (lambda: pardnn.fix_layout("no such", 0), "E245", "no op or tensor or layer is named"),
        (lambda: pardnn.fix_layout(_weights()[0], 7), "E245", "has no dim 7, it has 2"),
        (lambda: pardnn.fix_layout(_weights()[0], 0, "m5"), "E245", r"no mesh axis 'm5'"),
        (lambda: pardnn.fix_layout(_weights()[0], -1), "E245", "dim is -1"),
        (lambda: pardnn.fix_pieces(0), "E245", "number of pieces is 0"),
        (lambda: pardnn.prefer(pardnn.pin("x", 0), float("nan")), "E245", "its price is nan"),
        (lambda: pardnn.prefer(pardnn.pin("x", 0), -1.0), "E245", "its price is -1"),
        (lambda: pardnn.prefer(pardnn.pin("no such", 0), 1.0), "E245", "is named 'no such'"),
        (lambda: Constraint(kind="pin", what=("x",), devices=(0,), dim=1), "E245", "needs a dim"),
        (lambda: Constraint(kind="pieces", count=2, what=("x",)), "E245", "count and nothing else"),
    ],
)
def test_what_says_nothing_is_refused(constraint, code: str, message: str) -> None:
    with pytest.raises(PardnnError, match=message) as found:
        _plan([constraint()])
    assert found.value.code == code


@pytest.mark.parametrize(
    ("demand", "options"),
    [
        (pardnn.fix_layout("w1", 0), {"algorithm": "heft"}),
        (pardnn.fix_layout("w1", 0), {"policy": "fifo"}),
        (pardnn.fix_pieces(2), {"microbatches": 4}),
        (pardnn.prefer(pardnn.fix_pieces(2), 1.0), {"objective": "bytes"}),
    ],
)
def test_options_that_ask_for_another_plan_are_refused(demand: Constraint, options) -> None:
    if demand.kind == "layout":
        demand = dataclasses.replace(demand, what=(_weights()[0],))
    with pytest.raises(UsageError):
        _plan([demand], **options)


def test_cuts_take_demanded_pieces() -> None:
    plan = _plan([pardnn.fix_pieces(2)], algorithm="tofu")
    assert plan.partition is not None
    assert plan.pieces is not None
    assert len(plan.pieces.points) == 3


def test_options_and_files_say_the_same(tmp_path) -> None:
    graph, weight = tmp_path / "g.json", _weights()[0]
    write_graph(_graph(), graph)
    data = {
        "format": "pardnn.constraints/1",
        "constraints": [
            {"kind": "layout", "what": [weight], "dim": 1, "axis": "m0"},
            {"kind": "pin", "what": ["x"], "devices": [1], "price_s": 1e-9},
        ],
    }
    (tmp_path / "c.json").write_text(json.dumps(data))
    runner, shared = CliRunner(), ["plan", str(graph), "--devices", "2", "--costs", "k80"]
    plans = [tmp_path / "a.json", tmp_path / "b.json"]
    by_file = ["--constraints", str(tmp_path / "c.json"), "-o", str(plans[0])]
    by_option = ["--layout", f"{weight}=1@m0", "--prefer", "x=1@1ns", "-o", str(plans[1])]
    for more in (by_file, by_option):
        assert runner.invoke(app, [*shared, *more]).exit_code == 0
    one, other = (pardnn.read_plan(path) for path in plans)
    assert one.partition == other.partition
    assert [str(each) for each in one.constraints or ()] == [
        str(each) for each in other.constraints or ()
    ]
    assert one.constraints == read_constraints(tmp_path / "c.json")


@pytest.mark.parametrize(
    "option",
    [["--layout", "w"], ["--layout", "w=two"], ["--layout", "w=0@"], ["--prefer", "w=0"]],
)
def test_an_option_that_cannot_be_read_says_how_it_is_written(option, tmp_path) -> None:
    write_graph(_graph(), tmp_path / "g.json")
    found = CliRunner().invoke(app, ["plan", str(tmp_path / "g.json"), "--devices", "2", *option])
    assert isinstance(found.exception, UsageError)
