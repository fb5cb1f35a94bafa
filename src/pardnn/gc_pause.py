"""Python's garbage collector: paused where all that is allocated stays, asked for all objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, which would traverse traces and graphs repeatedly and find nothing.

    Objects made meanwhile are moved to the oldest generation, else the next allocation would
    traverse them all. Measured: the collector takes a third of the time of a capture of 11,000 ops,
    and a fifth of a search, half of that in the traversal afterwards.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            if not gc.get_freeze_count():  # else the user has frozen objects, and they stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def frozen_too() -> Iterator[None]:
    """Let the collector tell of all objects, as of those that `gc.freeze()` took from it."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()
