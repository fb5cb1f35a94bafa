"""Linear clustering's order: the earliest estimated start time first, not the largest level."""

import numpy as np

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.place.baselines.linear_clustering import earliest_first
from tests.place.machines import cluster_of, machine_for


def test_of_two_ready_ops_the_one_that_could_start_earlier_runs_first() -> None:
    """At 3 s both are ready: `early` could have run at 1 s, `late` has the longer way to go."""

    def op(name: str, seconds: float, *reads: str) -> Op:
        return Op(
            name=name,
            kind="aten.mm.default" if reads else "input",
            inputs=tuple(f"{read}.out" for read in reads),
            outputs=(Tensor(name=f"{name}.out", bytes=0),),
            seconds={"accelerator": seconds},
        )

    ops = [
        op("busy", 3),
        op("far", 1),
        op("early", 1, "far"),
        op("late", 1, "busy"),
        op("end", 5, "late"),
    ]
    graph = build_graph("est", ops)
    machine = machine_for(graph, cluster_of(2, latency=0.0))
    place = np.array([0, 1, 0, 0, 0])
    timeline = earliest_first(graph.arrays, machine, place)
    assert timeline.start.tolist() == [0.0, 0.0, 3.0, 4.0, 5.0]
    assert timeline.makespan == 10.0
