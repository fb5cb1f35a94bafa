"""Large pages for large tensors: a setting that torch reads only once, so it is set outside."""

from __future__ import annotations

import os
import sys

#: Environment variable of torch: with "1", tensors of 2 MiB and more are on pages of that size,
#: which Linux fills in a quarter of the time (`torch.ops.host_allocator`).
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def ask_for_large_pages() -> None:
    """Set the variable if torch is not loaded yet and nobody has set it."""
    if "torch" not in sys.modules:
        os.environ.setdefault(LARGE_PAGES, "1")


def has_large_pages() -> bool:
    """Whether torch was told to put large tensors on large pages."""
    return os.environ.get(LARGE_PAGES) == "1"
