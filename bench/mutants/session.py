"""A pytest session that never runs a test itself: forked children do, each with one change.

The parent imports everything and collects all tests once. A child puts the changed function's code
in place, runs the tests that it is asked for until the first failure, and ends. So a mutant costs
its tests' time and some milliseconds. It works because kernels are plain functions here
(`NUMBA_DISABLE_JIT=1`), and because all that changes is the code of functions.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import resource
import signal
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from bench.mutants.mutations import Mutant, mutated
from bench.mutants.page import LEAST_S, SLOWER
from bench.mutants.record import empty_caches

#: Wall time of a child: what waits for something that never comes uses no processor time.
WALL_S = 900
#: Bytes that a child may allocate.
MEMORY = 6 << 30


def forked(body: Callable[[], Any], limit_s: float = WALL_S) -> tuple[int, Any]:
    """Return the signal that ended a forked child, 0 if none, and what it returned, as JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            gc.freeze()
            with os.fdopen(writer, "w") as pipe:
                try:
                    json.dump([True, body()], pipe)
                except BaseException:
                    json.dump([False, traceback.format_exc()], pipe)
        finally:
            os._exit(0)
    os.close(writer)
    os.set_blocking(reader, False)
    text, end = b"", time.monotonic() + limit_s
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        text += _read(reader)
        time.sleep(0.005)
    text += _read(reader)
    os.close(reader)
    if os.WIFSIGNALED(done[1]):
        return os.WTERMSIG(done[1]), None
    ok, found = json.loads(text)
    if not ok:
        raise RuntimeError(found)
    return 0, found


def _read(descriptor: int) -> bytes:
    text = b""
    try:
        while part := os.read(descriptor, 1 << 16):
            text += part
    except BlockingIOError:
        pass
    return text


def failed(items: Sequence[pytest.Item], limits: Sequence[float], budget_s: float, at: Any,
           ) -> str | None:  # fmt: skip
    """Run tests; return the first that fails, or None.

    Args:
        items: Tests, of which none is begun once the budget is used up.
        limits: Processor time of each, in seconds, after which it does not end any more.
        budget_s: Processor time of all.
        at: Memory that is told the number of each test that begins; -1 at the end.
    """
    start = time.process_time()
    for number, item in enumerate(items):
        if time.process_time() - start > budget_s:
            break
        at[0:4] = number.to_bytes(4, "little", signed=True)
        signal.setitimer(signal.ITIMER_PROF, limits[number])
        after = items[number + 1] if number + 1 < len(items) else None
        reports = runtestprotocol(item, log=False, nextitem=after)
        if any(report.failed for report in reports):
            return item.nodeid
    return None


def ended(
    mutant: Mutant, items: Sequence[pytest.Item], seconds: Sequence[float], budget_s: float
) -> list[Any]:
    """Return how a mutant ended, and the test that says so.

    `caught`: a test failed; `timed out`, `crashed`: one did not end in `SLOWER` times its time,
    or ended the process; `survived`.

    Args:
        mutant: A change.
        items: Tests, in the order in which they are asked.
        seconds: Processor time of each where nothing is changed.
        budget_s: Processor time of all of them.
    """
    limits = [max(LEAST_S, SLOWER * each) for each in seconds]
    at = mmap.mmap(-1, 4)

    def body() -> list[Any]:
        here = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY, here + MEMORY))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        put_in_place(mutant)
        test = failed(items, limits, budget_s, at)
        return ["caught" if test else "survived", test]

    ended_by, found = forked(body)
    if found is not None:
        return found
    number = int.from_bytes(at[0:4], "little", signed=True)
    is_late = ended_by in (signal.SIGPROF, signal.SIGKILL)
    return ["timed out" if is_late else "crashed", items[number].nodeid]


def put_in_place(mutant: Mutant) -> None:
    """Give the function of a mutant the changed code, and empty all caches."""
    path = Path(mutant.path)
    name = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    module = importlib.import_module(name)
    file = str(module.__file__)
    tree = mutated(Path(file).read_text(encoding="utf-8"), mutant.number)
    code = compile(tree, file, "exec", dont_inherit=True)
    owner, value = module, None
    for part in mutant.function.split("."):
        code = next(
            each
            for each in code.co_consts
            if isinstance(each, types.CodeType) and each.co_name == part
        )
        owner, value = value if value is not None else owner, None
        value = vars(owner)[part]
    _function(value).__code__ = code
    empty_caches()


def _function(value: Any) -> types.FunctionType:
    """Return the function below decorators."""
    for name in ("fget", "func", "__func__", "__wrapped__"):
        if (inner := getattr(value, name, None)) is not None and not isinstance(
            value, types.FunctionType
        ):
            return _function(inner)
    assert isinstance(value, types.FunctionType), value
    return _function(value.__wrapped__) if hasattr(value, "__wrapped__") else value
