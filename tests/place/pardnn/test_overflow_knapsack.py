"""Addressing overflow (Eqs. 4.4 and 4.5) on cases worked by hand: which units move, and where."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.kernels.jit import kernel
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.pardnn.memory_potential import BLOCK, MemoryPotential, memory_potential_of
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.overflow_knapsack import (
    ROUNDS,
    _add_potentials,
    _resolve_kernel,
    resolve_overflow,
    units_of,
)
from pardnn.place.pardnn.problem import Problem, problem_of
from tests.place.grouped import grouped_graph
from tests.place.machines import cluster_of, machine_for, problem_for
from tests.reference.knapsack import Knapsack

#: What an op of a case is: name, bytes that it holds for the whole step, seconds, what it reads.
Row = tuple[str, int, float, Sequence[str]]


def _resolved(
    rows: Sequence[Row], place: Sequence[int], capacity: Sequence[int]
) -> tuple[bool, str]:
    """Whether all fits then, and the devices; messages take a second per byte."""
    ops = [
        Op(
            name=name,
            kind="aten.mm.default" if reads else "parameter",
            inputs=tuple(reads),
            outputs=(Tensor(name=name, bytes=size),),
            memory="residual",
            seconds={"accelerator": seconds},
        )
        for name, size, seconds, reads in rows
    ]
    graph = build_graph("by hand", ops)
    cluster = cluster_of(len(capacity), bandwidth=1.0, latency=0.0)
    problem = problem_of(graph.arrays, machine_for(graph, cluster))
    devices, limits = np.array(place, dtype=np.int64), np.array(capacity, dtype=np.int64)
    profile = memory_profile_of(graph.arrays, devices, np.arange(len(ops)), limits)
    fits = resolve_overflow(problem, profile)
    return fits, "".join(str(d) for d in profile.place)


@pytest.mark.parametrize(
    ("rows", "capacity", "moved"),
    [
        # Seconds per byte: a 4/12, b 1/5, c 3/5, d 1.5/6. Of 28 bytes 10 are too many: b, then d.
        ([("a", 12, 4, ()), ("b", 5, 1, ()), ("c", 5, 3, ()), ("d", 6, 1.5, ())], 18, "bd"),
        # a has the best ratio, 5/100, but b alone is enough, and cheaper.
        ([("a", 100, 5, ()), ("b", 10, 2, ())], 100, "b"),
        # With 11 too many b is not enough, however cheap: a resolves it alone.
        ([("a", 100, 5, ()), ("b", 10, 2, ())], 99, "a"),
        # b is cheap to compute, and what reads its 20 bytes stays: 20 s of messages.
        ([("a", 20, 5, ()), ("b", 20, 1, ()), ("c", 0, 1, ("b",))], 20, "a"),
        # The same the other way round: what it reads stays.
        ([("a", 20, 5, ()), ("c", 9, 9, ()), ("b", 20, 1, ("c",))], 29, "a"),
    ],
)
def test_the_units_that_move_are_those_of_the_greedy_knapsack(rows, capacity, moved) -> None:
    fits, place = _resolved(rows, [0] * len(rows), [capacity, 1000])
    assert fits
    assert "".join(row[0] for row, d in zip(rows, place, strict=True) if d == "1") == moved


@pytest.mark.parametrize(
    ("room", "target"), [((13, 13, 13), "3"), ((13, 13, 12), "2"), ((13, 12, 12), "1")]
)
def test_a_unit_goes_where_it_communicates_most_of_where_it_fits(room, target) -> None:
    """`u` of 10 bytes reads two ops on device 3, one on device 2 and none on device 1.

    They have a byte each: wherever `u` goes, 13 bytes are held.
    """
    rows = [("x", 1, 1, ()), ("y", 1, 1, ()), ("z", 1, 1, ()), ("u", 10, 1, ("x", "y", "z"))]
    fits, place = _resolved(rows, [2, 3, 3, 0], [9, *room])
    assert fits
    assert place == "233" + target


def test_what_fits_nowhere_is_not_resolved() -> None:
    """Two units of 10 bytes, and room for one of them."""
    rows = [("a", 10, 1, ()), ("b", 10, 1, ())]
    assert _resolved(rows, [0, 0], [9, 10])[0] is False
    assert _resolved(rows, [0, 0], [10, 10]) in [(True, "01"), (True, "10")]
    assert _resolved(rows, [0, 0], [20, 0]) == (True, "00")


def test_a_device_that_fits_does_not_hide_one_that_overflows() -> None:
    """What counts is the overflow: of device 1, with 10 of 5 bytes, not with 100 of 1000."""
    rows = [("a", 100, 1, ()), ("b", 5, 1, ()), ("c", 5, 1, ())]
    fits, place = _resolved(rows, [0, 1, 1], [1000, 5])
    assert fits
    assert place in ("001", "010")


def test_each_unit_goes_where_it_communicates_itself() -> None:
    """`a` reads of device 1, `b`, looked at after it, of device 2; `a` is the cheaper one."""
    rows = [("x", 4, 1, ()), ("y", 9, 1, ()), ("a", 10, 1, ("x",)), ("b", 10, 9, ("y",))]
    fits, place = _resolved(rows, [1, 2, 0, 0], [19, 100, 100])
    assert fits
    assert place == "1210"


def test_moves_are_those_of_the_naive_knapsack() -> None:
    """On tiny graphs with groups, parameters and workspaces; most overflow, and many are fitted."""
    fitted = compared = 0
    for seed in range(40):
        graph, k = grouped_graph(seed, 7 + seed % 4), 2 + seed % 2
        if seed % 4 == 0:  # some tensors hold nothing
            graph = build_graph("some empty", [
                dataclasses.replace(op, outputs=tuple(
                    dataclasses.replace(t, bytes=t.bytes // 4 * 4) for t in op.outputs
                ))
                for op in graph.ops
            ])  # fmt: skip
        problem = problem_for(graph, k)
        rng = np.random.default_rng(seed)
        place = rng.integers(0, k, len(problem.runs))[problem.arrays.group]
        top = memory_profile_of(
            problem.arrays, place, file_positions(graph.arrays), np.zeros(k, dtype=np.int64)
        ).top[:, 1]
        capacity = (top * rng.choice([0.6, 0.8, 1.0, 1.5], k)).astype(np.int64)
        compared += 1
        fitted += _compared(graph, problem, place, capacity)
    assert fitted > 8
    assert compared - fitted > 3


def test_a_pass_with_few_tries_and_little_patience_is_that_of_the_twin() -> None:
    """As in large graphs; some units cannot run everywhere, and inputs often weigh the same."""
    outcomes: list[str] = []
    for seed in range(60):
        graph, k = grouped_graph(seed, 8 + seed % 4), 3 + seed % 3
        problem = problem_for(graph, k)
        units, n, rng = len(problem.runs), problem.arrays.num_ops, np.random.default_rng(seed)
        position = np.arange(n)
        place = rng.integers(0, k - 1, units)[problem.arrays.group]
        runs = problem.runs & (rng.random((units, k)) < 0.8)
        problem = problem._replace(runs=runs, latency=float(seed % 2), byte_seconds=seed % 3 / 4)
        none = np.zeros(k, dtype=np.int64)
        top = memory_profile_of(problem.arrays, place, position, none).top[:, 1]
        capacity = (top * rng.choice([0.5, 0.7, 0.9, 1.2], k)).astype(np.int64) + 3
        profile = memory_profile_of(problem.arrays, place, position, capacity)
        twin = Knapsack(graph, problem, position, place, capacity)
        twin.tries, twin.patience = 1 + seed % k, int(rng.integers(0, 6))
        u, moved = units_of(problem), np.zeros(units, dtype=np.bool_)
        potential = np.zeros(units, dtype=np.int64)
        outcome, patience = _resolve_kernel(
            profile, u, memory_potential_of(profile, u.group), moved, potential,
            np.zeros(problem.arrays.num_tensors + 1, np.int64), twin.tries, twin.patience,
        )  # fmt: skip
        expected: set[int] = set()
        outcomes.append(twin.one_pass(expected))
        assert ["fits", "fails", "stale"][outcome] == outcomes[-1]
        assert (patience, set(np.flatnonzero(moved))) == (twin.patience, expected)
        assert profile.place.tolist() == twin.place.tolist()
        assert not potential.any()
    assert min(outcomes.count(each) for each in ("fits", "fails", "stale")) > 3


@kernel
def _add(
    terms: MemoryPotential, d: int, at: int, potential: np.ndarray, touched: np.ndarray
) -> int:
    return _add_potentials(terms, d, at, potential, touched)


@pytest.mark.parametrize("counts", [(BLOCK, 0), (1, BLOCK - 1), (70, 0, 3 * BLOCK - 5), (0, 140)])
def test_a_potential_is_the_sum_of_the_terms_alive(counts: tuple[int, ...]) -> None:
    """Terms of devices begin within blocks; some have a hole, and many have ended."""
    rng, total = np.random.default_rng(sum(counts)), sum(counts)
    begin, hole = np.sort(rng.integers(0, 12, total)), rng.integers(0, 16, (total, 2))
    ptr = np.concatenate([[0], np.cumsum(counts)])
    for d, first in enumerate(ptr[:-1]):
        begin[first : ptr[d + 1]].sort()
    columns = [begin, begin + rng.integers(0, 4, total), *hole.T, rng.integers(0, 9, (2, total))]
    term = np.column_stack([*columns[:4], columns[4][0], columns[4][1] + 1])
    until = np.maximum.reduceat(term[:, 1], np.arange(0, total, BLOCK))
    for d in range(len(counts)):
        for at in range(16):
            expected: dict[int, int] = {}
            for a, b, c, e, unit, size in term[ptr[d] : ptr[d + 1]].tolist():
                if a <= at <= b and not c <= at <= e:
                    expected[unit] = expected.get(unit, 0) + size
            potential, touched = np.zeros((2, 9), dtype=np.int64)
            count = _add(MemoryPotential(ptr, term, until), d, at, potential, touched)
            assert touched[:count].tolist() == list(expected)
            assert {int(u): int(potential[u]) for u in touched[:count]} == expected


def test_of_many_small_units_the_best_are_found() -> None:
    """More terms than a block holds, in any order of merit."""
    rng = np.random.default_rng(0)
    ops = [
        Op(
            name=f"p{i}",
            kind="parameter",
            outputs=(Tensor(name=f"p{i}", bytes=int(size)),),
            memory="residual",
            seconds={"accelerator": float(seconds)},
        )
        for i, (size, seconds) in enumerate(rng.integers(1, 200, (150, 2)))
    ]
    graph = build_graph("many", ops)
    problem, place = problem_for(graph), np.zeros(150, dtype=np.int64)
    total = sum(op.outputs[0].bytes for op in ops)
    assert _compared(graph, problem, place, np.array([total - 400, total]))


def _compared(graph: Graph, problem: Problem, place: np.ndarray, capacity: np.ndarray) -> bool:
    """Resolve an overflow as the twin does; return whether all fits then."""
    position = file_positions(graph.arrays)
    profile = memory_profile_of(problem.arrays, place, position, capacity)
    twin = Knapsack(graph, problem, position, place, capacity)
    expected = twin.resolve(ROUNDS)
    assert resolve_overflow(problem, profile) == expected
    assert profile.place.tolist() == twin.place.tolist()
    return expected
