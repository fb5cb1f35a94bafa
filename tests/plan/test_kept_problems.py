"""What the checker says of every small damage to some plans is what is kept as text.

A damage moves, drops or repeats one op or message; some leave the plan valid, which is kept too.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pardnn.cluster import Cluster, Device, Link
from pardnn.graph.ir import Graph
from pardnn.plan.check import plan_problems
from pardnn.plan.lower import lower
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, Predicted, plan_arrays
from pardnn.plan.rewritten.offload import graph_with_host
from pardnn.plan.state_in_place import (
    absent_bytes,
    bytes_alone,
    state_in_place,
    state_problems,
    usable_beside,
)
from pardnn.plan.state_layout import kept_shards
from pardnn.units import bytes_text
from tests.kept import assert_kept
from tests.place.grouped import grouped_graph
from tests.place.machines import random_place
from tests.plan.changed_plans import moved, with_message
from tests.plan.cut.test_check_partitioned_graph import sharded
from tests.plan.test_offload import in_order, momenta
from tests.reference.plan import serial_plan
from tests.strategies import random_graph

pytestmark = pytest.mark.jit  # hundreds of plans: checked shapes would take seconds


def damages(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield what is changed, and the plan with that change."""
    for name, device in plan.placement.items():
        rest = {each: d for each, d in plan.placement.items() if each != name}
        yield f"{name} is nowhere", dataclasses.replace(plan, placement=rest)
        yield f"{name} to the other", moved(plan, name, 1 - device)
        away = {**plan.placement, name: 1 - device}
        yield f"{name} away", dataclasses.replace(plan, placement=away)
    for device, row in enumerate(plan.order):
        for i in range(len(row) - 1):
            turned = (*row[:i], row[i + 1], row[i], *row[i + 2 :])
            order = tuple(turned if d == device else r for d, r in enumerate(plan.order))
            yield f"{row[i]} after {row[i + 1]}", dataclasses.replace(plan, order=order)
    for number, m in enumerate(plan.messages):
        some = plan.messages[:number] + plan.messages[number + 1 :]
        yield f"no {number}", dataclasses.replace(plan, messages=some)
        yield f"{number} twice", dataclasses.replace(plan, messages=(*plan.messages, m))
        yield f"{number} back", with_message(plan, number, source=m.target, target=m.source)
        yield f"{number} into", with_message(plan, number, into=m.tensor)
        for name in plan.order[m.target]:
            yield f"{number} before {name}", with_message(plan, number, post_before=name)
        for name in (*plan.order[m.source], None):
            yield f"{number} till {name}", with_message(plan, number, hold_until=name)


def cases() -> dict[str, tuple[Graph, Plan]]:
    found = {}
    for seed, family in ((3, "layered"), (11, "chain"), (2, "fork-join"), (5, "grouped")):
        graph = grouped_graph(seed, 6) if family == "grouped" else random_graph(seed, 7, family)
        place = random_place(graph, 2, seed).tolist()
        found[f"{family}-{seed}"] = graph, serial_plan(graph, place, 2, seed % 2 == 0)
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_problems_of_damaged_plans_are_those_that_are_kept(name: str) -> None:
    graph, plan = CASES[name]
    devices = (Device(name="a"), Device(name="b"))
    free = Cluster(devices=devices, links=(Link(source="a", target="b", bandwidth=1e9),))
    assert plan_problems(graph, plan, free) == []
    lines = [f"{name} damaged"]
    for what, damaged in damages(plan):
        problems = plan_problems(graph, damaged, free)
        lines.append(f"{what}: {' | '.join(problems) or 'valid'}")
    assert_kept("problems.txt", lines)


@pytest.mark.parametrize("name", CASES)
def test_limits_links_and_types_are_checked(name: str) -> None:
    """At its peaks a plan is valid, a byte below it is not; so with all else that it asks for."""
    graph, plan = CASES[name]
    held = peak_bytes(graph, plan_arrays(graph, plan))
    sizes = {t.name: t.bytes for op in graph.ops for t in op.outputs}
    sent = sum(sizes[m.tensor] for m in plan.messages)
    right = dataclasses.replace(plan, predicted=Predicted(
        makespan_s=1.0, peak_bytes=tuple(held), transfer_bytes=sent))  # fmt: skip

    def problems(of: Plan, *limits: int | None, kind: str = "accelerator", **more: Any) -> Any:
        devices = tuple(
            Device(name=f"d{i}", memory=limit, type=kind) for i, limit in enumerate(limits)
        )
        links = (Link(source="d0", target="d1", bandwidth=1e9),)
        return plan_problems(graph, of, Cluster(devices=devices, links=links, **more))

    assert problems(right, *held) == []
    for d in (0, 1):
        less = [h - (d == i) for i, h in enumerate(held)]
        (text,) = problems(right, *less)
        limit = bytes_text(less[d])
        assert text == (
            f"memory: device {d} holds up to {bytes_text(held[d])}, usable: {limit} (limit "
            f"{limit}, reserve 0)"
        )
    twice = [2 * h for h in held]
    assert problems(dataclasses.replace(right, reserve=0.5), *twice) == []
    assert len(problems(dataclasses.replace(right, reserve=0.51), *twice)) == 2
    wrong = dataclasses.replace(
        right, predicted=Predicted(makespan_s=1.0, peak_bytes=(0, 0), transfer_bytes=sent + 1)
    )
    assert problems(wrong, None, None) == [
        f"predicted.peak_bytes is [0, 0], but it is {held}",
        f"predicted.transfer_bytes is {sent + 1}, but it is {sent}",
    ]
    assert problems(right, None, None, None) == ["order has 2 devices, the cluster 3"]
    assert all("of type 'tpu'" in each for each in problems(right, None, None, kind="tpu"))
    devices = (Device(name="d0"), Device(name="d1"))
    apart = plan_problems(graph, right, Cluster(devices=devices))
    assert len(apart) == len(plan.messages)
    assert all("no link joins the two devices" in each for each in apart)


def test_problems_come_in_the_order_of_the_graph() -> None:
    """Not in that of a hash: what is missing is named alike in every process."""
    graph, _ = CASES["layered-3"]
    names = [op.name for op in graph.ops]
    found = plan_problems(graph, Plan(placement={}, order=((), ())), None)
    assert found == [f"placement: op {name!r} is missing" for name in names]
    placed = Plan(placement=dict.fromkeys(names, 0), order=((), ()))
    assert plan_problems(graph, placed) == [f"order: op {name!r} is missing" for name in names]


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_what_is_kept(name: str) -> None:
    graph, plan = CASES[name]
    lines = [f"{name} by rank"]
    lowered = lower(graph, plan)
    lines += [f"{m.tensor} {m.source} to {m.target}" for m in lowered.messages]
    lines += [" ".join(map(action_word, rank)) for rank in lowered.ranks]
    assert_kept("problems.txt", lines)


def action_word(action: Any) -> str:
    values = [getattr(action, name) for name in action.__slots__]
    return f"{type(action).__name__[0]}:{','.join(map(str, values))}"


def test_state_lies_where_a_plan_left_it_and_takes_memory_beside_other_steps() -> None:
    """Of a cut chain each device has 3 of the 6 rows of w1 and 1 of the 2 columns of w2."""
    graph, plan = sharded()
    state = state_in_place(graph, plan, other_bytes=(5, 7))
    assert {name: held.bytes for name, held in state.held.items()} == {
        "w1": (96, 96), "w2": (32, 32),
    }  # fmt: skip
    assert state.layout["w1"][1].box == ((3, 6), (0, 8))
    assert state.layout["w2"][0].box == ((0, 8), (0, 1))
    assert absent_bytes(graph, state) == [5, 7]
    assert usable_beside(graph, state, [100, None]) == [95, None]
    assert state_problems(graph, plan, state) == []
    alone = bytes_alone(momenta(), state)
    assert (dict(alone.held), alone.other_bytes) == ({}, (5 + 128, 7 + 128))
    b = next(op for op in graph.ops if op.name == "b")
    kept = kept_shards(b, b.outputs[0], plan)
    assert [(k.device, k.tensor, k.box) for k in kept] == [
        (0, "y@0", ((0, 4), (0, 1))), (1, "y@1", ((0, 4), (1, 2))),
    ]  # fmt: skip
    serial = serial_plan(graph, [0] * 5, 2)
    assert state_problems(graph, serial, state) == [
        f"{name!r} is on device 0 {one}, device 1 {other}, but the plan puts it on device 0"
        for name, one, other in (
            ("w1", ((0, 3), (0, 8)), ((3, 6), (0, 8))), ("w2", ((0, 8), (0, 1)), ((0, 8), (1, 2)))
        )
    ]  # fmt: skip
    whole = state_in_place(graph, serial_plan(graph, [0, 1, 0, 1, 1], 2), before=state)
    assert {name: held.bytes for name, held in whole.held.items()} == {
        "w1": (0, 192), "w2": (64, 0),
    }  # fmt: skip
    assert state_problems(graph, serial_plan(graph, [1, 1, 0, 1, 1], 2), whole) == []


def test_what_other_steps_keep_is_no_room_and_what_is_on_the_host_is() -> None:
    """A peak of 400 bytes fits in 410 beside 10 that others keep, not beside 11."""
    graph, offloaded = momenta(), in_order(momenta(), ("a",))
    plan = in_order(graph)
    host = state_in_place(graph, offloaded)
    assert {name: held.bytes for name, held in host.held.items()} == {"a": (0,), "b": (100,)}
    assert host.layout["a"][0].on_host
    assert "the host of device 0" in state_problems(graph, plan, host)[0]
    (peak,) = peak_bytes(graph, plan_arrays(graph, plan))
    cluster = Cluster(devices=(Device(name="d", memory=peak + 10),))
    for more, fits in ((10, True), (11, False)):
        state = state_in_place(graph, plan, other_bytes=(more,))
        found = state_problems(graph, plan, state, cluster)
        assert (found == []) == fits
    assert f"device 0 holds up to {bytes_text(peak)}" in found[0]
    assert f"{bytes_text(peak - 1)} are usable" in found[0]
    placed = graph_with_host(graph, ("a",))
    assert len(placed.ops) > len(graph.ops)
