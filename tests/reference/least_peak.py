"""Annealing for the order of least peak, naively: what is held is summed up anew for every move."""

import math
from collections.abc import Iterator

from pardnn.graph.ir import Graph, alias_of
from pardnn.place.ordering.least_peak import EACH, HOT, TARGET
from tests.reference.pardnn import op_successors

Order = list[int]


class Annealer:
    """Orders of a graph's ops on one device."""

    def __init__(self, graph: Graph, order: Order) -> None:
        self.order = order
        self.workspace = [op.workspace for op in graph.ops]
        self.after = [list(row) for row in op_successors(graph)]
        self.before = [[i for i in order if op in self.after[i]] for op in range(len(order))]
        self.random = _numbers()
        #: Bytes of each storage that does not stay, and the ops that make, view or read it.
        self.storages: dict[str, tuple[int, list[int]]] = {}
        owner: dict[str, str] = {}
        for i, op in enumerate(graph.ops):
            for tensor in op.outputs:
                alias = alias_of(op, tensor)
                owner[tensor.name] = tensor.name if alias is None else owner[alias]
                if alias is None:
                    size = 0 if op.memory == "residual" else tensor.bytes
                    self.storages[tensor.name] = size, []
                self.storages[owner[tensor.name]][1].append(i)
            for name in op.inputs:
                self.storages[owner[name]][1].append(i)

    def held(self, order: Order) -> list[int]:
        """Bytes while the op of each place runs."""
        place = {op: i for i, op in enumerate(order)}
        found = [self.workspace[op] for op in order]
        for size, users in self.storages.values():
            at = [place[op] for op in users]
            for i in range(min(at), max(at) + 1):
                found[i] += size
        return found

    def moves(self, work: float) -> Iterator[tuple[Order, float]]:
        """Draw moves of the order as it is by then; return each, and the work that is done."""
        done, n = 0.0, len(self.order)
        while done < work:
            op = int(next(self.random) * n)
            others = [other for other in self.order if other != op]
            low = max((others.index(i) + 1 for i in self.before[op]), default=0)
            high = min((others.index(i) for i in self.after[op]), default=n - 1)
            draw = next(self.random)
            to = low if draw < 0.3 else high
            if draw >= 0.6:
                to = low + int(next(self.random) * (high - low + 1))
            done += EACH + 3 * (abs(to - self.order.index(op)) + 1)
            others.insert(to, op)
            if others != self.order:
                yield others, done

    def anneal(self, work: float) -> None:
        """Lower the peak; the order is then that of the lowest one."""
        best, peak = self.order, max(self.held(self.order))
        least = self._over(self.order, peak)
        for moved, done in self.moves(work):
            more = self._over(moved, peak) - self._over(self.order, peak)
            heat = HOT * peak * (1 - done / work)
            if more > 0 and more >= -math.log(1 - next(self.random)) * heat:
                continue
            self.order = moved
            if self._over(moved, peak) < least:
                least = self._over(moved, peak)
                if max(self.held(moved)) < peak:
                    best, peak = moved, max(self.held(moved))
                    least = self._over(moved, peak)
        self.order = best

    def shorten(self, work: float) -> None:
        """Hold less in sum, at no higher peak."""
        peak = max(self.held(self.order))
        for moved, _ in self.moves(work):
            held = self.held(moved)
            if max(held) <= peak and sum(held) <= sum(self.held(self.order)):
                self.order = moved

    def _over(self, order: Order, peak: int) -> float:
        return sum(max(0, held - TARGET * peak) for held in self.held(order))


def _numbers() -> Iterator[float]:
    """Park and Miller's, from 1."""
    state = 1
    while True:
        state = state * 48271 % (2**31 - 1)
        yield state / 2**31
