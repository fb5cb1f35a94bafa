"""Third-party solvers, each behind a child process: a crash there is an error here, no more.

Each module of this folder is one problem: `solve` takes one JSON object and returns another. It
imports its solver and nothing of the planner. `ask` runs it in a child process (`__main__`), and
the caller checks the answer. The child is killed when its time is over and when the parent ends,
however it ends, so no solver is left behind.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pardnn.errors import PardnnError, StuckError, UsageError
from pardnn.time_limit import OutOfTimeError, check_time, seconds_left


def ask(
    solver: str, problem: dict[str, Any], *, seconds: float, extra: str, grace: float = 0.0
) -> dict[str, Any]:
    """Return the answer of a solver module of this folder.

    Args:
        solver: Name of the module, such as "lp".
        problem: JSON types.
        seconds: Time limit of the child process; the search's own holds, too.
        extra: The optional dependencies that bring the solver.
        grace: Seconds beyond the search's limit, for a solver that ends by itself when it passes.

    Raises:
        UsageError: E219, if the solver is not installed.
        StuckError: E709, if it does not answer in time; E710, if that is the search's limit.
        PardnnError: E109, if it fails or its answer is no JSON object.
    """
    command = [sys.executable, "-P", "-m", __name__, solver, str(os.getpid())]
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    left = seconds_left() + grace
    if left <= 0:
        check_time()
    try:
        done = subprocess.run(
            command,
            input=json.dumps(problem),
            text=True,
            capture_output=True,
            timeout=min(seconds, left),
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired:
        is_search = left < seconds
        raise (OutOfTimeError if is_search else StuckError)(
            f"the solver {solver!r} did not answer within {min(seconds, left):.3g} s; the graph is "
            "too large for it. Choose another algorithm.",
            code="E710" if is_search else "E709",
        ) from None
    try:
        answer = json.loads(done.stdout)
    except (ValueError, RecursionError):
        answer = None
    if done.returncode != 0 or not isinstance(answer, dict):
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise PardnnError(
            f"the solver {solver!r} failed with exit status {done.returncode}: {last:.200}",
            code="E109",
        )
    if "missing" in answer:
        raise UsageError(
            f"this algorithm needs {answer['missing']}, which is not installed.\n"
            f"Install it with: pip install 'pardnn[{extra}]'",
            code="E219",
        )
    return answer


def numbers(
    solver: str, answer: dict[str, Any], key: str, count: int, below: int | None = None
) -> list[float]:
    """Return a list of an answer, once it is known to be one of numbers.

    Args:
        solver: That gave the answer.
        answer: From `ask`.
        key: Of the list.
        count: How many numbers there must be.
        below: They are indices below this; None: any finite numbers.

    Raises:
        PardnnError: E109, if it is anything else.
    """
    found = answer.get(key)
    if not isinstance(found, list) or len(found) != count:
        raise wrong_answer(solver, f"{key} is not a list of {count} numbers")
    kinds = (int, float) if below is None else (int,)
    for value in found:
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise wrong_answer(
                solver, (f"{key} holds {value!r:.40}, which is not a valid number for it")
            )
        if below is not None and not 0 <= value < below:
            raise wrong_answer(solver, f"{key} holds {value}; it goes up to {below - 1}")
    return found


def wrong_answer(solver: str, what: str) -> PardnnError:
    """Return the error for an answer that did not pass its check."""
    return PardnnError(f"the solver {solver!r} gave a wrong answer: {what}", code="E109")
