"""How much local search a start is worth beside a known plan."""

import math

import pytest

from pardnn.place.baselines.round_robin import place_round_robin
from pardnn.place.polish import polish
from pardnn.place.polish.effort import LEAST_REACH, NEAR, REACH, ROUND, Gains, is_far
from pardnn.place.polish.polish import polish_best
from pardnn.sim.engine import simulate
from tests.place.machines import cluster_of, machine_for
from tests.strategies import random_graph


def test_rounds_that_gain_too_little_do_not_get_there() -> None:
    gains = Gains(4, (1.5, 1.1, 1.01))
    assert gains.may_reach(1.1**3 - 1e-9, 1.0, 3)  # the better of the last two counts
    assert not gains.may_reach(1.1**3 + 1e-9, 1.0, 3)
    idle = Gains(4, (1.0, 1.0))  # memory may have delayed what was found
    assert idle.may_reach(ROUND**8 - 1e-9, 1.0, 8)
    assert not idle.may_reach(ROUND**8 + 1e-9, 1.0, 8)
    assert gains.may_reach(9.0, math.inf, 0)
    assert Gains(4, (1.0,)).may_reach(9.0, 1.0, 0)  # one round says little


def test_a_second_start_may_gain_more_than_the_first() -> None:
    first, then = 1.0, 0.98
    reach = then * (first / then) ** REACH
    assert not is_far(reach - 1e-9, first, then, then)
    assert is_far(reach + 1e-9, first, then, then)
    assert is_far(1.0, first, then, 0.9)  # another plan is faster than either becomes
    assert is_far(NEAR * then + 1e-9, 2.0, then, then)
    assert not is_far(LEAST_REACH - 1e-9, first, first, first)  # the first may have been unlucky
    assert is_far(LEAST_REACH + 1e-9, first, first, first)


@pytest.mark.jit
@pytest.mark.parametrize("few", [79, 80])
def test_rounds_end_where_a_known_plan_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """Of a large graph alone, and no plan is slower than what it starts from."""
    graph = random_graph(1, 80, "fork-join", memory=False)
    machine = machine_for(graph, cluster_of(3))
    plan = place_round_robin(graph, machine, [None] * 3).plan
    seconds = simulate(graph, machine, plan).makespan
    rounds = list[int]()

    def searched(job, best, slower, work, tolerance, seed):  # type: ignore[no-untyped-def]
        rounds.append(work)
        return search(job, best, slower, work, tolerance, seed)

    search = polish._searched
    monkeypatch.setattr(polish, "_searched", searched)
    monkeypatch.setattr(polish, "FEW_OPS", few)
    monkeypatch.setattr(polish, "NEAR", math.inf)
    found, _ = polish_best(graph, machine, [plan], [None] * 3, work=80_000, known_s=1e-6 * seconds)
    assert simulate(graph, machine, found).makespan <= seconds
    assert len(rounds) == (2 if few < 80 else 2 * polish.ROUNDS)
