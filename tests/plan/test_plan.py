"""Plans: files, memory, lowering and the checker, over random graphs and planted faults."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.cluster import Cluster, Device
from pardnn.errors import FileError, InvalidPlanError, MismatchError
from pardnn.graph.build import build_graph
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.actions import actions_text, parse_actions
from pardnn.plan.check import capacities, check_plan, dry_run, plan_problems
from pardnn.plan.constraints import Constraint
from pardnn.plan.file import (
    check_fingerprint,
    placement_from_text,
    placement_to_text,
    plan_from_json,
    plan_to_json,
    read_plan,
    stamped,
)
from pardnn.plan.lower import Lowered, lower, message_order
from pardnn.plan.memory import memory_profiles, peak_bytes
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.pieces import Pieces
from pardnn.plan.plan import Message, Plan, Predicted, Tried, plan_arrays, plan_from_arrays
from pardnn.plan.rewritten.recompute import SecondCall
from tests.place.machines import random_place
from tests.plan.changed_plans import moved, with_message
from tests.reference.plan import naive_curves, naive_keeps_order, serial_plan
from tests.strategies import FAMILIES, graphs, random_graph


@st.composite
def plans(draw: st.DrawFn, max_devices: int = 3) -> tuple[Graph, Plan]:
    """A graph and a valid plan for it: a random placement in one global serial order."""
    graph = draw(graphs(1, 14, memory=True))
    k = draw(st.integers(1, max_devices))
    groups = int(graph.arrays.group.max()) + 1
    home = draw(st.lists(st.integers(0, k - 1), min_size=groups, max_size=groups))
    hold_at_once = draw(st.booleans())
    return graph, serial_plan(graph, [home[g] for g in graph.arrays.group], k, hold_at_once)


@given(plans())
def test_serial_plans_are_valid(pair: tuple[Graph, Plan]) -> None:
    graph, plan = pair
    assert plan_problems(graph, plan, Cluster.uniform(plan.num_devices)) == []


@given(plans())
def test_memory_equals_the_definition(pair: tuple[Graph, Plan]) -> None:
    graph, plan = pair
    curves = memory_profiles(graph, plan_arrays(graph, plan))
    assert curves == naive_curves(graph, plan)
    assert peak_bytes(graph, plan_arrays(graph, plan)) == [max(c, default=0) for c in curves]


def test_a_view_of_a_received_copy_is_sent_on_and_held() -> None:
    ops = [
        Op(name="h", kind="input", outputs=(Tensor(name="h", bytes=8),)),
        Op(
            name="v",
            kind="aten.view.default",
            inputs=("h",),
            memory="reference",
            outputs=(Tensor(name="v", bytes=8, alias_of="h"),),
        ),
        Op(name="c", kind="aten.neg.default", inputs=("v",)),
    ]
    graph = build_graph("on", ops)
    plan = serial_plan(graph, [0, 1, 2], 3, hold_at_once=False)
    assert [m.hold_until for m in plan.messages] == [None, None]
    assert peak_bytes(graph, plan_arrays(graph, plan)) == [8, 8, 8]
    assert plan_problems(graph, plan) == []


@given(plans())
def test_names_and_numbers_are_the_same_plan(pair: tuple[Graph, Plan]) -> None:
    graph, plan = pair
    assert plan_from_arrays(graph, plan_arrays(graph, plan)) == plan


@given(plans())
def test_file_round_trip(pair: tuple[Graph, Plan]) -> None:
    graph, plan = pair
    plan = stamped(plan, graph)
    again = plan_from_json(plan_to_json(plan))
    assert dataclasses.replace(again, checksum=None) == plan
    check_fingerprint(again, graph)


def test_every_field_of_a_plan_comes_back_from_its_file(example: tuple[Graph, Plan]) -> None:
    """All of them set; none has to be what the checker would take."""
    graph, plan = example
    cut = Partition(
        mesh=make_mesh((2,)), sharding={"x": ("Shard(0)",)}, ops=graph.ops,
        loops={"x": ("i", None)}, in_turn=True, reuse=3, relay_axes=1, sums_in_place=True,
        submeshes=2,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "cluster": Cluster.uniform(2, memory="1MiB"),
        "tried": (
            Tried(algorithm="heft", makespan_s=1.5),
            Tried(algorithm="metis", makespan_s=None, why="no links"),
        ),
        "predicted": Predicted(makespan_s=2.5, peak_bytes=(3, 4), transfer_bytes=5, costs="v100"),
        "partition": cut,
        "pieces": Pieces(points=(0, 2, 4), batch={"x": (0, 6, 1)}, ops=graph.ops),
        "offload": ("a",),
        "recompute": (SecondCall(op="a", readers=("b",), number=3),),
        "constraints": (Constraint(kind="pin", what=("a",), devices=(1,)),),
        "notes": ("as it was asked",),
        "seed": 7,
    }
    for name, value in fields.items():
        given = dataclasses.replace(plan, **{name: value})
        again = plan_from_json(plan_to_json(given))
        assert dataclasses.replace(again, checksum=None) == given
        assert getattr(again, name) == value
    fewer = (
        Partition(mesh=make_mesh((2,)), sharding={}, ops=()),
        Predicted(makespan_s=1.0, peak_bytes=(), transfer_bytes=0),
    )
    for other in fewer:
        name = type(other).__name__.lower()
        again = plan_from_json(plan_to_json(dataclasses.replace(plan, **{name: other})))
        assert getattr(again, name) == other


@given(plans(), st.randoms(use_true_random=False))
def test_any_order_of_messages_is_lowered_without_deadlock(
    pair: tuple[Graph, Plan], random: st.DataObject
) -> None:
    graph, plan = pair
    messages = list(plan.messages)
    random.shuffle(messages)  # pyright: ignore[reportAttributeAccessIssue]
    plan = dataclasses.replace(plan, messages=tuple(messages))
    assert list(dry_run(lower(graph, plan))) == []
    assert plan_problems(graph, plan) == []


@given(plans(), st.randoms(use_true_random=False))
def test_the_order_of_messages_is_kept_just_where_it_can_be(
    pair: tuple[Graph, Plan], random: st.DataObject
) -> None:
    graph, plan = pair
    messages = list(plan.messages)
    random.shuffle(messages)  # pyright: ignore[reportAttributeAccessIssue]
    for listed in (plan.messages, tuple(messages)):
        plan = dataclasses.replace(plan, messages=listed)
        kept = message_order(graph, plan_arrays(graph, plan)) == list(range(len(listed)))
        assert kept == naive_keeps_order(graph, plan)


def test_the_order_of_messages_where_two_of_them_changed_places() -> None:
    """As above, but where little is wrong, and between three devices."""
    kept = [0, 0]
    for seed in range(24):
        graph = random_graph(seed, 9, FAMILIES[seed % 6])
        place = random_place(graph, 3, seed).tolist()
        plan = serial_plan(graph, place, 3, hold_at_once=seed % 3 > 0)
        for i in range(len(plan.messages) - 1):
            listed = list(plan.messages)
            listed[i : i + 2] = listed[i + 1], listed[i]
            changed = dataclasses.replace(plan, messages=tuple(listed))
            found = message_order(graph, plan_arrays(graph, changed))
            expected = naive_keeps_order(graph, changed)
            assert (found == list(range(len(listed)))) == expected
            kept[expected] += 1
    assert min(kept) > 10, kept


@pytest.fixture
def example(tiny: Path) -> tuple[Graph, Plan]:
    return read_graph(tiny / "graph.json"), read_plan(tiny / "plan.json")


def _ordered(plan: Plan, *first: str) -> Plan:
    return dataclasses.replace(plan, order=(first, ("b",)))


def _without(plan: Plan, op: str) -> Plan:
    kept = {name: device for name, device in plan.placement.items() if name != op}
    return dataclasses.replace(plan, placement=kept)


PLANTED = {
    "missing op": (
        lambda p: _without(p, "a"), "'a' is missing",
    ),
    "unknown op": (lambda p: dataclasses.replace(p, placement={**p.placement, "z": 0}), "'z'"),
    "device too large": (lambda p: dataclasses.replace(p, placement={**p.placement, "b": 2}), "2"),
    "device negative": (lambda p: dataclasses.replace(p, placement={**p.placement, "b": -1}), "-1"),
    "op twice": (lambda p: dataclasses.replace(p, order=(p.order[0], ("b", "b"))), "twice"),
    "op on another list": (
        lambda p: dataclasses.replace(p, order=((*p.order[0], "b"), ())), "not placed there"
    ),
    "op in no list": (lambda p: dataclasses.replace(p, order=(p.order[0], ())), "'b' is missing"),
    "group apart": (lambda p: moved(p, "u", 1), "group"),
    "order against data": (
        lambda p: _ordered(p, "x", "w", "v", "h", "a", "c", "u"), "before"
    ),
    "order against after": (
        lambda p: _ordered(p, "x", "w", "a", "c", "u", "h", "v"), "h"
    ),
    "message missing": (lambda p: dataclasses.replace(p, messages=p.messages[:1]), "not sent"),
    "message twice": (
        lambda p: dataclasses.replace(p, messages=(*p.messages, p.messages[0])), "twice"
    ),
    "message nobody reads": (
        lambda p: dataclasses.replace(
            p,
            messages=(*p.messages, Message(tensor="a", source=0, target=1, post_before="b")),
        ),
        "nothing reads it",
    ),
    "message of nothing": (lambda p: with_message(p, 0, tensor="zz"), "no such tensor"),
    "wrong source": (lambda p: with_message(p, 0, source=1, target=0), "producer runs on device 0"),
    "to itself": (lambda p: with_message(p, 0, target=0), "sent to the device"),
    "to no device": (lambda p: with_message(p, 0, target=2), "sent to the device"),
    "from no device": (lambda p: with_message(p, 0, source=2), "device 2, but there are 2"),
    "posted by another": (lambda p: with_message(p, 0, post_before="a"), "an op of the receiver"),
    "posted too late": (
        lambda p: with_message(p, 1, post_before="u"), "before its receive is posted",
    ),
    "held by another": (lambda p: with_message(p, 0, hold_until="b"), "not an op of the sender"),
    "held before it exists": (
        lambda p: with_message(p, 0, hold_until="x"), "before the tensor exists",
    ),
    "wrong prediction": (
        lambda p: dataclasses.replace(
            p, predicted={"makespan_s": 1.0, "peak_bytes": (1, 2), "transfer_bytes": 0}
        ),
        "predicted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(example: tuple[Graph, Plan], name: str) -> None:
    graph, plan = example
    spoil, what = PLANTED[name]
    spoilt = spoil(plan)
    if isinstance(spoilt.predicted, dict):
        from pardnn.plan.plan import Predicted

        spoilt = dataclasses.replace(spoilt, predicted=Predicted(**spoilt.predicted))
    problems = plan_problems(graph, spoilt, Cluster.uniform(2))
    assert problems
    assert any(what in problem for problem in problems), problems
    with pytest.raises(InvalidPlanError):
        check_plan(graph, spoilt, Cluster.uniform(2))


def test_memory_over_the_limit(example: tuple[Graph, Plan], tiny: Path) -> None:
    graph, plan = example
    cluster = Cluster.load(tiny / "cluster.json")
    assert plan_problems(graph, plan, cluster) == []
    over = dataclasses.replace(plan, reserve=0.1)
    assert any("up to 2.73 KiB" in problem for problem in plan_problems(graph, over, cluster))


def test_an_overwritten_tensor_must_have_left(example: tuple[Graph, Plan]) -> None:
    graph, plan = example
    # h alone on device 1 reads a copy of w, which u overwrites on device 0.
    plan = Plan(
        placement={**plan.placement, "h": 1, "x": 1},
        order=(("w", "v", "a", "b", "c", "u"), ("x", "h")),
        messages=(
            Message(tensor="w", source=0, target=1, post_before="h", hold_until="u"),
            Message(tensor="h", source=1, target=0, post_before="v", hold_until="h"),
        ),
    )
    plan = dataclasses.replace(plan, placement={**plan.placement, "b": 0})
    problems = plan_problems(graph, plan, Cluster.uniform(2))
    assert any("overwrites" in problem for problem in problems), problems
    safe = with_message(plan, 0, hold_until="c")
    assert plan_problems(graph, safe, Cluster.uniform(2)) == []


def test_a_deadlock_is_explained(example: tuple[Graph, Plan]) -> None:
    graph, plan = example
    # Device 0 stops after a until v has left; device 1 posts v only when d has run, which needs c.
    ops = [dataclasses.replace(op, inputs=("a",)) if op.name == "c" else op for op in graph.ops]
    changed = build_graph("g", [*ops, Op(name="d", kind="aten.neg.default", inputs=("c",))])
    plan = dataclasses.replace(
        plan,
        placement={**plan.placement, "d": 1},
        order=(plan.order[0], ("d", "b")),
        messages=(
            plan.messages[0],
            Message(tensor="c", source=0, target=1, post_before="d", hold_until="u"),
        ),
    )
    with pytest.raises(InvalidPlanError, match="deadlock"):
        lower(changed, plan)
    later = with_message(plan, 0, hold_until=None)
    assert list(dry_run(lower(changed, later))) == []


def test_the_dry_run_finds_what_lowering_would_have_to_get_wrong(
    example: tuple[Graph, Plan],
) -> None:
    lowered = lower(*example)
    first, second = lowered.ranks
    without_send = tuple(a for a in first if actions_text([a]) != "S 0")
    problems = list(dry_run(Lowered(lowered.messages, (without_send, second))))
    assert any("waits forever" in problem for problem in problems), problems
    swapped = parse_actions(actions_text(second).replace("R 0", "R 1").replace("S 1", "S 0"))
    assert list(dry_run(Lowered(lowered.messages, (first, swapped))))


def test_plan_of_another_graph_lists_the_differences(example: tuple[Graph, Plan]) -> None:
    graph, plan = example
    plan = stamped(plan, graph)
    ops = list(graph.ops)
    ops[4] = dataclasses.replace(ops[4], workspace=1)
    ops[2] = dataclasses.replace(ops[2], seconds={"accelerator": 9.0}, source="moved.py:1")
    ops.append(dataclasses.replace(ops[4], name="new", outputs=()))
    with pytest.raises(MismatchError) as error:
        check_fingerprint(plan, build_graph("g", ops))
    assert error.value.details == {"added": ["new"], "removed": [], "changed": ["a"]}


@pytest.mark.parametrize("more", [5, 6])
def test_five_of_many_differences_are_named(example: tuple[Graph, Plan], more: int) -> None:
    graph, plan = example
    new = [Op(name=f"new{i}", kind="mylib::op") for i in range(more)]
    with pytest.raises(MismatchError) as error:
        check_fingerprint(stamped(plan, graph), build_graph("g", [*graph.ops, *new]))
    assert [f"'new{i}'" in error.value.message for i in (4, 5)] == [True, False]
    assert ("and 1 more" in error.value.message) == (more == 6)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"placement": {"x": True}}, r"\$\.placement\.x"),
        ({"order": "abc"}, r"\$\.order"),
        ({"speed": 3}, r"\$\.speed"),
        ({"messages": [{"tensor": "v"}]}, r"\$\.messages\[0\]"),
    ],
)
def test_fields_refused(example: tuple[Graph, Plan], change: dict[str, object], what: str) -> None:
    data = json.loads(plan_to_json(example[1]))
    del data["checksum"]
    with pytest.raises(FileError, match=what):
        plan_from_json(json.dumps(data | change).encode())


def test_other_version(example: tuple[Graph, Plan]) -> None:
    text = plan_to_json(example[1]).replace(b"pardnn.plan/1", b"pardnn.plan/9")
    with pytest.raises(MismatchError, match="pardnn.plan/9"):
        plan_from_json(text)


def test_truncation_anywhere_is_an_error_of_the_file(example: tuple[Graph, Plan]) -> None:
    text = plan_to_json(stamped(example[1], example[0])).rstrip()
    for end in range(len(text)):
        with pytest.raises(FileError):
            plan_from_json(text[:end])


def test_flipped_bits_are_found(example: tuple[Graph, Plan]) -> None:
    text = plan_to_json(stamped(example[1], example[0]))
    rng = np.random.default_rng(0)
    original = plan_from_json(text)
    for at in rng.integers(0, len(text) - 1, 400).tolist():
        flipped = bytearray(text)
        flipped[at] ^= 1 << int(rng.integers(8))
        try:
            found = plan_from_json(bytes(flipped))
        except (FileError, MismatchError):
            continue
        assert found == original  # white space, or another way to write the same


def test_placement_lines_round_trip_and_are_checked() -> None:
    placement = {"a b": 1, "c": 0, "ü/../x": 3}
    assert placement_from_text(placement_to_text(placement)) == placement
    for text in ("a", "a x", "a 1\na 2", " 1", "a -1", "a 1.5"):
        with pytest.raises(FileError):
            placement_from_text(text)
    with pytest.raises(FileError, match="line 2"):
        placement_from_text("a 1\nb 1234567890")
    assert placement_from_text("\n a 123456789\n") == {" a": 123_456_789}
    for name in ("a\nb", " a", "a ", ""):
        with pytest.raises(FileError):
            placement_to_text({name: 0})


def test_messages_that_repeat_or_carry_nothing_are_named() -> None:
    """Each by its number: what is wrong with one does not hide what is wrong with the next."""
    ops = [
        Op(name="a", kind="input", outputs=(Tensor(name="t", bytes=1),)),
        Op(name="b", kind="op", inputs=("t",)),
    ]
    graph = build_graph("two", ops)
    plan = serial_plan(graph, [0, 1], 2, hold_at_once=True)
    (message,) = plan.messages
    unknown = dataclasses.replace(message, tensor="none")
    plan = dataclasses.replace(plan, messages=(unknown, message, unknown, message))
    found = plan_problems(graph, plan, Cluster.uniform(2))
    assert [each for each in found if each.startswith("messages")] == [
        "messages[0] ('none', 0 to 1): no such tensor",
        "messages[2] ('none', 0 to 1): no such tensor",
        "messages[3] ('t', 0 to 1): the tensor goes there twice",
    ]


def test_what_is_reserved_may_not_be_used() -> None:
    cluster = Cluster(devices=(Device(name="a", memory=1000), Device(name="b")))
    assert capacities(cluster, 0.0) == [1000, None]
    assert capacities(cluster, 0.25) == [750, None]
