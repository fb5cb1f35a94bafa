"""Complete plans of a placement: where messages are posted and held."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from tests.place.machines import schedule


@given(st.integers(0, 2**32), st.integers(2, 4))
@settings(max_examples=30)
def test_transfers_of_no_time_do_not_wait_for_each_other(seed: int, num_devices: int) -> None:
    """Ops and messages that take no time tie everywhere; order alone keeps them apart."""
    draw = np.random.default_rng(seed)
    ops: list[Op] = []
    for i in range(int(draw.integers(4, 30))):
        inputs = {f"o{draw.integers(i)}" for _ in range(draw.integers(3)) if i}
        size, seconds = int(draw.choice([0, 100])), float(draw.choice([0.0, 1e-3]))
        ops.append(
            Op(
                name=f"o{i}",
                kind="op",
                inputs=tuple(sorted(inputs)),
                outputs=(Tensor(name=f"o{i}", bytes=size),),
                seconds={"accelerator": seconds},
            )
        )
    graph = build_graph("ties", ops)
    cluster = Cluster.uniform(num_devices, bandwidth=1e30, latency=0.0)
    machine = machine_of(graph_costs(graph), cluster)
    place = draw.integers(num_devices, size=len(ops))
    simulate(graph, machine, schedule(graph, machine, place))
