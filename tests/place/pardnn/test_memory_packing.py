"""Packing by memory, on cases worked by hand."""

import numpy as np

from pardnn.graph.build import build_graph
from pardnn.graph.csr import RESIDUAL
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import limits
from pardnn.place.pardnn.memory_packing import (
    attributed_units,
    balanced_place,
    packed_place,
    residual_pins,
)
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.problem import Problem
from tests.place.machines import problem_for
from tests.place.pardnn.test_view_priority import op_of
from tests.reference.memory_packing import attributed_units as naive_units
from tests.reference.memory_packing import live_at_peak, packed_devices
from tests.strategies import FAMILIES, Row, ops_of, random_graph


def test_activations_larger_than_parameters_are_spread() -> None:
    ops, layers, last = [], 12, "x.out"
    ops.append(op_of("x", (), 0.0, 1000))
    for i in range(layers):
        ops.append(op_of(f"p{i}", (), 0.0, 8, memory="residual"))
        ops.append(op_of(f"f{i}", (last, f"p{i}.out"), 1.0, 1000))
        last = f"f{i}.out"
    for i in reversed(range(layers)):
        ops.append(op_of(f"b{i}", (last, f"f{i}.out", f"p{i}.out"), 1.0, 1000))
        last = f"b{i}.out"
    graph = build_graph("deep", ops)
    problem, capacity = problem_for(graph, 4), limits([None] * 4)
    position = file_positions(graph.arrays)
    place = packed_place(problem, position, capacity)
    live = memory_profile_of(graph.arrays, place, position, capacity).top[:, 1]
    alone = memory_profile_of(graph.arrays, np.zeros_like(place), position, capacity).top[0, 1]
    assert live.max() < 0.5 * alone


def _problem(*rows: tuple[str, int, str], num_devices: int = 2) -> Problem:
    """Ops of one second by name, bytes and what they read; without inputs they stay."""
    return problem_for(build_graph("by hand", [
        op_of(name, tuple(f"{read}.out" for read in reads.split()), float(name[0] not in "pv"),
              size, memory="normal" if reads or name[0] == "x" else "residual")
        for name, size, reads in rows
    ]), num_devices)  # fmt: skip


def _units(problem: Problem, live: list[float] | None = None, parts: int = 1) -> str:
    """The op for whose unit each op is taken."""
    names = "".join(name[-1] for name in _names(problem))
    order = np.arange(problem.arrays.num_ops)
    held = None if live is None else np.array(live, dtype=np.float64)
    units = attributed_units(problem, order, held, parts)
    return "".join(names[np.flatnonzero(problem.arrays.group == unit)[0]] for unit in units)


def _names(problem: Problem) -> list[str]:
    return [chr(ord("0") + i) for i in range(problem.arrays.num_ops)]


def test_an_op_belongs_to_what_it_reads_most_of() -> None:
    """Parameters count twice; what reads nothing goes with what reads it."""
    for size, unit in ((6, "1"), (4, "0")):
        rows = [("p0", 6, ""), ("p1", size, ""), ("x2", 1, ""), ("f3", 10, "p0"),
                ("f4", 3, "f3 p1 x2")]  # fmt: skip
        assert _units(_problem(*rows)) == f"01{unit}0{unit}"


def test_what_is_held_at_the_peak_counts_more_than_its_size() -> None:
    rows = [("p0", 6, ""), ("p1", 6, ""), ("f2", 99, "p0"), ("f3", 5, "p1"), ("f4", 3, "f2 f3")]
    assert _units(_problem(*rows)) == "01010"
    assert _units(_problem(*rows), [0, 0, 0, 5, 0]) == "01011"


def test_what_a_full_unit_cannot_hold_begins_another_one() -> None:
    """Of 40 bytes a unit may hold 20: two of four activations, then the next two elsewhere."""
    rows = [("p0", 50, ""), ("f1", 10, "p0"), ("f2", 10, "p0"), ("f3", 10, "p0"), ("f4", 10, "p0")]
    live = [0.0, 10.0, 10.0, 10.0, 10.0]
    assert _units(_problem(*rows), live, 2) == "00033"
    assert _units(_problem(*rows), live, 1) == "00000"
    assert _units(_problem(*rows), live, 4) == "00234"
    assert _units(_problem(*rows)) == "00000"
    # The first of a unit stays in it, however large: another unit could hold it no better.
    rows = [("p0", 50, ""), ("f1", 30, "p0"), ("f2", 10, "p0")]
    assert _units(_problem(*rows), [0.0, 30.0, 10.0], 2) == "002"


def test_units_are_those_of_the_naive_twin() -> None:
    """Ops in any order in the file, so that any group may be the one that follows a full unit."""
    followed = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        graph = random_graph(seed, 16, FAMILIES[seed % 6])
        ops = [graph.ops[i] for i in rng.permutation(len(graph.ops))]
        problem = problem_for(build_graph("shuffled", ops), with_views=bool(seed % 2))
        a = problem.arrays
        live = np.where(rng.random(a.num_tensors) < 0.6, a.tensor_bytes, 0).astype(np.float64)
        order = a.topological.astype(np.int64)
        for parts in (1, 2, 4):
            found = attributed_units(problem, order, live, parts).tolist()
            assert found == naive_units(a, order.tolist(), live.tolist(), parts)
            stays = a.group[a.memory == RESIDUAL].tolist()
            followed += len(set(found) - set(stays)) > 0 < len(stays)
    assert followed > 20


def test_units_are_packed_as_by_the_naive_twin() -> None:
    """Some ops take no time, and what two of the ops hold stays where it is."""
    spread = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        roles = rng.choice(["parameter", "input", "compute", "compute", "compute"], 16).tolist()
        rows = [
            Row(role, tuple(rng.integers(0, 16, 2).tolist()), int(rng.integers(0, 3)),
                int(rng.integers(1, 99)), int(rng.integers(0, 50)))
            for role in roles
        ]  # fmt: skip
        ops = ops_of(rows)
        graph = build_graph("packed", [ops[i] for i in rng.permutation(16)])
        problem, a = problem_for(graph, 3), graph.arrays
        assert (a.tensor_alias < 0).all()
        fixed = np.full(len(problem.runs), -1)
        fixed[rng.integers(0, 16, 2)] = rng.integers(0, 3, 2)
        problem = problem._replace(fixed=fixed)
        position, capacity = file_positions(a), rng.integers(50, 200, 3)
        live = live_at_peak(a, position.tolist())
        unit = naive_units(a, np.argsort(position).tolist(), live, 8 * 3)
        device = packed_devices(
            a, unit, (problem.seconds > 0).tolist(), position.tolist(), capacity.tolist()
        )
        expected = [int(fixed[u]) if fixed[u] >= 0 else device[u] for u in unit]
        assert packed_place(problem, position, capacity).tolist() == expected
        spread += len(set(expected)) == 3
    assert spread > 20


def test_what_another_unit_reads_is_used_by_it() -> None:
    """`p1` is read beside `p0` before `p2` is: else `p1`, which no op is near, would come last."""
    problem = _problem(("p0", 10, ""), ("p1", 5, ""), ("p2", 10, ""), ("f3", 0, "p0 p1"),
                       ("f4", 0, "p2"), num_devices=3)  # fmt: skip
    place = packed_place(problem, np.arange(5), np.array([9, 9, 9]))
    assert place.tolist() == [0, 1, 2, 0, 2]


def test_a_unit_is_full_with_an_eighth_of_a_share() -> None:
    """Two devices: of the 32 bytes held a unit holds 2, which is what the first has room for."""
    rows = [op_of("p", (), 0.0, 0, memory="residual")]
    rows += [op_of(f"f{i}", ("p.out",), 1.0, 1) for i in range(32)]
    rows.append(op_of("last", tuple(f"f{i}.out" for i in range(32)), 1.0, 0))
    problem = problem_for(build_graph("32", rows), 2)
    place = packed_place(problem, np.arange(34), np.array([2, 30]))
    assert place[1:33].tolist() == [0] * 2 + [1] * 30


def test_where_no_device_has_room_all_is_on_one_of_them() -> None:
    problem = _problem(("p0", 10, ""), ("p1", 10, ""), ("f2", 1, "p0"), ("f3", 1, "p1"))
    place = packed_place(problem, np.arange(4), np.array([0, 0]))
    assert place.tolist() == [1] * 4


def test_without_anything_that_stays_each_group_is_a_unit() -> None:
    assert _units(_problem(("x0", 4, ""), ("f1", 4, "x0"), ("f2", 4, "f1"))) == "012"


def test_units_are_cut_in_the_order_of_their_use() -> None:
    """Used are 3, 1, 0 and 2, a view aside; 4 and 5, which nothing uses, come in the file's order.

    Of equal units, capacities of 3 and 1 take the first four and the last two at 2/3 to 1/3.
    """
    rows = [(f"p{i}", 10, "") for i in range(6)]
    rows += [("v6", 0, "p2"), ("f7", 0, "p3"), ("f8", 0, "p1"), ("f9", 0, "p0"), ("f:", 0, "p2")]
    problem = _problem(*rows)
    position = np.arange(11)
    position[[4, 5]] = 5, 4
    for capacity, expected in (
        ([200, 100], [0, 0, 0, 0, 1, 1]),
        ([100, 100], [0, 0, 1, 0, 1, 1]),
        ([500, 100], [0, 0, 0, 0, 1, 0]),
    ):
        place = packed_place(problem, position, np.array(capacity))
        assert place[:6].tolist() == expected
        assert place[6:].tolist() == [place[i] for i in (2, 3, 1, 0, 2)]


def test_sizes_alone_are_balanced_largest_first() -> None:
    """10 to device 0, 6 and 5 to device 1, where 89 bytes are left of 100, then 2 to device 0."""
    rows = [("p0", 2, ""), ("p1", 5, ""), ("p2", 10, ""), ("p3", 6, ""), ("f4", 1, "p1"),
            ("f5", 1, "p0")]  # fmt: skip
    problem, limit = _problem(*rows), np.array([100, 100])
    assert balanced_place(problem, np.arange(6), limit).tolist() == [0, 1, 0, 1, 1, 0]
    assert balanced_place(problem, np.arange(6), np.array([100, 105])).tolist() == [
        0,
        1,
        1,
        0,
        1,
        0,
    ]
    # What stays on device 0 comes first, so the 10 bytes go to device 1.
    only = problem._replace(runs=problem.runs & ~np.array([[0, 1], *[[0, 0]] * 5], dtype=bool),
                            fixed=np.array([0, -1, -1, -1, -1, -1]))  # fmt: skip
    assert balanced_place(only, np.arange(6), limit).tolist() == [0, 0, 1, 0, 0, 0]
    pins = residual_pins(problem, np.array([1, 0, 1, 0, 1, 1]))
    assert pins.tolist() == [1, 0, 1, 0, -1, -1]
