"""Plans that cut and place beside those that do one of both: two islands of fast links.

What `auto` with `microbatches="auto"` tries, and takes: the fastest of each kind. Few samples on
many devices is where pieces of the batch do not suffice.
"""

from __future__ import annotations

import argparse
import datetime
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import pardnn
from bench.common.side_by_side import cores, write_page
from pardnn import backends
from pardnn.cluster import Cluster, Device, Link
from pardnn.graph.ir import Graph
from pardnn.planner.algorithms import CUTS, RULES, mixed_parts

Entry = tuple[Callable[..., Any], tuple[Any, ...]]

COSTS, ISLANDS, INSIDE_BANDWIDTH = "v100", 2, 300e9
LAYERS, WIDTH, HEADS, TOKENS, WORDS = 2, 2048, 16, 512, 4096
#: Bytes/s between islands.
ACROSS = {"12 GB/s": 12e9, "2 GB/s": 2e9}
KINDS = ("cut", "placed", "mixed")


def gpt2(samples: int) -> Entry:
    """Return a step of layers as wide as those of GPT-2 XL, nearly."""
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=WORDS, n_positions=TOKENS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        batch = torch.zeros(2, samples, TOKENS, dtype=torch.int64)
    return _step, (model, torch.optim.AdamW(model.parameters(), fused=True), *batch)


def _step(model: Any, optimizer: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    scores = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss


@functools.cache
def captured(samples: int) -> Graph:
    """Return the step; no tensor data are allocated."""
    return backends.capture_factory(functools.partial(gpt2, samples))


def islands(size: int, across: float) -> Cluster:
    """Return two islands of devices.

    Args:
        size: Devices of each.
        across: Bytes per second between them.
    """
    number = range(ISLANDS * size)
    links = tuple(
        Link(source=f"gpu:{i}", target=f"gpu:{j}", latency=1e-6 if i // size == j // size else 1e-5,
             bandwidth=INSIDE_BANDWIDTH if i // size == j // size else across)
        for i in number for j in range(i)
    )  # fmt: skip
    return Cluster(devices=tuple(Device(name=f"gpu:{i}") for i in number), links=links)


def kind_of(algorithm: str) -> str:
    """Return of which kind a plan is, by its name among what was tried."""
    name = algorithm.rpartition(", ")[2].rpartition(": ")[2]
    if mixed_parts(name) is not None:
        return "mixed"
    return "cut" if name in ("tofu", *CUTS, *RULES) else "placed"


def measure(samples: str, size: str, across: str) -> dict[str, Any]:
    """Return the seconds of the fastest plan of each kind, and what `auto` takes.

    Args:
        samples: Of a batch.
        size: Devices of an island.
        across: A key of `ACROSS`.
    """
    graph, cluster = captured(int(samples)), islands(int(size), ACROSS[across])
    plan = pardnn.plan(graph, cluster, reserve=0.0, costs=COSTS, microbatches="auto")
    assert plan.predicted is not None
    row: dict[str, Any] = {"samples": samples, "size": size, "across": across}
    row |= dict.fromkeys(KINDS)
    for tried in plan.tried:
        kind = kind_of(tried.algorithm)
        if tried.makespan_s is not None and tried.makespan_s < (row[kind] or float("inf")):
            row[kind] = tried.makespan_s
    pieces = 1 if plan.pieces is None else len(plan.pieces.points) - 1
    taken = f"`{plan.algorithm}`" + (f" in {pieces} pieces" if pieces > 1 else "")
    return row | {"auto": plan.predicted.makespan_s, "taken": taken}


def page(rows: Sequence[dict[str, Any]], total: int, command: str) -> str:
    """Return the page, in Markdown."""
    setting = (
        f"Simulated milliseconds of a step, costs of `{COSTS}`, no memory limit; `{command}`, "
        f"{datetime.date.today()}, {cores()} cores under load, pardnn {pardnn.__version__}; "
        f"{len(rows)} of {total} rows. GPT-2 of {LAYERS} layers, width {WIDTH}, {HEADS} heads, "
        f"{TOKENS} tokens a sample, {WORDS} words, `AdamW(fused=True)`; {ISLANDS} islands of "
        "devices, 300 GB/s inside. The fastest plan of each kind that `auto` with "
        "`microbatches=auto` tried, before local search; and what it took. CPU: seconds of "
        "planning."
    )
    lines = [
        "# Cut and place, beside cut or place",
        "",
        setting,
        "",
        "| samples | devices | across | cut | placed | mixed | auto | taken | CPU |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        seconds = [row[kind] for kind in (*KINDS, "auto")]
        cells = ["-" if value is None else f"{1e3 * value:.3f}" for value in seconds]
        where = f"{ISLANDS} x {row['size']} | {row['across']}"
        lines.append(
            f"| {row['samples']} | {where} | {' | '.join(cells)} | "
            f"{row['taken']} | {row['cpu_s']:.0f} |"
        )
    return "\n".join([*lines, "", *findings(rows), ""])


def findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the rows say, counted."""
    won, gains = 0, list[float]()
    for row in rows:
        others = [row[kind] for kind in ("cut", "placed") if row[kind] is not None]
        if row["mixed"] is not None and row["mixed"] < min(others):
            won += 1
            gains.append(min(others) / row["mixed"])
    most = f", at most {max(gains):.2f} times as fast as the better of both" if gains else ""
    slower = sum(
        row[kind] < row["auto"] * (1 - 1e-9)
        for row in rows for kind in KINDS if row[kind] is not None
    )  # fmt: skip
    return [
        f"- A mixed plan is the fastest that was tried in {won} of {len(rows)} rows{most}.",
        f"- Plans that were tried and are faster than what `auto` took: {slower}.",
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench mixed", description=__doc__)
    parser.add_argument("--samples", default="2,8")
    parser.add_argument("--size", default="2,4", help="Devices of an island.")
    parser.add_argument("--across", default=",".join(ACROSS))
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--output", type=Path, help="File of the page; printed without.")
    options = parser.parse_args(arguments)
    tasks = [
        (samples, size, across)
        for size in options.size.split(",")
        for samples in options.samples.split(",")
        for across in options.across.split(",")
    ]
    command = " ".join(["python -m bench mixed", *arguments])
    made = functools.partial(page, command=command)
    write_page(measure, tasks, made, options.jobs, options.output)
