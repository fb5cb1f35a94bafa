"""Orders, slots and reserves of small placed graphs are those that are kept as text."""

import sys
from collections.abc import Iterable

import numpy as np
import pytest

from pardnn.graph.ir import Graph
from pardnn.place.baselines.modulo import place_modulo
from pardnn.place.ordering.early_slots import with_early_slots
from pardnn.place.ordering.edges import edges_of, heads, tails
from pardnn.place.ordering.fit import fit_order
from pardnn.place.ordering.low_memory_orders import (
    blended_positions,
    eager_free_positions,
    file_positions,
)
from pardnn.place.ordering.memory_bounded import (
    fast_memory_bounded_plan,
    latest_slot_plan,
    memory_bounded_plan,
)
from pardnn.place.ordering.order_search import FEW, by_modulo, improved, placed
from pardnn.place.ordering.pieces import piece_by_piece, pieces_of
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.place.ordering.storages import reserve_of, storages_of
from pardnn.plan.plan import PlanArrays
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine
from pardnn.sim.peak import peaks
from testbed.hand_graphs import pipeline, pipeline_cluster
from tests.kept import assert_kept, check_sum
from tests.place.grouped import grouped_graph
from tests.place.machines import cluster_of, machine_for, random_place
from tests.strategies import FAMILIES, random_graph

pytestmark = pytest.mark.skipif(
    "shape_checker" in sys.modules,
    reason="20 times as long where shapes are checked; compiled kernels run it too",
)


def words(values: Iterable[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def plan_text(graph: Graph, machine: Machine, plan: PlanArrays | None) -> str:
    """The order, then each message as number of its tensor, receiver, post and hold."""
    if plan is None:
        return "none"
    columns = (plan.message_tensor, plan.message_target, plan.message_post, plan.message_hold)
    sent = " ".join(f"{t}>{d}:{p},{h}" for t, d, p, h in zip(*columns, strict=True))
    seconds = run_lists(graph.arrays, machine, plan).makespan
    held = words(peaks(graph.arrays, plan))
    return f"{seconds:g} s, {held} bytes, {words(plan.order_op)}; {sent}".rstrip("; ")


@pytest.mark.parametrize("seed", range(12))
def test_orders_and_slots_are_those_that_are_kept(seed: int) -> None:
    graph = random_graph(seed, 12, FAMILIES[seed % 6]) if seed % 4 else grouped_graph(seed, 10)
    a, k = graph.arrays, 2 + seed % 2
    machine = machine_for(graph, cluster_of(k, bandwidth=16.0, speeds=(1.0, 0.5)))
    place, overwrites = random_place(graph, k, seed), first_overwrites(graph)
    timeline = emulate(a, machine, place, -bottom_levels(a, machine, place))
    first, frugal = file_positions(a), eager_free_positions(a)
    tight = latest_slot_plan(a, k, place, first, overwrites)
    least = peaks(a, tight).tolist()
    lines = [graph.name, f"on {words(place)}, first writes {words(overwrites.ravel())}".rstrip()]
    lines += [f"file {words(first)}", f"frugal {words(frugal)}"]
    lines += [
        f"{share} of both {words(blended_positions(timeline.dispatch, frugal, share))}"
        for share in (0.25, 0.5)
    ]

    def add(name: str, plan: PlanArrays | None) -> None:
        lines.append(f"{name}: {plan_text(graph, machine, plan)}")

    add("emulated", ordered_plan(a, k, place, timeline, overwrites))
    add("latest", tight)
    for before in (False, True):
        some = np.array(least) - 1
        add(f"early {before}", with_early_slots(a, tight, first, some, before_ops=before))
    for more in (0, 12):
        room = [each + more for each in least]
        add(f"{more} more", memory_bounded_plan(a, machine, place, first, room, overwrites))
        fast = fast_memory_bounded_plan(a, timeline, k, place, first, room, overwrites)
        add(f"{more} more, fast", fast)
        fit = fit_order(a, machine, place, timeline, frugal, room, overwrites)
        add(f"{more} more, fit", fit)
    storages, edges = storages_of(a, place, k), edges_of(a, machine, place)
    reserve = reserve_of(a, storages, place, first, np.array(least) - 3)
    lines.append(f"edges {check_sum(*map(np.asarray, edges_text(edges)))}")
    lines.append(f"heads {words(heads(edges, a.topological))}")
    lines += [f"tails {q} {words(tails(edges, a.topological, q))}" for q in (0, 1)]
    lines.append(f"storages {check_sum(*storages)}, reserve {check_sum(*reserve)}")
    lines.append(f"limits {words(reserve.limit)}")
    assert_kept("orders.txt", lines)


def edges_text(edges: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """Seconds as whole sixty-fourths, of which they are multiples."""
    return [np.rint(64 * np.nan_to_num(each, posinf=-1)).astype(np.int64) for each in edges]


@pytest.mark.parametrize(
    ("devices", "pieces", "chunks", "cap"), [(2, 3, 1, 2), (2, 4, 2, None), (3, 3, 1, 3)]
)
def test_orders_of_pieces_are_those_that_are_kept(
    devices: int, pieces: int, chunks: int, cap: int | None
) -> None:
    graph = pipeline(devices, pieces, chunks=chunks, message_bytes=8)
    a, machine = graph.arrays, machine_for(graph, pipeline_cluster(devices, cap, latency=0.25))
    limit = None if cap is None else cap * 1024 + 256
    alike = pieces_of(graph, machine.seconds[0])
    assert alike is not None
    reference = piece_by_piece(graph, alike)
    number = {name: i for i, name in enumerate(dict.fromkeys(op.group for op in graph.ops))}
    place = np.array([number[op.group] % devices for op in graph.ops])
    step = placed(a, machine, place, alike, reference, [limit] * devices)
    lines = [f"{graph.name}, {limit}", f"pieces {words(alike.piece)}, like {words(alike.model)}"]
    lines += [f"reference {words(reference)}", f"at least {step.bound:g} s"]
    found = by_modulo(step, FEW, len(FEW))
    lines += [f"{one.makespan:g} {one.mean_start:.6g}: {words(one.order)}" for one in found]
    for seed in (0, 1):
        one = improved(step, found[-1], 12, seed)
        lines.append(f"changed {one.makespan:g} {one.mean_start:.6g}: {words(one.order)}")
    plan = place_modulo(graph, machine, [limit] * devices).plan
    lines.append(f"chosen {plan_text(graph, machine, plan)}")
    assert_kept("orders.txt", lines)
