"""The world as one rank sees it: its rank and device, the shared store, its channel.

A process group that the user has already made is used and never destroyed; messages go over a
second group of our own, so that closing it after a failure wakes the peers and touches nothing of
the user's.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

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
from pardnn.backends.torch.comm.nodes import (
    advice,
    choose_interface,
    machine_id,
    may_be_several,
    node_numbers,
)
from pardnn.backends.torch.comm.secret import ForgedError, SignedStore, prove_links, signed
from pardnn.backends.torch.comm.unix_sockets import connect_local
from pardnn.errors import MismatchError, PardnnError, RankError, StuckError
from pardnn.shortage import shortage

_count = itertools.count()
#: Longest wait at the end of a process for messages that are on their way, seconds.
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
        is_recorded: Whether the record is to stay.
        lock: Held by the thread that exchanges messages.
        pending: Messages that a step has left to be waited for; it can `settle` them.
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
    pending: Any = None
    _waits: State = field(default_factory=dict)
    _has_made_records: bool = False

    def detect_failures(self, on_failure: Callable[[State], None] | None = None) -> None:
        """Start this rank's failure detector; again, or with a single rank, does nothing.

        Args:
            on_failure: See `FailureDetector`.
        """
        if self.store is not None and self.detector is None:

            def describe() -> State:
                return {"rank": self.rank, **self.describe(), **self._waits}

            self.detector = FailureDetector(
                self.store, self.rank, self.size, describe, self.timeout_s, on_failure, self._record
            )
            # A thread that is inside the store when the process ends would abort it.
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
        # One of the ranks of each node makes it.
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
            key: Used once.
            data: Of this rank, JSON types.
            doing: See `handshake.wait_for`.
            progress: See `handshake.Watch`.

        Raises:
            StuckError: E702, naming the ranks that wrote nothing within the timeout.
            LostError: E602, if a rank has failed or ended meanwhile.
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
            keys: To wait for.
            writers: For each key, the rank that writes it.
            doing: What for, for people.
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
            # What a thread waits for beside the steps is not what this rank is doing.
            tell if threading.current_thread() is threading.main_thread() else lambda _late: None,
        )  # fmt: skip
        wait_for(self.store, keys, writers, watch, doing)
        self._waits = {}  # a wait in vain is told until the end

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
        """Close the connections that this rank opened; again does nothing."""
        atexit.unregister(self._leave)
        if self.detector is not None:
            self.detector.close()
        if self.flight is not None and not self.is_recorded:
            self.flight.remove()
        if self.channel is not None:
            self.channel.close()


def rank_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank on its machine, and make it torch's current one.

    Args:
        kind: "cpu" or "cuda".
        local_rank: The rank's number on its machine.

    Raises:
        MismatchError: E513, if there are fewer GPUs than ranks; shows the mapping.
    """
    if kind != "cuda":
        return torch.device(kind)
    found = torch.cuda.device_count()
    if local_rank >= found:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise MismatchError(
            f"rank {local_rank} of this machine needs device cuda:{local_rank}, but torch sees "
            f"{found} (CUDA_VISIBLE_DEVICES: {visible}).\nRank i uses cuda:i. Plan for "
            f"{max(found, 1)} devices, start fewer ranks here, or run on the CPU.",
            code="E513",
            details={"local_rank": local_rank, "devices": found},
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join(
    device: torch.device,
    *,
    timeout_s: float,
    backend: str | None = None,
    headers: bool = False,
    meeting: Path | None = None,
) -> World:
    """Connect to the other ranks: over the user's process group, or one made from the environment.

    Args:
        device: Of this rank.
        timeout_s: Longest wait for one message, seconds.
        meeting: File of the store by which ranks of one machine meet, in a private folder; None
            takes the one at `MASTER_ADDR`.
        backend: "gloo" or "nccl"; None takes the one that suits the device.
        headers: See `Channel`.

    Raises:
        RankError: E605, if the ranks do not find each other.
        FileError: E413, if this one has too few open files or too little memory for it.
    """
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    wait = timedelta(seconds=timeout_s)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(0, 1, device, timeout_s)
    try:
        if backend == "gloo" and not (dist.is_initialized() and dist.get_backend() == "gloo"):
            choose_interface()
        if not dist.is_initialized():
            _initialise(backend, wait, meeting)
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return World(0, 1, device, timeout_s)
        store = _own_store()
        group = dist.new_group(list(range(size)), timeout=wait, backend=backend)
        if backend == "gloo":
            prove_links(group, rank, size)
    except ForgedError:
        raise
    except (RuntimeError, ValueError) as error:
        if (short := shortage(error)) is not None:
            raise short from error
        raise RankError(
            f"the ranks did not find each other within {timeout_s:g} s: {_first_line(error)}.\n"
            "A rank that is missing has ended or was not started; look at what it printed last."
            + (f"\n{advice()}" if backend == "gloo" and may_be_several() else ""),
            code="E605",
        ) from error
    channel = Channel(group, rank, timeout_s=timeout_s, device=device, headers=headers)
    world = World(rank, size, device, timeout_s, store, channel)
    if backend == "gloo" and device.type == "cpu" and not headers:
        channel.local = connect_local(rank, world.all_gather)
    # A barrier: no rank may fail, and so close connections, while another one still connects.
    world.nodes = node_numbers(world.all_gather("joined", machine_id()))
    return world


def _initialise(backend: str, wait: timedelta, meeting: Path | None) -> None:
    """Make the process group from the environment, once all ranks have come to its store.

    Raises:
        RankError: E605, naming the ranks that have not.
    """
    if meeting is None:
        store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(meeting), size)
        store.set_timeout(wait)
    store = dist.PrefixStore(f"default_pg/{_attempt()}", store)
    store.set(f"pardnn/come/{rank}", "")
    keys, watch = (
        [f"pardnn/come/{i}" for i in range(size)],
        Watch(rank, wait.total_seconds(), _none),
    )
    try:
        wait_for(store, keys, range(size), watch, "to come")
    except StuckError as error:
        missing = error.details["missing"]
        raise RankError(
            f"{error.message.splitlines()[0]}\n"
            "It has ended or was not started; look at what it printed last.",
            code="E605",
            details={**error.details, "first_failing_rank": missing[0]},
        ) from error
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)


def _none() -> None:
    """Know of no failure: nobody can tell one yet."""


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _own_store() -> dist.Store | SignedStore:
    # `join` is collective, so the count is the same on every rank.
    default = dist.distributed_c10d._get_default_store()
    return signed(dist.PrefixStore(f"pardnn/{_attempt()}/{next(_count)}", default))


def _attempt() -> str:
    """Return how often torchrun has started the ranks anew: their store outlives them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def leave(worlds: Sequence[World]) -> None:
    """Close everything, the process group too: for processes that belong to us entirely."""
    for world in worlds:
        world.close()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
