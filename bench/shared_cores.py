"""Step time of a plan on ranks that share the cores of one machine.

The judge of the product gives every device its own speed and every message its link. Ranks on one
machine share its cores, and move their messages themselves (`pardnn.backends.torch.local`). Here
each rank follows its own action list, and whoever is at work gets an equal part of the cores, at
most a whole one (processor sharing). A message costs its sender and its receiver their own time
(LogGP's overheads, `pardnn.cost.links.LinkCosts`), more if the receiver sleeps when it comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pardnn.cost.links import LinkCosts, LinkFit, message_seconds
from pardnn.plan.actions import Action, Allocate, Compute, Receive, Send, Wait
from pardnn.plan.lower import Lowered

_DONE = 1e-12


class Machine(NamedTuple):
    """What ranks run on.

    Attributes:
        cores: Shared by all.
        links: What messages cost their ends.
        action: Seconds of an action that is no op and no message, such as freeing a tensor.
    """

    cores: int
    links: LinkCosts
    action: float


class Step(NamedTuple):
    """A simulated step.

    Attributes:
        seconds: From its start to the end of the last rank.
        work: Seconds of cores that all ranks took together.
    """

    seconds: float
    work: float


def simulated_step(
    lowered: Lowered, seconds: Mapping[str, float], sizes: Sequence[int], machine: Machine
) -> Step:
    """Simulate one step. O(actions x ranks).

    Args:
        lowered: Action lists and messages.
        seconds: Of each op alone on a core, by name.
        sizes: Bytes of each message.
        machine: What it runs on.
    """
    state = _State(lowered, seconds, sizes, machine)
    while state.advance():
        pass
    return Step(state.now, state.work)


class _State:
    """What every rank is at."""

    def __init__(
        self,
        lowered: Lowered,
        seconds: Mapping[str, float],
        sizes: Sequence[int],
        machine: Machine,
    ) -> None:
        self.machine, self.seconds, self.sizes = machine, seconds, sizes
        self.now = self.work = 0.0
        self.lists, self.messages = lowered.ranks, lowered.messages
        ranks = len(self.lists)
        self.at = [0] * ranks
        self.left = [0.0] * ranks  # of the action that a rank is at; 0 of one that sleeps
        self.sent: set[int] = set()
        self.asleep: dict[int, int] = {}  # ranks, by the message that they wait for
        for rank in range(ranks):
            self._begin(rank)

    def advance(self) -> bool:
        """Go on to the next end of an action; False when all is done."""
        running = [rank for rank, left in enumerate(self.left) if left > 0.0]
        if not running:
            assert not self.asleep, f"ranks {sorted(self.asleep.values())} wait for ever"
            return False
        rate = min(1.0, self.machine.cores / len(running))
        least = min(self.left[rank] for rank in running)
        self.now += least / rate
        for rank in running:
            self.left[rank] -= least
        for rank in running:
            if self.left[rank] <= _DONE:
                self._finish(rank)
        return True

    def _begin(self, rank: int) -> None:
        """Start a rank's next actions until one takes time or sleeps."""
        self.left[rank] = 0.0
        while self.at[rank] < len(self.lists[rank]):
            action = self.lists[rank][self.at[rank]]
            awaited = self._awaited(rank, action)
            if awaited is not None and awaited not in self.sent:
                self.asleep[awaited] = rank
                return
            self._give(rank, self._work(rank, action))
            if self.left[rank] > 0.0:
                return
            self._done(rank, action)

    def _give(self, rank: int, seconds: float) -> None:
        self.left[rank] += seconds
        self.work += seconds

    def _awaited(self, rank: int, action: Action) -> int | None:
        """Return the message that an action of the rank takes, if it does."""
        is_wait = isinstance(action, Wait) and self.messages[action.message].target == rank
        return action.message if is_wait else None

    def _work(self, rank: int, action: Action) -> float:
        links = self.machine.links
        if isinstance(action, Compute):
            return self.seconds[action.op]
        if isinstance(action, Send):
            return own_seconds(links.sending, self.sizes[action.message])
        if isinstance(action, Receive):  # with the buffer, which is an action before it
            return links.posting
        awaited = self._awaited(rank, action)
        if awaited is not None:
            return own_seconds(links.taking, self.sizes[awaited])
        return 0.0 if isinstance(action, Allocate) else self.machine.action

    def _finish(self, rank: int) -> None:
        self._done(rank, self.lists[rank][self.at[rank]])
        self._begin(rank)

    def _done(self, rank: int, action: Action) -> None:
        self.at[rank] += 1
        if isinstance(action, Send):
            self.sent.add(action.message)
            sleeper = self.asleep.pop(action.message, None)
            if sleeper is not None:
                self._begin(sleeper)
                self._give(sleeper, self.machine.links.waking)


def own_seconds(fit: LinkFit, num_bytes: int) -> float:
    """Return what a message takes one of its ends."""
    return message_seconds(num_bytes, bandwidth=fit.bandwidth, latency=fit.latency)
