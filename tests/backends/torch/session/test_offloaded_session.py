"""A script whose optimizer state is on the host: its objects hold it, replaced data follows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import pardnn
from pardnn.backends.torch.ops.host_memory import is_on_host
from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.file import stamped
from pardnn.plan.plan import Plan
from pardnn.plan.rewritten.offload import graph_with_host, may_offload
from pardnn.plan.state_in_place import StateInPlace
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.session.kept_data.test_rebound import (
    TAKEN,
    eager,
    made,
    momentum,
    nothing,
    rows,
    trained,
)


def on_host(graph: Graph, size: int, _state: StateInPlace | None) -> Plan:
    names = tuple(op.name for op in may_offload(graph))
    assert names
    plan = pardnn.plan(graph_with_host(graph, names), Cluster.uniform(size), "single",
                       reserve=0.0, costs="v100")  # fmt: skip
    return stamped(dataclasses.replace(plan, offload=names), graph)


def on_host_at_first(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
    if state is None:
        return on_host(graph, size, state)
    return pardnn.plan(graph, Cluster.uniform(size), "single", reserve=0.0, costs="v100")


@pytest.mark.parametrize("decide", [on_host, on_host_at_first])
def test_replaced_data_goes_to_the_host(decide: Any) -> None:
    losses, state = eager(TAKEN)

    def body(rank: int, path: str) -> Any:
        connect(rank, 1, path, 20).close()
        step, *both = made()
        objects: Any = both
        fast = parallelize(step, *objects, rows(4, 6), decide=decide, timeout=20, device="cpu")
        first = trained(TAKEN[:-1], objects, fast)
        was_there = is_on_host(momentum(*objects)["momentum_buffer"])
        last = trained_from(len(TAKEN) - 1, objects, fast)
        is_there = is_on_host(momentum(*objects)["momentum_buffer"])
        whole = {name: fast.whole(name).tolist() for name in fast.names}
        return [*first, *last], whole, was_there, is_there

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    found, whole, was_there, is_there = outcome.value
    assert found == losses
    assert {each: whole[each] for each in state} == state
    assert was_there
    assert is_there == (decide is on_host)


def trained_from(number: int, objects: Any, run: Any) -> list[float]:
    """Train as `trained` does from one of its changes on."""
    losses = []
    for i in range(number, len(TAKEN)):
        TAKEN[i](*objects)
        losses.append(run(rows(4, 6).cos() * (i + 1)).item())
    return losses


def test_a_checkpoint_holds_what_is_on_the_host(tmp_path: Path) -> None:
    losses, _ = eager([nothing] * 4)

    def body(rank: int, path: str) -> Any:
        connect(rank, 1, path, 20).close()
        step, *both = made()
        objects: Any = both
        fast = parallelize(step, *objects, rows(4, 6), decide=on_host, timeout=20, device="cpu")
        trained([nothing] * 2, objects, fast)
        fast.save(tmp_path / "run")
        trained([nothing] * 2, objects, fast)
        fast.load(tmp_path / "run")
        there = is_on_host(momentum(*objects)["momentum_buffer"])
        return [fast(rows(4, 6).cos() * (i + 1)).item() for i in (2, 3)], there

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    assert outcome.value == [losses[2:], True]
