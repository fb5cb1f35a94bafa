"""Communication overlap: let transfers of a sharded plan run while devices compute.

Problem: `spmd_partition` cuts out, sends and assembles slices in one place, so ops wait for every
transfer.
Idea: slices are cut out, and receives posted, earlier by as much as the transfer takes (but not
before the tensor exists, or the buffer that they are received into, which moves with them); partial
results are reduced later by as much (but not after the sum is read). No transfer starts earlier
than needed, because the tensors that it holds take memory; this memory is part of the plan, and so
proven like any other.
No deadlock: the plain plan gives every op of every device a time in a common order of all events
that cannot deadlock (`plan.lower`). Ops are moved in this time, and each message gets a slot in the
new order of all ops, after its producer and its buffer and before its first reader; the sender's
wait is moved after that slot if needed. So the new order of all events has no cycle either.
Complexity: O(ops + messages), and a logarithm for sorting.
Reference: Tofu (EuroSys 2019), section 6, delays "the execution of the remote fetch operator"; this
is the other half: a fetch still starts in time.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE
from pardnn.plan.plan import Message, Plan, PlanArrays, order_rows, positions
from pardnn.shard.spmd.message_slots import MessageSlots, Overlapped
from pardnn.time_limit import check_time


def overlapped_plan(partitioned: Graph, plan: Plan, schedule: Overlapped) -> Plan:
    """Return a plan by names whose transfers overlap computation.

    Args:
        partitioned: The partitioned graph.
        plan: Of that graph, before.
        schedule: Of `OverlapScheduler.schedule`.
    """
    names = [op.name for op in partitioned.ops]
    columns = schedule.arrays.message_post.tolist(), schedule.arrays.message_hold.tolist()
    messages = [
        _moved(plan.messages[number], names[post], names[hold] if hold >= 0 else None)
        for number, post, hold in zip(schedule.messages, *columns, strict=True)
    ]
    order = tuple(tuple(names[op] for op in row) for row in order_rows(schedule.arrays))
    return dataclasses.replace(plan, order=order, messages=tuple(messages))


def _moved(m: Message, post: str, hold: str | None) -> Message:
    if (m.post_before, m.hold_until) == (post, hold):
        return m
    return Message(
        tensor=m.tensor,
        source=m.source,
        target=m.target,
        post_before=post,
        hold_until=hold,
        into=m.into,
    )


class _Schedule(NamedTuple):
    """New times under construction; the unit is an op of any device.

    Attributes:
        lead: By op, seconds that the messages take which it waits for.
        time: By op.
        is_moved: By op.
    """

    lead: dict[int, float]
    time: list[float]
    is_moved: list[bool]


class _Movable(NamedTuple):
    """What may be advanced: an op, where its messages are posted, and its predecessors."""

    op: int
    posts: list[int]
    predecessors: list[int]


@final
class OverlapScheduler:
    """Moves the transfers of a plan; ops and tensors by their number.

    Args:
        partitioned: The partitioned graph.
        arrays: The plan made by `spmd_partition`.
        seconds: Per device, of each op in its order.
        cluster: Gives the time of transfers.

    Raises:
        InvalidPlanError: E411, if the plan would deadlock as it is.
    """

    def __init__(
        self,
        partitioned: Graph,
        arrays: PlanArrays,
        seconds: Sequence[Sequence[float]],
        cluster: Cluster,
    ) -> None:
        self.plan = arrays
        self.rows = order_rows(arrays)
        self.position: list[int] = positions(arrays).tolist()
        self.device_of: list[int] = arrays.place.tolist()
        self.clock = [np.concatenate([[0.0], np.cumsum(row)]).tolist() for row in seconds]
        self.kinds = [op.kind for op in partitioned.ops]
        a = partitioned.arrays
        self.producer: list[int] = a.tensor_op.tolist()
        self.outputs = _rows(a.output_ptr, np.arange(a.num_tensors))
        self.inputs = _rows(a.input_ptr, a.input_tensor)
        self.after = _rows(a.after_ptr, a.after_op)
        self.before_of = _rows(a.before_ptr, a.before_op)
        self.consumers = _rows(a.consumer_ptr, a.consumer_op)
        self.tensors: list[int] = arrays.message_tensor.tolist()
        self.posts: list[int] = arrays.message_post.tolist()
        self.into: list[int] = arrays.message_into.tolist() or [-1] * len(self.posts)
        self.sent: dict[int, list[int]] = {}
        for number, (tensor, into) in enumerate(zip(self.tensors, self.into, strict=True)):
            self.sent.setdefault(tensor, []).append(number)
            if into >= 0:
                self.sent.setdefault(into, []).append(number)
        self.slots = MessageSlots(partitioned, arrays)
        self.time: list[int] = self.slots.time.tolist()
        self.movable = [list(self._find_movable(row)) for row in self.rows]
        ends = arrays.message_source, arrays.message_target
        latency, bandwidth = cluster.arrays.latency[ends], cluster.arrays.bandwidth[ends]
        self.takes = latency + a.tensor_bytes[arrays.message_tensor] / bandwidth

    def schedule(self, lead: float) -> Overlapped:
        """Return the plan with its transfers moved beside computation.

        Args:
            lead: Multiple of a transfer's time to leave between its begin and its end.
        """
        check_time()
        leads: dict[int, float] = {}
        for op, takes in zip(self.posts, (lead * self.takes).tolist(), strict=True):
            if takes > leads.get(op, 0.0):
                leads[op] = takes
            else:
                leads.setdefault(op, 0.0)
        schedule = _Schedule(leads, list(map(float, self.time)), [False] * len(self.time))
        for row in self.movable:
            self.advance(row, schedule)
        for device, row in enumerate(self.rows):
            self.delay(device, row, schedule)
        return self.slots.placed(np.array(schedule.time))

    def before(self, device: int, position: int, seconds: float) -> int:
        """Return the last position that is some seconds of computation before another one.

        Args:
            device: Whose order it is.
            position: In that order.
            seconds: Of computation between the two positions.
        """
        clock = self.clock[device]
        return max(bisect.bisect_right(clock, clock[position] - seconds) - 1, 0)

    def _find_movable(self, row: Sequence[int]) -> Iterator[_Movable]:
        """Yield slices that are cut out for others, and the buffers that receive in place."""
        for op in row:
            kind = self.kinds[op]
            if kind not in (SLICE, FETCH) or self.is_receiver(op):
                continue
            numbers = [n for t in self.outputs[op] for n in self.sent.get(t, ())]
            if kind == SLICE and not numbers:  # it is copied to be contiguous first
                consumers = self.consumers[self.outputs[op][0]]
                copies = [consumer for consumer in consumers if self.kinds[consumer] == FETCH]
                first = [self.outputs[consumer][0] for consumer in copies]
                numbers = [n for t in first for n in self.carried(t)]
            if numbers:
                yield _Movable(op, [self.posts[n] for n in numbers], self.predecessors(op))

    def advance(self, row: Sequence[_Movable], schedule: _Schedule) -> None:
        """Move slices cut out for other devices, and buffers, to an earlier time."""
        time, leads = schedule.time, schedule.lead
        for op, posts, predecessors in row:
            lead = max([leads[post] for post in posts])
            device = self.device_of[op]
            wanted = self.rows[device][self.before(device, self.position[op], lead)]
            earliest = max([time[other] for other in predecessors], default=-1.0)
            time[op] = min(max(self.time[wanted] - 0.5, earliest), float(self.time[op]))
            schedule.is_moved[op] = True

    def carried(self, tensor: int) -> list[int]:
        """Return the messages that carry a tensor."""
        return [n for n in self.sent.get(tensor, ()) if self.tensors[n] == tensor]

    def is_receiver(self, op: int) -> bool:
        """Whether an op reads what another device sends, so that it cannot run earlier."""
        device = self.device_of[op]
        return any(self.device_of[self.producer[t]] != device for t in self.inputs[op])

    def predecessors(self, op: int) -> list[int]:
        """Return the ops on the same device that must come before."""
        made = [self.producer[t] for t in self.inputs[op]]
        return [n for n in (*made, *self.after[op]) if self.device_of[n] == self.device_of[op]]

    def delay(self, device: int, row: Sequence[int], schedule: _Schedule) -> None:
        """Move ops that assemble received slices towards their first consumers.

        Args:
            device: Whose order it is.
            row: Its ops in order.
            schedule: Changed in place.
        """
        clock, time, leads = self.clock[device], schedule.time, schedule.lead
        times = [*(self.time[op] for op in row), math.inf, math.inf]
        for op in reversed(row):
            kind, position = self.kinds[op], self.position[op]
            if kind not in (FETCH, JOIN, REDUCE) or schedule.is_moved[op]:
                continue
            lead = leads.get(op, 0.0)
            for tensor in self.inputs[op]:
                made = self.producer[tensor]
                if made in leads and self.kinds[made] == FETCH:
                    lead = max(lead, leads[made])
            used = [r for t in self.outputs[op] for r in self.consumers[t]]
            last = min((time[r] for r in (*used, *self.before_of[op])), default=times[-3] + 1.0)
            wanted = times[bisect.bisect_left(clock, clock[position] + lead)]
            if lead and min(wanted, last) > times[position + 1]:
                time[op] = min(wanted - 0.5, last)
                schedule.is_moved[op] = True
                if kind == JOIN:  # its buffer need not be there earlier, too
                    buffer = self.producer[self.inputs[op][0]]
                    time[buffer], schedule.is_moved[buffer] = float(self.time[buffer]), False


def _rows(ptr: Int64[ndarray, " r"], index: Int64[ndarray, " e"]) -> list[list[int]]:
    """Return compressed sparse rows as lists."""
    ends, found = ptr.tolist(), index.tolist()
    return [found[begin:end] for begin, end in itertools.pairwise(ends)]
