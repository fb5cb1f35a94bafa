"""Undo moves that gain nothing: a plan near an earlier one (ours).

A search that starts from a plan moves many ops without making the step faster. First, equal devices
are renumbered so that most ops are where they were. Then moved groups, in the order in which their
first ops run, are sent back all at once; if that is slower or does not fit, each half of them is,
as delta debugging narrows a change down (Zeller and Hildebrandt, "Simplifying and isolating
failure-inducing input", 2002). Groups stay back only if the step is no slower than the plan was.

O(r (n + e)) for r simulations, at most `TRIES`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays, runnable
from pardnn.place.ordering.fit import fits
from pardnn.place.ordering.memory_bounded import memory_bounded_plan
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.plan.plan import PlanArrays, order_rows
from pardnn.sim.engine import run_lists
from pardnn.sim.machine import Machine
from pardnn.sim.transfers import missing_link

#: Placements that are simulated, at most: some milliseconds each for a thousand ops.
TRIES = 64
#: Rounding of the simulator: a step so little slower is none.
ROUNDING = 1e-9


def restored(
    graph: Graph,
    machine: Machine,
    plan: PlanArrays,
    near: Int64[ndarray, " n"],
    capacities: list[int | None],
) -> PlanArrays:
    """Return a plan that is no slower, with as many ops back in place as was found possible.

    Args:
        graph: The graph.
        machine: Durations and links.
        plan: A plan that fits.
        near: Where each op was before; -1 where it has been nowhere.
        capacities: Usable bytes of each device; None is unlimited.
    """
    a, overwrites = closed_arrays(graph), first_overwrites(graph)
    timeline = run_lists(a, machine, plan)
    position, most = timeline.dispatch.copy(), timeline.makespan * (1 + ROUNDING)
    group, tries = np.asarray(a.group), 0
    home = _of_group(near, group)

    def back(best: PlanArrays, chosen: Sequence[int]) -> PlanArrays | None:
        nonlocal tries
        tries += 1
        place = np.where(np.isin(group, chosen), home, best.place)
        if missing_link(a, machine, place) is not None:
            return None
        found = memory_bounded_plan(a, machine, place, position, capacities, overwrites)
        is_good = fits(a, found, capacities) and run_lists(a, machine, found).makespan <= most
        return found if is_good else None

    waiting = [_moved(plan, home, group, position, runnable(a, machine))]
    while waiting and tries < TRIES:
        chosen = waiting.pop(0)
        found = back(plan, chosen) if chosen else None
        plan = plan if found is None else found
        if found is None and len(chosen) > 1:
            half = len(chosen) // 2
            waiting += [chosen[:half], chosen[half:]]
    return plan


def relabelled(
    machine: Machine,
    plan: PlanArrays,
    near: Int64[ndarray, " n"],
    capacities: list[int | None],
) -> PlanArrays:
    """Return the same plan with devices numbered so that more ops are where they were.

    Devices change numbers if they are of one class and have the same memory, and all links are
    alike. The largest overlaps count first, as in greedy matching: within half of the best.

    Args:
        machine: Durations and links.
        plan: Any plan.
        near: Where each op was before; -1 where it has been nowhere.
        capacities: Usable bytes of each device; None is unlimited.
    """
    k, place = machine.num_devices, plan.place
    off = ~np.eye(k, dtype=np.bool_)
    links = np.stack([machine.latency[off], machine.bandwidth[off]])
    if k == 1 or bool((links != links[:, :1]).any()):
        return plan
    known = near >= 0
    shared = np.zeros((k, k), dtype=np.int64)
    np.add.at(shared, (place[known], near[known]), 1)
    kinds = list(zip(machine.device_class.tolist(), capacities, strict=True))
    number = np.full(k, -1, dtype=np.int64)
    for pair in np.argsort(-shared, axis=None, kind="stable").tolist():
        here, there = divmod(pair, k)
        if number[here] < 0 and there not in number and kinds[here] == kinds[there]:
            number[here] = there
    rows = order_rows(plan)
    ordered = [rows[device] for device in np.argsort(number).tolist()]
    return plan._replace(
        place=number[place],
        order_ptr=np.cumsum([0, *map(len, ordered)], dtype=np.int64),
        order_op=np.array([op for row in ordered for op in row], dtype=np.int64),
        message_source=number[plan.message_source],
        message_target=number[plan.message_target],
    )


def _of_group(near: Int64[ndarray, " n"], group: Int64[ndarray, " n"]) -> Int64[ndarray, " n"]:
    """Return for each op where its group was: -1 if nowhere, or on several devices."""
    known = near >= 0
    where = np.full(int(group.max()) + 1, -1, dtype=np.int64)
    where[group[known]] = near[known]
    where[group[known & (near != where[group])]] = -1
    return where[group]


def _moved(
    plan: PlanArrays,
    home: Int64[ndarray, " n"],
    group: Int64[ndarray, " n"],
    position: Int64[ndarray, " n"],
    runs: Bool[ndarray, "g k"],
) -> list[int]:
    """Return the groups that moved and can go back, in the order of their first ops."""
    ops = np.flatnonzero((home >= 0) & (home != plan.place))
    ops = ops[runs[group[ops], home[ops]]]
    return list(dict.fromkeys(group[ops[np.argsort(position[ops], kind="stable")]].tolist()))
