"""The failure detector: one rank's failure becomes known to all, root cause first.

A rank that fails writes a record into the shared store before it closes its connections; a
compare-and-set keeps the first record only. Ranks that see a connection close look there before
they blame the peer. A thread on every rank polls the store four times a second and, once there is a
failure, or a rank asks, publishes what its rank is doing, be it waiting, computing or in the user's
script. These states form a wait-for graph; followed from a waiting rank, it ends at a rank that
waits for none: that rank hangs or is slow.

A long wait is reported before it times out: at one third and at two thirds of the timeout, the
waiting rank asks, and logs which rank makes no progress and where it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from pardnn.backends.torch.comm.secret import SignedStore, counter
from pardnn.errors import MismatchError, PardnnError, RankError, StuckError, error_from

POLL_S = 0.25
#: How long a rank whose connection closed looks for the record of the failure, seconds.
BLAME_DELAY_S = 1.0
#: How long a rank that timed out collects the states of the others, seconds.
STATES_S = 1.0
#: How long the others wait for the report of the rank that failed first, seconds.
REPORT_S = 4.0

_LOG = logging.getLogger("pardnn")

State = dict[str, Any]


class LostError(RankError):
    """The connection to a peer closed; the store says whether the peer is the root cause."""

    default_code = "E602"


class FailureDetector:
    """One rank's view of the failures of all ranks.

    Args:
        store: Shared by all ranks; keys `failure`, `report`, `asked` and `state/...` belong to this
            class.
        rank: This rank.
        size: Number of ranks.
        describe: Returns what this rank is doing now, as JSON; called from the polling thread. If
            it waits, "waits_for" is the rank and "waited_s" how long.
        timeout_s: Longest wait for one message, seconds; long waits are reported before.
        on_failure: Called from the polling thread with the record of the first failure, once this
            rank has published its state; None does nothing.
        record: Called at each poll with this rank's state, and with True once there is a failure.

    Attributes:
        also: Called at each poll, by the polling thread, until there is a failure.
    """

    def __init__(
        self,
        store: dist.Store | SignedStore,
        rank: int,
        size: int,
        describe: Callable[[], State],
        timeout_s: float,
        on_failure: Callable[[State], None] | None = None,
        record: Callable[[State, bool], None] = lambda _state, _final: None,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._answered = self._told = 0
        self._rank = rank
        self._size = size
        self._describe = describe
        self._on_failure = on_failure
        self._record = record
        self.also: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="pardnn-failures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * POLL_S)

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            with contextlib.suppress(RuntimeError):  # the store's host may be gone
                found = self.first_failure()
                if found is None:
                    self._answer()
                    state = self._describe()
                    self._record(state, False)
                    self._tell_of_a_long_wait(state)
                    for call in list(self.also):
                        call()
                    continue
                self._publish_state("failure")
                self._record(self._describe(), True)
                if self._on_failure is not None:
                    self._on_failure(found)
                return

    def _publish_state(self, occasion: str) -> None:
        state = {key: value for key, value in self._describe().items() if key != "actions"}
        self._store.set(f"state/{occasion}/{self._rank}", json.dumps(state))

    def _answer(self) -> None:
        """Publish this rank's state for each rank that has asked since."""
        # Reads only: a file store grows with each write.
        asked = counter(self._store, "asked")
        for number in range(self._answered + 1, asked + 1):
            self._publish_state(str(number))
        self._answered = asked

    def _tell_of_a_long_wait(self, state: State) -> None:
        thirds = int(3 * state.get("waited_s", 0.0) / self._timeout_s)
        if thirds > self._told:
            asked = self._store.add("asked", 1)
            states = self._states(str(asked))
            found = hung_rank(self._rank, states)
            there = states[found]["text"] if found in states else "it does not answer"
            _LOG.warning(
                "rank %d is %s (timeout %g s). Rank %d: %s",
                self._rank, state["text"], self._timeout_s, found, there,
            )  # fmt: skip
        self._told = thirds

    def read(self, key: str, patience_s: float = 0.0) -> State | None:
        """Return the value of a key, waiting for it at most `patience_s`; None if it is absent."""
        end = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(RuntimeError):
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)

    def first_failure(self, patience_s: float = 0.0) -> State | None:
        """Return the record of the first failure, waiting at most `patience_s`; None for none."""
        return self.read("failure", patience_s)

    def report(self, error: PardnnError) -> PardnnError:
        """Record a failure, or learn which one came first; return the error to raise.

        Takes at most `BLAME_DELAY_S + REPORT_S` seconds.
        """
        if isinstance(error, LostError):
            self.first_failure(BLAME_DELAY_S)
        record = json.dumps({"rank": self._rank, "code": error.code, **error.details})
        first = self._record_first(record)
        if first is not None and first["rank"] != self._rank:
            return self._secondary(error, first)
        error.details.setdefault("first_failing_rank", self._rank)
        if isinstance(error, StuckError):
            states = self._states("failure")
            _add_states(error, self._rank, states)
            error = _disagreement(self._rank, states) or error
        with contextlib.suppress(RuntimeError):
            self._store.set("report", json.dumps(_report(error, self._rank)))
        return error

    def _record_first(self, record: str) -> State | None:
        """Write the record if there is none; return the one in the store."""
        try:
            return json.loads(self._store.compare_set("failure", "", record))
        except (RuntimeError, ValueError):
            return None  # the store's host is gone

    def _secondary(self, error: PardnnError, first: State) -> PardnnError:
        """Return the error of a rank that stops because another one failed first."""
        report = self.read("report", REPORT_S) or _bare_report(first)
        message = f"rank {self._rank} stopped: {report['message'].splitlines()[0]}"
        details = {**report["details"], "report": report, "own": error.message}
        return error_from(report["code"], message, details)

    def _states(self, occasion: str) -> dict[int, State]:
        """Return the state of each rank that answers within `STATES_S`."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        self._publish_state(occasion)
        end = time.monotonic() + STATES_S
        found = {self._rank: self._describe()}
        found[self._rank].pop("actions", None)
        for rank in others:
            state = self.read(f"state/{occasion}/{rank}", max(0.0, end - time.monotonic()))
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


def hung_rank(start: int, states: dict[int, State]) -> int:
    """Follow the wait-for graph from rank `start` to a rank that waits for no other.

    Args:
        start: Rank that timed out.
        states: The states of the ranks that answered, by rank.
    """
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
    """Add to a timeout which rank hangs and what each one was doing."""
    peer = int(error.details.get("peer", rank))
    found = hung_rank(peer, states)
    error.details |= {"first_failing_rank": found, "states": list(states.values())}
    lines = list(_state_lines(states, found))
    error.message = "\n".join([error.message, *lines])
    error.args = (error.message,)


def _disagreement(rank: int, states: dict[int, State]) -> MismatchError | None:
    """Return the error of a rank that waits for one that captures the step again; else None."""
    changed = {each: state["changed"] for each, state in states.items() if "changed" in state}
    if not changed or rank in changed:
        return None
    other = min(changed)
    return MismatchError(
        f"rank {other} saw that {changed[other]}; rank {rank} did not, and is "
        f"{states[rank]['text']}.\nEvery rank has to make the same calls, with the same flags, "
        "modes and shapes.",
        code="E519",
        details={"rank": rank, "peer": other, "first_failing_rank": other},
    )


def _state_lines(states: dict[int, State], found: int) -> Iterator[str]:
    if found in states:
        yield f"Rank {found} is the one that makes no progress: {states[found]['text']}."
    else:
        yield f"Rank {found} is the one that makes no progress; it does not even answer."
    for rank in sorted(states):
        yield f"rank {rank}: {states[rank]['text']}"
        yield from (f"  {line}" for line in states[rank].get("messages", ()))
