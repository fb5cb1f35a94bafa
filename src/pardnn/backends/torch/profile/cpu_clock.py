"""A clock of a thread that does not count its waits for a core.

Linux counts how long a thread was ready to run but did not (`/proc/thread-self/schedstat`). So a
call of 5 ms on a busy machine is timed as on an idle one; a call that sleeps, or waits for other
threads of the process, is not shortened. On other systems this is the wall clock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

_SCHEDSTAT = "/proc/thread-self/schedstat"


@contextlib.contextmanager
def undisturbed() -> Iterator[Callable[[Callable[[], object]], float]]:
    """Yield a function that makes a call and returns its seconds, including 1 us for the clock.

    Use it in the thread that entered the context.
    """
    with contextlib.ExitStack() as stack:
        try:
            number = os.open(_SCHEDSTAT, os.O_RDONLY)
            stack.callback(os.close, number)
            _waited(number)
        except (OSError, IndexError, ValueError):
            yield _wall
            return

        def timed(call: Callable[[], object]) -> float:
            before = _waited(number)
            seconds = _wall(call)
            waited = (_waited(number) - before) * 1e-9
            # Read separately from the clock: a wait in between would count although not in the
            # call.
            return seconds - waited if waited < seconds else seconds

        yield timed


def _waited(number: int) -> int:
    """Return the nanoseconds for which this thread has been ready to run without a core."""
    return int(os.pread(number, 64, 0).split()[1])


def _wall(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
