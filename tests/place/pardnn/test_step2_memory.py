"""Step 2: which placements are repaired first."""

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.pardnn.step1_makespan import emulated
from pardnn.place.pardnn.step2_memory import Task, _starts
from tests.place.machines import problem_for


def test_a_start_is_as_good_as_it_is_expected_to_be_once_it_fits() -> None:
    """Of 20 bytes on a device of 12, 8 move: 10 s are 14, and 13 s that fit come first.

    What has room to spare is not better for it.
    """
    ops = [
        Op(name=name, kind="parameter", memory="residual", seconds={"accelerator": 1.0},
           outputs=(Tensor(name=name, bytes=5),))
        for name in "abcd"
    ]  # fmt: skip
    problem = problem_for(build_graph("four", ops))
    candidates = [
        emulated(problem, np.array(place))._replace(makespan=seconds)
        for place, seconds in (([1, 1, 1, 1], 10.0), ([0, 1, 1, 0], 13.0))
    ]
    task = Task(problem, problem, [12, 12], np.empty((0, 2), dtype=np.int64))
    found = {"".join(map(str, s.place.tolist())): s.seconds for s in _starts(task, candidates)}
    assert found["1111"] == pytest.approx(14.0)
    assert found["0110"] == pytest.approx(13.0)
    assert [*found].index("0110") < [*found].index("1111")
    assert [*found.values()] == sorted(found.values())
