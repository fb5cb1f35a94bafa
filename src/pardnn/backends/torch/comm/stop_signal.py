"""The stop signal: after SIGTERM or SIGINT on any rank, all ranks stop at the same moment.

Problem: a signal reaches the ranks at different moments, or only one of them, and a rank that stops
before its peers leaves them waiting.
Idea: each rank counts the calls that all ranks make in one order (steps, saves). A rank that has
received a signal asks through the store; the polling thread of each rank answers with its count,
and its rank then begins no further call before all have answered. In calls beyond the largest
count, every rank knows that all have to stop.

Cost: a lock and a comparison per call, and a look into the store at each poll. Delay: the current
step and two polls, half a second.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, NoReturn

from pardnn.backends.torch.comm.pending_loss import settle_loss
from pardnn.backends.torch.comm.world import World
from pardnn.errors import PardnnError, UsageError

OnSignal = Literal["save", "stop"]
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Launchers pass on signals that the group already got: within this time, seconds, it is one.
ONE_SIGNAL_S = 2.0
#: Exit status of a rank that has stopped: interrupted.
STATUS = 130
#: How long rank 0, which may host the store, waits for the others to have read it, seconds.
LEAVE_S = 5.0

_LOG = logging.getLogger("pardnn")


class StopSignal:
    """One rank's view of the request to stop.

    Args:
        world: This rank's connections, with a failure detector if there are several ranks.
        on_signal: "save" stops at the script's next save, "stop" before the next step.
        also: Returns the name of a signal that reached this rank in another way; called at each
            poll.

    Attributes:
        on_signal: As passed in.
        is_set: Whether ranks have to stop, from the last call on; the same on all ranks.
        name: The name of the signal that came first, once `is_set`.

    Raises:
        UsageError: E201, if `on_signal` is something else, or this is not the main thread.
    """

    def __init__(
        self, world: World, on_signal: OnSignal, also: Callable[[], str | None] | None = None
    ) -> None:
        if on_signal not in ("save", "stop"):
            raise UsageError(f"on_signal is {on_signal!r:.40}; it is 'save', 'stop' or None")
        self.on_signal, self.is_set, self.name = on_signal, False, ""
        self._world, self._also = world, also
        self._lock = threading.Lock()
        self._count = 0
        self._last: int | None = None
        self._own, self._at, self._has_asked, self._has_answered = "", 0.0, False, False
        try:
            self._before = {number: signal.signal(number, self._heed) for number in SIGNALS}
        except ValueError as error:
            raise UsageError(
                "on_signal needs the main thread: Python gives signals to no other.\n"
                "Call parallelize there, or leave on_signal out."
            ) from error
        if world.detector is not None:
            world.detector.also.append(self._poll)

    def close(self) -> None:
        """Restore the signal handlers, unless a signal has asked to stop.

        A launcher may pass a signal on to a rank that is already leaving; that must not change its
        status.
        """
        for number, handler in self._before.items():
            if not self.is_set and signal.getsignal(number) == self._heed:
                signal.signal(number, handler)
        if self._world.detector is not None and self._poll in self._world.detector.also:
            self._world.detector.also.remove(self._poll)

    def _heed(self, number: int, _frame: FrameType | None) -> None:
        # Runs between two operations of the main thread, which may hold the lock.
        now = time.monotonic()
        if not self._own:
            self._own, self._at = signal.Signals(number).name, now
        elif now - self._at > ONE_SIGNAL_S:
            signal.signal(number, self._before[signal.Signals(number)])
            os.kill(os.getpid(), number)

    def _poll(self) -> None:
        """Ask if this rank has got a signal; answer if any has. Called by the polling thread."""
        world, store = self._world, self._world.store
        assert store is not None
        if not self._has_asked and (name := self._own or (self._also and self._also())):
            store.compare_set("stop/asked", "", name)
            self._has_asked = True
        if not self._has_answered and store.check(["stop/asked"]):
            with self._lock:
                self._has_answered, count = True, self._count
            store.set(f"stop/{world.rank}", json.dumps(count))

    def tick(self) -> bool:
        """Count a call that all ranks make, before it begins; return `is_set`.

        Raises:
            StuckError: E702, if a rank does not answer.
            RankError: E602, if one was lost.
        """
        with self._lock:
            if not self._has_answered and self._world.store is not None:
                self._count += 1
                return False
        if self._world.store is None:
            self.name = self._own or (self._also and self._also()) or ""
            self.is_set = bool(self.name)
            return self.is_set
        if self._last is None:
            self._last = self._decided(self._world.store)
        self._count += 1
        self.is_set = self._count > self._last
        return self.is_set

    def _decided(self, store: Any) -> int:
        """Return the largest count of all ranks."""
        world, keys = self._world, [f"stop/{rank}" for rank in range(self._world.size)]
        try:
            world.wait_for(keys, range(world.size), "to stop")
        except PardnnError as error:
            raise world.report_failure(error) from error
        self.name = store.get("stop/asked").decode()
        return max(json.loads(store.get(key)) for key in keys)

    def leave(self, what: str) -> NoReturn:
        """End this rank with status 130; all ranks call it.

        Args:
            what: What was done, in words, shown by rank 0.

        Raises:
            SystemExit: Always, unless a pending loss does not arrive.
        """
        world = self._world
        settle_loss(world)  # the caller may read the last loss while this process ends
        self.close()
        if world.rank == 0:
            _LOG.warning("%s: %s", self.name, what)
        if world.store is not None:
            world.store.set(f"stop/left/{world.rank}", "")
            end = time.monotonic() + (LEAVE_S if world.rank == 0 else 0.0)
            left = [f"stop/left/{rank}" for rank in range(world.size)]
            while time.monotonic() < end and not world.store.check(left):
                time.sleep(0.01)
        world.close()
        raise SystemExit(STATUS)
