"""Addressing overflow (Eqs. 4.4 and 4.5) written naively: no heaps, no trees, all counted anew."""

import numpy as np

from pardnn.graph.ir import Graph
from pardnn.place.pardnn.memory_potential import memory_potential_of
from pardnn.place.pardnn.memory_tracking import memory_profile_of
from pardnn.place.pardnn.problem import Problem
from tests.reference.pardnn import live_bytes_in_order


class Knapsack:
    """A placement whose units move until every device fits."""

    def __init__(
        self,
        graph: Graph,
        problem: Problem,
        position: np.ndarray,
        place: np.ndarray,
        capacity: np.ndarray,
    ) -> None:
        self.graph, self.problem, self.position = graph, problem, position
        self.place, self.capacity = place.copy(), capacity
        self.unit = problem.arrays.group
        number = {op.name: i for i, op in enumerate(graph.ops)}
        producer = {t.name: (number[op.name], t.bytes) for op in graph.ops for t in op.outputs}
        #: From op, to op, bytes: one for each input.
        self.edges = [(*producer[name], number[op.name]) for op in graph.ops for name in op.inputs]
        self.patience, self.tries = len(problem.runs), len(capacity)

    def live(self) -> np.ndarray:
        """Bytes of each device at each position."""
        k = len(self.capacity)
        return live_bytes_in_order(self.graph, self.place.tolist(), self.position.tolist(), k)

    def communication(self, unit: int) -> list[float]:
        """Seconds of what a unit exchanges with each device, over the slowest link."""
        seconds = [0.0] * len(self.capacity)
        for source, size, target in self.edges:
            ends = {int(self.unit[source]), int(self.unit[target])}
            if unit in ends and len(ends) == 2:
                other = target if self.unit[source] == unit else source
                seconds[self.place[other]] += (
                    self.problem.latency + size * self.problem.byte_seconds
                )
        return seconds

    def cost(self, unit: int) -> float:
        """Its seconds and its communication with its own device (Eq. 4.5)."""
        members = np.flatnonzero(self.unit == unit)
        own = self.communication(unit)[self.place[members[0]]]
        return float(self.problem.seconds[members].sum()) + own

    def resolve(self, rounds: int) -> bool:
        """Move units; return whether all fits."""
        if self.fits():
            return True
        for _ in range(rounds):
            moved: set[int] = set()
            outcome = "stale"
            while outcome == "stale":
                outcome = self.one_pass(moved)
            if outcome == "fits":
                return True
        return False

    def fits(self) -> bool:
        """Whether every device holds no more than it may."""
        return bool((self.live().max(axis=1) <= self.capacity).all())

    def one_pass(self, moved: set[int]) -> str:
        """Overflow by overflow, with the potentials of the placement at the start."""
        profile = memory_profile_of(self.problem.arrays, self.place, self.position, self.capacity)
        potential = memory_potential_of(profile, self.unit)
        has_moved = False
        while True:
            live = self.live()
            over = live.max(axis=1) - self.capacity
            d = int(over.argmax())
            if over[d] <= 0:
                return "fits"
            at = int(live[d].argmax())
            weight: dict[int, int] = {}
            for a, b, hole, end, unit, size in potential.term[
                potential.ptr[d] : potential.ptr[d + 1]
            ].tolist():
                if a <= at <= b and not hole <= at <= end and unit not in moved:
                    weight[unit] = weight.get(unit, 0) + size
            progress = self.at_one_overflow(d, at, weight, moved)
            has_moved |= progress
            if self.patience < 0:
                return "fails"
            if not progress and self.live()[d, at] > self.capacity[d]:
                return "stale" if has_moved else "fails"

    def at_one_overflow(self, d: int, at: int, weight: dict[int, int], moved: set[int]) -> bool:
        """Move units that weigh something there until it is resolved; return whether any moved."""
        left = {unit: size for unit, size in weight.items() if size > 0}
        alone = {
            unit for unit, size in left.items() if size >= self.live()[d, at] - self.capacity[d]
        }
        progress = False
        while self.live()[d, at] > self.capacity[d] and left and self.patience >= 0:
            over = self.live()[d, at] - self.capacity[d]
            best = min(left, key=lambda unit: (self.cost(unit) / left[unit], unit))
            enough = [unit for unit in alone if unit in left and left[unit] >= over]
            if enough:
                cheapest = min(enough, key=lambda unit: (self.cost(unit), unit))
                if self.cost(cheapest) < self.cost(best):
                    best = cheapest
            del left[best]
            moved.add(best)
            if self.move(best, d, at):
                progress = True
            else:
                self.patience -= 1
        return progress

    def move(self, unit: int, d: int, at: int) -> bool:
        """Move a unit where it communicates most, of where that helps and no limit is passed.

        The last try is where most room is.
        """
        live, before = self.live(), self.place.copy()
        peaks, comm = live.max(axis=1), self.communication(unit)
        targets = [q for q in range(len(comm)) if q != d and self.problem.runs[unit, q]]
        for left in range(self.tries, 0, -1):
            if not targets:
                return False
            room = {q: peaks[q] - self.capacity[q] for q in targets}
            q = min(targets, key=lambda q: ((-comm[q]) * (left > 1), room[q], q))
            targets.remove(q)
            self.place[self.unit == unit] = q
            now = self.live()
            within = (now.max(axis=1) <= np.maximum(self.capacity, peaks)).all()
            if now[d, at] < live[d, at] and within:
                return True
            self.place = before.copy()
        return False
