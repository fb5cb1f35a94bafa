"""Fetches begin as early as their transfers need to be over in time, and no earlier."""

import numpy as np
import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import memory_profiles
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import FETCH
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.comm_overlap import OverlapScheduler, overlapped_plan
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.peak import live_bytes
from tests.shard.spmd.test_multi_fetch import product, tensor

#: Element-wise ops of one second each before the one that needs all of w.
STEPS = 6


def chain() -> tuple[Graph, Sharding]:
    """x, h0, ... h5 by rows, and then a product with w, which lies in rows and is needed whole."""
    ops = [
        Op(name="x", kind="input", outputs=(tensor("x", 8, 8),)),
        Op(name="w", kind="parameter", outputs=(tensor("w", 8, 8),), memory="residual"),
    ]
    for n in range(STEPS):
        last = ops[-1].name if n else "x"
        args = {"args": [{"tensor": last}]}
        ops.append(Op(name=f"h{n}", kind="aten.tanh.default", inputs=(last,), arguments=args,
                      outputs=(tensor(f"h{n}", 8, 8),)))  # fmt: skip
    ops.append(product("y", ops[-1].name, "w"))
    layouts = {t.name: (0,) for op in ops for t in op.outputs}
    loops = {f"h{n}": ("i0",) for n in range(STEPS)} | {"y": ("i",)}
    return build_graph("chain", ops), Sharding(make_mesh((2,)), layouts, loops)


@pytest.mark.parametrize(
    ("latency", "lead", "early"),
    [(0.5, 1.0, 1), (1.5, 1.0, 2), (1.4, 2.0, 3), (3.5, 1.0, 4), (99.0, 1.0, STEPS)],
)
def test_a_region_is_received_while_the_ops_before_compute(
    latency: float, lead: float, early: int
) -> None:
    graph, sharding = chain()
    plan = spmd_partition(graph, sharding)
    parts = planned_graph(graph, plan)
    arrays = plan_arrays(parts, plan)
    cluster = Cluster.uniform(2, bandwidth=1e12, latency=latency)
    seconds = np.array([float(op.kind.startswith("aten.tanh")) for op in parts.ops])
    rows = [
        [float(seconds[op]) for op in row]
        for row in np.split(arrays.order_op, arrays.order_ptr[1:-1])
    ]
    moved = overlapped_plan(
        parts, plan, OverlapScheduler(parts, arrays, rows, cluster).schedule(lead)
    )
    assert plan_problems(graph, moved) == []
    kinds = {op.name: op.kind for op in parts.ops}
    for row in moved.order:
        at = next(i for i, name in enumerate(row) if kinds[name] == FETCH)
        product_at = next(i for i, name in enumerate(row) if name.startswith("y@"))
        between = row[at:product_at]
        assert sum(kinds[name].startswith("aten.tanh") for name in between) == early

    curves = memory_profiles(parts, plan_arrays(parts, moved))
    found = live_bytes(parts.arrays, plan_arrays(parts, moved))  # what is received is in its place
    assert found.tolist() == [live for curve in curves for live in curve]

    machine = machine_of(Costs({"accelerator": seconds}, "graph"), cluster)

    def makespan(of: Plan) -> float:
        return simulate(parts, machine, plan_arrays(parts, of)).makespan

    assert makespan(plan) == pytest.approx(STEPS + latency)
    # One order of all messages: a receive is posted up to two ops after its buffer is made.
    least = max(STEPS, STEPS - early + latency)
    assert least - 1e-6 <= makespan(moved) <= min(least + 2, STEPS + latency) + 1e-6
    # What is held meanwhile is in the plan: the buffer of w beside what each op reads and makes.
    whole, shard = 4 * 64, 4 * 32
    before, after = (
        [
            sum(live >= whole + 3 * shard for live in profile)
            for profile in memory_profiles(parts, of)
        ]
        for of in (arrays, plan_arrays(parts, moved))
    )
    assert [b - a for a, b in zip(before, after, strict=True)] == [early, early]
