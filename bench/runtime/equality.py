"""Sharded training beside one device: losses, gradients, parameters and memory.

    python -m bench tofu-equality [--models gpt2,rnn] [--ranks 2,3] [--dtypes float64] [--out FILE]

Each model trains five steps on one device and, by a plan of `tofu` (objective bytes: every tensor
cut), on gloo ranks. A gradient is copied into a buffer inside of the step, so that the ranks hold
their parts of it. This adds ops to the graph, so in single precision memory is measured in a run
without; in double precision the one run does for all.

- losses: largest relative difference over the steps;
- gradients: largest norm of a gradient's difference, over the norm of all gradients of that step;
- parameters: the same after five steps, over the norm of all parameters;
- peak: measured over predicted bytes, and measured over the issue's bound, 1.15 x one device's
  peak / k + 2 x the largest fetched region; worst rank.
"""

import argparse
import datetime
import math
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bench.common.forked import forked, world_of
from pardnn.api.planning import plan as make_plan
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.memory import peak_bytes
from pardnn.plan.partitioned_graph import FETCH
from pardnn.plan.plan import Plan, plan_arrays
from pardnn.plan.state_layout import shard_of
from testbed.small_models import MODELS, Entry

STEPS = 5


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Gradients(nn.Module):
    """A buffer for the gradient of each parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for i, parameter in enumerate(model.parameters()):
            self.register_buffer(f"g{i}", torch.zeros_like(parameter))


def keeping_gradients(entry: Entry) -> Entry:
    """Return the step that leaves its gradients in buffers."""
    step, (model, *rest) = entry

    def kept_step(gradients: Gradients, model: nn.Module, *args: Any) -> Any:
        loss = step(model, *args)
        for buffer, parameter in zip(gradients.buffers(), model.parameters(), strict=True):
            if parameter.grad is not None:
                buffer.copy_(parameter.grad)
        return loss

    return kept_step, (Gradients(model), model, *rest)


class Case(NamedTuple):
    """One model in one precision."""

    name: str
    dtype: torch.dtype
    keeps: bool

    def make(self) -> Entry:
        """Return step and arguments."""
        with default_dtype(self.dtype):
            entry = MODELS[self.name]()
            return keeping_gradients(entry) if self.keeps else entry


def captured(case: Case) -> Graph:
    step, args = case.make()
    with default_dtype(case.dtype):
        return capture(step, *args)


def one_device(case: Case, path: Path) -> list[float]:
    """Train on one device in a process of its own; the final values go to a file."""

    def body(_rank: int, _store: str) -> list[float]:
        with default_dtype(case.dtype):
            step, args = case.make()
            torch.manual_seed(99)
            losses = [float(loss_of(step(*args)).detach()) for _ in range(STEPS)]
            finals = (
                {f"gradients.{k}": v for k, v in args[0].named_buffers()}
                | {f"model.{k}": v for k, v in args[1].named_parameters()}
                if case.keeps
                else {}
            )
            np.savez(path, **{k: v.detach().numpy() for k, v in finals.items()})
        return losses

    return forked(1, body)[0]


class Found(NamedTuple):
    """What a run on ranks found; lists are per rank."""

    losses: list[float]
    squares: list[dict[str, float]]
    measured: list[int]
    predicted: list[int]
    step_s: list[float]


def on_ranks(case: Case, graph: Graph, plan: Plan, path: Path) -> Found:
    """Train by a plan; every rank compares its parts with one device's final values.

    Args:
        case: What is trained.
        graph: Its captured step.
        plan: Of the graph.
        path: File of one device's final values.
    """
    program = Program(graph, plan)

    def body(rank: int, store: str) -> list[Any]:
        with default_dtype(case.dtype):
            step, args = case.make()
            world = world_of(rank, plan.num_devices, store)
            binding = Binding(step, args, graph, torch.device("cpu"))
            mine = program.residents(rank)
            values = binding.live_values(mine)
            executor = start(program, world, lambda: values)
            torch.manual_seed(99)
            batch = binding.example()
            losses = [float(executor.step(binding.batch_inputs(batch))) for _ in range(STEPS)]
            squares = {}
            with np.load(path, allow_pickle=False) as expected:
                for op in mine:
                    of, box = shard_of(op, program.sources)
                    if of in expected:
                        whole = torch.from_numpy(expected[of])
                        part = whole if box is None else box_view(whole, box)
                        difference = (values[op.name].detach() - part).double()
                        share = 1.0 if box is not None else 1.0 / plan.num_devices
                        squares[of] = share * float(difference.square().sum())
            step_s = sorted(executor.step_s)[len(executor.step_s) // 2]
            executor.world.close()
        return [losses, squares, executor.peak_bytes, step_s]

    rows = forked(plan.num_devices, body)
    assert all(row[0] == rows[0][0] for row in rows), "ranks return other losses"
    columns = list(zip(*rows, strict=True))
    return Found(rows[0][0], list(columns[1]), list(columns[2]), program.peaks, list(columns[3]))


def tofu(graph: Graph, num_devices: int) -> Plan:
    """Return a plan that cuts every tensor."""
    cluster = Cluster.uniform(num_devices)
    return make_plan(graph, cluster, algorithm="tofu", objective="bytes", costs="cpu")


def single(graph: Graph) -> Plan:
    """Return the plan for one device, in the order of the step."""
    order = tuple(graph.ops[i].name for i in graph.arrays.topological.tolist())
    return Plan(placement=dict.fromkeys(order, 0), order=(order,))


def relative(squares: list[dict[str, float]], path: Path, prefix: str) -> float:
    """Return the largest difference of a tensor over the norm of all of them.

    Args:
        squares: By rank and tensor, the squared norm of the difference.
        path: File of one device's final values.
        prefix: Of the names of the tensors.
    """
    with np.load(path, allow_pickle=False) as expected:
        names = [name for name in expected if name.startswith(prefix)]
        norm = math.sqrt(sum(float(np.square(expected[name], dtype=np.float64).sum())
                             for name in names))  # fmt: skip
    worst = max(sum(rank.get(name, 0.0) for rank in squares) for name in names)
    return math.sqrt(worst) / norm


def loss_difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference over the steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


class Row(NamedTuple):
    """One line of the table."""

    model: str
    dtype: str
    ranks: int
    losses: float
    gradients: float
    parameters: float
    peak: int
    measured_by_predicted: float
    one_device: int
    largest_fetch: int
    by_bound: float
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether losses and gradients are within the tolerance of their precision."""
        limit = 1e-10 if self.dtype == "float64" else 1e-4
        return max(self.losses, self.gradients) <= limit


def measure(name: str, dtype: torch.dtype, ranks: list[int]) -> Iterator[Row]:
    """Compare one model on several numbers of ranks with one device.

    Args:
        name: Of the model.
        dtype: Of its parameters.
        ranks: Numbers of ranks.
    """
    plain, kept = Case(name, dtype, False), Case(name, dtype, True)
    graphs = captured(plain), captured(kept)
    metered = graphs[dtype == torch.float64]
    alone = peak_bytes(metered, plan_arrays(metered, single(metered)))[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.npz"
        empty = Path(folder) / "none.npz"
        np.savez(empty)
        expected = one_device(kept, path)
        for size in ranks:
            begun = time.perf_counter()
            plan = tofu(graphs[1], size)
            found = again = on_ranks(kept, graphs[1], plan, path)
            if metered is graphs[0]:
                plan = tofu(graphs[0], size)
                again = on_ranks(plain, graphs[0], plan, empty)
            assert plan.partition is not None
            fetched = [t.bytes for op in plan.partition.ops if op.kind == FETCH for t in op.outputs]
            largest = max(fetched, default=0)
            bound = 1.15 * alone / size + 2 * largest
            off = [m / p for m, p in zip(again.measured, again.predicted, strict=True)]
            yield Row(
                name, str(dtype).removeprefix("torch."), size,
                max(loss_difference(found.losses, expected),
                    loss_difference(again.losses, expected)),
                relative(found.squares, path, "gradients."),
                relative(found.squares, path, "model."),
                max(again.measured), max(off, key=lambda x: abs(x - 1)), alone, largest,
                max(again.measured) / bound, time.perf_counter() - begun,
            )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    head = (
        "model", "dtype", "ranks", "losses", "gradients", "parameters", "peak bytes, worst rank",
        "measured / predicted", "one device", "largest fetch", "peak / bound", "holds",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for row in rows:
        holds = row.is_equal and row.by_bound <= 1 and abs(row.measured_by_predicted - 1) <= 0.1
        lines.append(
            f"| {row.model} | {row.dtype} | {row.ranks} | {row.losses:.1e} | {row.gradients:.1e} | "
            f"{row.parameters:.1e} | {row.peak} | {row.measured_by_predicted:.3f} | "
            f"{row.one_device} | {row.largest_fetch} | {row.by_bound:.2f} | "
            f"{'yes' if holds else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench tofu-equality")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="2,3,4,6")
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in options.models.split(","):
        for dtype in options.dtypes.split(","):
            sizes = [int(size) for size in options.ranks.split(",")]
            for row in measure(name, getattr(torch, dtype), sizes):
                rows.append(row)
                sys.stderr.write(f"{row}\n")
    text = table(rows)
    sys.stdout.write(text)
    if options.out is not None:
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        options.out.write_text(
            f"# Sharded training beside one device\n\n{date}, {platform.machine()}, "
            f"torch {torch.__version__}, gloo ranks with one thread each.\n"
            f"`python -m bench tofu-equality {' '.join(arguments)}`\n\n```\n"
            + (__doc__ or "").split("\n\n", 2)[2].strip()
            + f"\n```\n\n{text}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
