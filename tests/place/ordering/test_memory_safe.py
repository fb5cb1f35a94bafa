"""Memory-safe list schedules: whatever the keys, the plan in the order found fits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.edges import Edges, edges_of, placed_bound, tails
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan
from pardnn.place.ordering.memory_safe import TRIALS, safe_schedule
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.ordering.storages import reserve_of, storages_of
from pardnn.plan.check import plan_problems
from pardnn.plan.plan import plan_from_arrays
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.peak import peaks
from tests.place.machines import cluster_of, limited, machine_for, random_place
from tests.reference.memory_safe import Banker
from tests.strategies import FAMILIES, examples, graphs, random_graph

SLACKS = [0.0, 1.0, np.inf]


def safe_order(
    graph: Graph, place: np.ndarray, limit: np.ndarray, key: np.ndarray, slack: float
) -> tuple[float, np.ndarray]:
    """Return the makespan and positions of a schedule along the file's order as the reserve."""
    a, machine = graph.arrays, machine_for(graph, cluster_of(len(limit)))
    storages, reference = storages_of(a, place, len(limit)), file_positions(a)
    reserve = reserve_of(a, storages, place, reference, limit)
    start, order = np.empty(a.num_ops), np.empty(a.num_ops, dtype=np.int64)
    edges = edges_of(a, machine, place)
    makespan = safe_schedule(
        edges, storages, reserve, a.workspace, key, slack, np.zeros(a.num_ops), np.inf, start, order
    )
    assert sorted(order) == list(range(a.num_ops))
    assert makespan >= placed_bound(edges, a.topological) * (1 - 1e-9)
    assert makespan >= lower_bound_seconds(a, machine) * (1 - 1e-9)
    position = np.empty(a.num_ops, dtype=np.int64)
    position[order] = np.arange(a.num_ops)
    return makespan, position


@examples(15)
@given(graph=graphs(max_ops=16), seed=st.integers(0, 99), slack=st.sampled_from(SLACKS))
def test_any_keys_fit_where_the_reference_order_fits(graph: Graph, seed: int, slack: float) -> None:
    a, overwrites = graph.arrays, first_overwrites(graph)
    place = random_place(graph, 2, seed)
    reference = latest_slot_plan(a, 2, place, file_positions(a), overwrites)
    limit = peaks(a, reference)
    key = np.random.default_rng(seed).random(a.num_ops)
    _, position = safe_order(graph, place, limit, key, slack)
    plan = latest_slot_plan(a, 2, place, position, overwrites)
    assert (peaks(a, plan) <= limit).all()
    cluster = limited(cluster_of(2), max(int(limit.max()), 1))
    assert plan_problems(graph, plan_from_arrays(graph, plan), cluster) == []


@pytest.mark.parametrize("seed", range(3))
def test_without_limits_it_is_a_list_schedule(seed: int) -> None:
    """Of all that is ready the smallest key starts: no device is idle that could start an op."""
    graph = random_graph(seed, 12, "layered", memory=False)
    place, unlimited = random_place(graph, 2, seed), np.full(2, 2**61)
    key = np.random.default_rng(seed).random(graph.arrays.num_ops)
    makespan, _ = safe_order(graph, place, unlimited, key, np.inf)
    machine = machine_for(graph, cluster_of(2))
    edges = edges_of(graph.arrays, machine, place)
    assert makespan == pytest.approx(naive_list_schedule(edges, key))


def naive_list_schedule(edges: Edges, key: np.ndarray) -> float:
    """Return the makespan of starting the op that can start first, the smallest key first."""
    n = len(key)
    ready, missing, start = np.zeros(n), edges.missing.copy(), np.full(n, np.inf)
    free = np.zeros(int(edges.place.max()) + 1)
    left = set(range(n))
    while left:
        at = {op: max(ready[op], free[edges.place[op]]) for op in left if missing[op] == 0}
        now = min(at.values())
        op = min((o for o in at if at[o] == now), key=lambda o: (edges.place[o], key[o]))
        start[op], free[edges.place[op]] = now, now + edges.seconds[op]
        left.remove(op)
        for i in range(edges.ptr[op], edges.ptr[op + 1]):
            x = edges.successor[i]
            missing[x] -= 1
            ready[x] = max(ready[x], now + edges.seconds[op] + edges.delay[i])
    return float((start + edges.seconds).max())


def test_the_schedule_is_that_of_a_banker_who_sums_up_anew() -> None:
    """Starts and order, with limits that make ops wait: without limits the order is another."""
    waited = given_up = 0
    for seed in range(36):
        graph = random_graph(seed, 14, FAMILIES[seed % 6])
        a, k, slack = graph.arrays, 2 + seed % 2, SLACKS[seed % 3]
        n = a.num_ops
        place, reference = random_place(graph, k, seed), file_positions(a)
        machine, key = machine_for(graph, cluster_of(k)), np.random.default_rng(seed).random(n)
        edges, storages = edges_of(a, machine, place), storages_of(a, place, k)
        orders = []
        for extra in (seed % 4, 2**40):
            capacity = np.full(k, extra)  # raised to what the reference order needs
            reserve = reserve_of(a, storages, place, reference, capacity)
            start, order = np.empty(n), np.empty(n, dtype=np.int64)
            tail = tails(edges, a.topological, 0)
            makespan = safe_schedule(
                edges, storages, reserve, a.workspace, key, slack, tail, np.inf, start, order
            )
            banker = Banker(edges, storages, reserve, a.workspace.tolist(), key.tolist())
            banker.run(slack)
            assert order.tolist() == banker.order
            assert start.tolist() == [banker.start[op] for op in range(n)]
            assert makespan == (start + edges.seconds).max()
            for most in (makespan, makespan * (1 - 1e-6)):  # given up, or the same
                begun = np.full(n, -1)
                found = safe_schedule(
                    edges, storages, reserve, a.workspace, key, slack, tail, most * (1 + 1e-9),
                    np.empty(n), begun,
                )  # fmt: skip
                assert found == (makespan if most == makespan else np.inf)
                given_up += bool((begun < 0).any())
            orders.append(banker.order)
        waited += orders[0] != orders[1]
    assert waited > 10
    assert given_up > 10


def by_hand(*rows: tuple[str, int, str]) -> Graph:
    """Ops of one second by name, bytes that they make, and what they read."""
    return build_graph("by hand", [
        Op(name=name, kind="op" if reads else "input", inputs=tuple(reads.split()),
           outputs=(Tensor(name=name, bytes=size),), seconds={"accelerator": 1.0})
        for name, size, reads in rows
    ])  # fmt: skip


def ordered(graph: Graph, key: dict[str, float], limit: int, slack: float) -> str:
    """The order on one device, by the first letters of the ops."""
    keys = np.array([key[op.name] for op in graph.ops])
    place = np.zeros(len(graph.ops), dtype=np.int64)
    _, position = safe_order(graph, place, np.array([limit]), keys, slack)
    return "".join(graph.ops[i].name[0] for i in np.argsort(position))


@pytest.mark.parametrize(("limit", "order"), [(12, "xaybz"), (21, "ybxaz"), (22, "ybxaz")])
@pytest.mark.parametrize("slack", [0.0, np.inf])
def test_a_device_that_may_not_start_its_first_by_key_takes_the_reference(
    limit: int, order: str, slack: float
) -> None:
    """`y` of 10 first would be held beside `x` of 10 until its reader's turn: 21 with `a`.

    With 12 bytes nothing else runs meanwhile, so what keeps to its keys would wait for ever.
    """
    graph = by_hand(("x", 10, ""), ("a", 1, "x"), ("y", 10, ""), ("b", 1, "y"), ("z", 0, "a b"))
    key = {"y": 0.0, "b": 1.0, "x": 2.0, "a": 3.0, "z": 4.0}
    assert ordered(graph, key, limit, slack) == order


def test_what_an_op_frees_is_there_for_the_rest() -> None:
    """`b` frees `y` of 10, so `a` after it holds 12 at most; without that it would be 22 of 21."""
    graph = by_hand(("x", 10, ""), ("y", 10, ""), ("a", 1, "x"), ("l", 9, "a"), ("b", 1, "y"),
                    ("z", 0, "l b"))  # fmt: skip
    key = {"x": 0.0, "y": 1.0, "b": 2.0, "a": 3.0, "l": 4.0, "z": 5.0}
    assert ordered(graph, key, 21, np.inf) == "xybalz"


@pytest.mark.parametrize("slack", SLACKS)
def test_where_nothing_may_ever_start_there_is_no_schedule(slack: float) -> None:
    """A limit that the reserve was not made for: 5 bytes for ops that make 10."""
    graph = by_hand(("x", 10, ""), ("a", 1, "x"))
    a, place, machine = graph.arrays, np.zeros(2, np.int64), machine_for(graph, cluster_of(1))
    storages = storages_of(a, place, 1)
    reserve = reserve_of(a, storages, place, file_positions(a), np.array([11]))
    reserve = reserve._replace(limit=np.array([5]))
    edges, start, order = edges_of(a, machine, place), np.empty(2), np.empty(2, np.int64)
    key = np.arange(2.0)
    found = safe_schedule(
        edges, storages, reserve, a.workspace, key, slack, np.zeros(2), np.inf, start, order
    )
    assert found == np.inf


def test_what_is_read_again_is_held_until_then() -> None:
    """`b` reads `x` of 10 before `a`, which needs 5 beside it: of 16 `w` of 4 may take none yet.

    Held are 11, so `w` itself would fit; then `a` would never.
    """
    graph = by_hand(("x", 10, ""), ("a", 5, "x"), ("b", 1, "x"), ("w", 4, ""), ("z", 0, "a b w"))
    key = {"x": 0.0, "b": 1.0, "w": 2.0, "a": 3.0, "z": 4.0}
    assert ordered(graph, key, 16, np.inf) == "xbawz"
    assert ordered(graph, key, 20, np.inf) == "xbwaz"


def test_what_has_started_in_its_turn_does_not_start_again() -> None:
    """More ops than are tried may not start before `x`, which is behind them by key and stays so.

    Each of them makes 10 bytes till its reader has run, and 12 may be held.
    """
    many = "pqrstuv"
    assert len(many) > TRIALS
    rows = [("x", 10, ""), ("a", 1, "x")]
    for name in many:
        rows += [(name, 10, ""), (name.upper(), 0, name)]
    order = f"xa{''.join(name + name.upper() for name in many)}"
    graph = by_hand(*rows)
    key = {name: float(i) for i, name in enumerate(f"{many}xa{many.upper()}")}
    assert ordered(graph, key, 12, np.inf) == order
