"""What a call of `parallelize`'s step costs beside the step itself: guards, and the ranks' ring.

`python -m bench guards [--layers 12] [--calls 200] [-o PAGE]` trains a GPT-2 of narrow layers, so
that its modules, parameters and guarded values are those of the real one, on two gloo ranks with
two captured graphs (training and evaluation mode), and times the parts of each call on rank 0.
Medians; CPU seconds of the thread, but for the ring, whose seconds are those of the clock with both
ranks in step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pardnn
from bench.common import RESULTS
from bench.common.forked import forked, process_group
from pardnn.backends.torch.parallelize import Parallel
from pardnn.backends.torch.runtime.agreement import Agreement
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.session import variants
from pardnn.backends.torch.session.variants import Variants
from testbed.zoo import gpt2

#: Step that a call is compared with, seconds, and the share of it that guards may take.
STEP_S, SHARE = 20e-3, 0.01
RANKS = 2
#: Part of the table -> (object, method).
PARTS: dict[str, tuple[Any, str]] = {
    "whole models taken back": (Parallel, "_begin"),
    "new data looked for": (Variants, "follow_data"),
    "batch read": (Binding, "read"),
    "values compared": (Variants, "_choose"),
    "graph agreed on": (Variants, "_agree"),
    "batch compared": (variants, "check_same_batch"),
    "inputs gathered": (Binding, "batch_inputs"),
    "numbers written back": (Binding, "end_step"),
    "ring: told": (Agreement, "post"),
    "ring: compared": (Agreement, "check"),
}


@contextlib.contextmanager
def timed(spent: dict[str, list[float]]) -> Iterator[None]:
    """Append the CPU seconds of each call of each part to `spent` while the context lasts."""

    def wrapped(part: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return real(*args, **kwargs)
            finally:
                spent.setdefault(part, []).append(time.thread_time() - started)

        return call

    with contextlib.ExitStack() as stack:
        for part, (holder, name) in PARTS.items():
            stack.enter_context(
                mock.patch.object(holder, name, wrapped(part, getattr(holder, name)))
            )
        yield


def model_of(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step, model, optimizer and batch of a narrow GPT-2.

    Args:
        layers: Number of its blocks.
    """
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = gpt2.network(n_layer=layers, n_embd=16, n_head=2, n_positions=8, vocab_size=50, **ends)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return gpt2.step, (model, optimizer, torch.randint(50, (2, 8)))


def on_rank(rank: int, store: str, layers: int, calls: int) -> dict[str, list[float]]:
    """Return the seconds of each part of each call on one rank."""
    process_group(rank, RANKS, store)
    step, args = model_of(layers)
    model, _, tokens = args
    fast = pardnn.parallelize(step, *args, algorithm="round-robin", costs="v100", timeout=120)
    for training in (True, False, True):
        model.train(training)
        fast(tokens)
    spent: dict[str, list[float]] = {}
    with timed(spent):
        for _ in range(calls):
            fast(tokens)
    fast.close()
    return spent


def page(spent: dict[str, list[float]], layers: int, calls: int, command: str) -> str:
    """Return the figures as Markdown."""
    about = (
        f"`{command}`; {platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {RANKS} gloo ranks on {os.cpu_count()} cores, load at the end "
        f"{os.getloadavg()[0]:.1f}. A GPT-2 of {layers} layers, two captured graphs; CPU time of "
        f"rank 0 in {calls} calls. Other work on the cores inflates it: the least is nearest to "
        "that of a machine of one's own."
    )
    lines = [f"# What a call costs beside the step, {datetime.date.today()}", "", about, ""]
    lines += ["| part | us a call, least | median |", "| --- | ---: | ---: |"]
    least, median = 0.0, 0.0
    for part, seconds in spent.items():
        least, median = least + min(seconds), median + statistics.median(seconds)
        lines.append(
            f"| {part} | {1e6 * min(seconds):.0f} | {1e6 * statistics.median(seconds):.0f} |"
        )
    shares = [f"{100 * total / STEP_S:.2f} %" for total in (least, median)]
    lines += [
        f"| **all** | **{1e6 * least:.0f}** | **{1e6 * median:.0f}** |",
        f"| of a step of {1e3 * STEP_S:.0f} ms | {shares[0]} | {shares[1]} |",
        "",
        f"Asked: at most {100 * SHARE:.0f} %.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench guards", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    def body(rank: int, store: str) -> dict[str, list[float]]:
        return on_rank(rank, store, options.layers, options.calls)

    command = " ".join(["python -m bench guards", *(arguments or [])])
    text = page(forked(RANKS, body)[0], options.layers, options.calls, command)
    output = options.output or RESULTS / f"{datetime.date.today()}_guards.md"
    output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
