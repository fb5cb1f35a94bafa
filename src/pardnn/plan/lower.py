"""Lower a plan to one action list per rank that cannot deadlock.

Every rank posts its sends and receives in one global total order of messages: NCCL needs that, gloo
forgives more. The order is a topological order of the plan's events:

- a rank *reaches* an op when the previous one has finished and every send held until it has left;
- a transfer needs its producer to have run and the receiver to have reached `post_before`;
- an op needs to be reached, and the messages that it is the first to read.

A send may be posted later than its producer runs, but only past ops that come before the transfer
in that order anyway, so posting in order never adds a wait that could close a cycle. O(ops + edges
+ devices x messages), or with a logarithm where the planner's order of messages cannot be kept.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.errors import InvalidPlanError
from pardnn.graph.ir import Graph
from pardnn.plan.actions import Action, Allocate, Compute, Free, Receive, Send, Wait
from pardnn.plan.memory import all_storages, storage_roots
from pardnn.plan.plan import (
    Message,
    Plan,
    PlanArrays,
    order_rows,
    plan_arrays,
    positions,
)


class Lowered(NamedTuple):
    """Messages in their global order, and the actions of each rank."""

    messages: tuple[Message, ...]
    ranks: tuple[tuple[Action, ...], ...]


class _Events(NamedTuple):
    """A graph of events: ops run (0 to n-1), are reached (n to 2n-1), messages (2n to 2n+m-1)."""

    successors: list[list[int]]
    missing: list[int]


def first_uses(graph: Graph, plan: PlanArrays) -> list[int]:
    """Return, for each message, the op of the receiver that reads it first."""
    a, k = graph.arrays, plan.num_devices
    tensor = np.repeat(np.arange(a.num_tensors), np.diff(a.consumer_ptr))
    device = plan.place[a.consumer_op]
    is_remote = plan.place[a.tensor_op[tensor]] != device
    consumers, codes = a.consumer_op[is_remote], (tensor * k + device)[is_remote]
    by_position = np.lexsort((positions(plan)[consumers], codes))
    read, first = np.unique(codes[by_position], return_index=True)
    wanted = plan.message_tensor * k + plan.message_target
    assert np.isin(wanted, read).all(), "a message that no op reads"
    return consumers[by_position][first[np.searchsorted(read, wanted)]].tolist()


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
        for predecessor in a.after_op[a.after_ptr[op] : a.after_ptr[op + 1]].tolist():
            yield predecessor, op
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
    for predecessor, successor in _event_edges(graph, plan, first_uses(graph, plan)):
        events.successors[predecessor].append(successor)
        events.missing[successor] += 1
    return events


def message_order(graph: Graph, plan: PlanArrays) -> list[int]:
    """Return the numbers of the plan's messages in a global order that cannot deadlock.

    The planner's order is kept if it can be; else the earliest possible message comes first.

    Raises:
        InvalidPlanError: E411, if the events have a cycle: the plan would deadlock.
    """
    n, m = graph.arrays.num_ops, len(plan.message_tensor)
    is_simple = _is_simple(graph, plan)
    if is_simple and _is_possible(graph, plan):
        return list(range(m))
    events = _events(graph, plan)
    if not is_simple:
        chained = _Events([list(row) for row in events.successors], list(events.missing))
        for number in range(m - 1):
            chained.successors[2 * n + number].append(2 * n + number + 1)
            chained.missing[2 * n + number + 1] += 1
        if len(_sorted_events(chained, 2 * n)) == 2 * n + m:
            return list(range(m))
    return [node - 2 * n for node in _complete_order(graph, plan, events) if node >= 2 * n]


def op_times(graph: Graph, plan: PlanArrays) -> Int64[ndarray, " n"]:
    """Return the place of each op in an order of all ops that the events of a plan can come in.

    Raises:
        InvalidPlanError: E411, if the events have a cycle: the plan would deadlock.
    """
    return event_times(graph, plan)[0].argsort().argsort()


def event_times(
    graph: Graph, plan: PlanArrays
) -> tuple[Int64[ndarray, " n"], Int64[ndarray, " n"]]:
    """Return the places of ops in an order of all events: that each runs, that it is reached.

    Before it is reached, what its device held until the op before has left.

    Raises:
        InvalidPlanError: E411, if the events have a cycle: the plan would deadlock.
    """
    n, m = graph.arrays.num_ops, len(plan.message_tensor)
    order = np.array(_complete_order(graph, plan, _events(graph, plan)), dtype=np.int64)
    times = np.empty(2 * n + m, dtype=np.int64)
    times[order] = np.arange(2 * n + m)
    return times[:n], times[n : 2 * n]


def _complete_order(graph: Graph, plan: PlanArrays, events: _Events) -> list[int]:
    n, m = graph.arrays.num_ops, len(plan.message_tensor)
    order = _sorted_events(events, 2 * n)
    if len(order) < 2 * n + m:
        stuck = sorted(set(range(2 * n + m)) - set(order))
        raise InvalidPlanError(_cycle_text(graph, plan, events, stuck), code="E411")
    return order


def _is_simple(graph: Graph, plan: PlanArrays) -> bool:
    """Whether an op follows only ops that come before it in the list of its own device."""
    a, position = graph.arrays, positions(plan)
    successor = np.repeat(np.arange(a.num_ops), np.diff(a.after_ptr))
    is_here = plan.place[successor] == plan.place[a.after_op]
    return bool((is_here & (position[a.after_op] < position[successor])).all())


def _is_possible(graph: Graph, plan: PlanArrays) -> bool:
    """Whether messages can run in the planner's order, of a plan that is simple.

    If each message comes after the one before, a rank that waits for one of those that are left
    has run all ops up to the first that needs any of them. So message i can run if on either side
    what it needs comes before what needs a message from i on: a minimum from the end, per rank.
    Event 2 p is that a rank reaches its op at position p, 2 p + 1 that it runs. O(k messages).
    """
    a, position = graph.arrays, positions(plan)
    made = 2 * position[a.tensor_op[plan.message_tensor]] + 1
    posted = 2 * position[plan.message_post]
    read = 2 * position[np.array(first_uses(graph, plan), dtype=np.int64)] + 1
    never = 2 * a.num_ops
    held = np.where(plan.message_hold < 0, never, 2 * position[plan.message_hold] + 2)
    for device in range(plan.num_devices):
        sends, receives = plan.message_source == device, plan.message_target == device
        blocked = np.minimum(np.where(receives, read, never), np.where(sends, held, never))
        first = np.minimum.accumulate(blocked[::-1])[::-1]
        if (made >= first)[sends].any() or (posted >= first)[receives].any():
            return False
    return True


def _sorted_events(events: _Events, first_message: int) -> list[int]:
    missing = list(events.missing)

    def key(node: int) -> tuple[bool, int]:
        return node < first_message, node  # messages first, as the planner lists them

    # Ops alone, so sorted as a heap is: a message waits for what it carries.
    heap = [key(node) for node, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while heap:
        node = heapq.heappop(heap)[1]
        order.append(node)
        for successor in events.successors[node]:
            missing[successor] -= 1
            if missing[successor] == 0:
                heapq.heappush(heap, key(successor))
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
        for successor in events.successors[node]:
            before.setdefault(successor, node)
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
    position: list[int] = positions(plan).tolist()
    producer = graph.arrays.tensor_op[plan.message_tensor].tolist()
    source: list[int] = plan.message_source.tolist()
    target: list[int] = plan.message_target.tolist()
    post: list[int] = plan.message_post.tolist()
    hold: list[int] = plan.message_hold.tolist()
    first_use = first_uses(graph, plan)
    ends: list[list[_End]] = [[] for _ in rows]
    for new, old in enumerate(order):
        until = len(rows[source[old]]) if hold[old] < 0 else position[hold[old]]
        ends[source[old]].append(_End(new, True, position[producer[old]] + 1, until))
        read = position[first_use[old]]
        ends[target[old]].append(_End(new, False, position[post[old]], read))
    return ends


def _rank_actions(
    row: Sequence[str], ends: list[_End], frees: dict[int, list[tuple[str, ...]]] | None
) -> list[Action]:
    """Return what a rank does.

    Args:
        row: Names of its ops, in order.
        ends: Its messages, in the global order.
        frees: What is released after each position; None leaves out computing and memory.
    """
    posts: dict[int, list[_End]] = {}
    holds: dict[int, list[Action]] = {}
    arrivals: dict[int, list[Action]] = {}
    allocations: dict[int, list[Action]] = {}
    slot = 0
    for end in ends:
        slot = max(slot, end.post)
        posts.setdefault(slot, []).append(end)
        (holds if end.sends else arrivals).setdefault(end.until, []).append(Wait(end.number))
        if not end.sends and frees is not None:
            allocations.setdefault(end.post, []).append(Allocate(end.number))

    def post(end: _End) -> Action:
        return (Send if end.sends else Receive)(end.number)

    found: list[Action] = []
    slots: Iterable[int] = range(len(row) + 2)
    if frees is None:
        slots = sorted({*posts, *arrivals, *(at + 1 for at in holds)})
    for slot in slots:
        here = posts.get(slot, ())
        # What is received at its own slot waits for the memory of what is freed there.
        early = next((i for i, e in enumerate(here) if not e.sends and e.post == slot), len(here))
        found += map(post, here[:early])
        found += holds.get(slot - 1, ())
        if frees is not None:
            found += map(Free, frees.get(slot - 1, ()))
        found += allocations.get(slot, ())
        found += map(post, here[early:])
        found += arrivals.get(slot, ())
        if frees is not None and slot < len(row):
            found.append(Compute(row[slot]))
    return found


def _frees(graph: Graph, plan: PlanArrays) -> list[dict[int, list[tuple[str, ...]]]]:
    """By rank and position, the names that share each storage that is released after it."""
    names = [tensor.name for op in graph.ops for tensor in op.outputs]
    sharing = _sharing(graph, plan, names)
    found = all_storages(graph, plan)
    lengths = np.diff(plan.order_ptr)
    at = np.where(found.released < 0, lengths[found.device], found.released)
    table = np.stack([found.device, found.tensor, at], axis=1)
    rows: list[list[int]] = table[found.allocated >= 0].tolist()
    frees: list[dict[int, list[tuple[str, ...]]]] = [{} for _ in range(plan.num_devices)]
    for device, tensor, position in rows:
        group = (names[tensor], *sharing.get((tensor, device), ()))
        frees[device].setdefault(position, []).append(group)
    return frees


def _sharing(
    graph: Graph, plan: PlanArrays, names: Sequence[str]
) -> dict[tuple[int, int], list[str]]:
    """By owner of a storage and device, the names of the others that share it, as they are made."""
    a = graph.arrays
    roots = storage_roots(a, plan)
    views = np.flatnonzero(roots != np.arange(len(roots)))
    views = views[np.lexsort((views, positions(plan)[a.tensor_op[views]]))]
    home = plan.place[a.tensor_op[views]]
    rows: list[list[int]] = np.stack([views, roots[views] % len(roots), home], axis=1).tolist()
    sharing: dict[tuple[int, int], list[str]] = {}
    for tensor, owner, device in rows:
        sharing.setdefault((owner, device), []).append(names[tensor])
    return sharing


def lower(graph: Graph, plan: Plan, arrays: PlanArrays | None = None) -> Lowered:
    """Return the messages in their global order and the action list of each rank.

    Args:
        graph: The graph that the plan is for.
        plan: Valid for it, see `plan.check`.
        arrays: The plan by numbers, if they are known.

    Raises:
        InvalidPlanError: E411, if the plan would deadlock.
    """
    arrays = arrays or plan_arrays(graph, plan)
    frees = _frees(graph, arrays)
    return _lowered(graph, plan, arrays, frees)


def lower_messages(graph: Graph, plan: Plan, arrays: PlanArrays) -> Lowered:
    """Return what `lower` does without computing and memory: sends, receives and waits alone.

    Args:
        graph: The graph that the plan is for.
        plan: Valid for it.
        arrays: The plan by numbers.

    Raises:
        InvalidPlanError: E411, if the plan would deadlock.
    """
    return _lowered(graph, plan, arrays, [None] * arrays.num_devices)


def _lowered(
    graph: Graph,
    plan: Plan,
    arrays: PlanArrays,
    frees: Sequence[dict[int, list[tuple[str, ...]]] | None],
) -> Lowered:
    order = message_order(graph, arrays)
    ranks = tuple(
        tuple(_rank_actions(*each))
        for each in zip(plan.order, _ends(graph, arrays, order), frees, strict=True)
    )
    return Lowered(tuple(plan.messages[number] for number in order), ranks)
