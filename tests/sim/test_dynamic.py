"""The emulator against its naive twin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.ir import Graph
from pardnn.sim.dynamic import emulate
from pardnn.sim.levels import bottom_levels
from tests.place.machines import cluster_of, machine_for
from tests.reference.sim import emulated_finish
from tests.strategies import graphs


@pytest.mark.parametrize("fifo", [True, False])
@given(graph=graphs(max_ops=12, memory=False), seed=st.integers(0, 9))
def test_dynamic(fifo: bool, graph: Graph, seed: int) -> None:
    machine = machine_for(graph, cluster_of(3, bandwidth=3.0, latency=0.11))
    # No op without duration: at one instant, those make the order of devices matter.
    machine = machine._replace(seconds=machine.seconds + 0.13)
    place = np.random.default_rng(seed).integers(0, 3, len(graph.ops))
    key = None if fifo else -bottom_levels(graph.arrays, machine, place)
    finish = emulate(graph.arrays, machine, place, key).finish
    expected = emulated_finish(
        graph, machine, place.tolist(), None if key is None else key.tolist()
    )
    assert finish.tolist() == pytest.approx(expected)
