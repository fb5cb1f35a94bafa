"""What a call of `parallelize`'s step costs beside the step itself: guards, and the ranks' ring.

`python -m bench guards [--layers 12] [--calls 200] [-o PAGE]` trains a GPT-2 of narrow layers, so
that its modules, parameters and guarded values are those of the real one, a ResNet of 50 layers and
an MLP, on two gloo ranks with two captured graphs each (training and evaluation mode), and times
the parts of each call on rank 0. CPU seconds of the thread.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
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
import transformers

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
#: Those that compare the values and tensors that a graph took for granted; the others are what
#: binds a batch, and what keeps ranks together.
GUARDS = ("new data looked for", "values compared")


@contextlib.contextmanager
def timed(spent: dict[str, list[float]]) -> Iterator[None]:
    """Append the CPU seconds of each call of each part to `spent` while the context lasts."""

    def wrapped(part: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return real(*args, **kwargs)
            finally:
                spent.setdefault(part, []).append(time.thread_time() - started - clock_s)

        return call

    clock_s = _clock_s()
    with contextlib.ExitStack() as stack:
        for part, (holder, name) in PARTS.items():
            stack.enter_context(
                mock.patch.object(holder, name, wrapped(part, getattr(holder, name)))
            )
        yield


def _clock_s() -> float:
    """Return the least seconds between two readings of the clock, which is a system call."""
    stamps = [time.thread_time() for _ in range(1000)]
    return min(later - earlier for earlier, later in itertools.pairwise(stamps))


Made = tuple[Callable[..., Any], tuple[Any, ...]]


def model_of(layers: int) -> Made:
    """Return a step, model, optimizer and batch of a narrow GPT-2.

    Args:
        layers: Number of its blocks.
    """
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = gpt2.network(n_layer=layers, n_embd=16, n_head=2, n_positions=8, vocab_size=50, **ends)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return gpt2.step, (model, optimizer, torch.randint(50, (2, 8)))


def _classifier_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def resnet() -> Made:
    """Return the same of a ResNet of 50 layers with momentum, of small images."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 64, 128], num_labels=10
    )
    model = torch.nn.Sequential(
        transformers.ResNetModel(config), _Pooled(), torch.nn.Flatten(), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return _classifier_step, (model, optimizer, torch.randn(2, 3, 32, 32))


class _Pooled(torch.nn.Module):
    def forward(self, output: Any) -> torch.Tensor:
        """Return what a model of transformers has pooled."""
        return output.pooler_output


def mlp() -> Made:
    """Return the same of a perceptron of four layers with AdamW."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) if i % 2 == 0 else torch.nn.ReLU() for i in range(7)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return _classifier_step, (model, optimizer, torch.randn(8, 16))


def on_rank(rank: int, store: str, made: Callable[[], Made], calls: int) -> dict[str, list[float]]:
    """Return the seconds of each part of each call on one rank."""
    process_group(rank, RANKS, store)
    step, args = made()
    model, _, batch = args
    fast = pardnn.parallelize(step, *args, algorithm="round-robin", costs="v100", timeout=120)
    for training in (True, False, True):
        model.train(training)
        fast(batch)
    spent: dict[str, list[float]] = {}
    with timed(spent):
        for _ in range(calls):
            fast(batch)
    fast.close()
    return spent


def page(found: dict[str, dict[str, list[float]]], calls: int, command: str) -> str:
    """Return the figures as Markdown.

    Args:
        found: Seconds of each call, by model and part.
        calls: How many.
        command: That measured them.
    """
    about = (
        f"`{command}`; {platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {RANKS} gloo ranks on {os.cpu_count()} cores, load at the end "
        f"{os.getloadavg()[0]:.1f}. Two captured graphs each; CPU time of rank 0 in {calls} calls, "
        "microseconds, least and median, without what reading the clock takes. Other work on the "
        "cores inflates it: the least is nearest to that of a machine of one's own."
    )
    lines = [f"# What a call costs beside the step, {datetime.date.today()}", "", about, ""]
    lines += ["| part | " + " | ".join(found) + " |", "| --- |" + " ---: |" * len(found)]
    kinds = (min, statistics.median)
    for part in PARTS:
        cells = (
            ", ".join(f"{1e6 * kind(spent[part]):.0f}" for kind in kinds) if part in spent else "-"
            for spent in found.values()
        )
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    for name, parts in (("guards", GUARDS), ("all", tuple(PARTS))):
        totals = [
            [sum(kind(spent[part]) for part in parts if part in spent) for kind in kinds]
            for spent in found.values()
        ]
        cells = (", ".join(f"{1e6 * total:.0f}" for total in each) for each in totals)
        lines.append(f"| **{name}** | " + " | ".join(f"**{cell}**" for cell in cells) + " |")
        cells = (", ".join(f"{100 * total / STEP_S:.2f}" for total in each) for each in totals)
        lines.append(f"| % of a step of {1e3 * STEP_S:.0f} ms | " + " | ".join(cells) + " |")
    lines += ["", f"Asked: at most {100 * SHARE:.0f} %. Guards: {' and '.join(GUARDS)}."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench guards", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    models: dict[str, Callable[[], Made]] = {
        f"GPT-2, {options.layers} layers": lambda: model_of(options.layers),
        "ResNet-50": resnet,
        "MLP, 4 layers": mlp,
    }
    found = {
        name: forked(RANKS, functools.partial(on_rank, made=made, calls=options.calls))[0]
        for name, made in models.items()
    }
    command = " ".join(["python -m bench guards", *(arguments or [])])
    text = page(found, options.calls, command)
    output = options.output or RESULTS / f"{datetime.date.today()}_guards.md"
    output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
