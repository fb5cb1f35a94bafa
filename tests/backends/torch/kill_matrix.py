"""One cell of the kill matrix: three ranks train and save, one of them gets a signal at a phase."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from pardnn.backends.torch.checkpoint import saving, training_state
from pardnn.backends.torch.comm.flight_record import PREFIX as RECORDS
from pardnn.backends.torch.comm.private_folder import private_folder
from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.backends.torch.session import new_variant
from pardnn.checkpoint import disk
from pardnn.checkpoint.directory import read_manifest, resolve
from pardnn.checkpoint.verify import verify
from tests.backends.torch.faults import a_plan, at, chain
from tests.backends.torch.ranks import Outcome, run_ranks

SIZE = 3
#: Ranks come together within it too: beside other tests one was 2 s behind the others.
TIMEOUT_S = 2.0 if os.environ.get("KILL_MATRIX") else 6.0
PHASES = (
    "rendezvous", "initialisation", "first step", "mid-step", "saving", "committing", "resuming",
    "leaving",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")


class Cell(NamedTuple):
    """Which rank gets which signal, and when."""

    rank: int
    phase: str
    signal: str


class Seen(NamedTuple):
    """What was seen in a cell; `problems` break the promise."""

    cell: Cell
    seconds: float
    codes: str
    message: str
    problems: list[str]


def cells() -> Iterator[Cell]:
    return (Cell(r, p, s) for p in PHASES for s in SIGNALS for r in range(SIZE))


def run_cell(cell: Cell, root: Path, folder: Path) -> Seen:
    """Run a cell.

    Args:
        cell: To run.
        root: Of the checkpoints, which hold a step: each cell goes on from the one before.
        folder: For temporary files, empty.
    """
    marker = folder / "fault"

    def fail() -> None:
        marker.write_text(repr(time.time()))
        # In a session of its own: a group that is orphaned while a member is stopped gets SIGHUP.
        os.setsid()
        os.kill(os.getpid(), getattr(signal, cell.signal))

    def body(rank: int, _store: str) -> None:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        tempfile.tempdir = str(folder)
        _trained(root, cell.phase if rank == cell.rank else "", fail)

    with _agent_store() as port:
        outcomes = run_ranks(SIZE, body, limit_s=TIMEOUT_S + 40, victim=cell.rank)
    took = time.time() - float(marker.read_text()) if marker.exists() else -1.0
    return _seen(cell, outcomes, took, root, folder)


@contextlib.contextmanager
def _agent_store() -> Iterator[str]:
    """Yield the port of a store that outlives every rank, as torchrun's does.

    A process of its own has it: a rank that is forked beside the store's threads may get a lock
    that one of them holds (1 of 200 cells hung as it connected).
    """
    told, tell = os.pipe()
    if not (pid := os.fork()):
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
            os.write(tell, str(store.port).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    try:
        yield os.read(told, 8).decode()
    finally:
        os.close(told)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _trained(root: Path, phase: str, fail: Callable[[], None]) -> None:
    if phase == "rendezvous":
        fail()
    if phase == "initialisation":
        _before(new_variant, "prepare", fail)
    step, args = chain()
    fast = parallelize(step, *args, plan=a_plan(SIZE), timeout=TIMEOUT_S, device="cpu")
    if phase == "resuming":
        _before(training_state, "fill", fail)
    fast.load(root)
    if phase in ("first step", "mid-step"):
        at(0.5, fail, step=0 if phase == "first step" else 2)(fast._executor)
    for _ in range(3):
        fast(*args[2:])
    if phase == "saving":
        _before(saving, "write_tensors", fail)
    if phase == "committing":
        _while_committing(fast, fail)
    fast.save(root, keep=2)
    if phase == "leaving":
        fail()
    fast.close()


def _before(module: Any, name: str, fail: Callable[[], None]) -> None:
    function = getattr(module, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        fail()
        return function(*args, **kwargs)

    setattr(module, name, failing)


def _while_committing(fast: Parallel, fail: Callable[[], None]) -> None:
    """Fail between the rename and `latest` on rank 0, elsewhere as the last phase begins."""
    if fast.rank == 0:
        _before(disk, "replace_file", fail)
        return
    run, count = saving.Phases.run, 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:  # lock, reserve, write, commit
            fail()
        return run(self, *args, **kwargs)

    saving.Phases.run = counted  # type: ignore[method-assign]


def _seen(cell: Cell, outcomes: list[Outcome], took: float, root: Path, folder: Path) -> Seen:
    others = [outcome for outcome in outcomes if outcome.rank != cell.rank]
    problems = list(_problems(cell, others, took))
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    with private_folder():
        pass  # as the next run does
    tempfile.tempdir = before
    left = [path.name for path in folder.glob("pardnn-*") if not path.name.startswith(RECORDS)]
    problems += [f"left {left}"] if left else []
    try:
        path = resolve(root)
        verify(path, read_manifest(path))
    except Exception as error:
        problems.append(f"latest does not load: {error}")
    message = next((o.error["message"].splitlines()[0] for o in others if o.error), "")
    codes = " ".join(str(o.code or o.status) for o in others)
    return Seen(cell, took, codes, message, problems)


def _problems(cell: Cell, others: list[Outcome], took: float) -> Iterator[str]:
    if not 0 <= took < TIMEOUT_S + 10:
        yield f"took {took:.1f} s"
    for each in others:
        if cell.phase == "leaving" and each.status == 0:
            continue  # nobody waits for a rank that has done its work
        if each.status not in (6, 7):
            yield f"rank {each.rank} ended with {each.status}: {each.error.get('message')}"
            continue
        named = each.error["details"].get("first_failing_rank")
        if named != cell.rank or f"rank {cell.rank}" not in each.error["message"].lower():
            yield f"rank {each.rank} names {named}: {each.error['message']}"
    in_step = cell.phase in ("first step", "mid-step")
    if in_step and not any(
        {"op", "tensor", "peer"} <= each.error.get("details", {}).keys() for each in others
    ):
        yield "no op, tensor and peer"


def first_checkpoint(root: Path) -> None:
    """Write the step that the first cell goes on from."""

    def body(_rank: int, _store: str) -> None:
        step, args = chain()
        fast = parallelize(step, *args, plan=a_plan(1), device="cpu")
        fast(*args[2:])
        fast.save(root)
        fast.close()

    a_plan(1), a_plan(SIZE)  # here, and not in each rank
    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
