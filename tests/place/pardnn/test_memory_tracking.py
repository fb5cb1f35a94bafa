"""The memory profile (Eq. 4.3) against its naive twin and against plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan, limits
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn import memory_tracking
from pardnn.place.pardnn.memory_potential import memory_potential_of
from pardnn.place.pardnn.memory_tracking import memory_profile_of, track_memory
from pardnn.place.pardnn.overflow_knapsack import move_unit, units_of
from pardnn.place.pardnn.problem import Problem
from pardnn.sim.peak import peaks
from tests.place.machines import problem_for, random_place
from tests.reference import pardnn as naive
from tests.strategies import FAMILIES, graphs, random_graph


@given(graph=graphs(max_ops=12), seed=st.integers(0, 9))
def test_the_profile_stays_exact_while_units_move(graph: Graph, seed: int) -> None:
    problem = problem_for(graph, 3, with_views=True)
    rng = np.random.default_rng(seed)
    units = len(problem.runs)
    place = rng.integers(0, 3, units)[problem.arrays.group]
    position = file_positions(graph.arrays)
    profile = memory_profile_of(problem.arrays, place, position, limits([None] * 3))
    stamp = np.zeros(graph.arrays.num_tensors + 1, dtype=np.int64)
    parts = units_of(problem)
    for _ in range(4):
        live = naive.live_bytes_in_order(graph, profile.place.tolist(), position.tolist(), 3)
        assert profile.top[:, 1].tolist() == np.maximum(live.max(axis=1), 0).tolist()
        move_unit(profile, parts, int(rng.integers(units)), int(rng.integers(3)), stamp)


def test_a_coarse_profile_is_kept_up_too_and_is_never_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four positions share a leaf: it holds what is live at any of them."""
    for seed in range(12):
        graph = random_graph(seed, 16, FAMILIES[seed % 6])
        problem, rng = problem_for(graph, 3, with_views=True), np.random.default_rng(seed)
        units, position = len(problem.runs), file_positions(graph.arrays)
        place = rng.integers(0, 3, units)[problem.arrays.group]
        none, parts = limits([None] * 3), units_of(problem)
        stamp = np.zeros(graph.arrays.num_tensors + 1, dtype=np.int64)
        with monkeypatch.context() as patch:
            patch.setattr(memory_tracking, "MAX_LEAVES", 4)
            profile = memory_profile_of(problem.arrays, place, position, none)
            assert profile.shift >= 2
            for _ in range(4):
                move_unit(profile, parts, int(rng.integers(units)), int(rng.integers(3)), stamp)
                anew = memory_profile_of(problem.arrays, profile.place.copy(), position, none)
                assert profile.top[:, 1].tolist() == anew.top[:, 1].tolist()
        exact = memory_profile_of(problem.arrays, profile.place.copy(), position, none)
        assert (profile.top[:, 1] >= exact.top[:, 1]).all()


@given(graph=graphs(max_ops=14), seed=st.integers(1, 9).filter(lambda seed: seed % 2))
def test_its_peaks_are_those_of_plans_with_the_latest_slots(graph: Graph, seed: int) -> None:
    place, position = random_place(graph, 3, seed), file_positions(graph.arrays)
    plan = latest_slot_plan(graph.arrays, 3, place, position, first_overwrites(graph))
    problem = problem_for(graph, 3, with_views=True)
    top = memory_profile_of(problem.arrays, place, position, limits([None] * 3)).top[:, 1]
    busy = np.bincount(place, minlength=3) > 0
    assert (np.where(busy, top, 0) >= peaks(graph.arrays, plan)).all()
    first = plan.order_op[plan.order_ptr[plan.message_target]]
    if not (plan.message_post == first).any():
        # A device that has not begun receives at any time, so the sender need not wait.
        assert np.array_equal(np.where(busy, top, 0), peaks(graph.arrays, plan))


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("eager", [True, False])
def test_potentials_are_what_leaves_a_device(eager: bool, memory: bool) -> None:
    """M_pot (Table 4.2): the bytes at each position that leave with a unit for an idle device.

    Exactly, where messages leave at once and nothing is a view or written in place. In their latest
    slots the first reader of a copy takes with it what later readers still need, too, which counts
    for neither: so at most.
    """
    for seed in range(20):
        graph = random_graph(seed, 7, FAMILIES[seed % 5], memory=memory)
        problem = problem_for(graph, 3)
        rng = np.random.default_rng(seed)
        place = rng.integers(0, 2, len(problem.runs))[problem.arrays.group]
        position, none = file_positions(graph.arrays), np.zeros(3, dtype=np.int64)
        before = track_memory(problem.arrays, place, position, none, eager=eager).profile
        terms = memory_potential_of(before, problem.arrays.group)
        for unit in range(len(problem.runs)):
            members = problem.arrays.group == unit
            d = int(place[members][0])
            after = np.where(members, 2, place)
            leaves = _live(problem, place, eager)[d] - _live(problem, after, eager)[d]
            found = np.zeros(len(position), dtype=np.int64)
            for first, last, hole, end, owner, size in terms.term[terms.ptr[d] : terms.ptr[d + 1]]:
                if owner == unit:
                    found[first : last + 1] += size
                    found[max(first, hole) : min(last, end) + 1] -= size
            if eager and not memory:
                assert found.tolist() == leaves.tolist()
            assert (found <= np.maximum(leaves, 0)).all()


def _live(problem: Problem, place: np.ndarray, eager: bool) -> np.ndarray:
    position = file_positions(problem.arrays)
    none = np.zeros(3, dtype=np.int64)
    top = track_memory(problem.arrays, place, position, none, eager=eager).profile.top
    return top[:, top.shape[1] // 2 :][:, : len(position)]


@pytest.mark.parametrize("eager", [True, False])
def test_an_input_made_on_the_device_leaves_with_its_last_reader(eager: bool) -> None:
    """Of `a`, `b` and `c` on one device, `b` reads `a` last: 10 bytes of it are b's potential.

    Sent in its latest slot, before `b` elsewhere would begin, `a` is gone when `b` runs, too.
    """
    ops = [
        Op(name=name, kind="aten.mm.default", inputs=reads, seconds={"accelerator": 1.0},
           outputs=(Tensor(name=f"{name}.out", bytes=size),))
        for name, reads, size in (("a", (), 10), ("c", ("a.out",), 3), ("b", ("a.out",), 1))
    ]  # fmt: skip
    problem = problem_for(build_graph("three", ops))
    place, none = np.zeros(3, dtype=np.int64), np.zeros(2, dtype=np.int64)
    profile = track_memory(problem.arrays, place, np.arange(3), none, eager=eager).profile
    terms = memory_potential_of(profile, problem.arrays.group)
    found = {(int(r[4]), int(r[0]), int(r[1]), int(r[5])) for r in terms.term}
    assert found == {(0, 0, 2, 10), (1, 1, 1, 3), (2, 2, 2, 1), (2, 2, 2, 10)}
