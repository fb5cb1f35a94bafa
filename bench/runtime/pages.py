"""What a memory limit costs a step: fresh pages of 4 KiB and of 2 MiB beside no limit at all.

    python -m bench pages [--target examples/gpt2.py:training] [--steps 6] [-o PAGE]

A limit holds for what a rank has of the system, so freed tensors go back, and new ones have fresh
pages, except those at fixed places. The step is run as the user wrote it, in a process without a
limit, and by `pardnn run` under a limit, with tensors on pages of 4 KiB (as torch does by itself)
and of 2 MiB (as ranks have). The fastest step after the first counts.
Predictions come from costs measured with the same pages.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from pardnn.backends.large_pages import LARGE_PAGES

#: Ranks and the limit of each.
CASES = ((1, "2.1GiB"), (4, "768MiB"))
PAGES = {"4 KiB": "0", "2 MiB": "1"}

_EAGER = """
import sys, time, torch
from pardnn.backends.entry_point import load_entry_point
torch.set_num_threads(1)
step, args = load_entry_point(sys.argv[1]).function()
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    step(*args)
    print(time.perf_counter() - start, flush=True)
"""


def _run(command: list[str], pages: str, cache: str) -> str:
    environment = os.environ | {LARGE_PAGES: PAGES[pages], "XDG_CACHE_HOME": cache}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def eager_seconds(target: str, steps: int) -> float:
    """Return the fastest step of the user's own code, without a limit, on one thread.

    Args:
        target: `FILE.py:FUNCTION`.
        steps: How many; the first does not count.
    """
    printed = _run(["-c", _EAGER, target, str(steps)], "4 KiB", "")
    return min(map(float, printed.split()[1:]))


def limited(target: str, steps: int, devices: int, memory: str, pages: str) -> dict[str, Any]:
    """Return what `pardnn run --json` tells.

    Args:
        target: `FILE.py:FUNCTION`.
        steps: How many.
        devices: Ranks.
        memory: Limit of each.
        pages: Of large tensors, as in `PAGES`.
    """
    command = ["-m", "pardnn", "run", target, "--devices", str(devices), "--max-memory", memory]
    with tempfile.TemporaryDirectory() as cache:
        _run(["-m", "pardnn", "profile", "--links"], pages, cache)
        return json.loads(_run([*command, "--steps", str(steps), "--json"], pages, cache))


def page(target: str, eager: float, rows: list[tuple[int, str, str, dict[str, Any]]]) -> str:
    """Return the figures as Markdown.

    Args:
        target: What was run.
        eager: Seconds of the user's step.
        rows: Ranks, limit, pages and figures of each run.
    """
    about = (
        f"`python -m bench pages`, `{target}`; {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, load at the end {os.getloadavg()[0]:.1f}."
    )
    what = (
        f"The step as the user wrote it, in a process without a limit: **{eager:.2f} s** measured. "
        "Measured steps are the fastest after the first; predicted are those of the plan on the "
        "cores that its ranks share, from costs measured anew with the same pages."
    )
    titles = ["ranks", "limit of each", "pages of large tensors", "predicted, s", "measured, s",
              "error", "beside the user's step"]  # fmt: skip
    lines = [f"# What a memory limit costs, {datetime.date.today()}", "", about, "", what, ""]
    lines += ["| " + " | ".join(titles) + " |", "| ---: | --- | --- |" + " ---: |" * 4]
    for ranks, memory, pages, found in rows:
        measured, predicted = min(found["step_s"][1:]), found["shared_cores_s"]
        lines.append(
            f"| {ranks} | {memory} | {pages} | {predicted:.2f} | {measured:.2f} | "
            f"{100 * (predicted / measured - 1):+.0f} % | {100 * (measured / eager - 1):+.0f} % |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench pages", description=__doc__)
    parser.add_argument("--target", default="examples/gpt2.py:training")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    eager = eager_seconds(options.target, options.steps)
    rows = [
        (devices, memory, pages, limited(options.target, options.steps, devices, memory, pages))
        for devices, memory in CASES
        for pages in PAGES
    ]
    text = page(options.target, eager, rows)
    output = options.output or RESULTS / f"{datetime.date.today()}_pages.md"
    output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
