"""Message slots: one order of all ops of all devices, and a position in it for every message.

Problem: once ops of a plan have moved, each message needs an op before which its receive is posted
and one after which its sender waits for it, so that ranks never wait for each other in a cycle.
Idea: a plan cannot deadlock if its ops and messages can be put in one order in which a message
comes after the op that makes its tensor, the one that makes the buffer it is received into, and
whatever precedes its post; and before its first reader and whatever its sender runs after waiting
for it (`plan.lower`). Such an order of the original plan is known. In the new plan, ops are sorted
by their new times; the slot of a message is chosen between the ops that it needs and those that
need it, and post and wait follow from the order at that slot. So this order proves the new plan.
Complexity: O((ops + messages) log ops).
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.ir import Graph, writes
from pardnn.plan.lower import first_uses, op_times
from pardnn.plan.plan import PlanArrays, order_rows


class Overlapped(NamedTuple):
    """A plan by numbers whose transfers overlap computation.

    Attributes:
        arrays: The plan.
        messages: Number that each message had before.
    """

    arrays: PlanArrays
    messages: list[int]


@final
class MessageSlots:
    """Finds slots for the messages of a plan whose ops have moved.

    Args:
        partitioned: The partitioned graph.
        plan: Before any op moved.

    Attributes:
        time: By op, its place in an order of all ops that proves that the plan cannot deadlock.

    Raises:
        InvalidPlanError: E411, if the plan would deadlock.
    """

    def __init__(self, partitioned: Graph, plan: PlanArrays) -> None:
        self.partitioned = partitioned
        self.plan = plan
        self.producer = partitioned.arrays.tensor_op[plan.message_tensor]
        into = plan.message_into if len(plan.message_into) else np.full_like(self.producer, -1)
        self.buffer = np.where(into >= 0, partitioned.arrays.tensor_op[into], self.producer)
        self.first_use = np.array(first_uses(partitioned, plan), dtype=np.int64)
        number = np.arange(len(plan.place))
        if not self._is_order(partitioned, number):
            number = op_times(partitioned, plan)
        self.time: Int64[ndarray, " n"] = number
        until = np.minimum(number[plan.message_post], _after_hold(plan, number))
        self.slot: Float64[ndarray, " m"] = until - 0.5

    def _is_order(self, partitioned: Graph, number: Int64[ndarray, " n"]) -> bool:
        """Whether numbers of ops are times, each message with a slot between two of them."""
        a, plan = partitioned.arrays, self.plan
        successor = np.repeat(number, np.diff(a.after_ptr))
        if not (number[a.after_op] < successor).all():
            return False
        for row in order_rows(plan):
            if not (np.diff(number[row]) > 0).all():
                return False
        before_post = np.full(len(number), -1)
        for row in order_rows(plan):
            before_post[row[1:]] = number[row[:-1]]
        needs = [number[self.producer], number[self.buffer], before_post[plan.message_post]]
        wanted = np.minimum(number[self.first_use], _after_hold(plan, number))
        return bool((np.maximum.reduce(needs) < wanted).all())

    def placed(self, time: Float64[ndarray, " n"]) -> Overlapped:
        """Return the plan with its ops sorted by new times and its messages in their slots.

        A message keeps its distance from the op that makes its tensor; if its receiver waits later,
        it stays as early as before.

        Args:
            time: By op, near `self.time`: an op after its predecessors and before its successors,
                the first reader of a message not earlier than before.
        """
        plan = self.plan
        by_time = np.lexsort((self.time, time))
        rank = np.empty_like(by_time)
        rank[by_time] = np.arange(len(by_time))
        order_op = np.concatenate([by_time[plan.place[by_time] == d] for d in _devices(plan)])
        moved = plan._replace(order_op=order_op)
        is_later: Bool[ndarray, " m"] = time[plan.message_post] > self.time[plan.message_post]
        earlier = np.where(is_later, 0.0, self.time[self.producer] - time[self.producer])
        wanted = np.searchsorted(time[by_time], self.slot - earlier)
        low = np.maximum(rank[self.producer], rank[self.buffer]) + 1
        high = np.minimum(rank[self.first_use], _after_hold(moved, rank))
        slot = np.maximum(np.minimum(wanted, high), low)
        assert (slot <= rank[self.first_use]).all(), "a message behind its first reader"
        order = np.argsort(slot, kind="stable")
        post, hold = plan.message_post.copy(), plan.message_hold.copy()
        for device, row in enumerate(order_rows(moved)):
            ranks, ops = rank[row], np.array(row, dtype=np.int64)
            here = plan.message_target == device
            post[here] = ops[np.searchsorted(ranks, slot[here])]
            late = (plan.message_source == device) & (slot > high)
            hold[late] = ops[np.searchsorted(ranks, slot[late]) - 1]
        moved = moved._replace(message_post=post, message_hold=hold)
        columns = (column[order] if len(column) else column for column in moved[3:])
        found = self._held_longer(PlanArrays(*moved[:3], *columns))
        if found is None:
            return Overlapped(plan, list(range(len(slot))))
        return Overlapped(found, order.tolist())

    def _held_longer(self, plan: PlanArrays) -> PlanArrays | None:
        """Let no rank wait for a message before it posts an earlier one at the same op.

        Such a message is waited for after that op.

        Args:
            plan: Its messages in the order of their slots.

        Returns:
            The plan; None if the op overwrites what is sent.
        """
        following = _following(plan)
        number = np.arange(len(plan.message_post))
        earliest = np.full(len(following), len(number))
        np.minimum.at(earliest, plan.message_post, number)
        until = following[plan.message_hold]
        waits = earliest[until] < number
        for message in np.flatnonzero(waits).tolist():
            if self._overwrites(int(until[message]), int(plan.message_tensor[message])):
                return None
        hold = plan.message_hold.copy()
        hold[waits] = until[waits]
        return plan._replace(message_hold=hold)

    def _overwrites(self, op: int, tensor: int) -> bool:
        """Whether an op writes the storage of a tensor in place."""
        a, names = self.partitioned.arrays, writes(self.partitioned.ops[op])
        inputs = a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()
        read = zip(self.partitioned.ops[op].inputs, inputs, strict=True)
        return any(n in names and a.tensor_owner[t] == a.tensor_owner[tensor] for n, t in read)


def _devices(plan: PlanArrays) -> range:
    return range(len(plan.order_ptr) - 1)


def _following(plan: PlanArrays) -> Int64[ndarray, " r"]:
    """Return, by op, the next one of its device; the number of ops after the last, and for -1."""
    following = np.full(len(plan.place) + 1, len(plan.place))
    for row in order_rows(plan):
        following[row[:-1]] = row[1:]
    return following


def _after_hold(plan: PlanArrays, time: Int64[ndarray, " n"]) -> Int64[ndarray, " m"]:
    """Return, by message, the time of the op that its sender runs after waiting for it."""
    return np.append(time, len(time))[_following(plan)[plan.message_hold]]
