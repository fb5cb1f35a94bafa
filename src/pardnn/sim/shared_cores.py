"""Step time of a plan on ranks that share the cores of one machine.

The simulator (`pardnn.sim.engine`) gives every device its own speed and every message its link.
Ranks on one machine share its cores, and move their messages themselves. Here each rank follows its
own action list, and every rank at work gets an equal part of the cores, at most a whole one
(processor sharing). A message costs its sender and its receiver their own time (LogGP's overheads,
`pardnn.cost.links.LinkCosts`), more if the receiver sleeps when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float64
from numpy import ndarray

from pardnn.cost.links import LinkCosts, LinkFit, message_seconds
from pardnn.graph.ir import Graph, span_bytes
from pardnn.plan.actions import Action, Allocate, Compute, Receive, Send, Wait
from pardnn.plan.lower import lower
from pardnn.plan.plan import Plan

_DONE = 1e-12

#: Seconds of an action that is no op and no message, such as freeing a tensor. Measured: 1 to 2 us.
ACTION_S = 1.5e-6


class Host(NamedTuple):
    """What ranks run on.

    Attributes:
        cores: Shared by all.
        links: What messages cost their ends.
        threads: Cores that an op uses while it runs.
        action: Seconds of an action that is no op and no message.
    """

    cores: int
    links: LinkCosts
    threads: int = 1
    action: float = ACTION_S


class Step(NamedTuple):
    """A simulated step.

    Attributes:
        seconds: From its start to the end of the last rank.
        work: Seconds of cores that all ranks took together.
    """

    seconds: float
    work: float


def simulated_step(graph: Graph, plan: Plan, seconds: Float64[ndarray, " n"], host: Host) -> Step:
    """Simulate one step. O(actions x ranks).

    Args:
        graph: The graph whose ops the plan orders: the partitioned one, where ops are cut.
        plan: A valid plan.
        seconds: Of each op on cores of its own.
        host: What it runs on.
    """
    state = _State(graph, plan, seconds, host)
    while state.advance():
        pass
    return Step(state.now, state.work)


class _State:
    """The action that each rank is at, and what is left of it."""

    def __init__(
        self, graph: Graph, plan: Plan, seconds: Float64[ndarray, " n"], host: Host
    ) -> None:
        lowered = lower(graph, plan)
        sizes = {tensor.name: span_bytes(tensor) for op in graph.ops for tensor in op.outputs}
        self.host = host
        self.seconds = dict(zip((op.name for op in graph.ops), seconds.tolist(), strict=True))
        self.sizes = [sizes[message.tensor] for message in lowered.messages]
        self.now = self.work = 0.0
        self.lists: Sequence[Sequence[Action]] = lowered.ranks
        self.messages = lowered.messages
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
            assert not self.asleep, f"ranks {sorted(self.asleep.values())} wait forever"
            return False
        rate = min(1.0, self.host.cores / (self.host.threads * len(running)))
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
        if isinstance(action, Wait) and self.messages[action.message].target == rank:
            return action.message
        return None

    def _work(self, rank: int, action: Action) -> float:
        links = self.host.links
        if isinstance(action, Compute):
            return self.seconds[action.op]
        if isinstance(action, Send):
            return own_seconds(links.sending, self.sizes[action.message])
        if isinstance(action, Receive):  # with the buffer, which is an action before it
            return links.posting
        awaited = self._awaited(rank, action)
        if awaited is not None:
            return own_seconds(links.taking, self.sizes[awaited])
        return 0.0 if isinstance(action, Allocate) else self.host.action

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
                self._give(sleeper, self.host.links.waking)


def own_seconds(fit: LinkFit, num_bytes: int) -> float:
    """Return what a message takes one of its ends."""
    return message_seconds(num_bytes, bandwidth=fit.bandwidth, latency=fit.latency)
