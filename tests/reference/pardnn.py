"""Naive twins of ParDNN's steps and of what memory needs: written from the definitions."""

from collections.abc import Sequence

import numpy as np

from pardnn.graph.ir import Graph, writes
from pardnn.sim.machine import Machine


def op_successors(graph: Graph) -> list[dict[int, int]]:
    """Successors of each op, with the largest tensor between them in bytes; -1 for order alone."""
    number = {op.name: i for i, op in enumerate(graph.ops)}
    producer = {t.name: (i, t.bytes) for i, op in enumerate(graph.ops) for t in op.outputs}
    successors: list[dict[int, int]] = [{} for _ in graph.ops]
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            j, size = producer[name]
            successors[j][i] = max(successors[j].get(i, -1), size)
        for name in op.after:
            successors[number[name]].setdefault(i, -1)
    return successors


def levels(
    graph: Graph, seconds: Sequence[float], link: tuple[float, float], of: Sequence[int],
    peeled: set[int],
) -> tuple[dict[int, float], dict[int, float]]:  # fmt: skip
    """Top and bottom levels by recursion; edges within a cluster cost nothing."""
    successors = op_successors(graph)
    left = [i for i in range(len(graph.ops)) if i not in peeled]
    predecessors: dict[int, list[int]] = {i: [] for i in left}
    for i in left:
        for j in successors[i]:
            if j not in peeled:
                predecessors[j].append(i)

    def cost(i: int, j: int) -> float:
        if successors[i][j] < 0 or (of[i] >= 0 and of[i] == of[j]):
            return 0.0
        return link[0] + successors[i][j] * link[1]

    top: dict[int, float] = {}
    bottom: dict[int, float] = {}

    def fill_top(j: int) -> float:
        if j not in top:
            paths = [fill_top(i) + seconds[i] + cost(i, j) for i in predecessors[j]]
            top[j] = max(paths, default=0.0)
        return top[j]

    def fill_bottom(i: int) -> float:
        if i not in bottom:
            paths = [cost(i, j) + fill_bottom(j) for j in successors[i] if j not in peeled]
            bottom[i] = seconds[i] + max(paths, default=0.0)
        return bottom[i]

    for i in left:
        fill_top(i)
        fill_bottom(i)
    return top, bottom


def slices(
    graph: Graph, seconds: Sequence[float], link: tuple[float, float],
    groups: Sequence[int], num_primaries: int,
) -> list[list[int]]:  # fmt: skip
    """Paths of primaries and secondaries as Alg. 1 finds them; groups go with their first path."""
    n = len(graph.ops)
    successors = op_successors(graph)
    of = [-1] * n
    peeled: set[int] = set()
    paths: list[list[int]] = []

    def peel(op: int) -> None:
        for other in range(n):
            if groups[other] == groups[op]:
                of[other] = len(paths)
                peeled.add(other)

    def heaviest(ops: Sequence[int], weight: dict[int, float], bottom: dict[int, float]) -> int:
        return max(ops, key=lambda i: (weight[i], bottom[i], -i))

    for _ in range(num_primaries):
        top, bottom = levels(graph, seconds, link, [-1] * n, peeled)
        weight = {i: top[i] + bottom[i] for i in top}
        path: list[int] = []
        op = heaviest(list(top), weight, bottom) if top else -1
        while op >= 0:
            path.append(op)
            peel(op)
            lengths = {
                j: bottom[j] + (0.0 if size < 0 else link[0] + size * link[1])
                for j, size in successors[op].items()
                if j not in peeled
            }
            op = max(lengths, key=lambda j: (lengths[j], -j), default=-1)
        paths.append(path)
    top, bottom = levels(graph, seconds, link, of, set())
    weight = {i: top[i] + bottom[i] for i in top}
    while len(peeled) < n:
        op = heaviest([i for i in range(n) if i not in peeled], weight, bottom)
        path = []
        while op >= 0:
            path.append(op)
            peel(op)
            ahead = [j for j in successors[op] if j not in peeled]
            op = heaviest(ahead, weight, bottom) if ahead else -1
        paths.append(path)
    return paths


def closed_groups(graph: Graph) -> list[set[int]]:
    """Sets of ops that must share a device: named groups, and who owns, views or writes storage."""
    owner: dict[str, str] = {}
    for op in graph.ops:
        for tensor in op.outputs:
            owner[tensor.name] = tensor.name
    parent = {t.name: t.alias_of for op in graph.ops for t in op.outputs if t.alias_of}

    def root(name: str) -> str:
        return root(parent[name]) if name in parent else name

    written = {root(name) for op in graph.ops for name in writes(op)}
    named = sorted({op.group for op in graph.ops if op.group is not None})
    sets = [{i for i, op in enumerate(graph.ops) if op.group == name} for name in named]
    sets += [
        {
            i
            for i, op in enumerate(graph.ops)
            if any(root(t.name) == storage for t in op.outputs)
            or any(root(name) == storage for name in writes(op))
        }
        for storage in sorted(written)
    ]
    sets += [{i} for i in range(len(graph.ops))]
    merged = True
    while merged:
        merged = False
        for i, one in enumerate(sets):
            for j in range(len(sets) - 1, i, -1):
                if one & sets[j]:
                    one |= sets.pop(j)
                    merged = True
    return sorted(sets, key=min)


def live_bytes_in_order(
    graph: Graph, place: Sequence[int], position: Sequence[int], num_devices: int
) -> np.ndarray:
    """Bytes on each device at each position; messages go just before their first consumer."""
    n = len(graph.ops)
    live = np.zeros((num_devices, n), dtype=np.int64)
    producer = {t.name: (i, t) for i, op in enumerate(graph.ops) for t in op.outputs}

    def root(name: str) -> str:
        alias = producer[name][1].alias_of
        return name if alias is None else root(alias)

    consumers: dict[str, list[int]] = {name: [] for name in producer}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            consumers[name].append(i)
    for i, op in enumerate(graph.ops):
        live[place[i], position[i]] += op.workspace
    for name, (producer_op, tensor) in producer.items():
        here = place[producer_op]
        for d in range(num_devices):
            at = [position[i] for i in consumers[name] if place[i] == d]
            if d != here and at:
                live[d, min(at) : max(at) + 1] += tensor.bytes
        if root(name) != name:
            continue
        end = position[producer_op]
        for other in producer:
            if root(other) != name:
                continue
            end = max(end, position[producer[other][0]])
            for d in range(num_devices):
                at = [position[i] for i in consumers[other] if place[i] == d]
                if at:
                    end = max(end, max(at) if d == here else min(at) - 1)
        if graph.ops[producer_op].memory == "residual":
            live[here] += tensor.bytes
        else:
            live[here, position[producer_op] : end + 1] += tensor.bytes
    return live


def least_makespan(graph: Graph, machine: Machine, groups: Sequence[int]) -> float:
    """The shortest step of all placements and orders, by exhaustion; links are independent."""
    n, k = len(graph.ops), machine.num_devices
    successors = op_successors(graph)
    predecessors: list[list[int]] = [[i for i in range(n) if j in successors[i]] for j in range(n)]
    best = np.inf

    def extend(done: dict[int, float], place: dict[int, int], free: tuple[float, ...]) -> None:
        nonlocal best
        if max(free) >= best:
            return
        if len(done) == n:
            best = max(free)
            return
        for op in range(n):
            if op in done or any(i not in done for i in predecessors[op]):
                continue
            fixed = {place[i] for i in place if groups[i] == groups[op]}
            for d in fixed or range(k):
                start = free[d]
                for i in predecessors[op]:
                    comm = 0.0
                    if place[i] != d:
                        size = max(successors[i][op], 0)
                        comm = machine.latency[place[i], d] + size / machine.bandwidth[place[i], d]
                    start = max(start, done[i] + comm)
                finish = start + machine.seconds[machine.device_class[d], op]
                if not np.isfinite(finish):
                    continue
                left = list(free)
                left[d] = finish
                extend({**done, op: finish}, {**place, op: d}, tuple(left))

    extend({}, {}, (0.0,) * k)
    return best


def swapped(
    graph: Graph, machine: Machine, of: Sequence[int], num_primaries: int,
    spans: Sequence[tuple[int, int]], levels_of: Sequence[int], device: Sequence[int],
) -> list[int]:  # fmt: skip
    """Devices of clusters after swaps of secondaries, each gain computed from the definitions.

    `spans` has the first level of each cluster and the one after its last, `levels_of` the level of
    each op.
    """
    seconds = machine.seconds[machine.device_class]
    producer = {t.name: (of[i], t.bytes) for i, op in enumerate(graph.ops) for t in op.outputs}
    readers: dict[str, set[int]] = {name: set() for name in producer}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            readers[name] |= {of[i]} - {producer[name][0]}
    device = list(device)

    def cost(c: int, d: int) -> float:
        total = 0.0
        for name, (home, size) in producer.items():
            if c in readers[name] and device[home] != d:
                p = device[home]
                total += machine.latency[p, d] + size / machine.bandwidth[p, d]
            if c == home:
                for q in {device[r] for r in readers[name]} - {d}:
                    total += machine.latency[d, q] + size / machine.bandwidth[d, q]
        return total

    def work(d: int, c: int, of_cluster: int | None = None) -> float:
        begin, end = spans[c]
        return sum(
            float(seconds[d, i])
            for i in range(len(of))
            if begin <= levels_of[i] < end
            and (of[i] == of_cluster if of_cluster is not None else device[of[i]] == d)
        )

    def runs(c: int, d: int) -> bool:
        return all(np.isfinite(seconds[d, i]) for i in range(len(of)) if of[i] == c)

    secondaries = sorted(range(num_primaries, len(spans)), key=lambda c: (spans[c][0], c))
    done: set[int] = set()
    for c in secondaries:
        (begin, end), p = spans[c], device[c]
        inside = [
            o for o in secondaries
            if begin <= spans[o][0] < end and spans[o][1] <= end and device[o] != p
            and o not in done
        ]  # fmt: skip
        best, largest = -1, 0.0
        for other in inside[:8] if c not in done else []:
            q = device[other]
            if not runs(c, q) or not runs(other, p):
                continue
            left = work(p, c) - work(p, c, c) + work(p, other, other)
            gain = max(work(p, c), work(q, c))
            gain -= max(left, work(q, c) - work(q, other, other) + work(q, c, c))
            before = cost(c, p) - cost(c, q)
            device[c] = q
            before += cost(other, q) - cost(other, p)
            device[c] = p
            if gain + before > largest:
                best, largest = other, gain + before
        if best >= 0:
            device[c], device[best] = device[best], p
            done |= {c, best}
    return device
