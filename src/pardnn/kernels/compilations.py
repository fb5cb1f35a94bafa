"""Who is told that kernels are being compiled: they are kept, so most commands only load them.

This loads no compiler, so that what shows progress needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final


@final
class Compilations:
    """The kernels of this process that were not kept from before.

    Attributes:
        begun: How many were compiled, those within others and shares of other processes among them.
        kept: What is said of them: a folder for them can be written, or none can.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.begun = 0
        self.kept = "kept for later"
        self._under_way = 0
        self._watchers: list[Callable[[bool], None]] = []

    def begin(self) -> None:
        """Count one more; the first that is under way is told."""
        self.begun += 1
        self._under_way += 1
        if self._under_way == 1:
            self._tell()

    def end(self) -> None:
        """Count one less under way; the last one is told."""
        self._under_way -= 1
        if self._under_way == 0:
            self._tell()

    @contextmanager
    def watched(self, tell: Callable[[bool], None]) -> Iterator[None]:
        """Tell, for a while, whether kernels are being compiled, whenever that changes."""
        self._watchers.append(tell)
        try:
            yield
        finally:
            self._watchers.remove(tell)

    def _tell(self) -> None:
        for tell in self._watchers:
            tell(self._under_way > 0)


COMPILATIONS = Compilations()
