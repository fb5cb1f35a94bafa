"""What planning refuses before or after any algorithm: by name, with the numbers."""

from typing import Any

import pytest

import pardnn
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, UsageError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.planner.options import PlanOptions
from pardnn.sim.machine import machine_of
from pardnn.time_limit import OutOfTimeError
from tests.place.machines import cluster_of


def _graph(seconds: float, kind: str = "accelerator"):
    return build_graph("two", [
        Op(name="first", kind="input", outputs=(Tensor(name="a", bytes=8),),
           seconds={"accelerator": seconds}),
        Op(name="second", kind="aten.mm.default", inputs=("a",), seconds={kind: seconds},
           source="train.py:7"),
    ])  # fmt: skip


@pytest.mark.jit
@pytest.mark.parametrize("algorithm", ["auto", "pardnn", "round-robin", "heft", "m-topo"])
def test_an_op_that_can_run_nowhere_is_named(algorithm: str) -> None:
    with pytest.raises(
        InfeasibleError, match=r"op 'second' \(train.py:7\) cannot run on any"
    ) as caught:
        pardnn.plan(_graph(1.0, "cpu"), cluster_of(2), algorithm=algorithm)
    assert caught.value.code == "E302"
    assert caught.value.details["op"] == "second"


def test_seconds_that_add_up_to_infinity_are_refused() -> None:
    with pytest.raises(UsageError, match="no finite time") as caught:
        pardnn.plan(_graph(1e308), cluster_of(2), algorithm="single")
    assert caught.value.code == "E235"
    pardnn.plan(_graph(1e200), cluster_of(2), algorithm="single")


def test_a_slow_device_may_make_them_infinite() -> None:
    graph = _graph(1e288)
    seconds = [op.seconds["accelerator"] for op in graph.ops if op.seconds]
    costs = Costs({"accelerator": pytest.importorskip("numpy").array(seconds)}, "graph")
    machine_of(costs, cluster_of(1))
    with pytest.raises(UsageError, match="speed 1e-20"):
        machine_of(costs, cluster_of(1, speeds=(1e-20,)))


@pytest.mark.parametrize("asked", [{"recompute": True}, {"offload": True}, {"microbatches": 2}])
def test_what_a_policy_cannot_do_is_not_met_by_another_algorithm(asked: dict[str, Any]) -> None:
    """The advice was `auto`, with which the same was refused again."""
    with pytest.raises(UsageError, match=r"policy fifo(?s:.*)use the policy order"):
        PlanOptions(algorithm="auto", policy="fifo", **asked)
    PlanOptions(algorithm="auto", policy="order", **asked)


def test_a_search_that_tried_nothing_says_so() -> None:
    with pytest.raises(OutOfTimeError, match="tried: none completed"):
        pardnn.plan(_graph(1.0), cluster_of(4), algorithm="heft", microbatches=2, time_limit=0.0)
