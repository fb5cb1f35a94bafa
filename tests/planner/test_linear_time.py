"""Graphs of many ops and one odd shape are planned and proven in near linear time."""

from __future__ import annotations

import time

import pytest

import pardnn
from pardnn.errors import MismatchError
from pardnn.graph.build import build_graph
from pardnn.graph.file import fingerprint
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan import check
from pardnn.plan import file as plan_file
from pardnn.planner.check_cut import proven_cluster

pytestmark = pytest.mark.jit
SMALL, TIMES = 4000, 4


def op(name: str, *inputs: str) -> Op:
    return Op(
        name=name, kind="k" if inputs else "input", inputs=inputs,
        outputs=(Tensor(name=name, bytes=64),), seconds={"accelerator": 1e-6},
    )  # fmt: skip


def isolated(n: int) -> list[Op]:
    return [op(f"t{i}") for i in range(n)]


def chain(n: int) -> list[Op]:
    return [op("t0"), *(op(f"t{i}", f"t{i - 1}") for i in range(1, n))]


def one_source(n: int) -> list[Op]:
    return [op("t0"), *(op(f"t{i}", "t0") for i in range(1, n))]


def one_reader(n: int) -> list[Op]:
    return [*isolated(n - 1), op("last", *(f"t{i}" for i in range(n - 1)))]


def seconds(graph: Graph) -> float:
    begin = time.process_time()
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(4), "pardnn")  # proves it, too
    assert len(plan.placement) == len(graph.ops)
    return time.process_time() - begin


@pytest.mark.parametrize("shape", [isolated, chain, one_source, one_reader])
def test_planning_takes_near_linear_time(shape) -> None:
    """Of four times the ops a quadratic step would take sixteen times as long."""
    small, large = (build_graph("g", shape(n)) for n in (SMALL, SMALL * TIMES))
    seconds(small)  # loads the kernels
    least = min(seconds(small) for _ in range(2))
    assert seconds(large) < 2.5 * TIMES * least


def test_a_fingerprint_is_compared_once_where_a_plan_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a million ops it takes seconds."""
    graph = build_graph("g", chain(4))
    plan, compared = pardnn.plan(graph, pardnn.Cluster.uniform(2), "heft"), []

    def counted(graph: Graph) -> str:
        compared.append(graph)
        return fingerprint(graph)

    for module in (check, plan_file):
        monkeypatch.setattr(module, "fingerprint", counted)
    proven_cluster(graph, plan)
    pardnn.simulate(graph, plan)
    assert len(compared) == 2
    with pytest.raises(MismatchError, match="another graph"):
        proven_cluster(build_graph("g", chain(5)), plan)
