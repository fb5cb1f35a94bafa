"""Data parallelism over pieces of the batch, in which every tensor of state has one owner.

Problem: if state is cut over all devices, each device launches every update, and every gradient is
sent in as many parts; on many devices launches and small messages take longer than the work.
Idea: the pieces of the batch are dealt out to the devices in consecutive runs. What runs once (sums
of gradients and updates) runs on the device of the state that it writes: the ops that serve one
state alone are its *share*, and shares go to the device with least to do, the largest first. A
weight is sent once to each device that reads it, a part of a gradient to its owner. If memory is
tight, all devices run ops in the order of the whole step, and a device with several pieces runs
them one after the other.
Complexity: O((ops + edges) log ops), beside an order that fits.
Reference: Rajbhandari et al., "ZeRO", SC 2020, with whole tensors as parts, as FairScale's OSS has
them; the largest first: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Applied
Mathematics 1969.
Deviations: shares are dealt out by seconds, and by bytes; the fastest plan that fits is kept.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays, op_edges
from pardnn.graph.ir import Graph
from pardnn.kernels.sorting import inverse_permutation
from pardnn.place.colocation import closed_arrays, legal_placement, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.place.ordering.fit import fit_order, fits
from pardnn.place.ordering.pieces import Pieces, pieces_of
from pardnn.place.ordering.schedule import first_overwrites, ordered_plan
from pardnn.plan.piece_order import piece_by_piece
from pardnn.sim.dynamic import emulate
from pardnn.sim.engine import run_lists
from pardnn.sim.levels import bottom_levels
from pardnn.sim.machine import Machine, fastest_seconds
from pardnn.sim.peak import residual_bytes
from pardnn.sim.transfers import missing_link


def place_owners(
    graph: Graph, machine: Machine, capacities: list[int | None], *, seed: int = 0
) -> Decision:
    """Deal out the pieces of a batch, and what belongs to each state.

    Args:
        graph: A graph; of one without pieces that are alike, all runs once.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Not used.

    Raises:
        InfeasibleError: E301, if it does not fit; E302, if an op can run nowhere.
    """
    del seed
    arrays, k = closed_arrays(graph), machine.num_devices
    runs, seconds = runnable(arrays, machine), fastest_seconds(machine)
    alone = Pieces(1, np.full(arrays.num_ops, -1, dtype=np.int64), np.arange(arrays.num_ops))
    pieces = pieces_of(graph, seconds) or alone
    device = _devices_of_pieces(arrays, pieces.piece * k // pieces.count, k)
    share, position = _shares(arrays, device), _in_rounds(graph, pieces, k)
    work = np.bincount(arrays.group, weights=seconds)
    best, shortest = None, np.inf
    failure: InfeasibleError | None = None
    for sizes in (work, residual_bytes(arrays).astype(np.float64)):
        target = _dealt(device, share, sizes, work, k)
        place = legal_placement(arrays, runs, target[arrays.group])
        try:
            found = _ordered(graph, machine, place, capacities, position)
        except InfeasibleError as error:
            failure = failure or error
            continue
        makespan = run_lists(arrays, machine, found.plan).makespan
        best, shortest = (found, makespan) if makespan < shortest else (best, shortest)
    if best is None:
        assert failure is not None
        raise failure
    return best


def _devices_of_pieces(
    a: GraphArrays, device: Int64[ndarray, " n"], k: int
) -> Int64[ndarray, " g"]:
    """Return the device of each group that is of the pieces of one device alone; -1 of others."""
    count = int(a.group.max()) + 1
    most, least = np.full(count, -1, dtype=np.int64), np.full(count, k, dtype=np.int64)
    np.maximum.at(most, a.group, device)
    np.minimum.at(least, a.group, device)
    return np.where(most == least, most, -1)


def _shares(a: GraphArrays, device: Int64[ndarray, " g"]) -> Int64[ndarray, " g"]:
    """Return what each group that runs once belongs to, by one of its groups.

    It goes with what reads its largest result, and so on, up to a state or what nothing reads.
    """
    count, holds = len(device), residual_bytes(a) > 0
    reader = a.group[np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))]
    maker, size = a.group[a.tensor_op[a.input_tensor]], a.tensor_bytes[a.input_tensor]
    counts = (maker != reader) & ~holds[maker] & (device[maker] < 0) & (device[reader] < 0)
    largest = np.lexsort((reader, size))  # what comes last is kept
    largest = largest[counts[largest]]
    share = np.arange(count)
    share[maker[largest]] = reader[largest]
    for _ in range(count.bit_length()):
        share = share[share]
    return np.where(share[share] == share, share, np.arange(count))  # of a circle, each alone


def _dealt(
    device: Int64[ndarray, " g"],
    share: Int64[ndarray, " g"],
    sizes: Float64[ndarray, " g"],
    work: Float64[ndarray, " g"],
    k: int,
) -> Int64[ndarray, " g"]:
    """Return the device of each group; shares are dealt out by size, the largest first."""
    is_free, count = device < 0, len(device)

    def by_device(values: Float64[ndarray, " g"]) -> Float64[ndarray, " k"]:
        sums = np.bincount(device[~is_free], weights=values[~is_free], minlength=k)
        return sums.astype(np.float64)  # the sums of nothing are ints

    def by_share(values: Float64[ndarray, " g"]) -> Float64[ndarray, " g"]:
        sums = np.bincount(share[is_free], weights=values[is_free], minlength=count)
        return sums.astype(np.float64)

    load, busy, size, seconds = by_device(sizes), by_device(work), by_share(sizes), by_share(work)
    owner = device.copy()
    for each in np.lexsort((np.arange(count), -seconds, -size)).tolist():
        if is_free[each] and share[each] == each:
            owner[each] = target = int(np.lexsort((busy, load))[0])
            load[target] += size[each]
            busy[target] += seconds[each]
    return np.where(is_free, owner[share], owner)


def _in_rounds(graph: Graph, pieces: Pieces, k: int) -> Int64[ndarray, " n"]:
    """Return each op's position where all devices do alike, one piece after the other on each."""
    first = -(-np.arange(k) * pieces.count // k)  # of each device; rounded up
    turn = np.where(pieces.piece < 0, -1, pieces.piece - first[pieces.piece * k // pieces.count])
    at = inverse_permutation(graph.arrays.topological)
    order = np.lexsort((pieces.piece, at[pieces.model]))
    return inverse_permutation(piece_by_piece(op_edges(graph.arrays), turn, order))


def _ordered(
    graph: Graph,
    machine: Machine,
    place: Int64[ndarray, " n"],
    capacities: list[int | None],
    position: Int64[ndarray, " n"],
) -> Decision:
    """Return the fastest plan found for a placement that fits.

    Raises:
        InfeasibleError: E301, if none was found, or a link is missing.
    """
    a, overwrites = graph.arrays, first_overwrites(graph)
    plan = None
    if missing_link(a, machine, place) is None:
        timeline = emulate(a, machine, place, -bottom_levels(a, machine, place))
        plan = ordered_plan(a, machine.num_devices, place, timeline, overwrites)
        if not fits(a, plan, capacities):
            plan = fit_order(a, machine, place, timeline, position, capacities, overwrites)
    return fitted(graph, machine, place, capacities) if plan is None else Decision(plan)
