"""Addressing overflow (Eqs. 4.4 and 4.5) on cases worked by hand: which units move, and where."""

from collections.abc import Sequence

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.overflow_knapsack import resolve_overflow
from pardnn.place.pardnn.problem import problem_of
from tests.place.machines import cluster_of, machine_for

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
