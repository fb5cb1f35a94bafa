"""The banker's list scheduling without a tree: what is held is summed up anew at every question."""

from collections.abc import Sequence

import numpy as np

from pardnn.place.ordering.edges import Edges
from pardnn.place.ordering.memory_safe import TRIALS
from pardnn.place.ordering.storages import Reserve, Storages


class Banker:
    """A schedule in the making.

    An op may start if what is held then fits, and so does each op that is left while it runs in
    its turn of the reference order.
    """

    def __init__(
        self, e: Edges, s: Storages, r: Reserve, workspace: Sequence[int], key: Sequence[float]
    ) -> None:
        self.e, self.s, self.r = e, s, r
        self.workspace, self.key = workspace, key
        self.start: dict[int, float] = {}
        self.order: list[int] = []
        self.users = [s.user[a:b].tolist() for a, b in _slices(s.user_ptr)]
        self.uses = [s.use[a:b].tolist() for a, b in _slices(s.use_ptr)]
        self.readers = [s.reader[a:b].tolist() for a, b in _slices(s.reader_ptr)]
        self.before: list[list[tuple[int, float]]] = [[] for _ in key]
        for op, (a, b) in enumerate(_slices(e.ptr)):
            for i in range(a, b):
                self.before[e.successor[i]].append((op, float(e.delay[i])))

    def last(self, x: int, done: set[int]) -> int:
        """Position of a storage's last use that is left; -1 without any."""
        left = [int(self.r.position[op]) for op in self.users[x] if op not in done]
        for m, readers in enumerate(self.readers):
            if self.s.sent[m] == x and not done & set(readers):
                left.append(int(self.r.bound[m]))
        return max(left, default=-1)

    def held(self, d: int, p: int, done: set[int]) -> int:
        """Bytes on a device at a position of the reference order, after some ops."""
        total = int(self.s.resident[d])
        for x, size in enumerate(self.s.bytes.tolist()):
            begun = done & set(self.users[x])
            begins = -1 if begun else min(int(self.r.position[op]) for op in self.users[x])
            if self.s.device[x] == d and begins <= p <= self.last(x, done):
                total += size
        return total

    def may_start(self, op: int) -> bool:
        d, done = int(self.e.place[op]), set(self.start)
        now = int(self.s.resident[d])
        takes = 0
        for x, size in enumerate(self.s.bytes.tolist()):
            if self.s.device[x] == d and done & set(self.users[x]) and self.last(x, done) >= 0:
                now += size
            if x in self.uses[op] and not done & set(self.users[x]):
                takes += size
        if now + takes + self.workspace[op] > self.r.limit[d]:
            return False
        left = [o for o in range(len(self.key)) if self.e.place[o] == d and o not in done]
        return takes == 0 or all(
            self.held(d, int(self.r.position[o]), done | {op}) + self.workspace[o]
            <= self.r.limit[d]
            for o in left
        )

    def ready(self, op: int) -> float:
        """When all that an op waits for is there."""
        return max(
            (self.start.get(j, np.inf) + self.e.seconds[j] + delay for j, delay in self.before[op]),
            default=0.0,
        )

    def choice(self, d: int, now: float, slack: float) -> int | None:
        """The ready op of a device with the smallest key that may start."""
        left = [op for op in range(len(self.key)) if self.e.place[op] == d and op not in self.start]
        busy = [op for op in self.order if self.e.place[op] == d]
        if not left or any(self.start[op] + self.e.seconds[op] > now for op in busy):
            return None
        most = min(self.key[op] for op in left) + slack
        ready = [op for op in left if self.ready(op) <= now]
        asked = sorted((op for op in ready if self.key[op] <= most), key=lambda op: self.key[op])
        first = min(left, key=lambda op: self.r.position[op])
        asked = asked[:TRIALS] + ([first] if slack == np.inf and first in ready else [])
        return next((op for op in asked if self.may_start(op)), None)

    def run(self, slack: float) -> None:
        """Start all ops; where devices wait for each other's memory, one start is free of keys."""
        now, n, k = 0.0, len(self.key), len(self.r.limit)
        while len(self.order) < n:
            self.start_what_may(now, slack, k)
            times = [self.start[op] + self.e.seconds[op] for op in self.order]
            times += [self.ready(op) for op in range(n) if op not in self.start]
            later = [float(t) for t in times if now < t < np.inf]
            if later:
                now = min(later)
            elif len(self.order) < n:
                d, op = next(
                    (d, op) for d in range(k) if (op := self.choice(d, now, np.inf)) is not None
                )
                self.begin(op, now)
                self.start_what_may(now, slack, k, first=d + 1)

    def start_what_may(self, now: float, slack: float, k: int, first: int = 0) -> None:
        """Device by device, again and again until nothing can start."""
        moved = True
        while moved:
            moved = False
            for d in range(first, k):
                if (op := self.choice(d, now, slack)) is not None:
                    self.begin(op, now)
                    moved = True
            moved, first = moved or first > 0, 0

    def begin(self, op: int, now: float) -> None:
        self.start[op] = now
        self.order.append(op)


def _slices(ptr: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True))
