"""Capture: seconds per op and where they go, as a dated page of Markdown.

`python -m bench capture [--ops 100000] [-o PAGE]` captures models of the zoo and a stacked LSTM,
unrolled to about that many ops. Times are CPU seconds of this process, the least of `--repeat`
captures; the parts are those of that capture, timed by wrapping the functions they stand for.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.common import RESULTS
from pardnn.backends.entry_point import load_factory
from pardnn.backends.torch.capture import capture as capturing
from pardnn.backends.torch.make_step import make_step
from pardnn.graph import build
from pardnn.graph.file import graph_to_json
from pardnn.graph.ir import Graph
from testbed.kept_graphs import ZOO

#: Part of the table -> (module, functions). `run_traced` is called once per pass.
PARTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "steps run": (capturing, ("run_traced",)),
    "walks, placeholders": (
        capturing,
        ("walk_objects", "insert_placeholders", "changes", "restore"),
    ),
    "order, names": (capturing, ("live_calls", "add_order_edges", "name_calls")),
    "comparison": (capturing, ("traces_differ",)),
    "ops written": (capturing, ("graph_of",)),
    "checks, arrays": (build, ("check_ops", "build_arrays")),
}
#: An unrolled cell of an LSTM and its share of backward pass and update, ops.
_OPS_PER_CELL = 53
_LAYERS = 20


class StackedLSTM(nn.Module):
    """Cells in layers, unrolled by hand over the time steps."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        """Make a language model of `layers` layers."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList([nn.LSTMCell(width, width) for _ in range(layers)])
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after each token."""
        x = self.embedding(tokens)
        zeros = x.new_zeros(x.shape[0], x.shape[2])
        states = [(zeros, zeros) for _ in self.cells]
        outputs = []
        for t in range(x.shape[1]):
            h = x[:, t]
            for i, cell in enumerate(self.cells):
                states[i] = cell(h, states[i])
                h = states[i][0]
            outputs.append(h)
        return self.out(torch.stack(outputs, 1))


def lstm(num_ops: int) -> Callable[[], Any]:
    """Return a factory of a stacked LSTM whose step has about `num_ops` ops."""

    def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    def factory() -> Any:
        torch.manual_seed(0)
        model = StackedLSTM(_LAYERS, 64, 1000)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        length = max(1, num_ops // (_OPS_PER_CELL * _LAYERS))
        return step, (model, optimizer, torch.randint(1000, (8, length + 1)))

    return factory


@contextlib.contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Add the CPU seconds of each part to `spent` while the context lasts."""

    def wrapped(part: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return real(*args, **kwargs)
            finally:
                spent[part] = spent.get(part, 0.0) + time.process_time() - started

        return call

    with contextlib.ExitStack() as stack:
        for part, (module, names) in PARTS.items():
            for name in names:
                replacement = wrapped(part, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def measure(name: str, factory: Callable[[], Any], repeat: int) -> dict[str, Any]:
    """Capture a model `repeat` times and return the figures of the fastest.

    Args:
        name: Of the row.
        factory: Makes the step and its arguments.
        repeat: Number of captures.
    """
    step, args, _ = make_step(factory)
    best: dict[str, Any] = {}
    content = b""
    file_s = float("inf")
    for _ in range(repeat):
        spent: dict[str, float] = {}
        started = time.process_time()
        with timed(spent):
            graph: Graph = capturing.capture(step, *args)
        total = time.process_time() - started
        spent["ops written"] -= spent["checks, arrays"]  # called from there
        if not best or total < best["seconds"]:
            best = {"model": name, "ops": len(graph.ops), "seconds": total, "parts": spent}
        started = time.process_time()
        content = graph_to_json(graph)
        file_s = min(file_s, time.process_time() - started)
        del graph
    return best | {"file_s": file_s, "file_bytes": len(content)}


def page(rows: Sequence[dict[str, Any]], command: str) -> str:
    """Return the figures as Markdown."""
    names = list(PARTS)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    head = ["model", "ops", "s", "ms an op", *names, "rest", "file, s", "file, MB"]
    about = (
        f"`{command}`; {platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, one thread. CPU seconds; the step runs three times in each capture. "
        "The columns after `ms an op` are shares of the time of a capture. "
        f"Largest resident size of the process: {memory:.0f} MiB. Load of the machine at the end, "
        f"which inflates CPU seconds: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores."
    )
    lines = [
        f"# Capture, {datetime.date.today()}",
        "",
        about,
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    for row in rows:
        shares = [row["parts"].get(name, 0.0) / row["seconds"] for name in names]
        cells = [row["model"], row["ops"], f"{row['seconds']:.2f}"]
        cells.append(f"{1e3 * row['seconds'] / row['ops']:.3f}")
        cells += [f"{100 * share:.0f} %" for share in [*shares, 1 - sum(shares)]]
        cells += [f"{row['file_s']:.2f}", f"{row['file_bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench capture", description=__doc__)
    parser.add_argument("--ops", default="11000,100000", help="sizes of the unrolled LSTM")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    zoo = {
        name: load_factory(f"{ZOO / file}.py:{function}")
        for name, file, function in (
            ("gpt2", "gpt2", "gpt2"),
            ("rnn_4_8k", "rnn", "rnn_4_8k"),
            ("wresnet_50_4", "wresnet", "wresnet_50_4"),
        )
    }
    rows = [measure(name, factory, options.repeat) for name, factory in zoo.items()]
    rows += [
        measure(f"LSTM, {_LAYERS} layers", lstm(size), options.repeat)
        for size in map(int, options.ops.split(","))
    ]
    command = " ".join(["python -m bench capture", *(arguments or [])])
    text = page(rows, command)
    output = options.output or RESULTS / f"{datetime.date.today()}_capture.md"
    output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
