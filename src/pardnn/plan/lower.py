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
    uses: list[int] = []
    for tensor, target in zip(
        plan.message_tensor.tolist(), plan.message_target.tolist(), strict=True
    ):
        readers = a.consumer_op[a.consumer_ptr[tensor] : a.consumer_ptr[tensor + 1]].tolist()
        here = [op for op in readers if plan.place[op] == target]
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


def _slots(
    plan: PlanArrays, producer: list[int], order: list[int], device: int
) -> list[tuple[int, bool, int]]:
    """Return (slot, is a receive at its own slot, message) of a rank's posts, in global order.

    Slot s lies between op s - 1 and op s of the rank's list.
    """
    row = order_rows(plan)[device]
    position = {op: i for i, op in enumerate(row)}
    slots: list[tuple[int, bool, int]] = []
    slot = 0
    for number in order:
        if plan.message_source[number] == device:
            own, receive = position[producer[number]] + 1, False
        elif plan.message_target[number] == device:
            own, receive = position[int(plan.message_post[number])], True
        else:
            continue
        slot = max(slot, own)
        slots.append((slot, receive and slot == own, number))
    return slots


def _rank_actions(
    graph: Graph, plan: PlanArrays, order: list[int], first_use: list[int], device: int
) -> Iterator[Action]:
    new_number = {old: new for new, old in enumerate(order)}
    row = order_rows(plan)[device]
    position = {op: i for i, op in enumerate(row)}
    producer = graph.arrays.tensor_op[plan.message_tensor].tolist()
    posts: dict[int, list[tuple[bool, int]]] = {}
    for slot, receive, number in _slots(plan, producer, order, device):
        posts.setdefault(slot, []).append((receive, number))
    holds, arrivals, allocations = _message_positions(plan, position, first_use, device)
    frees = _frees(graph, plan, device, row)

    def post(number: int) -> Action:
        kind = Send if plan.message_source[number] == device else Receive
        return kind(new_number[number])

    for slot in range(len(row) + 1):
        here = posts.get(slot, [])
        early = next((i for i, (receive, _) in enumerate(here) if receive), len(here))
        yield from (post(number) for _, number in here[:early])
        yield from (Wait(new_number[number]) for number in holds.get(slot - 1, []))
        yield from (Free(names) for names in frees.get(slot - 1, []))
        yield from (Allocate(new_number[number]) for number in allocations.get(slot, []))
        yield from (post(number) for _, number in here[early:])
        yield from (Wait(new_number[number]) for number in arrivals.get(slot, []))
        if slot < len(row):
            yield Compute(graph.ops[row[slot]].name)
    yield from (Wait(new_number[number]) for number in holds.get(len(row), []))
    yield from (Free(names) for names in frees.get(len(row), []))


def _message_positions(
    plan: PlanArrays, position: dict[int, int], first_use: list[int], device: int
) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, list[int]]]:
    holds: dict[int, list[int]] = {}
    arrivals: dict[int, list[int]] = {}
    allocations: dict[int, list[int]] = {}
    for number, hold in enumerate(plan.message_hold.tolist()):
        if plan.message_source[number] == device:
            at = len(position) if hold < 0 else position[hold]
            holds.setdefault(at, []).append(number)
        if plan.message_target[number] == device:
            post = position[int(plan.message_post[number])]
            allocations.setdefault(post, []).append(number)
            arrivals.setdefault(position[first_use[number]], []).append(number)
    return holds, arrivals, allocations


def _frees(
    graph: Graph, plan: PlanArrays, device: int, row: list[int]
) -> dict[int, list[tuple[str, ...]]]:
    """Names that share a storage, by the position after which the storage is released."""
    a = graph.arrays
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    place = plan.place
    sharing: dict[int, list[str]] = {}
    for op in row:
        for tensor in range(a.output_ptr[op], a.output_ptr[op + 1]):
            owner = tensor
            while place[a.tensor_op[owner]] == device and a.tensor_alias[owner] >= 0:
                owner = int(a.tensor_alias[owner])
            if owner != tensor:
                sharing.setdefault(owner, []).append(names[tensor])
    frees: dict[int, list[tuple[str, ...]]] = {}
    for storage in device_storages(graph, plan)[device]:
        if storage.allocated < 0:
            continue
        at = len(row) if storage.released < 0 else storage.released
        group = (names[storage.tensor], *sharing.get(storage.tensor, []))
        frees.setdefault(at, []).append(group)
    return frees


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
    first_use = first_uses(graph, arrays)
    ranks = tuple(
        tuple(_rank_actions(graph, arrays, order, first_use, device))
        for device in range(plan.num_devices)
    )
    return Lowered(tuple(plan.messages[number] for number in order), ranks)
