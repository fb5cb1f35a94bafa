"""Progress on stderr, if that is a terminal; else nothing is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from pardnn.errors import printable
from pardnn.kernels.compilations import COMPILATIONS

_COMPILING = "; compiling kernels, which are {kept}: up to a minute or two"


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line with a spinner while something runs; yield a function that shows another line.

    If kernels have to be compiled meanwhile, the line says so.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    line, is_compiling = text, False
    with Console(stderr=True, markup=False).status(printable(text)) as shown:

        def update() -> None:
            more = _COMPILING.format(kept=COMPILATIONS.kept) if is_compiling else ""
            shown.update(printable(line + more))

        def show(other: str) -> None:
            nonlocal line
            line = other
            update()

        def tell(compiling: bool) -> None:
            nonlocal is_compiling
            is_compiling = compiling
            update()

        with COMPILATIONS.watched(tell):
            yield show


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of the number done and the total, which draws a bar; None without one."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task: TaskID | None = None

        def update(done: int, total: int) -> None:
            nonlocal task
            task = bar.add_task(title, total=total) if task is None else task
            bar.update(task, completed=done, total=total)

        yield update


def lines_of(interval_s: float) -> Callable[[str], None]:
    """Return a function that writes a line at most every so many seconds.

    Lines stay intact if others write to the same terminal, which a spinner's do not.
    """
    due = time.monotonic() + interval_s

    def tell(line: str) -> None:
        nonlocal due
        if sys.stderr.isatty() and time.monotonic() >= due:
            due = time.monotonic() + interval_s
            print(printable(line), file=sys.stderr, flush=True)

    return tell
