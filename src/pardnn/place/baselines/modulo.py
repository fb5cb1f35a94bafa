"""Stages and a modulo schedule: pipelines for any step whose pieces are alike.

Stages consist of groups, in the order in which one piece reaches them. They are cut into contiguous
blocks of equal work, one or two per device; two are dealt out there and back (the first and the
last share a device) or in turn. `ordering.order_search` orders the ops of each placement, and the
simulator chooses. A step without pieces that are alike counts as one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import InfeasibleError
from pardnn.graph.csr import GraphArrays
from pardnn.graph.ir import Graph
from pardnn.place.colocation import closed_arrays, legal_placement, runnable
from pardnn.place.decision import Decision, fitted
from pardnn.place.ordering.order_search import best_ordered, placed
from pardnn.place.ordering.pieces import Pieces, piece_by_piece, pieces_of
from pardnn.place.ordering.schedule import first_overwrites
from pardnn.sim.machine import Machine, fastest_seconds

#: Blocks per device.
CHUNKS = 2


def has_pieces(graph: Graph, machine: Machine) -> bool:
    """Return whether most of a step's work is in groups, and done in pieces that are alike."""
    seconds, group = _seconds(machine), graph.arrays.group
    grouped = np.bincount(group)[group] > 1
    is_grouped = 2 * seconds[grouped].sum() > seconds.sum()
    return bool(is_grouped) and pieces_of(graph, seconds) is not None


def _seconds(machine: Machine) -> np.ndarray:
    seconds = fastest_seconds(machine)
    return np.where(np.isfinite(seconds), seconds, 0.0)


def place_modulo(
    graph: Graph,
    machine: Machine,
    capacities: list[int | None],
    *,
    seed: int = 0,
    targets: Sequence[Int64[ndarray, " n"]] | None = None,
    below: float = np.inf,
) -> Decision:
    """Place contiguous blocks of groups, and repeat one piece's schedule.

    Args:
        graph: The graph.
        machine: Durations and links.
        capacities: Usable bytes of each device; None is unlimited.
        seed: Of the search over orders.
        targets: Placements that are tried, as near as groups allow; None for blocks of groups.
        below: Seconds; placements for which no order can take less are left out.

    Raises:
        InfeasibleError: E301, if no such plan fits, or is below; E302, if an op can run nowhere.
    """
    arrays = closed_arrays(graph)
    runs = runnable(arrays, machine)
    seconds = _seconds(machine)
    pieces = pieces_of(graph, seconds)
    alone = Pieces(1, np.zeros(arrays.num_ops, dtype=np.int64), np.arange(arrays.num_ops))
    reference = piece_by_piece(graph, pieces or alone)
    if targets is None:
        targets = stage_placements(arrays, seconds, reference, machine.num_devices)
    places = {
        place.tobytes(): place
        for target in targets
        if (place := legal_placement(arrays, runs, target)) is not None
    }
    plan = None
    if pieces is not None and seconds.sum() > 0:
        found = (
            placed(arrays, machine, place, pieces, reference, capacities)
            for place in places.values()
        )
        steps = [step for step in found if np.isfinite(step.edges.delay).all()]  # links are there
        bound = min((step.bound for step in steps), default=0.0)
        if bound >= below:
            raise InfeasibleError(f"no order of such stages takes less than {bound:.4g} s")
        steps = [step for step in steps if step.bound < below]
        overwrites = first_overwrites(graph)
        plan = best_ordered(steps, machine, capacities, overwrites, seed=seed) if steps else None
    if plan is not None:
        return Decision(plan)
    failure: InfeasibleError | None = None
    for place in places.values():
        try:
            return fitted(graph, machine, place, capacities)
        except InfeasibleError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def stage_placements(
    arrays: GraphArrays,
    seconds: np.ndarray,
    reference: Int64[ndarray, " n"],
    num_devices: int,
) -> list[Int64[ndarray, " n"]]:
    """Return placements of contiguous blocks of groups.

    Args:
        arrays: The graph, with closed groups.
        seconds: Of each op.
        reference: Position of each op in a topological order.
        num_devices: Number of devices.
    """
    first = np.full(int(arrays.group.max()) + 1, arrays.num_ops, dtype=np.int64)
    np.minimum.at(first, arrays.group, np.where(seconds > 0, reference, arrays.num_ops))
    work = np.bincount(arrays.group, weights=seconds)
    chain = np.lexsort((np.arange(len(first)), first))
    middle = np.cumsum(work[chain]) - work[chain] / 2
    placements = list[Int64[ndarray, " n"]]()
    for chunks in range(1, CHUNKS + 1):
        blocks = chunks * num_devices
        block = np.empty(len(chain), dtype=np.int64)
        block[chain] = np.minimum(middle / max(work.sum(), 1e-300) * blocks, blocks - 1)
        turn, within = np.divmod(block, num_devices)
        there_and_back = np.where(turn % 2 == 0, within, num_devices - 1 - within)
        placements += [device[arrays.group] for device in (there_and_back, within)]
    return placements
