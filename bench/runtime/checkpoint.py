"""Speed of saving and loading a checkpoint beside `dd` on the same disk, measured in turns.

    python -m bench checkpoint [--gib 2] [--ranks 1,2] [--rounds 5] [--directory DIR] [--out PAGE]

A round writes a file by `dd if=/dev/zero bs=64M conv=fsync`, saves the state of a model with AdamW
of as many bytes, reads what was saved by `dd bs=64M of=/dev/null`, and loads it: with its pages
dropped from the system's cache (`posix_fadvise`) before each of the two, and then with all of it in
the cache. All are durable when their time ends; a load's checksums are compared. Ratios are of
medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.common import RESULTS
from bench.common.forked import forked, process_group
from pardnn.api.planning import plan as make_plan
from pardnn.backends.torch.make_step import capture_factory
from pardnn.backends.torch.parallelize import parallelize
from pardnn.checkpoint.directory import resolve
from pardnn.cluster import Cluster
from pardnn.plan.plan import Plan

WIDTH = 4096
#: Weights and AdamW's two moments of a layer.
LAYER_BYTES = 3 * 4 * WIDTH * WIDTH
BLOCK = 64 << 20
Seconds = dict[str, list[float]]


def wide(layers: int) -> Any:
    """Return a step of a model whose state is mostly `layers` matrices and their moments."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(2, WIDTH))


def dd(*arguments: str) -> None:
    subprocess.run(["dd", f"bs={BLOCK}", *arguments], check=True, stderr=subprocess.DEVNULL)


def drop(paths: list[Path]) -> None:
    """Drop files, all of them on disk, from the system's cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def seconds_of(layers: int, plan: Plan, rounds: int, directory: Path) -> Seconds:
    """Return the seconds of each round, on rank 0 between barriers, by what was done."""
    size = plan.num_devices

    def body(rank: int, store: str) -> Seconds:
        process_group(rank, size, store)
        step, args = wide(layers)
        fast = parallelize(step, *args, plan=plan, timeout=120, device="cpu")
        fast(args[2])
        found: Seconds = {}

        def timed(what: str, call: Callable[[], Any]) -> None:
            dist.barrier()
            start = time.perf_counter()
            call()
            dist.barrier()
            found.setdefault(what, []).append(time.perf_counter() - start)

        def on_first(call: Callable[[], Any]) -> Callable[[], Any]:
            return call if rank == 0 else lambda: None

        def files() -> list[Path]:
            return sorted(resolve(directory).glob("rank-*"))

        def write() -> None:
            dd("if=/dev/zero", f"of={directory}/dd", f"count={total // BLOCK}", "conv=fsync")

        def read() -> None:
            for path in files():
                dd(f"if={path}", "of=/dev/null")

        total = layers * LAYER_BYTES
        reads = {"dd reads": on_first(read), "load": lambda: fast.load(directory)}
        for _ in range(rounds):
            timed("dd writes", on_first(write))
            on_first(lambda: (directory / "dd").unlink())()
            timed("save", lambda: fast.save(directory, keep=1))
            for after, forget in ((", cold", lambda: drop(files())), (", warm", lambda: None)):
                for what, call in reads.items():
                    on_first(forget)()
                    timed(what + after, call)
        fast.close()
        return found

    return forked(size, body, limit_s=3600)[0]


def rows_of(size: int, total: int, seconds: Seconds) -> list[dict[str, Any]]:
    """Return a row per pair of dd and ours: seconds of all rounds, speeds and ratio of medians."""
    pairs = [("write", "dd writes", "save")]
    pairs += [(f"read{c}", f"dd reads{c}", f"load{c}") for c in (", cold", ", warm")]
    rows = []
    for what, theirs, ours in pairs:
        medians = [statistics.median(seconds[name]) for name in (theirs, ours)]
        rows.append({
            "what": what, "ranks": size, "bytes": total, "dd_s": seconds[theirs],
            "pardnn_s": seconds[ours], "dd_MB_s": total / medians[0] / 1e6,
            "pardnn_MB_s": total / medians[1] / 1e6, "ratio": medians[0] / medians[1],
        })  # fmt: skip
    return rows


def page(rows: list[dict[str, Any]], head: str) -> str:
    """Return the figures as Markdown."""
    names = ["what", "ranks", "dd, MB/s", "pardnn, MB/s", "pardnn / dd", "rounds, s (dd; pardnn)"]
    lines = [head, "| " + " | ".join(names) + " |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        each = ["; ".join(" ".join(f"{s:.2f}" for s in row[k]) for k in ("dd_s", "pardnn_s"))]
        cells = [row["what"], row["ranks"], f"{row['dd_MB_s']:.0f}", f"{row['pardnn_MB_s']:.0f}"]
        cells += [f"{100 * row['ratio']:.0f} %", *each]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure, print and write the page and its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench checkpoint", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path())
    date = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date}_checkpoint.md")
    options = parser.parse_args(arguments)
    layers = max(2, round(options.gib * 2**30 / LAYER_BYTES))
    before = os.getloadavg()[0]
    graph = capture_factory(lambda: wide(layers))
    rows: list[dict[str, Any]] = []
    for size in map(int, options.ranks.split(",")):
        cluster = Cluster.uniform(size)
        plan = make_plan(graph, cluster, "layer-round-robin", costs="v100")
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            seconds = seconds_of(layers, plan, options.rounds, Path(directory))
        rows += rows_of(size, layers * LAYER_BYTES, seconds)
    head = (
        f"# Checkpoints beside dd, {date}\n\n`python -m bench checkpoint {' '.join(arguments)}`; "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a "
        f"rank. Measured: {layers * LAYER_BYTES / 1e9:.2f} GB of weights and AdamW moments, "
        f"{options.rounds} rounds in turns, medians. Load of the machine before and at the end: "
        f"{before:.1f} and {os.getloadavg()[0]:.1f}.\n"
        "dd writes zeros with one sync at the end; we write, take CRC-32 and SHA-256, and sync; a "
        "load compares CRC-32. Cold: the files' pages are dropped from the system's cache first; "
        "what the disk caches stays.\n"
    )
    text = page(rows, head)
    options.out.write_text(text, encoding="utf-8")
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
