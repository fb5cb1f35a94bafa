"""Longest paths of a placed step, by following every edge; the bound beside simulated plans."""

import numpy as np
import pytest

from pardnn.place.ordering.edges import edges_of, heads, placed_bound, tails
from pardnn.sim.engine import simulate
from tests.place.machines import random_place, schedule, uneven_machine
from tests.strategies import FAMILIES, random_graph


def test_heads_and_tails_are_longest_paths() -> None:
    for seed in range(30):
        graph = random_graph(seed, 12, FAMILIES[seed % len(FAMILIES)])
        machine, place = uneven_machine(graph, 3, seed), random_place(graph, 3, seed)
        number = {op.name: i for i, op in enumerate(graph.ops)}
        made = {t.name: (i, t.bytes) for i, op in enumerate(graph.ops) for t in op.outputs}
        seconds = machine.seconds[machine.device_class[place], np.arange(len(place))]
        waits: list[list[tuple[int, float]]] = []
        for i, op in enumerate(graph.ops):
            sources = [made[name] for name in op.inputs] + [(number[x], 0) for x in op.after]
            links = [(machine.latency[place[x], place[i]], machine.bandwidth[place[x], place[i]])
                     for x, _ in sources]  # fmt: skip
            waits.append([
                (x, 0.0 if place[x] == place[i] else float(latency + size / bandwidth))
                for (x, size), (latency, bandwidth) in zip(sources, links, strict=True)
            ])  # fmt: skip
        order = graph.arrays.topological.tolist()
        head, after = [0.0] * len(order), [0.0] * len(order)
        for i in order:
            head[i] = max((head[x] + seconds[x] + delay for x, delay in waits[i]), default=0.0)
        queued, behind = [0.0] * len(order), dict[int, float]()
        for i in reversed(order):
            queued[i] = max(queued[i], behind.get(int(place[i]), 0.0)) + seconds[i]
            behind[int(place[i])] = queued[i]
            after[i] += seconds[i]
            for x, delay in waits[i]:
                after[x] = max(after[x], delay + after[i])
                queued[x] = max(queued[x], delay + queued[i])
        edges, turn = edges_of(graph.arrays, machine, place), graph.arrays.topological.copy()
        assert heads(edges, turn).tolist() == head
        assert tails(edges, turn, 0).tolist() == after
        assert tails(edges, turn, 1).tolist() == queued
        bound = max(a + b for a, b in zip(head, after, strict=True))
        for d in set(place.tolist()):
            busy = [i for i in order if place[i] == d and seconds[i] > 0]
            rest = [a - s for a, s in zip(after, seconds, strict=True)]
            for one, other in ((head, rest), (rest, head)):
                for x in busy:  # and all that is no nearer to that end of the step
                    far = [i for i in busy if one[i] >= one[x]]
                    work = sum(seconds[i] for i in far)
                    bound = max(bound, one[x] + work + min(other[i] for i in far))
        assert placed_bound(edges, turn) == pytest.approx(bound)


def test_no_plan_of_a_placement_is_shorter_than_its_bound() -> None:
    """And an op alone, a chain over devices, and independent ops of one device reach it."""
    reached = 0
    for seed in range(30):
        graph = random_graph(seed, 4 + seed % 9, FAMILIES[seed % len(FAMILIES)])
        machine, place = uneven_machine(graph, 2, seed), random_place(graph, 2, seed)
        edges = edges_of(graph.arrays, machine, place)
        bound = placed_bound(edges, graph.arrays.topological.copy())
        makespan = simulate(graph, machine, schedule(graph, machine, place)).makespan
        assert bound <= makespan * (1 + 1e-12)
        reached += bound >= makespan * (1 - 1e-12)
    assert reached >= 10
