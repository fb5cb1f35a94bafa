"""What every placement algorithm returns, and how a fixed placement becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError, shown
from pardnn.graph.ir import Graph
from pardnn.place.ordering.fit import fit_schedule, fits
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.plan.plan import PlanArrays
from pardnn.sim.machine import Machine
from pardnn.sim.timeline import Timeline
from pardnn.sim.transfers import missing_link


class Decision(NamedTuple):
    """A plan, and how it was found.

    Attributes:
        plan: Placement, order and messages.
        moved_ops: Ops that the memory step moved.
        seconds_by_step: Wall time of each step of the algorithm.
        notes: What a reader should know about it.
        lower_bound_s: No plan that fits is faster; 0 if nothing is known.
    """

    plan: PlanArrays
    moved_ops: int = 0
    seconds_by_step: Mapping[str, float] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    lower_bound_s: float = 0.0


def fitted(
    graph: Graph,
    machine: Machine,
    place: Int64[ndarray, " n"],
    capacities: list[int | None],
    timeline: Timeline | None = None,
) -> Decision:
    """Return a plan for a fixed placement, in the order of `timeline` if that fits.

    Args:
        graph: The graph.
        machine: Durations and links.
        place: Device of each op; groups are together.
        capacities: Usable bytes of each device; None is unlimited.
        timeline: A complete timeline of this placement, whose order is tried first; None for an
            emulation's.

    Raises:
        InfeasibleError: E301, if no order was found that fits, or a link is missing.
    """
    missing = missing_link(graph.arrays, machine, place)
    if missing is not None:
        before, after = (graph.ops[op].name for op in missing)
        source, target = (int(place[op]) for op in missing)
        raise InfeasibleError(
            f"this algorithm's placement needs a link that the cluster does not have: "
            f"{shown(before)} on device {source} comes before {shown(after)} on device {target}.",
            details={"op": after, "devices": [source, target]},
        )
    if timeline is not None:
        own = ordered_plan(
            graph.arrays, machine.num_devices, place, timeline, first_overwrites(graph)
        )
        if fits(graph.arrays, own, capacities):
            return Decision(own)
    plan = fit_schedule(graph, machine, place, capacities)
    if plan is None:
        raise InfeasibleError(
            "this algorithm's placement does not fit in any order that was tried."
        )
    return Decision(plan)
