"""List scheduling, its keys and warm starts beside naive twins; devices and links differ."""

from typing import NamedTuple

import numpy as np
import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.place.pardnn.list_scheduling import Homes, list_schedule
from pardnn.place.pardnn.problem import Problem, problem_of
from pardnn.place.pardnn.step1_makespan import emulated, in_order, time_left
from pardnn.place.pardnn.warm_start import KnownPlaces, started_near
from pardnn.sim.levels import bottom_levels
from tests.place.machines import cluster_of, machine_for, problem_for, uneven_machine
from tests.reference.pardnn import op_successors
from tests.strategies import FAMILIES, random_graph

NO_HOMES = np.empty(0, dtype=np.int64)


class _Case(NamedTuple):
    graph: Graph
    problem: Problem
    successors: list[dict[int, int]]

    def comm(self, size: int, source: int, target: int) -> float:
        machine = self.problem.machine
        if source == target:
            return 0.0
        return float(machine.latency[source, target] + size / machine.bandwidth[source, target])

    def seconds(self, op: int, device: int) -> float:
        machine = self.problem.machine
        return float(machine.seconds[machine.device_class[device], op])


def _case(seed: int, num_devices: int, *, even: bool = False) -> _Case:
    graph = random_graph(seed, 9 + seed % 6, FAMILIES[seed % 5], memory=False)
    arrays = problem_for(graph, num_devices).arrays
    cluster = cluster_of(num_devices, speeds=(1.0, 2.0))
    machine = machine_for(graph, cluster) if even else uneven_machine(graph, num_devices, seed)
    if seed % 2:  # some ops are together
        arrays = arrays._replace(group=np.arange(arrays.num_ops) % max(2, arrays.num_ops - 3))
    return _Case(graph, problem_of(arrays, machine), op_successors(graph))


def _scheduled(
    case: _Case, order: list[int], fixed: list[int], homes: tuple[list[int], list[float]] | None
) -> tuple[list[int], list[float]]:
    """Each op where it finishes first, what follows on its home included; devices and starts."""
    k, group = case.problem.machine.num_devices, case.problem.arrays.group.tolist()
    chosen, free = list(fixed), [0.0] * k
    place, start, finish = ([0] * len(order), [0.0] * len(order), [0.0] * len(order))
    for op in order:
        before = [(p, row[op]) for p, row in enumerate(case.successors) if op in row]
        begin = [
            max([free[d], *(finish[p] + case.comm(size, place[p], d) for p, size in before)])
            for d in range(k)
        ]
        end = [begin[d] + case.seconds(op, d) for d in range(k)]

        def after(d: int, op: int = op) -> float:
            if homes is None:
                return 0.0
            later = case.successors[op].items()
            return max(
                [homes[1][s] + case.comm(size, d, homes[0][s]) for s, size in later], default=0.0
            )

        def merit(d: int, op: int = op, end: list[float] = end) -> tuple[float, float, bool, int]:
            return end[d] + after(d), end[d], homes is not None and d != homes[0][op], d

        d = chosen[group[op]] if chosen[group[op]] >= 0 else min(range(k), key=merit)
        chosen[group[op]], place[op], start[op], finish[op], free[d] = (
            d,
            d,
            begin[d],
            end[d],
            end[d],
        )
    return place, start


@pytest.mark.parametrize("even", [True, False])
def test_an_op_goes_where_it_and_what_follows_finish_first(even: bool) -> None:
    for seed in range(24):
        case = _case(seed, 2 + seed % 3, even=even)
        problem, rng = case.problem, np.random.default_rng(seed)
        a, k = problem.arrays, problem.machine.num_devices
        home = rng.integers(0, k, a.num_ops)
        bottom = bottom_levels(a, problem.machine, home)
        fixed = np.where(rng.random(len(problem.runs)) < 0.2, 1, -1)
        order = np.argsort(-bottom, kind="stable").tolist()
        for homes, known in ((Homes(home, bottom, fixed), (home.tolist(), bottom.tolist())),
                             (Homes(NO_HOMES, np.empty(0), fixed), None)):  # fmt: skip
            made = list_schedule(problem, -bottom, homes)
            expected = _scheduled(case, made.order.tolist(), fixed.tolist(), known)
            assert bottom[made.order].tolist() == bottom[order].tolist()
            assert (made.place.tolist(), made.start.tolist()) == expected
            ends = [case.seconds(op, d) for op, d in enumerate(made.place)]
            assert made.finish.tolist() == (made.start + ends).tolist()


def test_of_devices_that_are_as_good_the_one_that_ends_first_is_taken_then_the_home() -> None:
    """Ops of one second, messages of one second: what a device costs ties everywhere."""
    at_home = 0
    for seed in range(40):
        rng, k = np.random.default_rng(seed), 2 + seed % 2
        ops = [
            Op(name=f"o{i}", kind="op", seconds={"accelerator": 1.0},
               inputs=tuple(f"o{j}" for j in sorted({*rng.integers(0, max(i, 1), 2).tolist()}))
               if i > 2 else (), outputs=(Tensor(name=f"o{i}", bytes=0),))
            for i in range(12)
        ]  # fmt: skip
        graph = build_graph("units", ops)
        machine = machine_for(graph, cluster_of(k, bandwidth=1.0, latency=1.0))
        problem = problem_of(graph.arrays, machine)
        case = _Case(graph, problem, op_successors(graph))
        home = rng.integers(0, k, len(ops))
        bottom = bottom_levels(graph.arrays, problem.machine, home)
        fixed = np.full(len(problem.runs), -1)
        made = list_schedule(problem, -bottom, Homes(home, bottom, fixed))
        known = home.tolist(), bottom.tolist()
        expected = _scheduled(case, made.order.tolist(), fixed.tolist(), known)
        assert (made.place.tolist(), made.start.tolist()) == expected
        at_home += int((made.place == home).sum())
    assert at_home > 100


def test_time_left_in_a_queue_is_what_no_op_may_delay() -> None:
    """Ops start as late as those that follow on their device and those that read them allow."""
    for seed in range(12):
        case = _case(seed, 3)
        problem = case.problem
        place = np.random.default_rng(seed).integers(0, 3, len(problem.runs))[problem.arrays.group]
        current = emulated(problem, place)
        late: dict[int, float] = {}
        for op in reversed(current.order.tolist()):
            d, at = int(place[op]), current.order.tolist().index(op)
            queue = [late[s] for s in current.order[at + 1 :].tolist() if place[s] == d]
            later = case.successors[op].items()
            waits = [late[s] - case.comm(size, d, int(place[s])) for s, size in later]
            late[op] = min([current.makespan, *queue[:1], *waits]) - case.seconds(op, d)
        key, left = time_left(problem, current, by_queue=True)
        assert key.tolist() == [late[op] for op in range(len(place))]
        assert left.tolist() == [current.makespan - late[op] for op in range(len(place))]
        key, left = time_left(problem, current, by_queue=False)
        assert left.tolist() == bottom_levels(problem.arrays, problem.machine, place).tolist()
        assert key.tolist() == (-left).tolist()


def test_a_placement_is_timed_as_it_is() -> None:
    for seed in range(6):
        case = _case(seed, 3)
        place = np.arange(len(case.problem.runs))[case.problem.arrays.group] % 3
        key = -bottom_levels(case.problem.arrays, case.problem.machine, place)
        found = in_order(case.problem, place, key)
        fixed = place[np.unique(case.problem.arrays.group, return_index=True)[1]].tolist()
        assert found.place.tolist() == place.tolist()
        assert (
            found.schedule.start.tolist() == _scheduled(case, found.order.tolist(), fixed, None)[1]
        )


def test_a_warm_start_keeps_ops_where_they_ran() -> None:
    """The first of a group counts, and what holds state stays; others go where they end first."""
    for seed in range(12):
        case = _case(seed, 2 + seed % 2)
        problem, rng = case.problem, np.random.default_rng(seed)
        a, k = problem.arrays, problem.machine.num_devices
        near = rng.integers(-1, k, a.num_ops)
        pins = np.full(a.num_ops, -1)
        pins[0] = k - 1
        problem = problem._replace(fixed=np.where(np.arange(len(problem.runs)) == a.group[0],
                                                  k - 1, -1))  # fmt: skip
        home = problem.fixed.tolist()
        for op in range(a.num_ops):
            if near[op] >= 0 and home[a.group[op]] < 0:
                home[a.group[op]] = int(near[op])
        key = -bottom_levels(a, problem.machine)
        expected = list_schedule(problem, key, Homes(NO_HOMES, np.empty(0), np.array(home)))
        first, better = started_near(problem, KnownPlaces(pins, near))
        assert first.place.tolist() == expected.place.tolist()
        assert better.makespan <= first.makespan
        assert (better.place[a.group == a.group[0]] == k - 1).all()
    alone = _case(0, 1)
    nowhere = np.full(alone.problem.arrays.num_ops, -1)
    assert list(started_near(alone.problem, KnownPlaces(nowhere, nowhere))) == []
