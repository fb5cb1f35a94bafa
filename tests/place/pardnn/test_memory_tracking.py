"""The memory profile (Eq. 4.3) against its naive twin and against plans."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.place.ordering.low_memory_orders import file_positions
from pardnn.place.ordering.memory_bounded import latest_slot_plan, limits
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.overflow_knapsack import move_unit, units_of
from pardnn.sim.peak import peaks
from tests.place.machines import problem_for, random_place
from tests.reference import pardnn as naive
from tests.strategies import graphs


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
