"""How one rank's failure becomes known to all: in the store, at once, root cause first.

A rank that fails writes what happened into the store before it closes its connections; only the
first record stands. Ranks that see a connection closed look there before they blame the peer, and
a thread on every rank looks there four times a second, so that a rank that is waiting, computing
or asleep says what it was doing. From these states the wait of one rank for another is followed to
the rank that does not wait: that one hangs.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from pardnn.errors import MismatchError, PardnnError, RankError, StuckError, UnsupportedError

POLL_S = 0.25
#: A rank that fails writes its record before its connections close; how long peers look for it.
BLAME_DELAY_S = 1.0
#: How long the first failing rank collects what the others were doing.
STATES_S = 1.0
#: How long the others wait for the first one's account.
REPORT_S = 4.0

State = dict[str, Any]
#: Ranks that stop because of another one end with the same exit status.
_KINDS = {"5": MismatchError, "7": StuckError, "8": UnsupportedError}


class LostError(RankError):
    """The connection to a peer closed; whether it is to blame, the store knows."""

    default_code = "E602"


class Watch:
    """One rank's view of the failures of all.

    Args:
        store: A store that all ranks reach, used by nobody else under these keys.
        rank: This rank.
        size: Number of ranks.
        describe: What this rank is doing now, as JSON; called from another thread.
        on_failure: Called from another thread once a failure is known and this rank has said what
            it was doing; None does nothing.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        describe: Callable[[], State],
        on_failure: Callable[[State], None] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._describe = describe
        self._on_failure = on_failure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="pardnn-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * POLL_S)

    def _look(self) -> None:
        while not self._stop.wait(POLL_S):
            with contextlib.suppress(RuntimeError):  # the store's host may be gone
                found = self.failure()
                if found is None:
                    continue
                self._say()
                if self._on_failure is not None:
                    self._on_failure(found)
                return

    def _say(self) -> None:
        self._store.set(f"state/{self._rank}", json.dumps(self._describe()))

    def _read(self, key: str, patience_s: float = 0.0) -> State | None:
        """Return what is under a key, waiting for it at most `patience_s`."""
        end = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(RuntimeError):
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)

    def failure(self, patience_s: float = 0.0) -> State | None:
        """Return the first failure, if any is known."""
        return self._read("failure", patience_s)

    def settle(self, error: PardnnError) -> PardnnError:
        """Make a failure known, or learn which one came first; return the error to raise.

        Takes at most `BLAME_DELAY_S + REPORT_S` seconds.
        """
        if isinstance(error, LostError):
            self.failure(BLAME_DELAY_S)
        record = json.dumps({"rank": self._rank, "code": error.code, **error.details})
        first = self._claim(record)
        if first is not None and first["rank"] != self._rank:
            return self._secondary(error, first)
        error.details.setdefault("first_failing_rank", self._rank)
        if isinstance(error, StuckError):
            _add_states(error, self._rank, self._states())
        with contextlib.suppress(RuntimeError):
            self._store.set("report", json.dumps(_report(error, self._rank)))
        return error

    def _claim(self, record: str) -> State | None:
        try:
            return json.loads(self._store.compare_set("failure", "", record))
        except (RuntimeError, ValueError):
            return None  # nobody is left to be told

    def _secondary(self, error: PardnnError, first: State) -> PardnnError:
        report = self._read("report", REPORT_S) or _bare_report(first)
        kind = _KINDS.get(report["code"][1], RankError)
        message = f"rank {self._rank} stopped: {report['message'].splitlines()[0]}"
        details = {**report["details"], "report": report, "own": error.message}
        return kind(message, code=report["code"], details=details)

    def _states(self) -> dict[int, State]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._say()
        end = time.monotonic() + STATES_S
        found = {self._rank: self._describe()}
        for rank in others:
            state = self._read(f"state/{rank}", max(0.0, end - time.monotonic()))
            if state is not None:
                found[rank] = state
        return found


def _report(error: PardnnError, rank: int) -> State:
    return {
        "rank": rank, "code": error.code, "message": error.message, "details": error.details,
    }  # fmt: skip


def _bare_report(first: State) -> State:
    return {
        "rank": first["rank"],
        "code": first["code"],
        "message": f"rank {first['rank']} failed first",
        "details": {"first_failing_rank": first.get("first_failing_rank", first["rank"])},
    }


def culprit(start: int, states: dict[int, State]) -> int:
    """Follow who waits for whom, from rank `start`, to the rank that waits for nobody."""
    seen: list[int] = []
    rank = start
    while rank not in seen:
        seen.append(rank)
        waits_for = states.get(rank, {}).get("waits_for")
        if waits_for is None:
            return rank
        rank = int(waits_for)
    return rank


def _add_states(error: PardnnError, rank: int, states: dict[int, State]) -> None:
    """Name the rank that hangs and say what all of them were doing."""
    peer = int(error.details.get("peer", rank))
    found = culprit(peer, states)
    error.details |= {"first_failing_rank": found, "states": list(states.values())}
    lines = list(_state_lines(states, found))
    error.message = "\n".join([error.message, *lines])
    error.args = (error.message,)


def _state_lines(states: dict[int, State], found: int) -> Iterator[str]:
    if found in states:
        yield f"Rank {found} is the one that does not move: {states[found]['text']}."
    else:
        yield f"Rank {found} is the one that does not move; it does not even answer."
    for rank in sorted(states):
        yield f"rank {rank}: {states[rank]['text']}"
        yield from (f"  {line}" for line in states[rank].get("messages", ()))
