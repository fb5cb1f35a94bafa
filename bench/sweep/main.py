"""A sweep of models, optimizers, layers and idioms, and of values that change between calls.

    python -m bench sweep [--only NAME,...] [--jobs N] [--fresh] [--out PAGE.md]

Each case runs in a process of its own, so that a crash or a hang is a row. A row is kept as soon as
it ends (`journal.py`): the same command, given again on the same commit, measures what is missing.
The page and its JSON are written anew after every few cases.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import pardnn
from bench.common import RESULTS
from bench.sweep import changes, idioms, layers, measure, optimizers, transformers_models
from bench.sweep.between import measure_change
from bench.sweep.journal import ROOT, Journal, commit
from bench.sweep.page import page
from pardnn.cluster import Cluster

Row = dict[str, Any]
Job = tuple[str, str, Callable[[Callable[[Row], None]], None]]
GROUPS = {
    "transformers": transformers_models.CASES,
    "optimizers": optimizers.CASES,
    "layers": layers.CASES,
    "idioms": idioms.CASES,
}
#: Seconds after which a case is stopped.
CASE_S = 400.0


def jobs_of(names: set[str]) -> list[Job]:
    """Return what to run; a name is that of a group, a case, or nothing for all."""
    found: list[Job] = [
        (group, name, functools.partial(measure.measure, factory))
        for group, cases in GROUPS.items()
        for name, factory in cases.items()
    ]
    found += [
        ("changes", name, functools.partial(measure_change, pattern))
        for name, pattern in changes.PATTERNS.items()
    ]
    return [job for job in found if not names or {job[0], job[1]} & names]


def run(jobs: list[Job], at_once: int, limit_s: float = CASE_S) -> Iterator[Row]:
    """Yield a row per job as it ends, `at_once` of them side by side."""
    waiting, running = list(jobs), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                path = Path(folder) / str(len(waiting))
                running[_start(job, path)] = job, path, time.monotonic()
            for pid, (job, path, begun) in list(running.items()):
                late = time.monotonic() - begun > limit_s
                if late:
                    os.killpg(pid, signal.SIGKILL)
                ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
                if ended:
                    del running[pid]
                    row = {"group": job[0], "name": job[1], "seconds": time.monotonic() - begun}
                    yield row | _result(path, status, late)
            time.sleep(0.01)


def _start(job: Job, path: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # ranks die with it
        with path.with_suffix(".log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)

        def save(row: Row) -> None:
            path.with_suffix(".new").write_text(json.dumps(row), encoding="utf-8")
            path.with_suffix(".new").replace(path)

        job[2](save)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _result(path: Path, status: int, late: bool) -> Row:
    row: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if status:
        tail = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-2000:]
        what = "timeout" if late else "failed"
        begun = [s for s, each in row.items() if isinstance(each, dict)]
        stage = next((s for s in begun if row[s]["status"] == "timeout"), "case")
        row[stage] = {"status": what, "code": f"exit {os.waitstatus_to_exitcode(status)}"}
        row[stage]["text"] = tail
    return row


def warm_up() -> None:
    """Compile and import in this process what every case needs; it is forked for each."""
    torch.set_num_threads(1)
    step, args = layers.CASES["linear"]()
    graph = pardnn.capture(step, *args)
    for options in measure.RUNS.values():
        pardnn.plan(graph, Cluster.uniform(measure.RANKS), **options, costs=measure.COSTS)


def main(arguments: list[str]) -> None:
    """Run what has no row yet, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench sweep")
    parser.add_argument("--only", default="", help="groups or cases, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side")
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date}_sweep.md")
    parser.add_argument("--fresh", action="store_true", help="measure again what has a row")
    parser.add_argument("--journal", type=Path, default=ROOT / ".sweep", help="folder of the rows")
    options = parser.parse_args(arguments)
    jobs = jobs_of(set(filter(None, options.only.split(","))))
    report = begin(date, arguments, len(jobs_of(set())))
    journal = Journal(options.journal, [report["commit"], *report["versions"].values()])
    if options.fresh:
        journal.clear()
    report["rows"] = journal.rows(job[:2] for job in jobs)
    report["kept"] = len(report["rows"])
    measure_rest(report, jobs, journal, options)
    write(report, options.out)


def measure_rest(
    report: Row, jobs: list[Job], journal: Journal, options: argparse.Namespace
) -> None:
    """Add the rows that a report lacks, in the order of the jobs.

    Args:
        report: With the rows that are known.
        jobs: All that belong to it.
        journal: Gets each row.
        options: `jobs` side by side; `out` is written now and then.
    """
    done = {(row["group"], row["name"]) for row in report["rows"]}
    rest = [job for job in jobs if job[:2] not in done]
    if rest:
        warm_up()
    place = {job[:2]: i for i, job in enumerate(jobs)}
    for row in run(rest, options.jobs):
        journal.add(row)
        report["rows"].append(row)
        report["rows"].sort(key=lambda each: place[each["group"], each["name"]])
        sys.stdout.write(f"{len(report['rows'])}/{len(jobs)} {line(row)}\n")
        sys.stdout.flush()
        if len(report["rows"]) % 5 == 0:
            write(report, options.out)


def begin(date: str, arguments: list[str], chosen: int) -> Row:
    """Return a report without rows."""
    return {
        "date": date,
        "command": " ".join(["python -m bench sweep", *arguments]),
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "pardnn": pardnn.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "ranks": measure.RANKS,
        "steps": measure.STEPS,
        "seed": 0,
        "chosen": chosen,
        "kept": 0,
        "rows": [],
    }


def line(row: Row) -> str:
    """Return one line about a row, for whoever watches."""
    stages = {k: v for k, v in row.items() if isinstance(v, dict)}
    shown = [f"{k} {v['status']} {v.get('code', '')}".rstrip() for k, v in stages.items()]
    return f"{row['group']} {row['name']}: {', '.join(shown)} ({row['seconds']:.1f} s)"


def write(report: Row, path: Path) -> None:
    """Write the JSON and the page that is made of it."""
    text = json.dumps(report, indent=1)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    path.write_text(page(json.loads(text)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
