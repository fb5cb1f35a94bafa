"""The world as one rank sees it: its rank and device, the shared store, its channel.

A process group that the user has already made is used and never destroyed; messages go over a
second, private group, so that closing it after a failure wakes the peers without affecting the
user's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pardnn.backends.torch.arena import Arena
from pardnn.backends.torch.comm.channel import Channel
from pardnn.backends.torch.comm.failure_detector import FailureDetector, State
from pardnn.backends.torch.comm.flight_record import (
    FAILED,
    RUNNING,
    VARIABLE,
    WITH_ERROR,
    FlightRecord,
    add_line,
    folder_named,
    main_stack,
    make_folder,
)
from pardnn.backends.torch.comm.handshake import Watch, wait_for
from pardnn.backends.torch.comm.secret import SignedStore
from pardnn.errors import PardnnError

#: Longest wait at the end of a process for messages in flight, seconds.
LEAVE_S = 5.0
_NOT_STARTED: State = {"text": "not yet in its first step", "waits_for": None, "messages": []}


@dataclass(eq=False)
class World:
    """One rank's connections.

    Attributes:
        rank: Its rank, which is the index of its device in the plan.
        size: Number of ranks.
        device: Where its tensors are.
        timeout_s: Longest wait for one message, seconds.
        store: Shared by all ranks; None with a single one.
        channel: Sends and receives its messages; None with a single rank.
        nodes: The number of each rank's node.
        detector: Made by `detect_failures`.
        describe: Returns what this rank is doing now, see `FailureDetector`; the executor sets it.
        reported: The error of `report_failure`.
        flight: Its flight record, once it has one.
        is_recorded: Whether the record is kept.
        lock: Held by the thread that exchanges messages.
        arena: Where its tensors have fixed places.
        pending: Messages for which a step has not waited yet; `settle` waits for them.
    """

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    store: dist.Store | SignedStore | None = None
    channel: Channel | None = None
    nodes: tuple[int, ...] = (0,)
    detector: FailureDetector | None = None
    describe: Callable[[], State] = lambda: dict(_NOT_STARTED)
    reported: PardnnError | None = None
    flight: FlightRecord | None = None
    is_recorded: bool = False
    lock: Any = field(default_factory=threading.RLock)
    arena: Arena = field(default_factory=Arena)
    pending: Any = None
    _waits: State = field(default_factory=dict)
    _has_made_records: bool = False

    def detect_failures(self, on_failure: Callable[[State], None] | None = None) -> None:
        """Start this rank's failure detector; a second call, or a single rank, does nothing.

        Args:
            on_failure: See `FailureDetector`.
        """
        if self.store is not None and self.detector is None:

            def describe() -> State:
                return {"rank": self.rank, **self.describe(), **self._waits}

            self.detector = FailureDetector(
                self.store, self.rank, self.size, describe, self.timeout_s, on_failure, self._record
            )
            # A thread inside the store when the process ends would abort it.
            atexit.register(self._leave)

    def _record(self, state: State, final: bool, error: PardnnError | None = None) -> None:
        """Write what this rank does into its flight record."""
        record = self._flight_record()
        if record is None or not (final or record.is_due):
            return
        self.is_recorded = self.is_recorded or final
        lines = [state["text"]]
        if error is not None:
            lines += ["", *str(error).splitlines()]
        lines += ["", "last actions:", *state.get("actions", ())]
        lines += ["", "last messages:", *state.get("messages", ())]
        if final:
            lines += ["", "main thread:", *main_stack()]
        weight = WITH_ERROR if error is not None else FAILED if final else RUNNING
        record.write(lines, weight=weight)

    def _flight_record(self) -> FlightRecord | None:
        """Return this rank's record; None as long as no folder for it is known."""
        if self.flight is None and self.detector is not None:
            folder = self._folder_of_records(self.detector)
            self.flight = FlightRecord(folder, self.rank) if folder is not None else None
        return self.flight

    def _folder_of_records(self, detector: FailureDetector) -> Path | None:
        given = os.environ.get(VARIABLE)
        if given:
            return Path(given)
        # One rank of each node makes the folder.
        node = self.nodes[self.rank]
        if self.nodes.index(node) == self.rank and not self._has_made_records:
            self._has_made_records, folder = True, make_folder()
            if folder is not None and self.store is not None:
                self.store.set(f"flight/{node}", json.dumps({"name": folder.name}))
            return folder
        found = detector.read(f"flight/{node}")
        return folder_named(str(found["name"])) if found is not None else None

    def all_gather(
        self,
        key: str,
        data: Any,
        doing: str = "before the next step",
        progress: Callable[[int], int] | None = None,
    ) -> list[Any]:
        """All-gather through the store: every rank gets the data of each rank, in order of rank.

        Args:
            key: A key used only once.
            data: The data of this rank, JSON types.
            doing: See `handshake.wait_for`.
            progress: See `handshake.Watch`.

        Raises:
            StuckError: E702, naming the ranks that wrote nothing within the timeout.
            LostError: E602, if a rank has failed or ended in the meantime.
        """
        assert self.store is not None
        self.store.set(f"{key}/{self.rank}", json.dumps(data))
        ranks = range(self.size)
        keys = [f"{key}/{rank}" for rank in ranks]
        self.wait_for(keys, ranks, doing, progress=progress)
        return [json.loads(self.store.get(each)) for each in keys]

    def wait_for(
        self,
        keys: Sequence[str],
        writers: Sequence[int],
        doing: str,
        timeout_s: float | None = None,
        progress: Callable[[int], int] | None = None,
    ) -> None:
        """Wait until all keys are in the store; see `handshake.wait_for`.

        Args:
            keys: The keys to wait for.
            writers: For each key, the rank that writes it.
            doing: The occasion, in words.
            timeout_s: Longest wait, seconds; None takes this rank's.
            progress: See `handshake.Watch`.
        """
        assert self.store is not None
        begin, limit = time.monotonic(), timeout_s or self.timeout_s

        def tell(late: Sequence[int]) -> None:
            waited = time.monotonic() - begin
            self._waits = {
                "text": f"waiting for rank {late[0]} {doing} since {waited:.1f} s",
                "waits_for": late[0], "waited_s": waited * self.timeout_s / limit,
            }  # fmt: skip

        watch = Watch(
            self.rank, limit, self.first_failure, self._closed, progress or (lambda _rank: 0),
            # A wait of a thread beside the steps is not what this rank is doing.
            tell if threading.current_thread() is threading.main_thread() else lambda _late: None,
        )  # fmt: skip
        wait_for(self.store, keys, writers, watch, doing)
        self._waits = {}  # a wait in vain is reported until the end

    def _closed(self) -> set[int]:
        """Return the ranks of this machine whose connections have closed."""
        local = self.channel.local if self.channel is not None else None
        return local.closed() if local is not None else set()

    def first_failure(self) -> State | None:
        """Return the record of the first failure of any rank, None if none is known."""
        return self.detector.first_failure() if self.detector is not None else None

    def report_failure(self, error: PardnnError) -> PardnnError:
        """Make this rank's failure known, close its connections, and return what to raise."""
        if error is self.reported:
            return error
        error.details.setdefault("rank", self.rank)
        error.details.setdefault("first_failing_rank", self.rank)
        if self.detector is not None:
            state = self.describe()
            error = self.detector.report(error)
            self._record(state, True, error)
        if self.flight is not None:
            add_line(error, self.flight.folder)
        self.reported = error
        self.close()
        return error

    def _leave(self) -> None:
        """Close at the end of the process: peers may still wait for what this rank has sent."""
        # An exception that ends the script is a crash, too: Python has printed it by now.
        self.is_recorded = self.is_recorded or getattr(sys, "last_value", None) is not None
        if self.pending is not None and self.reported is None and self.channel is not None:
            self.channel.timeout_s = min(self.channel.timeout_s, LEAVE_S)
            with contextlib.suppress(PardnnError):
                self.pending.settle()
        self.close()

    def close(self) -> None:
        """Close the connections that this rank opened; a second call does nothing."""
        atexit.unregister(self._leave)
        if self.detector is not None:
            self.detector.close()
        if self.flight is not None and not self.is_recorded:
            self.flight.remove()
        if self.channel is not None:
            self.channel.close()
