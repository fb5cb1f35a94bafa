"""The worked example comes out to the last digit, under every policy."""

import json
from pathlib import Path

import numpy as np
import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.graph.file import read_graph
from pardnn.plan.check import plan_problems
from pardnn.plan.file import read_plan
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import plan_arrays
from pardnn.sim.bounds import critical_path_seconds, lower_bound_seconds
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of, serial_seconds
from pardnn.sim.peak import peaks

DIGITS = 1e-15  # of seconds: the sums are rounded in another order than in the file


@pytest.mark.jit
def test_tiny(tiny: Path) -> None:
    graph, plan = read_graph(tiny / "graph.json"), read_plan(tiny / "plan.json")
    cluster = Cluster.load(tiny / "cluster.json")
    expected = json.loads((tiny / "expected.json").read_text())
    machine = machine_of(graph_costs(graph), cluster)
    arrays = plan_arrays(graph, plan)
    assert plan_problems(graph, plan, cluster) == []
    assert peak_bytes(graph, arrays) == peaks(graph.arrays, arrays).tolist()
    assert peak_bytes(graph, arrays) == expected["peak_bytes"]
    assert serial_seconds(machine) == pytest.approx(expected["serial_s"], abs=DIGITS)
    path = critical_path_seconds(graph.arrays, machine)
    assert path == pytest.approx(expected["critical_path_s"], abs=DIGITS)
    assert lower_bound_seconds(graph.arrays, machine) >= expected["lower_bound_s_at_least"] - DIGITS
    for policy in ("order", "fifo", "priority"):
        timeline = simulate(graph, machine, arrays, policy)
        assert timeline.makespan == pytest.approx(expected["makespan_s"][policy], abs=DIGITS)
        assert timeline.transfer_bytes(graph) == expected["transfer_bytes"]
        assert np.allclose(timeline.busy(arrays.place, 2), expected["busy_s"], atol=DIGITS)
        found = {op.name: [timeline.start[i], timeline.finish[i]] for i, op in enumerate(graph.ops)}
        tensors = [tensor.name for op in graph.ops for tensor in op.outputs]
        for i, tensor in enumerate(timeline.message_tensor):
            times = [timeline.message_start[i], timeline.message_finish[i]]
            found[f"message {tensors[tensor]}"] = times
        for name, times in expected["timeline_s"].items():
            assert found[name] == pytest.approx(times, abs=DIGITS), name


@pytest.mark.jit
def test_tiny_on_one_device(tiny: Path) -> None:
    graph = read_graph(tiny / "graph.json")
    expected = json.loads((tiny / "expected.json").read_text())
    order = [op.name for op in graph.ops]
    from pardnn.plan.plan import Plan

    plan = Plan(placement=dict.fromkeys(order, 0), order=(tuple(order),))
    assert peak_bytes(graph, plan_arrays(graph, plan)) == [expected["one_device_peak_bytes"]]
