"""Evaluation of another placement: ordered, simulated, its memory proven.

Two orders are tried, and the faster one that fits counts: the plan's order, in which moved ops keep
their turn and messages are posted as memory allows (or, if that does not fit, an order as close to
it as memory allows), and a new order, as the planner finds it for a fixed placement. So a move is
evaluated without moving anything else, and the best plan with it may be faster. If a new order
alone is faster than the plan's, that is reported separately, as it is not due to the move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import PardnnError
from pardnn.explain.case import Case
from pardnn.place.ordering.fit import fit_moved, fit_schedule
from pardnn.plan.demands.check_constraints import breaking
from pardnn.plan.plan import PlanArrays
from pardnn.report.explained import Alternative
from pardnn.sim.engine import simulate
from pardnn.sim.peak import peaks
from pardnn.sim.transfers import missing_link
from pardnn.units import size_texts


class Judged(NamedTuple):
    """The result of a placement.

    Attributes:
        plan: The faster of those that fit, else the closest one; None if it cannot run.
        makespan_s: Simulated; None if none fits.
        peak_bytes: Of each device.
        transfer_bytes: Sent in all.
        why: Why it is not possible; None if it is.
    """

    plan: PlanArrays | None
    makespan_s: float | None
    peak_bytes: tuple[int, ...] | None
    transfer_bytes: int | None
    why: str | None


def moved(case: Case, ops: Sequence[int], device: int) -> Int64[ndarray, " n"]:
    """Return the placement with some ops, and all that must be with them, on another device."""
    place = case.arrays.place.copy()
    place[np.isin(case.groups, case.groups[list(ops)])] = device
    return place


def judged(case: Case, place: Int64[ndarray, " n"]) -> Judged:
    """Evaluate another placement of the ops of a plan.

    Args:
        case: The plan.
        place: Device of each op; groups are together.
    """
    graph, machine, a = case.planned, case.machine, case.planned.arrays
    broken = next((each for each in case.constraints if breaking(each, place.tolist())), None)
    if broken is not None:
        return Judged(None, None, None, None, f"constraint: {broken.constraint}")
    seconds = machine.seconds[machine.device_class[place], np.arange(len(place))]
    if not np.isfinite(seconds).all():
        name = graph.ops[int(np.flatnonzero(~np.isfinite(seconds))[0])].name
        return Judged(None, None, None, None, f"{name!r:.80} cannot run on a device of that type")
    missing = missing_link(a, machine, place)
    if missing is not None:
        ends = sorted({int(place[op]) for op in missing})
        return Judged(None, None, None, None, f"there is no link between devices {ends}")
    kept, near = fit_moved(a, machine, place, case.timeline, case.usable, case.overwrites)
    found = [] if near is None else [near]
    anew = fit_schedule(graph, machine, place, case.usable)
    found += [] if anew is None else [anew]
    if not found:
        held = tuple(peaks(a, kept).tolist())
        sent = simulate(graph, machine, kept).transfer_bytes(graph)
        return Judged(kept, None, held, sent, _over(case, held))
    timed = [(simulate(graph, machine, plan), plan) for plan in found]
    line, plan = min(timed, key=lambda each: each[0].makespan)
    held = tuple(peaks(a, plan).tolist())
    return Judged(plan, line.makespan, held, line.transfer_bytes(graph), None)


def _over(case: Case, held: Sequence[int]) -> str:
    """Say which device holds too much."""
    limits = [2**62 if size is None else size for size in case.usable]
    device = max(range(len(held)), key=lambda d: held[d] - limits[d])
    here, room = size_texts(held[device], case.usable[device])
    return f"{case.devices[device]} would hold {here}, usable: {room}; tried in two orders"


def alternative(case: Case, what: str, found: Judged) -> Alternative:
    """Return a judged placement for the report.

    Args:
        case: The plan.
        what: Description, for people.
        found: How it was judged.
    """
    change = None if found.makespan_s is None else found.makespan_s - case.timeline.makespan
    return Alternative(
        what=what,
        judged=True,
        fits=found.makespan_s is not None,
        makespan_s=found.makespan_s,
        change_s=change,
        peak_bytes=found.peak_bytes,
        transfer_bytes=found.transfer_bytes,
        why=found.why,
    )


def ordered_anew(case: Case) -> Alternative:
    """Evaluate the plan with nothing moved: the part of every move's gain that is due to order."""
    found = judged(case, case.arrays.place.copy())
    return alternative(case, "nothing moved, new order", found)


def moves(case: Case, ops: Sequence[int]) -> tuple[Alternative, ...]:
    """Evaluate some ops on each device that does not have all of them."""
    here = set(case.arrays.place[list(ops)].tolist())
    others = [d for d in range(case.plan.num_devices) if here != {d}]
    return judged_each(case, {f"on {case.devices[d]}": moved(case, ops, d) for d in others})


def judged_each(case: Case, places: Mapping[str, Int64[ndarray, " n"]]) -> tuple[Alternative, ...]:
    """Evaluate other placements of the ops of a plan, preceded by a new order, if faster.

    Args:
        case: The plan.
        places: Each with its description.
    """
    stays = ordered_anew(case)
    found = [stays] if stays.change_s is not None and stays.change_s < 0 else []
    for what, place in places.items():
        try:
            found.append(alternative(case, what, judged(case, place)))
        except PardnnError as error:
            why = error.message.splitlines()[0]
            found.append(alternative(case, what, Judged(None, None, None, None, why)))
    return tuple(found)
