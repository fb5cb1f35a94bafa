"""A naive twin of ParDNN's mapping: Algorithm 2 and Eq. 4.2, sums over all ops of the graph."""

from collections.abc import Sequence
from typing import NamedTuple

from pardnn.graph.ir import Graph
from pardnn.sim.machine import Machine
from tests.reference.pardnn import levels, op_successors


class Paths(NamedTuple):
    """Clusters: of each op, and the first and last op of each path; -1 for an empty one."""

    of: Sequence[int]
    head: Sequence[int]
    tail: Sequence[int]


class Mapping:
    """The device of each cluster, in the making; every device can run every op."""

    def __init__(
        self, graph: Graph, machine: Machine, link: tuple[float, float], paths: Paths
    ) -> None:
        self.machine, self.link, self.of = machine, link, paths.of
        self.num_clusters, k = len(paths.head), machine.num_devices
        self.fastest = machine.seconds.min(axis=0).tolist()
        self.top, bottom = levels(graph, self.fastest, link, paths.of, set())
        self.spans = [self._span(graph, paths, c, bottom) for c in range(self.num_clusters)]
        self.producer = {
            t.name: (paths.of[i], t) for i, op in enumerate(graph.ops) for t in op.outputs
        }
        self.readers: dict[str, set[int]] = {name: set() for name in self.producer}
        for i, op in enumerate(graph.ops):
            for name in op.inputs:
                self.readers[name] |= {paths.of[i]} - {self.producer[name][0]}
        # The heaviest primary, which is the first, to the fastest device.
        speed = machine.seconds.sum(axis=1)[machine.device_class]
        self.device: dict[int, int] = dict(enumerate(sorted(range(k), key=lambda d: (speed[d], d))))

    def _span(
        self, graph: Graph, paths: Paths, c: int, bottom: dict[int, float]
    ) -> tuple[float, float]:
        """The window in which a cluster could run (Table 4.2)."""
        if paths.head[c] < 0:
            return 0.0, 0.0
        successors = op_successors(graph)
        before = [p for p in self.top if paths.head[c] in successors[p]]
        after = [self.top[s] for s in successors[paths.tail[c]]]
        start = max((self.top[p] + self.fastest[p] for p in before), default=0.0)
        makespan = max(self.top[i] + bottom[i] for i in self.top)
        return start, max(start, min(after, default=makespan))

    def work(self, c: int) -> float:
        return sum(self.fastest[i] for i in self.top if self.of[i] == c)

    def potential(self, c: int) -> float:
        """Work of others that may run while the cluster's messages travel."""
        start, end = self.spans[c]
        return sum(
            self.fastest[i] for i in self.top if self.of[i] != c and start <= self.top[i] < end
        )

    def messages(self, c: int) -> list[tuple[int | None, int | None, int]]:
        """Source, target and bytes: a tensor once per device, None for the cluster itself.

        Of clusters that have no device yet, all readers of a tensor are one; their device is -1.
        """
        found: list[tuple[int | None, int | None, int]] = []
        for name, (home, tensor) in self.producer.items():
            if c in self.readers[name]:
                found.append((self.device.get(home, -1), None, tensor.bytes))
            if c == home:
                targets = {self.device.get(r, -1) for r in self.readers[name]}
                found += [(None, q, tensor.bytes) for q in targets]
        return found

    def comm(self, c: int, d: int | None = None) -> float:
        """Communication with a device, or with all others, at the slowest link."""
        return sum(
            self.link[0] + size * self.link[1]
            for source, target, size in self.messages(c)
            if d is None or d in (source, target)
        )

    def load(self, d: int, span: tuple[float, float] = (0.0, float("inf"))) -> float:
        seconds = self.machine.seconds[self.machine.device_class[d]]
        return sum(
            seconds[i]
            for i in self.top
            if self.device.get(self.of[i]) == d and span[0] <= self.top[i] < span[1]
        )

    def cost(self, c: int, p: int) -> float:
        """Eq. 4.2: work of p within the span, and communication with all other devices."""
        m, total = self.machine, self.load(p, self.spans[c])
        for source, target, size in self.messages(c):
            a, b = p if source is None else source, p if target is None else target
            if -1 not in (a, b) and a != b:
                total += m.latency[a, b] + size / m.bandwidth[a, b]
        return total


def mapped(
    graph: Graph, machine: Machine, link: tuple[float, float], paths: Paths
) -> tuple[list[int], int]:
    """Devices of all clusters by Algorithm 2, and how many were merged into primaries."""
    m, k = Mapping(graph, machine, link, paths), machine.num_devices
    heaviest = sorted(range(k, m.num_clusters), key=lambda c: (-m.work(c), c))
    for c in heaviest:
        comm = {d: m.comm(c, d) for d in range(k)}
        nearest = max(comm, key=lambda d: (comm[d], -d))
        if m.comm(c) > m.potential(c) and comm[nearest] > 0:
            m.device[c] = nearest
    merged = len(m.device) - k
    for c in heaviest:
        if c not in m.device:
            m.device[c] = min(range(k), key=lambda p: (m.cost(c, p), -m.comm(c, p), m.load(p), p))
    return [m.device[c] for c in range(m.num_clusters)], merged
