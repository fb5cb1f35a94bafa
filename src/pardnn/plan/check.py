"""The checker of plans: independent of every planner, and of the code that lowers a plan.

It proves that a plan runs every op once on a device that can run it, that every tensor is where it
is read, that in-place writes change nothing that is still read or sent, that no schedule of the
ranks deadlocks, and that no device exceeds its memory. Of a sharded plan it checks the partitioned
graph first (`plan.cut`), then the plan of that graph as any other. O(ops + edges + messages).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import MAX_DEVICES, Cluster
from pardnn.errors import InvalidPlanError
from pardnn.gc_pause import collector_paused
from pardnn.graph.file import fingerprint
from pardnn.graph.ir import Graph, Op, addressed, addresses_storage
from pardnn.kernels.sorting import inverse_permutation
from pardnn.plan.actions import Action, Receive, Send, Wait
from pardnn.plan.constraints import hard
from pardnn.plan.demands.check_constraints import constraint_problems
from pardnn.plan.lower import Lowered, lower_messages
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Message, Plan, PlanArrays, plan_arrays, planned_graph
from pardnn.plan.rewritten.check_planned_graph import planned_graph_problems
from pardnn.units import bytes_text, size_texts

MAX_PROBLEMS = 20


@dataclass(frozen=True)
class _Context:
    """The input of every rule.

    Attributes:
        graph: The graph, or the partitioned graph.
        plan: The plan under check.
        cluster: What it must run on, if that is known.
    """

    graph: Graph
    plan: Plan
    cluster: Cluster | None

    @functools.cached_property
    def place(self) -> Int64[ndarray, " n"]:
        """The device of each op; of a plan that places all ops."""
        placement = self.plan.placement
        return np.array([placement[name] for name in self.graph.op_numbers], dtype=np.int64)

    @functools.cached_property
    def at(self) -> Int64[ndarray, " n"]:
        """The position of each op in the order of its device; of a plan that orders all ops."""
        number, rows = self.graph.op_numbers, self.plan.order
        op = np.array([number[name] for row in rows for name in row], dtype=np.int64)
        begin = np.array([0, *itertools.accumulate(map(len, rows))], dtype=np.int64)
        return inverse_permutation(op) - begin[self.place]

    def position(self, op: str) -> int:
        """Return the position of an op in the order of its device."""
        return int(self.at[self.graph.op_numbers[op]])

    def producer(self, tensor: str) -> Op:
        """Return the op that makes a tensor."""
        return self.graph.ops[int(self.graph.arrays.tensor_op[self.graph.tensor_numbers[tensor]])]

    def owner(self, tensor: str) -> int:
        """Return the number of the tensor that owns a tensor's storage."""
        return int(self.graph.arrays.tensor_owner[self.graph.tensor_numbers[tensor]])

    def home(self, tensor: str) -> int:
        """Return the device of the storage that a tensor is made in."""
        return int(self.place[self.graph.arrays.tensor_op[self.owner(tensor)]])


def capacities(cluster: Cluster, reserve: float) -> list[int | None]:
    """Return the usable bytes of each device: limit x (1 - reserve), None if unlimited."""
    return [
        None if device.memory is None else int(device.memory * (1 - reserve))
        for device in cluster.devices
    ]


@collector_paused()
def plan_problems(graph: Graph, plan: Plan, cluster: Cluster | None = None) -> list[str]:
    """Return every rule that the plan breaks, up to `MAX_PROBLEMS`; empty if it is valid.

    Args:
        graph: The graph that the plan is for.
        plan: Any plan.
        cluster: What it must run on; the plan's own if None. Without either, device types, links
            and memory are not checked.
    """
    cluster = cluster or plan.cluster
    if plan.num_devices > MAX_DEVICES:
        return [f"order has {plan.num_devices} devices; at most {MAX_DEVICES} are possible"]
    if plan.graph_fingerprint is not None and plan.graph_fingerprint != fingerprint(graph):
        return ["graph_fingerprint: the plan was made for another graph"]
    problems = planned_graph_problems(graph, plan, MAX_PROBLEMS)
    if problems:
        return problems
    whole, graph = graph, planned_graph(graph, plan)
    context = _Context(graph, plan, cluster)
    for rule in (_placement, _order, _groups, _messages, _deliveries, _writes, _addresses):
        # Later rules assume that every op has one device and one position.
        problems += [p for _, p in zip(range(MAX_PROBLEMS), rule(context), strict=False)]
        if problems and rule in (_placement, _order, _messages):
            return problems[:MAX_PROBLEMS]
    broken = constraint_problems(hard(plan.constraints or ()), whole, graph, plan, cluster)
    problems += itertools.islice(broken, MAX_PROBLEMS)
    if problems:
        return problems[:MAX_PROBLEMS]
    arrays = plan_arrays(graph, plan)
    return [*_schedule(graph, plan, arrays), *_memory(graph, plan, arrays, cluster)]


def check_plan(graph: Graph, plan: Plan, cluster: Cluster | None = None) -> None:
    """Raise unless the plan is valid for the graph.

    Args:
        graph: The graph.
        plan: Any plan.
        cluster: What it has to run on; None for the plan's own.

    Raises:
        InvalidPlanError: E410, with all problems in `details["problems"]`.
    """
    raise_problems(plan_problems(graph, plan, cluster))


def raise_problems(problems: Sequence[str]) -> None:
    """Raise if there are problems of a plan.

    Raises:
        InvalidPlanError: E410, with all of them in `details["problems"]`.
    """
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidPlanError(
            f"the plan is not valid: {problems[0]}{more}", details={"problems": list(problems)}
        )


def _placement(c: _Context) -> Iterator[str]:
    k = c.plan.num_devices
    if c.cluster is not None and c.cluster.num_devices != k:
        yield f"order has {k} devices, the cluster {c.cluster.num_devices}"
        return
    known, placement = c.graph.op_numbers, c.plan.placement
    for name in known:
        if name not in placement:
            yield f"placement: op {name!r:.80} is missing"
    types = [] if c.cluster is None else [device.type for device in c.cluster.devices]
    unable = {
        (op.name, kind)
        for kind in set(types)
        for op in c.graph.ops
        if op.seconds is not None and kind not in op.seconds
    }
    devices = placement.values()
    if not unable and len(placement) == len(known) and 0 <= min(devices) <= max(devices) < k:
        return
    for name, device in placement.items():
        if name not in known:
            yield f"placement: op {name!r:.80} is not in the graph"
        elif not 0 <= device < k:
            yield f"placement: op {name!r:.80} is on device {device}, but there are {k}"
        elif types and (name, kind := types[device]) in unable:
            yield f"placement: op {name!r:.80} cannot run on device {device} of type {kind!r}"


def _order(c: _Context) -> Iterator[str]:
    known, placement, rows = c.graph.op_numbers, c.plan.placement, c.plan.order
    seen = set(itertools.chain.from_iterable(rows))
    is_there = all(
        list(map(placement.get, row)).count(device) == len(row) for device, row in enumerate(rows)
    )
    if is_there and len(seen) == len(known) == sum(map(len, rows)):
        return
    seen.clear()
    for device, row in enumerate(rows):
        for name in row:
            if name in seen:
                yield f"order: op {name!r:.80} is listed twice"
            seen.add(name)
            if placement.get(name) != device:
                yield f"order: op {name!r:.80} is in the list of device {device}, not placed there"
    for name in known:
        if name not in seen:
            yield f"order: op {name!r:.80} is missing"


def _groups(c: _Context) -> Iterator[str]:
    first: dict[str, str] = {}
    for op in c.graph.ops:
        if op.group is None:
            continue
        other = first.setdefault(op.group, op.name)
        if c.plan.placement[other] != c.plan.placement[op.name]:
            yield f"group {op.group!r:.60}: {other!r:.60} and {op.name!r:.60} are on two devices"


def _messages(c: _Context) -> Iterator[str]:
    seen: set[tuple[str, int]] = set()
    for i, m in enumerate(c.plan.messages):
        where = f"messages[{i}] ({m.tensor!r:.60}, {m.source} to {m.target})"
        if m.tensor not in c.graph.tensor_numbers:
            yield f"{where}: no such tensor"
            continue
        if (m.tensor, m.target) in seen:
            yield f"{where}: the tensor goes there twice"
        seen.add((m.tensor, m.target))
        yield from (f"{where}: {problem}" for problem in _message_problems(c, m))


def _message_problems(c: _Context, m: Message) -> Iterator[str]:
    producer = c.producer(m.tensor).name
    if c.plan.placement[producer] != m.source:
        yield f"its producer runs on device {c.plan.placement[producer]}"
    if not 0 <= m.source < c.plan.num_devices:
        yield f"it comes from device {m.source}, but there are {c.plan.num_devices}"
    elif not 0 <= m.target < c.plan.num_devices or m.target == m.source:
        yield "it is sent to the device it comes from"
    elif c.cluster is not None and c.cluster.arrays.latency[m.source, m.target] == float("inf"):
        yield "no link joins the two devices"
    if c.plan.placement.get(m.post_before) != m.target:
        yield f"post_before {m.post_before!r:.60} is not an op of the receiver"
    if m.into is not None and c.plan.partition is None:
        yield f"it goes into {m.into!r:.60}, but only sharded plans receive in place"
    if m.hold_until is not None:
        if c.plan.placement.get(m.hold_until) != m.source:
            yield f"hold_until {m.hold_until!r:.60} is not an op of the sender"
        elif c.position(m.hold_until) < c.position(producer):
            yield f"hold_until {m.hold_until!r:.60} runs before the tensor exists"


def _deliveries(c: _Context) -> Iterator[str]:
    """Check that every tensor is present, in time, where it is read."""
    delivered, place = {(m.tensor, m.target): m for m in c.plan.messages}, c.plan.placement
    readers, unread = _suspects(c)
    for op in map(c.graph.ops.__getitem__, readers):
        device, at = place[op.name], c.position(op.name)
        for tensor in dict.fromkeys(op.inputs):
            producer = c.producer(tensor).name
            if place[producer] == device:
                if c.position(producer) > at:
                    yield f"order: {op.name!r:.60} runs before {producer!r:.60}, which it reads"
                continue
            message = delivered.get((tensor, device))
            if message is None:
                yield f"op {op.name!r:.60} reads {tensor!r:.60}, not sent to device {device}"
            elif c.position(message.post_before) > at:
                yield f"op {op.name!r:.60} reads {tensor!r:.60} before its receive is posted"
        for predecessor in op.after:
            if place[predecessor] == device and c.position(predecessor) > at:
                yield f"order: {op.name!r:.60} must come after {predecessor!r:.60}"
    for tensor, device in sorted((m.tensor, m.target) for m in unread):
        yield f"messages: {tensor!r:.60} goes to device {device}, where nothing reads it"


def _suspects(c: _Context) -> tuple[list[int], list[Message]]:
    """Return the ops that something is missing for, and messages that nobody reads."""
    a, k, messages = c.graph.arrays, c.plan.num_devices, c.plan.messages
    numbers, tensors = c.graph.op_numbers, c.graph.tensor_numbers
    sent = np.array([tensors[m.tensor] * k + m.target for m in messages], dtype=np.int64)
    posts = c.at[np.array([numbers[m.post_before] for m in messages], dtype=np.int64)]
    by_code = np.argsort(sent)
    reader = np.repeat(np.arange(len(c.graph.ops)), np.diff(a.input_ptr))
    made, device = a.tensor_op[a.input_tensor], c.place[reader]
    is_local = c.place[made] == device
    is_late = is_local & (c.at[made] > c.at[reader])
    remote = np.flatnonzero(~is_local)
    wanted = a.input_tensor[remote] * k + device[remote]
    is_sent = np.isin(wanted, sent)
    is_late[remote[~is_sent]] = True
    arriving = remote[is_sent]
    row = by_code[np.searchsorted(sent[by_code], wanted[is_sent])]
    is_late[arriving] = posts[row] > c.at[reader[arriving]]
    later = np.repeat(np.arange(len(c.graph.ops)), np.diff(a.after_ptr))
    is_early = (c.place[later] == c.place[a.after_op]) & (c.at[later] < c.at[a.after_op])
    found = np.unique(np.concatenate([reader[is_late], later[is_early]])).tolist()
    return found, [messages[i] for i in np.flatnonzero(~np.isin(sent, wanted)).tolist()]


def _writes(c: _Context) -> Iterator[str]:
    """Check that storage is written where it is owned, and not while it is being sent."""
    written: dict[int, list[Op]] = {}
    for number, names in c.graph.overwrites:
        op = c.graph.ops[number]
        for tensor in names:
            written.setdefault(c.owner(tensor), []).append(op)
            yield from _elsewhere(c, op, tensor, "writes {} in place", "its storage")
    for m in c.plan.messages:
        sent = c.position(c.producer(m.tensor).name)
        for op in written.get(c.owner(m.tensor), []):
            at = c.position(op.name)
            left = None if m.hold_until is None else c.position(m.hold_until)
            if at > sent and c.plan.placement[op.name] == m.source and (left is None or left >= at):
                yield (
                    f"op {op.name!r:.60} overwrites {m.tensor!r:.60} while it may still be "
                    f"on its way to device {m.target}"
                )


def _addresses(c: _Context) -> Iterator[str]:
    """Check that an offset in a storage is applied where that storage is, not to a sent copy."""
    kinds = set(filter(addresses_storage, {op.kind for op in c.graph.ops}))
    for op in c.graph.ops if kinds else ():
        for tensor in addressed(op):
            yield from _elsewhere(c, op, tensor, "addresses the storage of {}", "that storage")


def _elsewhere(c: _Context, op: Op, tensor: str, does: str, storage: str) -> Iterator[str]:
    """Yield what an op does to a tensor's storage, if that is on another device."""
    device, home = c.plan.placement[op.name], c.home(tensor)
    if device != home:
        what = does.format(f"{tensor!r:.60}")
        yield f"op {op.name!r:.60} {what} on device {device}, but {storage} is on device {home}"


def _schedule(graph: Graph, plan: Plan, arrays: PlanArrays) -> Iterator[str]:
    try:
        lowered = lower_messages(graph, plan, arrays)
    except InvalidPlanError as error:
        yield error.message
        return
    yield from dry_run(lowered)


def dry_run(lowered: Lowered) -> Iterator[str]:
    """Run the action lists of all ranks without computing, and yield what goes wrong.

    A transfer happens when both sides have posted it, the strictest that any backend asks for.
    """
    for rank, actions in enumerate(lowered.ranks):
        posts = [a.message for a in actions if isinstance(a, Send | Receive)]
        if posts != sorted(posts):
            yield f"rank {rank} posts its messages out of the global order"
    at = [0] * len(lowered.ranks)
    posted = [0] * len(lowered.messages)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lowered.ranks):
            start = at[rank]
            at[rank] = _advance(actions, start, posted)
            moved |= at[rank] > start
    for rank, actions in enumerate(lowered.ranks):
        if at[rank] < len(actions):
            waiting = actions[at[rank]]
            assert isinstance(waiting, Wait)
            message = lowered.messages[waiting.message]
            yield f"deadlock: rank {rank} waits forever for {message.tensor!r:.60}"
    if all(place == len(actions) for place, actions in zip(at, lowered.ranks, strict=True)):
        for number, count in enumerate(posted):
            if count != 2:
                yield f"message {number} is posted {count} times, not once by each end"


def _advance(actions: Sequence[Action], at: int, posted: list[int]) -> int:
    while at < len(actions):
        action = actions[at]
        if isinstance(action, Send | Receive):
            posted[action.message] += 1
        elif isinstance(action, Wait) and posted[action.message] < 2:
            break
        at += 1
    return at


def _memory(graph: Graph, plan: Plan, arrays: PlanArrays, cluster: Cluster | None) -> Iterator[str]:
    peaks = peak_bytes(graph, arrays)
    if plan.predicted is not None and list(plan.predicted.peak_bytes) != peaks:
        yield f"predicted.peak_bytes is {list(plan.predicted.peak_bytes)}, but it is {peaks}"
    sent = int(graph.arrays.tensor_bytes[arrays.message_tensor].sum())
    if plan.predicted is not None and plan.predicted.transfer_bytes != sent:
        yield f"predicted.transfer_bytes is {plan.predicted.transfer_bytes}, but it is {sent}"
    if cluster is None:
        return
    usable = capacities(cluster, plan.reserve)
    for device, (peak, capacity) in enumerate(zip(peaks, usable, strict=True)):
        if capacity is not None and peak > capacity:
            held, room = size_texts(peak, capacity)
            limit = bytes_text(cluster.devices[device].memory)
            yield (
                f"memory: device {device} holds up to {held}, usable: {room} (limit {limit}, "
                f"reserve {plan.reserve:g})"
            )
