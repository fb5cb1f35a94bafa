"""Python's collector of cycles, paused where everything that is made stays alive anyway."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector from walking traces and graphs again and again: it would find nothing.

    Measured: it takes a third of the time of a capture of 11,000 ops, a tenth of a search.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
