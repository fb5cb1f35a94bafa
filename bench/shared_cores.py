"""Step time of a plan on ranks that share the cores of one machine.

The judge of the product gives every device its own speed. Ranks on one machine share its cores, and
so do the threads that carry messages. Here everything that is at work, ops and transfers alike,
gets an equal part of the cores, at most a whole one (processor sharing). Each rank follows its own
action list; a message moves once its send and its receive are posted, one at a time per sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pardnn.plan.actions import Action, Compute, Receive, Send, Wait
from pardnn.plan.lower import Lowered

_DONE = 1e-12


class Machine(NamedTuple):
    """What ranks run on.

    Attributes:
        cores: Shared by all.
        latency: Seconds of an empty message.
        bandwidth: Bytes/s of a message.
        posting: Seconds that a rank's own thread takes to post a send or a receive.
        action: Seconds of an action that is no op: what is timed of an op holds its own.
    """

    cores: int
    latency: float
    bandwidth: float
    posting: float
    action: float


def step_seconds(
    lowered: Lowered, seconds: Mapping[str, float], sizes: Sequence[int], machine: Machine
) -> float:
    """Return the simulated seconds of one step. O(actions x ranks).

    Args:
        lowered: Action lists and messages.
        seconds: Of each op alone on a core, by name.
        sizes: Bytes of each message.
        machine: What it runs on.
    """
    state = _State(lowered, seconds, sizes, machine)
    while state.advance():
        pass
    return state.now


class _State:
    """What every rank and every message is at."""

    def __init__(
        self,
        lowered: Lowered,
        seconds: Mapping[str, float],
        sizes: Sequence[int],
        machine: Machine,
    ) -> None:
        self.machine, self.seconds, self.sizes, self.now = machine, seconds, sizes, 0.0
        self.lists, self.messages = lowered.ranks, lowered.messages
        ranks = len(self.lists)
        self.at = [0] * ranks
        self.left = [0.0] * ranks  # of the action that a rank is at
        self.posted: dict[int, int] = {}
        self.arrived: set[int] = set()
        self.queues: list[deque[int]] = [deque() for _ in range(ranks)]
        self.moving = [0.0] * ranks  # left of the transfer at the head of a sender's queue
        for rank in range(ranks):
            self._begin(rank)

    def advance(self) -> bool:
        """Go on to the next end of an action or a transfer; False when all is done."""
        running = [rank for rank in range(len(self.at)) if self.left[rank] > 0.0]
        sending = [rank for rank, queue in enumerate(self.queues) if queue]
        if not running and not sending:
            stuck = [r for r in range(len(self.at)) if self.at[r] < len(self.lists[r])]
            assert not stuck, f"ranks {stuck} wait for ever"
            return False
        rate = min(1.0, self.machine.cores / (len(running) + len(sending)))
        least = min([self.left[r] for r in running] + [self.moving[r] for r in sending])
        self.now += least / rate
        for rank in sending:
            self.moving[rank] -= least
            if self.moving[rank] <= _DONE:
                self._arrive(rank)
        for rank in running:
            self.left[rank] -= least
            if self.left[rank] <= _DONE:
                self._end(rank)
        return True

    def _begin(self, rank: int) -> None:
        """Start a rank's next actions until one takes time or waits."""
        while self.at[rank] < len(self.lists[rank]):
            action = self.lists[rank][self.at[rank]]
            if isinstance(action, Wait) and action.message not in self.arrived:
                self.left[rank] = 0.0
                return
            self.left[rank] = self._work(action)
            if self.left[rank] > 0.0:
                return
            self._finish(rank, action)
        self.left[rank] = 0.0

    def _work(self, action: Action) -> float:
        if isinstance(action, Compute):
            return self.seconds[action.op]
        posting = isinstance(action, Send | Receive)
        return self.machine.action + (self.machine.posting if posting else 0.0)

    def _end(self, rank: int) -> None:
        self._finish(rank, self.lists[rank][self.at[rank]])
        self._begin(rank)

    def _finish(self, rank: int, action: Action) -> None:
        self.at[rank] += 1
        if isinstance(action, Send | Receive):
            number = action.message
            self.posted[number] = self.posted.get(number, 0) + 1
            if self.posted[number] == 2:
                self._queue(self.messages[number].source, number)

    def _queue(self, source: int, number: int) -> None:
        self.queues[source].append(number)
        if len(self.queues[source]) == 1:
            self.moving[source] = self._transfer(number)

    def _transfer(self, number: int) -> float:
        return self.machine.latency + self.sizes[number] / self.machine.bandwidth

    def _arrive(self, source: int) -> None:
        number = self.queues[source].popleft()
        self.arrived.add(number)
        if self.queues[source]:
            self.moving[source] = self._transfer(self.queues[source][0])
        for rank, at in enumerate(self.at):
            if self.left[rank] > 0.0 or at >= len(self.lists[rank]):
                continue
            action = self.lists[rank][at]
            if isinstance(action, Wait) and action.message == number:
                self._begin(rank)
