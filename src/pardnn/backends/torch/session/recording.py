"""`parallelize(..., record="run.json")`: rank 0 writes what all ranks measure while they train."""

from __future__ import annotations

from pathlib import Path

from pardnn.backends.torch.runtime.executor import Executor
from pardnn.files import check_writable
from pardnn.plan.run_record import run_record, write_run


class Recording:
    """The record of one graph of a step: the first that was captured.

    Args:
        path: The path of the file; rank 0 writes it.
        executor: Runs that graph.

    Raises:
        FileError: E405, if it cannot be written.
    """

    def __init__(self, path: str | Path, executor: Executor) -> None:
        self._path, self._executor = path, executor
        self._written = 0
        if executor.rank == 0:
            check_writable(Path(path))
        executor.record()

    def after_step(self) -> None:
        """Write after 1, 2, 4, 8 and so on recorded steps, which all ranks count alike."""
        recorder, world = self._executor.recorder, self._executor.world
        assert recorder is not None
        if recorder.steps < max(1, 2 * self._written):
            return
        self._written = recorder.steps
        mine = recorder.times(self._executor.peak_bytes)
        found = [mine]
        if world.store is not None:
            found = world.all_gather(f"record {recorder.steps}", mine)
        if world.rank == 0:
            plan = self._executor.program.plan
            write_run(run_record(plan.graph_fingerprint, found), self._path)
