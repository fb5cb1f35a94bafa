"""Let transfers of a sharded plan run while devices compute.

Problem: `spread` cuts out, sends and puts together in one place, so every transfer is waited for.
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
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import numpy as np

from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph, Op
from pardnn.plan.partition import FETCH, JOIN, REDUCE, SLICE
from pardnn.plan.plan import Message, Plan


class _Moves(NamedTuple):
    """New places: of ops by name, and of receives by number of the message; in old positions."""

    ops: dict[str, float]
    posts: dict[int, float]


def overlapped(
    parts: Graph,
    plan: Plan,
    seconds: Sequence[Sequence[float]],
    cluster: Cluster,
    lead: float = 1.0,
) -> Plan:
    """Return a sharded plan with its transfers moved beside computation.

    Args:
        parts: The partitioned graph.
        plan: Of that graph, as `spread` makes it.
        seconds: Per device, of each op in its order.
        cluster: Tells how long transfers take.
        lead: How much of a transfer's time to leave between its begin and its end.
    """
    mover = _Mover(parts, plan, seconds, cluster, lead)
    moves = _Moves({}, {})
    for row in plan.order:
        mover.earlier(row, moves)
    for device, row in enumerate(plan.order):
        mover.later(device, row, moves)
    rows = tuple(
        tuple(sorted(row, key=lambda name: moves.ops.get(name, mover.at[name])))
        for row in plan.order
    )
    keys = [[mover.there(name, moves) for name in row] for row in rows]
    now = {name: i for row in rows for i, name in enumerate(row)}
    messages = [
        mover.posted(n, m, moves, rows[m.target], keys[m.target], now)
        for n, m in enumerate(plan.messages)
    ]
    order = sorted(range(len(messages)), key=lambda n: max(moves.posts[n], mover.made(n, moves)))
    return dataclasses.replace(plan, order=rows, messages=tuple(messages[n] for n in order))


@final
class _Mover:
    """What is known of the plan while things are moved.

    Attributes:
        at: Position of each op in its device's order.
        lead: Seconds that the messages which an op waits for take.
    """

    def __init__(
        self,
        parts: Graph,
        plan: Plan,
        seconds: Sequence[Sequence[float]],
        cluster: Cluster,
        share: float,
    ) -> None:
        self.plan = plan
        self.ops = {op.name: op for op in parts.ops}
        self.place = plan.placement
        self.producer = {t.name: op.name for op in parts.ops for t in op.outputs}
        self.at = {name: float(i) for row in plan.order for i, name in enumerate(row)}
        self.clock = [np.concatenate([[0.0], np.cumsum(row)]).tolist() for row in seconds]
        sizes = {t.name: t.bytes for op in parts.ops for t in op.outputs}
        readers: dict[str, list[Op]] = {}
        for op in parts.ops:
            for name in (*op.inputs, *(f"after {other}" for other in op.after)):
                readers.setdefault(name, []).append(op)
        self.readers: Mapping[str, list[Op]] = readers
        self.lead: dict[str, float] = {}
        self.sent: dict[str, list[int]] = {}
        self.landing: dict[str, list[int]] = {}
        latency, bandwidth = cluster.arrays.latency, cluster.arrays.bandwidth
        for number, message in enumerate(plan.messages):
            ends = message.source, message.target
            takes = share * float(latency[ends] + sizes[message.tensor] / bandwidth[ends])
            reader = message.post_before
            self.lead[reader] = max(self.lead.get(reader, 0.0), takes)
            self.sent.setdefault(message.tensor, []).append(number)
            if message.into is not None:
                self.landing.setdefault(message.into, []).append(number)

    def before(self, device: int, position: float, seconds: float) -> int:
        """Return the last position from which that much is computed up to a position."""
        clock = self.clock[device]
        return max(bisect.bisect_right(clock, clock[int(position)] - seconds) - 1, 0)

    def earlier(self, row: Sequence[str], moves: _Moves) -> None:
        """Move what is cut out for others, and the receives of it."""
        for name in row:
            op = self.ops[name]
            numbers = [n for t in op.outputs for n in self.sent.get(t.name, [])]
            numbers += [n for t in op.outputs for n in self.landing.get(t.name, [])]
            if op.kind == SLICE and not numbers:  # to be packed first
                numbers = [
                    n
                    for reader in self.readers.get(op.outputs[0].name, [])
                    for n in self.sent.get(reader.outputs[0].name, [])
                    if reader.kind == FETCH
                ]
            if op.kind not in (SLICE, FETCH) or not numbers:
                continue
            lead = max(self.lead[self.plan.messages[n].post_before] for n in numbers)
            device = self.place[name]
            wanted = self.before(device, self.at[name], lead)
            earliest = max((self.there(other, moves) for other in self.needed(op)), default=-1.0)
            moves.ops[name] = min(max(wanted - 0.5, earliest), self.at[name])

    def needed(self, op: Op) -> list[str]:
        """Return the ops on the same device that must come before."""
        made = [self.producer[t] for t in op.inputs]
        return [n for n in (*made, *op.after) if self.place[n] == self.place[op.name]]

    def there(self, name: str, moves: _Moves) -> float:
        """Return where an op is now."""
        return moves.ops.get(name, self.at[name])

    def made(self, number: int, moves: _Moves) -> float:
        """Return where a message's tensor is made."""
        return self.there(self.producer[self.plan.messages[number].tensor], moves)

    def later(self, device: int, row: Sequence[str], moves: _Moves) -> None:
        """Move what is put together of received pieces towards its first reader."""
        for name in reversed(row):
            op = self.ops[name]
            if op.kind not in (FETCH, JOIN, REDUCE) or name in moves.ops:
                continue
            lead = self.lead.get(name, 0.0)
            chained = [r for t in op.inputs for r in (self.producer[t],) if r in self.lead]
            lead = max([lead, *(self.lead[r] for r in chained if self.ops[r].kind == FETCH)])
            used = [r for t in op.outputs for r in self.readers.get(t.name, [])]
            used += self.readers.get(f"after {name}", [])
            last = min((self.there(r.name, moves) for r in used), default=float(len(row)))
            clock = self.clock[device]
            wanted = bisect.bisect_left(clock, clock[int(self.at[name])] + lead)
            if lead and min(wanted, last) > self.at[name] + 1:
                moves.ops[name] = min(wanted - 0.5, last)
                if op.kind == JOIN:  # its buffer need not be there earlier, too
                    moves.ops.pop(self.producer[op.inputs[0]], None)

    def posted(
        self,
        number: int,
        m: Message,
        moves: _Moves,
        row: Sequence[str],
        keys: Sequence[float],
        now: Mapping[str, int],
    ) -> Message:
        """Return a message with its receive posted where its transfer can begin.

        Args:
            number: Of the message.
            m: The message.
            moves: What was moved.
            row: New order of the receiver.
            keys: Places of its ops, in old positions.
            now: New positions of ops.
        """
        reader = m.post_before
        old = self.at[reader]
        piece = self.producer[m.tensor]
        # Devices do the same at the same place, so the receiver moves as far as the sender does.
        early = old - (self.at[piece] - self.there(piece, moves))
        slot = old - 0.5 if self.there(reader, moves) > old else early
        first = 0
        if m.into is not None:
            first = now[self.producer[m.into]] + 1
            slot = max(slot, keys[first - 1])
        moves.posts[number] = slot
        # Not before its place is there, even where all wait for another region that moved up.
        at = max(min(bisect.bisect_left(keys, slot), now[reader]), first)
        return dataclasses.replace(m, post_before=row[at])
