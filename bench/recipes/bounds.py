"""What no plan that cuts a step in pieces of its batch can be faster than.

Let each op be in any number of pieces, m(op), and messages be free. Of a path of the step, the
pieces that one sample goes through run one after the other, so a step takes at least the sum of
t(op, m) over the path, t being the seconds of the shortest piece; and at least 1/k of the seconds
of all pieces on k devices. For any share s from 0 to 1 it therefore takes at least
    sum over the path of min over m of (s t(op, m) + (1 - s) m t(op, m) / k)
    + sum over all other ops of (1 - s) times their least seconds in all / k,
for every path: the longest one is found by dynamic programming, for shares on a grid.
Paths are those of the graph in two pieces, as far as they go through the first of them.
Complexity: O(shares x (ops x numbers of pieces + edges)).
Deviations: pieces are of equal size; with unequal ones the path of some sample is longer where the
seconds of a piece are a constant and a part that grows with it. A batch has at most 32 samples,
or they are cut in at most 32 pieces. Numbers between those of `NUMBERS`
are taken to have the shortest piece of the next larger one and the seconds in all of the next
smaller one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from pardnn.cluster import Cluster
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.plan.pieces import piece_number
from pardnn.planner.costs import costs_for
from pardnn.shard.microbatch.analysis import most_pieces
from pardnn.shard.microbatch.rewrite import cut_batch
from pardnn.sim.machine import fastest_seconds, machine_of, serial_seconds

NUMBERS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
SHARES = np.linspace(0, 0.2, 81)

#: Seconds of a piece and of all pieces of an op.
Option = tuple[float, float]


def most_in_pieces(graph: Graph, costs: str, devices: int) -> tuple[float, dict[int, float]]:
    """Return a bound on how many times as fast as one device devices can be.

    Args:
        graph: A captured step.
        costs: A preset.
        devices: How many.

    Returns:
        The bound, and the seconds of one device that does all pieces, by their number.
    """
    one, most = Cluster.uniform(1), most_pieces(graph, NUMBERS[-1])
    numbers = sorted({number for number in NUMBERS if number <= most} | {most})
    names = [op.name for op in graph.ops]
    options: dict[str, list[Option]] = {name: [] for name in names}
    serial: dict[int, float] = {}
    halved = graph
    for number in numbers:
        cut = graph
        if number > 1:
            cut = build_graph(graph.name, cut_batch(graph, number, 1).ops)
            cut = dataclasses.replace(cut, is_captured=graph.is_captured)
        halved = cut if number == 2 else halved
        machine = machine_of(costs_for(cut, one, costs), one)
        serial[number] = serial_seconds(machine)
        pieces: dict[str, list[float]] = {}
        for op, seconds in zip(cut.ops, fastest_seconds(machine).tolist(), strict=True):
            pieces.setdefault(_whole_name(op.name), []).append(seconds)
        for name in names:
            options[name].append((min(pieces[name]), sum(pieces[name])))
    for name, found in options.items():
        steps = itertools.pairwise(zip(numbers, found, strict=True))
        options[name] = found + [
            (later[0], earlier[1]) for (a, earlier), (b, later) in steps if b > a + 1
        ]
    least = max(_least_seconds(halved, options, devices, float(share)) for share in SHARES)
    return serial[1] / least, serial


def _whole_name(name: str) -> str:
    """Return the op of the step that an op of the cut graph is a piece of."""
    return name.rpartition("@")[0] if piece_number(name) >= 0 else name


def _least_seconds(
    cut: Graph, options: dict[str, list[Option]], devices: int, share: float
) -> float:
    """Return a lower bound on the seconds of a step, for a share of what is on a path."""
    beside = {
        name: (1 - share) * min(total for _, total in found) / devices
        for name, found in options.items()
    }
    more = {
        name: min(share * piece + (1 - share) * total / devices for piece, total in found)
        - beside[name]
        for name, found in options.items()
    }
    maker = {tensor.name: op.name for op in cut.ops for tensor in op.outputs}
    longest: dict[str, float] = {}
    for number in cut.arrays.topological.tolist():
        op = cut.ops[number]
        if piece_number(op.name) > 0:
            continue
        before = (maker[name] for name in op.inputs)
        longest[op.name] = max((longest.get(name, 0.0) for name in before), default=0.0)
        longest[op.name] += more.get(_whole_name(op.name), 0.0)
    return max(longest.values()) + math.fsum(beside.values())
