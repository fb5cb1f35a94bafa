"""One rank of `pardnn run`: it builds its shard of the step and trains it under its limit."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pardnn.backends.entry_point import load_factory
from pardnn.backends.torch.arena import Layout
from pardnn.backends.torch.checkpoint.training_state import TrainingState
from pardnn.backends.torch.codegen.load import load_step
from pardnn.backends.torch.comm.joining import join, leave, rank_device
from pardnn.backends.torch.comm.stop_signal import StopSignal
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.launch.job import (
    BUILDING,
    GRAPH_FILE,
    PLAN_FILE,
    PROGRESS_FILE,
    STATE_FOLDER,
    STORE_FILE,
    Job,
    result_path,
    signal_of,
    write_result,
    write_stage,
    write_whole,
)
from pardnn.backends.torch.launch.reference import seed_generators
from pardnn.backends.torch.make_step import make_step
from pardnn.backends.torch.ops.host_allocator import pin_allocator
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.effects import tell
from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.runtime.memory import limits as memory_limits
from pardnn.backends.torch.runtime.memory.fixed_places import choose_memory
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.backends.torch.user_step.access import SpreadObjects
from pardnn.errors import FileError, PardnnError, UnsupportedError
from pardnn.graph.file import read_graph
from pardnn.plan.file import read_plan

#: How long a rank may take to end by itself once another one has failed, seconds.
GRACE_S = 6.0
#: How often rank 0 reports how far the training is, seconds: a small file takes some 50 us.
TOLD_S = 0.5
NO_ROOM = (
    "the limit has no room for freed tensors below 2 MiB to stay in the heap: each gets fresh "
    "pages, and steps take longer than predicted"
)


def run_rank(directory: Path, job: Job, rank: int) -> dict[str, Any]:
    """Run one rank and return its result; at the end its memory limit is lifted, even on error.

    Args:
        directory: The directory of the run, with graph and plan.
        job: What to do.
        rank: This rank.

    Raises:
        PardnnError: As `start` and `Executor.step` do.
    """
    try:
        return _trained(directory, job, rank)
    finally:
        memory_limits.lift_limit()


def _trained(directory: Path, job: Job, rank: int) -> dict[str, Any]:
    limit, device = job.limits[rank], _warm_device(job)
    program = Program(read_graph(directory / GRAPH_FILE), read_plan(directory / PLAN_FILE))
    seed_generators(job.seed)
    write_stage(directory, rank, BUILDING)
    step, args, recording = make_step(load_factory(job.target, job.batch_size))
    binding = Binding(step, args, program.whole, device)
    layout = choose_memory(program, rank, limit, device, has_places=job.code is None)
    notes = _notes_of(layout, device)
    notes += [f"the model was built on the host: {recording.fallback}"] * bool(recording.fallback)
    write_stage(directory, rank, "meeting the other ranks, or training with them")
    world = join(device, timeout_s=job.timeout_s, meeting=directory / STORE_FILE)
    example: dict[str, Any] = {}

    def residents() -> dict[str, Any]:
        if limit is not None:
            notes.append(memory_limits.set_limit(limit, device))
        batch = [op for op in program.inputs() if op.name in binding.example_values()]
        values = binding.replayed([*program.residents(rank), *batch], recording)
        example.update((op.name, values.pop(op.name)) for op in batch)
        return values

    executor = start(program, world, residents, on_failure=_abandon(directory, rank))
    executor.limit_bytes, executor.layout = limit, layout
    _choose_what_runs(job, executor)
    nothing_spread = SpreadObjects()  # from here on, no user code runs
    state = TrainingState(program, world, binding, executor.live_values, nothing_spread)
    stop = _stop_signal(directory, job, world)
    tell_step = _Progress(directory, job.steps) if rank == 0 else None
    losses, saved = _steps(job, executor, state, binding, example, stop, tell_step)
    memory_limits.lift_limit()
    if job.verify and len(losses) == job.steps:
        notes += _left_state(directory, state)
    state.close()
    _end_together(world)
    leave([world])
    return _told(executor) | {
        "losses": losses, "notes": notes, "saved_steps": saved,
        "stopped_by": stop.name if stop is not None and stop.is_set else None,
    }  # fmt: skip


def _told(executor: Executor) -> dict[str, Any]:
    """Return what an executor measured."""
    recorder = executor.recorder
    times = None if recorder is None else recorder.times(executor.peak_bytes)
    return {
        "step_s": executor.step_s, "peak_bytes": executor.peak_bytes, "times": times,
        "waits_s": executor.waits_s,
    }  # fmt: skip


def _notes_of(layout: Layout, device: torch.device) -> list[str]:
    """Return a note if a CPU's limit leaves no room for freed tensors in the heap."""
    return [] if layout.has_room or device.type == "cuda" else [NO_ROOM]


def _choose_what_runs(job: Job, executor: Executor) -> None:
    """Make the executor run generated code or record times, if the job says so."""
    if job.code is not None:
        executor.run_code(load_step(Path(job.code[executor.rank])))
    if job.record:
        executor.record()


def _left_state(directory: Path, state: TrainingState) -> list[str]:
    """Write the state for the reference; return a note if that cannot be done."""
    try:
        state.save(directory / STATE_FOLDER)
    except (FileError, UnsupportedError) as error:
        return [f"parameters were not compared: {error.message.splitlines()[0]}"]
    return []


def _end_together(world: World) -> None:
    """Wait for the other ranks: one that does not end is reported like one that hangs."""
    if world.store is not None:
        try:
            world.all_gather("end", None, "to end")
        except PardnnError as error:
            raise world.report_failure(error) from error


def _stop_signal(directory: Path, job: Job, world: World) -> StopSignal | None:
    """Handle signals from here on, including those of the launcher, if the job says so."""
    if job.on_signal is None:
        return None
    signal.set_wakeup_fd(-1)  # a signal no longer ends this process, see `worker`
    return StopSignal(world, job.on_signal, lambda: signal_of(directory))


class _Progress:
    """Tells the launcher how far the training is, at most once in `TOLD_S` seconds."""

    def __init__(self, directory: Path, steps: int) -> None:
        self._path, self._steps, self._next = directory / PROGRESS_FILE, steps, 0.0

    def __call__(self, losses: Sequence[float], step_s: Sequence[float]) -> None:
        """Report the finished step, and the time left if steps go on like the latest ones."""
        now, done = time.monotonic(), len(losses)
        if now < self._next:
            return
        self._next = now + TOLD_S
        left = (self._steps - done) * statistics.median(step_s[-5:])
        text = f"step {done} of {self._steps}: loss {losses[-1]:.6g}; {left:.0f} s left"
        write_whole(self._path, text)


def _steps(
    job: Job,
    executor: Executor,
    state: TrainingState,
    binding: Binding,
    batch: Mapping[str, Any],
    stop: StopSignal | None,
    tell_step: _Progress | None,
) -> tuple[list[float], list[int]]:
    """Train until a signal asks to stop; return the losses, and the steps that were saved.

    Args:
        job: Says how many steps to train, and what to save.
        executor: Runs the steps.
        state: The state to save.
        binding: The binding of the user's objects.
        batch: The tensors of the example batch by name.
        stop: Heeds signals; None ignores them.
        tell_step: Reports a step to the launcher; None does not.
    """
    saving = job.saving
    if saving is not None and saving.first_step is not None:
        state.load(saving.directory, saving.first_step)
    losses: list[float] = []
    binding.mark_stepped()
    saved: list[int] = []
    last = state.steps + job.steps
    for _ in range(job.steps):
        losses.append(executor.step(binding.inputs(batch, {})).item())
        binding.end_step(executor.effects)
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results alone
            tell(executor.effects, binding.sinks())
        state.steps += 1
        if tell_step is not None:
            tell_step(losses, executor.step_s)
        stops = stop is not None and stop.tick()
        is_last = stops and job.on_signal == "save"
        if saving is not None and (is_last or saving.is_due(state.steps, last)):
            state.save(saving.directory, keep=saving.keep)
            saved.append(state.steps)
        if stops:
            break
    return losses, saved


def _warm_device(job: Job) -> torch.device:
    """Return this rank's device, with everything loaded that torch loads late."""
    pin_allocator()
    torch.set_num_threads(job.threads)
    device = rank_device(job.device, int(os.environ.get("LOCAL_RANK", "0")))
    memory_limits.warm_up(device)
    return device


def _abandon(directory: Path, rank: int) -> Callable[[dict[str, Any]], None]:
    def abandon(failure: dict[str, Any]) -> None:
        """End a rank that still waits, computes or sleeps after another one has failed."""
        time.sleep(GRACE_S)
        if not result_path(directory, rank).exists():
            first = failure.get("first_failing_rank", failure["rank"])
            details = {"rank": rank, "first_failing_rank": first}
            message = f"rank {rank} stopped: rank {first} failed first"
            write_result(directory, rank, {"error": {
                "code": failure["code"], "message": message, "details": details}})  # fmt: skip
        os._exit(6)

    return abandon
