"""Critical-path switches and repeated list scheduling never lengthen the step."""

import numpy as np

from pardnn.place.pardnn.critical_path_switch import switch_critical_path
from pardnn.place.pardnn.step1_makespan import emulated, improved
from tests.place.machines import problem_for
from tests.strategies import FAMILIES, random_graph


def test_switches_never_lengthen_what_they_look_at() -> None:
    switched_at_all = 0
    for seed in range(10):
        problem = problem_for(random_graph(seed, 40, FAMILIES[seed % 5], memory=False))
        place = np.random.default_rng(seed).integers(0, 2, problem.arrays.num_ops)
        before = emulated(problem, place)
        after, switched = switch_critical_path(problem, place)
        switched_at_all += switched
        assert (after != place).any() == (switched > 0)
        best = improved(problem, before, np.full(len(problem.runs), -1, dtype=np.int64))
        assert best.makespan <= before.makespan
    assert switched_at_all > 0
