"""Load kernels before planning is timed."""

from __future__ import annotations

from collections.abc import Iterable

from pardnn.api.algorithms import ALGORITHMS, SOLVED
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor

#: A tiny step whose plan overflows two devices of this many bytes each, and yet fits.
_WARM_UP_BYTES = 80


def _warm_up_graph() -> Graph:
    def op(i: int) -> Op:
        is_source = i % 6 == 0
        return Op(
            name=f"op{i}",
            kind="parameter" if is_source else "pardnn.warm_up",
            inputs=() if is_source else (f"t{i - 1}",),
            after=(f"op{i - 5}",) if i % 6 == 5 else (),
            outputs=(Tensor(name=f"t{i}", bytes=32 if is_source else 8),),
            memory="residual" if is_source else "normal",
            seconds={"accelerator": 1e-6},
        )

    return build_graph("warm-up", [op(i) for i in range(24)])


def warm_up(names: Iterable[str], *, limited: bool = True, polished: bool = False) -> None:
    """Compile, or load from the cache, the kernels of these algorithms on a tiny graph.

    Args:
        names: Of algorithms.
        limited: Also those that resolve overflows.
        polished: Also those of `polish`.
    """
    from pardnn.api.deciding import decide
    from pardnn.cost.costs import graph_costs
    from pardnn.place.polish import load_kernels
    from pardnn.sim.machine import machine_of

    graph = _warm_up_graph()
    costs = graph_costs(graph)
    if polished:
        load_kernels(graph, machine_of(costs, Cluster.uniform(2)))
    for memory in (None, _WARM_UP_BYTES) if limited else (None,):
        cluster = Cluster.uniform(2, memory=memory)
        for name in [name for name in names if name not in SOLVED and name in ALGORITHMS]:
            try:
                decide(graph, cluster, costs, algorithm=name, reserve=0.0, seed=0)
            except InfeasibleError:
                continue
