"""Phases of saving or loading, at whose ends all ranks agree on the outcome.

A failure of one rank (its disk is full) is an error of the phase: all ranks raise it, and may
continue to train. A lost rank ends the run, as in a step.

A phase may take long, so a rank is given up only if it has neither arrived nor made progress for
the length of the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from pardnn.backends.torch.comm.failure_detector import LostError
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.runtime.failures import memory_reason
from pardnn.backends.torch.runtime.memory.limits import is_out_of_memory
from pardnn.errors import MismatchError, PardnnError, error_from

#: Seconds between two signs of life from a rank that writes or reads.
TICK_S = 1.0
T = TypeVar("T")


class Phases:
    """The phases of one collective operation.

    Args:
        world: This rank's connections.
        key: A key used only once, the same on all ranks.
        doing: What is done, in words: "saving step 12".
    """

    def __init__(self, world: World, key: str, doing: str) -> None:
        self._world, self._key, self._doing = world, key, doing
        self._phase = 0
        self._ticked = time.monotonic()

    def tick(self) -> None:
        """Tell the other ranks that this one makes progress."""
        now = time.monotonic()
        if self._world.store is not None and now - self._ticked > TICK_S:
            self._ticked = now
            self._world.store.add(f"{self._key}/progress/{self._world.rank}", 1)

    def run(self, phase: Callable[[], T], undo: Callable[[], None] | None = None) -> list[T]:
        """Run a phase on this rank, and return what it returned on every rank.

        Args:
            phase: Returns JSON types.
            undo: Called on every rank if the phase failed on any, before any rank raises.

        Raises:
            PardnnError: The error of the lowest rank that had one, the same on all ranks.
            RankError: E602, if a rank was lost.
            StuckError: E702, if a rank makes no progress.
        """
        try:
            row = {"value": phase()}
        except PardnnError as error:
            row = {"code": error.code, "message": error.message, "details": error.details}
        except Exception as error:
            if is_out_of_memory(error):
                code, message = "E603", f"it ran out of memory: {memory_reason(error)}"
            else:
                code, message = "E601", f"{type(error).__name__}: {str(error)[:500]}"
            row = {"code": code, "message": message, "details": {}}
        rows = self._gathered(row)
        failed = next((rank for rank, each in enumerate(rows) if "code" in each), None)
        if failed is not None:
            if undo is not None:
                undo()
                self._gathered({})
            raise self._error(failed, rows[failed])
        return [each["value"] for each in rows]

    def agree(self, phase: Callable[[], Any], otherwise: str) -> None:
        """Run a phase that returns what this rank has read, which must be the same on all.

        Args:
            phase: Returns JSON types.
            otherwise: What to say if ranks have read different things.

        Raises:
            MismatchError: E521, if they have read different things.
            PardnnError: As `run` does.
        """
        first, *others = self.run(phase)
        if any(each != first for each in others):
            raise MismatchError(otherwise, code="E521")

    def _error(self, rank: int, row: dict[str, Any]) -> PardnnError:
        where = f"{self._doing}, rank {rank}: " if self._world.size > 1 else f"{self._doing}: "
        return error_from(row["code"], where + row["message"], {**row["details"], "rank": rank})

    def _gathered(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of all ranks, in order of rank."""
        world, store = self._world, self._world.store
        if store is None:
            return [row]
        self._phase += 1
        try:
            key, doing = f"{self._key}/{self._phase}", f"while {self._doing}"
            return world.all_gather(key, row, doing, self._progress)
        except PardnnError as error:
            raise world.report_failure(error) from error
        except RuntimeError as error:  # the store's host is gone
            lost = LostError(
                f"rank {world.rank} lost the other ranks while {self._doing}",
                details={"rank": world.rank, "transport": str(error)[:200]},
            )
            raise world.report_failure(lost) from error

    def _progress(self, rank: int) -> int:
        """Return how often a rank has reported progress."""
        assert self._world.store is not None
        return self._world.store.add(f"{self._key}/progress/{rank}", 0)
