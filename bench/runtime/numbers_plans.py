"""Plans of the kinds that `python -m bench numbers` runs, without a limit or under one."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pardnn
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, plan_arrays, planned_graph

#: Of the peak without a limit.
PARTS = (0.95, 0.85, 0.7, 0.55)
#: Of the optimizer state of the fullest device, taken off that peak.
PARTS_OF_STATE = (0.3, 0.6, 0.9)


class Kind(NamedTuple):
    """How to plan."""

    algorithm: str
    pieces: int | None = None
    recompute: bool = False
    offload: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit, under which the plan needs more than placing or cutting."""
        return self.recompute or self.offload

    @property
    def least_ranks(self) -> int:
        """Fewest ranks that can be two submeshes of two."""
        return 4 if "*" in self.algorithm else 2


KINDS = {
    "pardnn": Kind("pardnn"),
    "1f1b, 4 pieces": Kind("1f1b", 4),
    "tofu": Kind("tofu"),
    "zero-3": Kind("zero-3"),
    "zero-1, 2 pieces": Kind("zero-1", 2),
    "megatron*1f1b, 2 pieces": Kind("megatron*1f1b", 2),
    "tofu*pardnn, 2 pieces": Kind("tofu*pardnn", 2),
    "pardnn, recompute": Kind("pardnn", recompute=True),
    "1f1b, 2 pieces, recompute": Kind("1f1b", 2, recompute=True),
    "zero-3, recompute": Kind("zero-3", recompute=True),
    "tofu, recompute": Kind("tofu", recompute=True),
    "pardnn, offload": Kind("pardnn", offload=True),
    "zero-1, 2 pieces, offload": Kind("zero-1", 2, offload=True),
    "megatron*1f1b, 2 pieces, recompute": Kind("megatron*1f1b", 2, recompute=True),
    "megatron*1f1b, 2 pieces, offload": Kind("megatron*1f1b", 2, offload=True),
    "auto-whole": Kind("auto-whole"),
    "auto, pieces auto": Kind("auto", 0),
}


def tensor_peaks(graph: Graph, plan: Plan) -> list[int]:
    """Return a plan's peaks without what calls hold while they run.

    Args:
        graph: The graph.
        plan: A plan for it.
    """
    there = planned_graph(graph, plan)
    without = build_graph(there.name, [dataclasses.replace(op, workspace=0) for op in there.ops])
    return [int(peak) for peak in peak_bytes(without, plan_arrays(without, plan))]


def plan_of(graph: Graph, kind: Kind, ranks: int, limit: int | None = None) -> Plan:
    """Return a plan of a kind; links are fast, so that small ops are spread.

    Args:
        graph: The graph.
        kind: How to plan.
        ranks: Number of devices.
        limit: Bytes of each; without one nothing is called twice or lives on the host.
    """
    cluster = Cluster.uniform(ranks, latency=1e-6, memory=limit)
    return pardnn.plan(
        graph, cluster, kind.algorithm, reserve=0.0, costs="v100",
        microbatches="auto" if kind.pieces == 0 else kind.pieces,
        recompute=kind.recompute and limit is not None,
        offload=kind.offload and limit is not None,
    )  # fmt: skip


def limits_below(graph: Graph, kind: Kind, plan: Plan) -> list[int]:
    """Return limits under what a plan without any needs, the largest first.

    Args:
        graph: The graph.
        kind: How to plan.
        plan: Without a limit.
    """
    assert plan.predicted is not None
    peaks = plan.predicted.peak_bytes
    if kind.recompute:
        return [int(part * max(peaks)) for part in PARTS]
    fullest = peaks.index(max(peaks))
    state = sum(
        op.outputs[0].bytes
        for op in planned_graph(graph, plan).ops
        if op.kind == "state" and plan.placement[op.name] == fullest
    )
    return [max(peaks) - int(part * state) for part in PARTS_OF_STATE]


def planned(graph: Graph, kind: Kind, ranks: int) -> tuple[Plan, int | None]:
    """Return a plan of a kind and its limit, with second calls or state on the host if it can.

    Args:
        graph: The graph.
        kind: How to plan.
        ranks: Number of devices.

    Raises:
        PardnnError: If the first plan is refused.
    """
    plan = plan_of(graph, kind, ranks)
    if not kind.is_limited:
        return plan, None
    best: tuple[Plan, int] | None = None
    for limit in limits_below(graph, kind, plan):
        try:
            best = plan_of(graph, kind, ranks, limit), limit
        except InfeasibleError:
            if best is None:
                raise
            break
        if best[0].recompute if kind.recompute else best[0].offload:
            break
    assert best is not None
    return best
