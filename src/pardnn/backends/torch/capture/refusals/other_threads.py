"""Work that a step gives to other threads and processes, which no trace sees.

Problem: a tracer sees the calls of its own thread. What another thread does to objects or files
would be done once, at capture; what it computes is not in the graph; and what it raises is lost.

Idea: a step that starts one itself is refused at once, with its name. A library may start threads;
such a step is refused only if one of them uses a tensor of the trace, after the step has run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing.pool
import multiprocessing.process
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.refusals.unsupported import at, error_at
from pardnn.backends.torch.user_step.code_names import is_library_frame
from pardnn.errors import UnsupportedError

_POOL = "gives work to a pool"
_STARTS: tuple[tuple[Any, str, str], ...] = (
    (threading.Thread, "start", "starts a thread"),
    (multiprocessing.process.BaseProcess, "start", "starts a process"),
    (concurrent.futures.ThreadPoolExecutor, "submit", _POOL),
    (concurrent.futures.ProcessPoolExecutor, "submit", _POOL),
    *((multiprocessing.pool.Pool, name, _POOL)
      for name in ("apply_async", "_map_async", "imap", "imap_unordered")),
)  # fmt: skip
#: What runs between the user's line and the start of a thread.
_BETWEEN = frozenset({"asyncio", "concurrent", "multiprocessing", "threading"})


@contextlib.contextmanager
def threads_refused(where: Callable[[], str | None]) -> Iterator[None]:
    """Refuse work of other threads while the context is open.

    Args:
        where: Returns the user's line that runs.

    Raises:
        UnsupportedError: E801.
    """
    own, met = threading.get_ident(), []
    dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def noting(cls: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == own:
            return dispatch(cls, func, *args, **kwargs)
        met.append(work_in_thread("computes with a tensor in another thread", None))
        raise met[-1]

    with contextlib.ExitStack() as stack:
        for owner, name, deed in _STARTS:
            new = _refusing(getattr(owner, name), deed, own, where)
            stack.enter_context(mock.patch.object(owner, name, new))
        new = classmethod(noting)
        stack.enter_context(mock.patch.object(FakeTensor, "__torch_dispatch__", new))
        yield
    if met:
        raise met[0]


def _refusing(
    real: Callable[..., Any], deed: str, own: int, where: Callable[[], str | None]
) -> Callable[..., Any]:
    @functools.wraps(real)
    def start(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == own and _is_of_users(sys._getframe(1)):
            raise work_in_thread(deed, where())
        return real(*args, **kwargs)

    return start


def _is_of_users(frame: types.FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name.partition(".")[0] not in _BETWEEN:
            return not is_library_frame(frame)
        frame = frame.f_back
    return False


def work_in_thread(deed: str, where: str | None) -> UnsupportedError:
    """Return E801: a step that has other threads or processes do something.

    Args:
        deed: What it does.
        where: "file.py:line" of the user's code; None if unknown.
    """
    return error_at(
        where,
        f"the step {deed}{at(where)}. Only what the step's own\n"
        "thread computes is captured: what others do would happen once, at capture, or be lost.\n"
        "Compute it in the step itself (outs = [model(part) for part in parts]); start threads\n"
        "between two calls, with what the step has returned.",
    )
