"""JIT compilation of kernels, without wrappers that nothing calls.

Numba wraps every function twice, for Python and for C, and for each wrapper unpacks every array of
every argument. For a kernel that takes a NamedTuple of twenty arrays, that is half of the code
compiled. No C calls ours, and only some are called by Python. Measured on five functions: without
the wrapper for C 5 to 24 % less processor time, without both 32 to 72 % less.

Compiled code is kept beside the source, below the home, or in `NUMBA_CACHE_DIR`. Where none of them
can be written, it is kept in memory, which is said once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, final

import numba
from numba.core import event

from pardnn.kernels.compilations import COMPILATIONS

Function = TypeVar("Function", bound=Callable[..., Any])
_njit: Any = numba.njit


_LOG = logging.getLogger("pardnn")


def kernel(function: Function) -> Function:
    """Compile a function that Python calls."""
    return _compiled(function, no_cfunc_wrapper=True)


def helper(function: Function) -> Function:
    """Compile a function that kernels alone call.

    From Python it must not be called: without a wrapper the process ends. A test looks for
    such calls in this package, its tests and its benchmarks (`tests/kernels/test_jit.py`).
    """
    return _compiled(function, no_cfunc_wrapper=True, no_cpython_wrapper=True)


def _compiled(function: Any, **options: bool) -> Any:
    try:
        found = _njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator" not in str(error):
            raise
        _tell_of_no_cache()
        return _njit(**options)(function)
    cache = getattr(found, "_cache", None)  # none where kernels run as plain Python
    if cache is not None:
        cache.save_overload = _saving(cache.save_overload)
    return found


@final
class _Listener(event.Listener):
    """Counts kernels that are compiled; numba tells of none that it finds kept."""

    def on_start(self, event: Any) -> None:
        if _is_ours(event):
            COMPILATIONS.begin()

    def on_end(self, event: Any) -> None:
        if _is_ours(event):
            COMPILATIONS.end()


def _is_ours(event: Any) -> bool:
    """Whether what is compiled is of this package, not of the user's code or of numba's own."""
    return event.data["dispatcher"].py_func.__module__.startswith("pardnn.")


event.register("numba:compile", _Listener())


def _saving(save: Callable[..., None]) -> Callable[..., None]:
    """Return numba's function that keeps compiled code, for disks that are full, too."""

    def save_or_tell(*args: Any) -> None:
        try:
            save(*args)
        except OSError:
            _tell_of_no_cache()

    return save_or_tell


@functools.cache
def _tell_of_no_cache() -> None:
    COMPILATIONS.kept = "not kept"
    _LOG.warning(
        "compiled kernels cannot be kept, so each command compiles them again: set NUMBA_CACHE_DIR "
        "to a folder that can be written"
    )
