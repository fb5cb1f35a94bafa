"""Plans of the kinds that `python -m bench numbers` runs, without a limit or under one."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

import pardnn
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.place.recompute.placed import recomputed_plan
from pardnn.plan.check import check_plan
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Plan, on_devices, plan_arrays, planned_graph
from pardnn.plan.rewritten.offload import may_offload
from pardnn.planner.offload.cut import ordered

#: Of the peak without a limit, for second calls; of the optimizer state, taken off for the host.
PART, PART_OF_STATE = 0.8, 0.6
#: Limits to try.
TRIES = 4
#: Of a search for second calls that are forced.
WORK = 20_000


class Kind(NamedTuple):
    """How to plan."""

    algorithm: str
    pieces: int | None = None
    recompute: bool = False
    offload: bool = False
    is_forced: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit, under which the plan needs more than placing or cutting."""
        return self.recompute or self.offload

    def is_met(self, plan: Plan) -> bool:
        """Whether a plan has what the kind is for."""
        has_calls, is_on_host = bool(plan.recompute), bool(plan.offload)
        return has_calls >= self.recompute and is_on_host >= self.offload

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
    "megatron*1f1b, 2 pieces, recompute, offload": Kind("megatron*1f1b", 2, True, True),
    "tofu*pardnn, 2 pieces, recompute, offload": Kind("tofu*pardnn", 2, True, True),
    "pardnn, forced": Kind("pardnn", is_forced=True),
    "1f1b, 4 pieces, forced": Kind("1f1b", 4, is_forced=True),
    "tofu, forced": Kind("tofu", is_forced=True),
    "zero-3, forced": Kind("zero-3", is_forced=True),
    "zero-1, 2 pieces, forced": Kind("zero-1", 2, is_forced=True),
    "megatron*1f1b, 2 pieces, forced": Kind("megatron*1f1b", 2, is_forced=True),
    "tofu*pardnn, 2 pieces, forced": Kind("tofu*pardnn", 2, is_forced=True),
    "auto-whole": Kind("auto-whole"),
    "auto, pieces auto": Kind("auto", 0),
}


def means_of(plan: Plan) -> list[str]:
    """Return what a plan uses to fit or to be fast, of five."""
    used = {
        "ops cut": plan.partition is not None,
        "ops placed": plan.partition is None or "*" in str(plan.algorithm),
        "pieces": plan.pieces is not None,
        "second calls": bool(plan.recompute),
        "state on the host": bool(plan.offload),
    }
    return [means for means, is_used in used.items() if is_used]


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


def first_limit(graph: Graph, kind: Kind, plan: Plan) -> int:
    """Return a limit under what a plan without any needs.

    Args:
        graph: The graph.
        kind: How to plan.
        plan: Without a limit.
    """
    assert plan.predicted is not None
    state = np.zeros(plan.num_devices)
    for op in planned_graph(graph, plan).ops:
        if op.kind == "state":
            state[plan.placement[op.name]] += op.outputs[0].bytes
    peaks = np.array(plan.predicted.peak_bytes)
    fullest = peaks.argmax()
    # Only ParDNN places by the limit: below the mean of all devices it needs more than that.
    peak, there = (
        (peaks.mean(), state.mean())
        if kind.algorithm == "pardnn"
        else (peaks[fullest], state[fullest])
    )
    return int(peak * (PART if kind.recompute else 1) - PART_OF_STATE * there * kind.offload)


def forced(graph: Graph, plan: Plan) -> Plan:
    """Return a plan with second calls and half of the optimizer state on the host, fit or not.

    Args:
        graph: The graph.
        plan: A plan for it without them.
    """
    assert plan.predicted is not None
    there = on_devices(graph, plan)
    seconds = np.full((plan.num_devices, len(there.ops)), 1e-6)
    limits = [int(PART * peak) for peak in plan.predicted.peak_bytes]
    plan = recomputed_plan(there, plan, seconds, limits, work=WORK)
    sent = {message.tensor for message in plan.messages}
    free = [op.name for op in may_offload(there) if op.outputs[0].name not in sent]
    if free:
        plan = dataclasses.replace(plan, offload=tuple(free[::2]))
        plan = ordered(plan, planned_graph(graph, plan))
    again = planned_graph(graph, plan)
    peaks = tuple(int(peak) for peak in peak_bytes(again, plan_arrays(again, plan)))
    predicted = dataclasses.replace(plan.predicted, peak_bytes=peaks) if plan.predicted else None
    plan = dataclasses.replace(plan, predicted=predicted, checksum=None)
    check_plan(graph, plan)
    return plan


def planned(graph: Graph, kind: Kind, ranks: int) -> tuple[Plan, int | None]:
    """Return a plan of a kind and its limit, with second calls or state on the host if it can.

    Args:
        graph: The graph.
        kind: How to plan.
        ranks: Number of devices.

    Raises:
        PardnnError: If the plan without a limit is refused, or each under one.
    """
    plan = plan_of(graph, kind, ranks)
    if kind.is_forced:
        plan = forced(graph, plan)
        return plan, max(plan.predicted.peak_bytes) if plan.predicted else None
    if not kind.is_limited:
        return plan, None
    assert plan.predicted is not None
    refused, without = 0, max(plan.predicted.peak_bytes)
    limit = first_limit(graph, kind, plan)
    best: tuple[Plan, int] | None = None
    failure: InfeasibleError | None = None
    for _ in range(TRIES):
        try:
            best = plan_of(graph, kind, ranks, limit), limit
        except InfeasibleError as error:
            failure, refused = error, limit
            limit = (limit + without) // 2
            continue
        if kind.is_met(best[0]):
            break
        without = limit
        limit = (limit + refused) // 2 if refused else int(limit * PART)
    if best is None:
        assert failure is not None
        raise failure
    return best
