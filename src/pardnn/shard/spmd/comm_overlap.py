"""Let transfers of a sharded plan run while devices compute.

Problem: `spmd_partition` cuts out, sends and assembles in one place, so every transfer is waited
for.
Idea: pieces are cut out, and receives posted, as much earlier as the transfer takes (and no
earlier than the tensor exists, or the buffer that they are received into, which moves with them);
partial results are added up as much later (and no later than
somebody reads the sum). That is as late as costs no time; what is held meanwhile is in the plan,
so its memory is proven like any other's.
Complexity: O(ops + messages), and a logarithm for sorting.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE
from pardnn.plan.plan import Message, Plan, PlanArrays, positions


class Overlapped(NamedTuple):
    """A plan by numbers after its transfers were moved.

    Attributes:
        arrays: The plan.
        messages: Number that each message had before.
    """

    arrays: PlanArrays
    messages: list[int]


def overlapped_plan(parts: Graph, plan: Plan, moved: Overlapped) -> Plan:
    """Return a plan by names after its transfers were moved.

    Args:
        parts: The partitioned graph.
        plan: Of that graph, before.
        moved: From `OverlapScheduler.moved`.
    """
    names = [op.name for op in parts.ops]
    rows = np.split(moved.arrays.order_op, moved.arrays.order_ptr[1:-1])
    posts: list[int] = moved.arrays.message_post.tolist()
    messages = [
        _posted(plan.messages[number], names[post])
        for number, post in zip(moved.messages, posts, strict=True)
    ]
    order = tuple(tuple(names[op] for op in row.tolist()) for row in rows)
    return dataclasses.replace(plan, order=order, messages=tuple(messages))


def _posted(m: Message, before: str) -> Message:
    if m.post_before == before:
        return m
    return Message(
        tensor=m.tensor,
        source=m.source,
        target=m.target,
        post_before=before,
        hold_until=m.hold_until,
        into=m.into,
    )


class _Positions(NamedTuple):
    """New places, in old positions.

    Attributes:
        lead: Seconds that the messages which an op waits for take, by op.
        there: Of ops.
        is_moved: By op.
    """

    lead: dict[int, float]
    there: list[float]
    is_moved: list[bool]


class _Movable(NamedTuple):
    """What may move up: an op, where its messages are received, and what must come before it."""

    op: int
    posts: list[int]
    needed: list[int]


@final
class OverlapScheduler:
    """What is known of a plan whose transfers are moved, ops and tensors by their number.

    Args:
        parts: The partitioned graph.
        arrays: The plan, as `spmd_partition` makes it.
        seconds: Per device, of each op in its order.
        cluster: Tells how long transfers take.
    """

    def __init__(
        self,
        parts: Graph,
        arrays: PlanArrays,
        seconds: Sequence[Sequence[float]],
        cluster: Cluster,
    ) -> None:
        self.plan = arrays
        self.rows: list[list[int]] = [
            row.tolist() for row in np.split(arrays.order_op, arrays.order_ptr[1:-1])
        ]
        self.at: list[int] = positions(arrays).tolist()
        self.place: list[int] = arrays.place.tolist()
        self.clock = [np.concatenate([[0.0], np.cumsum(row)]).tolist() for row in seconds]
        self.kinds = [op.kind for op in parts.ops]
        a = parts.arrays
        self.producer: list[int] = a.tensor_op.tolist()
        self.outputs = _rows(a.output_ptr, np.arange(a.num_tensors))
        self.inputs = _rows(a.input_ptr, a.input_tensor)
        self.after = _rows(a.after_ptr, a.after_op)
        self.before_of = _rows(a.before_ptr, a.before_op)
        self.readers = _rows(a.consumer_ptr, a.consumer_op)
        self.tensors: list[int] = arrays.message_tensor.tolist()
        self.posts: list[int] = arrays.message_post.tolist()
        self.into: list[int] = arrays.message_into.tolist() or [-1] * len(self.posts)
        self.sent: dict[int, list[int]] = {}
        for number, (tensor, into) in enumerate(zip(self.tensors, self.into, strict=True)):
            self.sent.setdefault(tensor, []).append(number)
            if into >= 0:
                self.sent.setdefault(into, []).append(number)
        self.movable = [list(self._movable(row)) for row in self.rows]
        ends = arrays.message_source, arrays.message_target
        latency, bandwidth = cluster.arrays.latency[ends], cluster.arrays.bandwidth[ends]
        self.takes = latency + a.tensor_bytes[arrays.message_tensor] / bandwidth

    def moved(self, lead: float) -> Overlapped:
        """Return the plan with its transfers moved beside computation.

        Args:
            lead: How much of a transfer's time to leave between its begin and its end.
        """
        leads: dict[int, float] = {}
        for op, takes in zip(self.posts, (lead * self.takes).tolist(), strict=True):
            if takes > leads.get(op, 0.0):
                leads[op] = takes
            else:
                leads.setdefault(op, 0.0)
        moves = _Positions(leads, [float(at) for at in self.at], [False] * len(self.at))
        for row in self.movable:
            self.advance(row, moves)
        for device, row in enumerate(self.rows):
            self.delay(device, row, moves)
        there = moves.there
        rows = [sorted(row, key=there.__getitem__) for row in self.rows]
        keys = [[there[op] for op in row] for row in rows]
        order_op = np.array([op for row in rows for op in row], dtype=np.int64)
        plan = self.plan._replace(order_op=order_op)
        now: list[int] = positions(plan).tolist()
        targets: list[int] = plan.message_target.tolist()
        slots: list[float] = []
        posts: list[int] = []
        for number, device in enumerate(targets):
            slot, at = self.posted(number, moves, keys[device], now)
            slots.append(max(slot, there[self.producer[self.tensors[number]]]))
            posts.append(rows[device][at])
        order = sorted(range(len(slots)), key=slots.__getitem__)
        plan = plan._replace(message_post=np.array(posts, dtype=np.int64))
        columns = (column[order] if len(column) else column for column in plan[3:])
        return Overlapped(PlanArrays(*plan[:3], *columns), order)

    def before(self, device: int, position: int, seconds: float) -> int:
        """Return the last position from which that much is computed up to a position."""
        clock = self.clock[device]
        return max(bisect.bisect_right(clock, clock[position] - seconds) - 1, 0)

    def _movable(self, row: Sequence[int]) -> Iterator[_Movable]:
        """Yield what is cut out for others, and the buffers into which they are received."""
        for op in row:
            kind = self.kinds[op]
            if kind not in (SLICE, FETCH):
                continue
            numbers = [n for t in self.outputs[op] for n in self.sent.get(t, ())]
            if kind == SLICE and not numbers:  # to be packed first
                readers = self.readers[self.outputs[op][0]]
                packs = [reader for reader in readers if self.kinds[reader] == FETCH]
                first = [self.outputs[reader][0] for reader in packs]
                numbers = [n for t in first for n in self.carried(t)]
            if numbers:
                yield _Movable(op, [self.posts[n] for n in numbers], self.needed(op))

    def advance(self, row: Sequence[_Movable], moves: _Positions) -> None:
        """Move what is cut out for others, and the receives of it."""
        there, leads = moves.there, moves.lead
        for op, posts, needed in row:
            lead = max([leads[post] for post in posts])
            wanted = self.before(self.place[op], self.at[op], lead)
            earliest = max([there[other] for other in needed], default=-1.0)
            there[op] = min(max(wanted - 0.5, earliest), float(self.at[op]))
            moves.is_moved[op] = True

    def carried(self, tensor: int) -> list[int]:
        """Return the messages that carry a tensor."""
        return [n for n in self.sent.get(tensor, ()) if self.tensors[n] == tensor]

    def needed(self, op: int) -> list[int]:
        """Return the ops on the same device that must come before."""
        made = [self.producer[t] for t in self.inputs[op]]
        return [n for n in (*made, *self.after[op]) if self.place[n] == self.place[op]]

    def delay(self, device: int, row: Sequence[int], moves: _Positions) -> None:
        """Move what is put together of received pieces towards its first reader."""
        clock, there, leads = self.clock[device], moves.there, moves.lead
        for op in reversed(row):
            kind = self.kinds[op]
            if kind not in (FETCH, JOIN, REDUCE) or moves.is_moved[op]:
                continue
            lead = leads.get(op, 0.0)
            for tensor in self.inputs[op]:
                made = self.producer[tensor]
                if made in leads and self.kinds[made] == FETCH:
                    lead = max(lead, leads[made])
            used = [r for t in self.outputs[op] for r in self.readers[t]]
            last = min((there[r] for r in (*used, *self.before_of[op])), default=float(len(row)))
            wanted = bisect.bisect_left(clock, clock[self.at[op]] + lead)
            if lead and min(wanted, last) > self.at[op] + 1:
                there[op] = min(wanted - 0.5, last)
                moves.is_moved[op] = True
                if kind == JOIN:  # its buffer need not be there earlier, too
                    buffer = self.producer[self.inputs[op][0]]
                    there[buffer], moves.is_moved[buffer] = float(self.at[buffer]), False

    def posted(
        self, number: int, moves: _Positions, keys: Sequence[float], now: Sequence[int]
    ) -> tuple[float, int]:
        """Return where a receive is posted so that its transfer can begin.

        Args:
            number: Of the message.
            moves: What was moved.
            keys: Places of the receiver's ops in their new order, in old positions.
            now: New positions of ops.

        Returns:
            The place, in old positions, and the new position of the op before which that is.
        """
        reader, there = self.posts[number], moves.there
        old = float(self.at[reader])
        piece = self.producer[self.tensors[number]]
        # Devices do the same at the same place, so the receiver moves as far as the sender does.
        early = old - (self.at[piece] - there[piece])
        slot = old - 0.5 if there[reader] > old else early
        first = 0
        if self.into[number] >= 0:
            first = now[self.producer[self.into[number]]] + 1
            slot = max(slot, keys[first - 1])
        # Not before its place is there, even where all wait for another region that moved up.
        return slot, max(min(bisect.bisect_left(keys, slot), now[reader]), first)


def _rows(ptr: np.ndarray, index: np.ndarray) -> list[list[int]]:
    """Return compressed sparse rows as lists."""
    ends, found = ptr.tolist(), index.tolist()
    return [found[begin:end] for begin, end in itertools.pairwise(ends)]
