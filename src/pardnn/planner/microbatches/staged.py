"""A cut batch in stages: pipelines found from the graph, with orders that memory allows.

Blocks of layers of nearly equal work (`place.recipes.stages`), one or two on each device, there and
back or in turn; `place.ordering.order_search` orders the work of the devices. One device has all
pieces of a layer, so there is one accumulator per gradient.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.graph.ir import Graph
from pardnn.place.baselines.modulo import CHUNKS, place_modulo
from pardnn.place.decision import Decision
from pardnn.place.recipes.phases import phases_of
from pardnn.place.recipes.stages import stages_of
from pardnn.place.recipes.units import units_of
from pardnn.plan.pieces import piece_number
from pardnn.planner.problem import Problem
from pardnn.sim.levels import slowest_link
from pardnn.sim.machine import fastest_seconds

#: Of the seconds that stages send: what counts as work, where they are balanced. Sending runs
#: beside computing, so all of it would unbalance stages.
SENDING = (0.3, 1.0)


def decide_staged(whole: Graph, cut: Problem) -> Decision:
    """Return the best plan found of a cut graph in stages.

    Args:
        whole: The graph with its batch whole.
        cut: The cut graph as a problem.

    Raises:
        InfeasibleError: E301, if none fits or can be faster than a known plan; E302, if an op
            cannot run on any device.
    """
    machine, devices = cut.machine, cut.cluster.num_devices
    seconds = _whole_seconds(whole, cut)
    phases = phases_of(whole)
    _, per_byte = slowest_link(machine)
    targets = dict[bytes, Int64[ndarray, " n"]]()
    for chunks, share in itertools.product(range(1, CHUNKS + 1), SENDING):
        found = stages_of(whole, phases, seconds, chunks * devices, byte_seconds=share * per_byte)
        turn, within = np.divmod(units_of(whole, cut.graph, found).stage, devices)
        for target in (np.where(turn % 2 == 0, within, devices - 1 - within), within):
            targets.setdefault(target.tobytes(), target)
    return place_modulo(
        cut.graph, machine, cut.capacities, seed=cut.options.seed, targets=list(targets.values()),
        below=cut.below,
    )  # fmt: skip


def _whole_seconds(whole: Graph, cut: Problem) -> np.ndarray:
    """Return the seconds of all pieces of each op."""
    number = {op.name: i for i, op in enumerate(whole.ops)}
    found = fastest_seconds(cut.machine)
    found = np.where(np.isfinite(found), found, 0.0)
    seconds = np.zeros(len(whole.ops))
    for op, value in zip(cut.graph.ops, found.tolist(), strict=True):
        name = op.name.rpartition("@")[0] if piece_number(op.name) >= 0 else op.name
        if name in number:
            seconds[number[name]] += value
    return seconds
