"""Lower a plan to one action list per rank that cannot deadlock.

Every rank posts its sends and receives in one global total order of messages: NCCL needs that, gloo
forgives more. The order is a topological order of the plan's events:

- a rank *reaches* an op when the previous one has finished and every send held until it has left;
- a transfer needs its producer to have run and the receiver to have reached `post_before`;
- an op needs to be reached, and the messages that it is the first to read.

A send may be posted later than its producer runs, but only past ops that come before the transfer
in that order anyway, so posting in order never adds a wait that could close a cycle. O(ops + edges
+ messages), or with a logarithm where the planner's order of messages cannot be kept.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from pardnn.errors import InvalidPlanError
from pardnn.graph.ir import Graph
from pardnn.plan.actions import Action, Allocate, Compute, Free, Receive, Send, Wait
from pardnn.plan.memory import device_storages
from pardnn.plan.plan import Message, Plan, PlanArrays, order_rows, plan_arrays


class Lowered(NamedTuple):
    """Messages in their global order, and the actions of each rank."""

    messages: tuple[Message, ...]
    ranks: tuple[tuple[Action, ...], ...]


class _Events(NamedTuple):
    """Nodes: ops run (0 to n-1), ops are reached (n to 2n-1), messages (2n to 2n+m-1)."""

    successors: list[list[int]]
    missing: list[int]


def first_uses(graph: Graph, plan: PlanArrays) -> list[int]:
    """Return, for each message, the op of the receiver that reads it first."""
    a = graph.arrays
    position = {op: i for row in order_rows(plan) for i, op in enumerate(row)}
    place = plan.place.tolist()
    uses: list[int] = []
    for tensor, target in zip(
        plan.message_tensor.tolist(), plan.message_target.tolist(), strict=True
    ):
        readers = a.consumer_op[a.consumer_ptr[tensor] : a.consumer_ptr[tensor + 1]].tolist()
        here = [op for op in readers if place[op] == target]
        uses.append(min(here, key=position.__getitem__))
    return uses


def _event_edges(graph: Graph, plan: PlanArrays, first_use: list[int]) -> Iterator[tuple[int, int]]:
    a, n = graph.arrays, graph.arrays.num_ops
    next_op: dict[int, int] = {}
    for row in order_rows(plan):
        next_op.update(itertools.pairwise(row))
        for op in row:
            yield n + op, op
            if op in next_op:
                yield op, n + next_op[op]
    for op in range(n):
        for earlier in a.after_op[a.after_ptr[op] : a.after_ptr[op + 1]].tolist():
            yield earlier, op
    columns = (plan.message_tensor, plan.message_post, plan.message_hold)
    for number, (tensor, post, hold) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        message = 2 * n + number
        yield int(a.tensor_op[tensor]), message
        yield n + post, message
        yield message, first_use[number]
        if hold >= 0 and hold in next_op:
            yield message, n + next_op[hold]


def _events(graph: Graph, plan: PlanArrays) -> _Events:
    num_nodes = 2 * graph.arrays.num_ops + len(plan.message_tensor)
    events = _Events([[] for _ in range(num_nodes)], [0] * num_nodes)
    for earlier, later in _event_edges(graph, plan, first_uses(graph, plan)):
        events.successors[earlier].append(later)
        events.missing[later] += 1
    return events


def message_order(graph: Graph, plan: PlanArrays) -> list[int]:
    """Return the numbers of the plan's messages in a global order that cannot deadlock.

    The planner's order is kept if it can be; else the earliest possible message comes first.

    Raises:
        InvalidPlanError: E411, if the events have a cycle: the plan would deadlock.
    """
    n, m = graph.arrays.num_ops, len(plan.message_tensor)
    events = _events(graph, plan)
    chained = _Events([list(row) for row in events.successors], list(events.missing))
    for number in range(m - 1):
        chained.successors[2 * n + number].append(2 * n + number + 1)
        chained.missing[2 * n + number + 1] += 1
    if len(_sorted_events(chained, 2 * n)) == 2 * n + m:
        return list(range(m))
    order = _sorted_events(events, 2 * n)
    if len(order) < 2 * n + m:
        stuck = sorted(set(range(2 * n + m)) - set(order))
        raise InvalidPlanError(_cycle_text(graph, plan, events, stuck), code="E411")
    return [node - 2 * n for node in order if node >= 2 * n]


def _sorted_events(events: _Events, first_message: int) -> list[int]:
    missing = list(events.missing)

    def key(node: int) -> tuple[bool, int]:
        return node < first_message, node  # messages first, as the planner lists them

    heap = [key(node) for node, count in enumerate(missing) if count == 0]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        node = heapq.heappop(heap)[1]
        order.append(node)
        for later in events.successors[node]:
            missing[later] -= 1
            if missing[later] == 0:
                heapq.heappush(heap, key(later))
    return order


def _cycle_text(graph: Graph, plan: PlanArrays, events: _Events, stuck: list[int]) -> str:
    n = graph.arrays.num_ops
    names = [tensor.name for op in graph.ops for tensor in op.outputs]

    def text(node: int) -> str:
        if node < 2 * n:
            verb = "runs" if node < n else "is reached"
            return f"{graph.ops[node % n].name!r:.60} {verb} on device {plan.place[node % n]}"
        number = node - 2 * n
        tensor = names[int(plan.message_tensor[number])]
        ends = f"{plan.message_source[number]} to {plan.message_target[number]}"
        return f"{tensor!r:.60} goes from {ends}"

    before: dict[int, int] = {}
    for node in stuck:
        for later in events.successors[node]:
            before.setdefault(later, node)
    path: list[int] = []
    node = stuck[0]
    while node not in path:
        path.append(node)
        node = before[node]
    cycle = [*path[path.index(node) :], node][::-1]
    return "the plan would deadlock; each of these waits for the one before:\n" + "\n".join(
        text(node) for node in cycle[:12]
    )


class _End(NamedTuple):
    """A message as one of its two ranks sees it; positions are those of the rank's order.

    Attributes:
        number: In the global order.
        sends: Whether this rank sends it.
        post: The slot before which it cannot be posted: slot s lies before the op at position s.
        until: Of a send, the position until which its tensor is held; of a receive, that of the
            first op that reads it.
    """

    number: int
    sends: bool
    post: int
    until: int


def _ends(graph: Graph, plan: PlanArrays, order: list[int]) -> list[list[_End]]:
    """Return the messages of each rank, in the global order."""
    rows = order_rows(plan)
    position = {op: at for row in rows for at, op in enumerate(row)}
    producer = graph.arrays.tensor_op[plan.message_tensor].tolist()
    source: list[int] = plan.message_source.tolist()
    target: list[int] = plan.message_target.tolist()
    post, hold = plan.message_post.tolist(), plan.message_hold.tolist()
    first_use = first_uses(graph, plan)
    ends: list[list[_End]] = [[] for _ in rows]
    for new, old in enumerate(order):
        until = len(rows[source[old]]) if hold[old] < 0 else position[hold[old]]
        ends[source[old]].append(_End(new, True, position[producer[old]] + 1, until))
        read = position[first_use[old]]
        ends[target[old]].append(_End(new, False, position[post[old]], read))
    return ends


def _rank_actions(
    graph: Graph, row: list[int], ends: list[_End], frees: dict[int, list[tuple[str, ...]]]
) -> Iterator[Action]:
    posts: list[list[_End]] = [[] for _ in range(len(row) + 1)]
    holds: list[list[int]] = [[] for _ in posts]
    arrivals: list[list[int]] = [[] for _ in posts]
    allocations: list[list[int]] = [[] for _ in posts]
    slot = 0
    for end in ends:
        slot = max(slot, end.post)
        posts[slot].append(end)
        (holds if end.sends else arrivals)[end.until].append(end.number)
        if not end.sends:
            allocations[end.post].append(end.number)

    def post(end: _End) -> Action:
        return (Send if end.sends else Receive)(end.number)

    for slot, here in enumerate(posts):
        # What is received at its own slot waits for the memory of what is freed there.
        early = next((i for i, e in enumerate(here) if not e.sends and e.post == slot), len(here))
        yield from (post(end) for end in here[:early])
        if slot:
            yield from (Wait(number) for number in holds[slot - 1])
            yield from (Free(names) for names in frees.get(slot - 1, []))
        yield from (Allocate(number) for number in allocations[slot])
        yield from (post(end) for end in here[early:])
        yield from (Wait(number) for number in arrivals[slot])
        if slot < len(row):
            yield Compute(graph.ops[row[slot]].name)
    yield from (Wait(number) for number in holds[len(row)])
    yield from (Free(names) for names in frees.get(len(row), []))


def _frees(graph: Graph, plan: PlanArrays) -> list[dict[int, list[tuple[str, ...]]]]:
    """By rank and position, the names that share each storage that is released after it."""
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    place = plan.place[graph.arrays.tensor_op].tolist()
    alias = graph.arrays.tensor_alias.tolist()
    sharing: dict[tuple[int, int], list[str]] = {}
    rows = order_rows(plan)
    for device, row in enumerate(rows):
        for tensor in _outputs(graph, row):
            owner = tensor
            while place[owner] == device and alias[owner] >= 0:
                owner = alias[owner]
            if owner != tensor:
                sharing.setdefault((owner, device), []).append(names[tensor])
    frees: list[dict[int, list[tuple[str, ...]]]] = [{} for _ in rows]
    for device, storages in enumerate(device_storages(graph, plan)):
        for storage in storages:
            if storage.allocated < 0:
                continue
            at = len(rows[device]) if storage.released < 0 else storage.released
            group = (names[storage.tensor], *sharing.get((storage.tensor, device), []))
            frees[device].setdefault(at, []).append(group)
    return frees


def _outputs(graph: Graph, row: list[int]) -> Iterator[int]:
    ptr = graph.arrays.output_ptr.tolist()
    for op in row:
        yield from range(ptr[op], ptr[op + 1])


def lower(graph: Graph, plan: Plan) -> Lowered:
    """Return the messages in their global order and the action list of each rank.

    Args:
        graph: The graph that the plan is for.
        plan: Valid for it, see `plan.check`.

    Raises:
        InvalidPlanError: E411, if the plan would deadlock.
    """
    arrays = plan_arrays(graph, plan)
    order = message_order(graph, arrays)
    ranks = tuple(
        tuple(_rank_actions(graph, row, ends, frees))
        for row, ends, frees in zip(
            order_rows(arrays), _ends(graph, arrays, order), _frees(graph, arrays), strict=True
        )
    )
    return Lowered(tuple(plan.messages[number] for number in order), ranks)
