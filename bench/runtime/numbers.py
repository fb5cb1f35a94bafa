"""Plans of every kind beside the user's step on one device: numbers, peaks and limits.

    python -m bench numbers [--models gpt2,gan] [--ranks 2,3,4] [--kinds tofu,1f1b] [-o FOLDER]

Each model trains five steps by the user's own code, on one device, and by a plan of its captured
graph on gloo ranks. The step copies its gradients into buffers, so that ranks hold them like any
state; then all parameters, buffers, gradients and states of the optimizer are gathered whole and
compared.

- Differences are relative: losses, the largest of the five; of tensors the norm of the difference
  over the norm of all tensors of that sort. The limits are 1e-10 in double precision, 1e-4 in
  single, and no bit for plans that cut nothing (`Plan.keeps_bits`).
- The random generator has to end where one device leaves it.
- Peaks are measured in the first step and compared with the plan's, rank by rank. What a call holds
  while it runs, such as a whole draw of which a rank keeps a part, is planned for and cannot be
  measured: the same plan's peak without it is compared, too.
- Kinds with second calls or state on the host are planned under a limit under which the plan has
  them, if a few tries find one. Limits are enforced while they run; then a step runs whose worst
  rank has a byte less than it needs, which has to fail by name.
- Forced kinds have second calls, and half of the optimizer state on the host, whether a limit asks
  for them or not. Planning under limits takes a minute, and often finds another way.

A plan that is refused counts by its code. What has run is in the JSON beside the page, and is not
run again. Each kind and model with one number of ranks first, another one in each precision.
Seconds per case on an idle core, with what `auto` searches minutes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.common import RESULTS
from bench.common.forked import forked, world_of
from bench.runtime.equality import default_dtype
from bench.runtime.numbers_page import page
from bench.runtime.numbers_plans import KINDS, Kind, means_of, planned, tensor_peaks
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.gather import resident_names, whole_source
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_layout import STATE_KINDS
from testbed import small_models
from testbed.small_models import Entry

CPU = torch.device("cpu")
STEPS = 5
MODELS = {name: getattr(small_models, name)
          for name in ("gpt2", "llama", "resnet", "lstm", "moe", "gan")}  # fmt: skip
Row = dict[str, Any]


class Gradients(nn.Module):
    """A buffer for the gradient of each parameter of some models."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for i, parameter in enumerate(parameters):
            self.register_buffer(f"g{i}", torch.zeros_like(parameter))


def language_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Train by the model's logits: the library's own loss is in single precision, always."""
    optimizer.zero_grad()
    logits = model(input_ids=tokens).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss


def made(model: str, dtype: str) -> Entry:
    """Return a model's step, which leaves its gradients in buffers, and its arguments."""
    with default_dtype(getattr(torch, dtype)):
        step, args = MODELS[model]()
    step = language_step if step is small_models.language_step else step
    models = [arg for arg in args if isinstance(arg, nn.Module)]
    parameters = [each for model in models for each in model.parameters()]

    def kept_step(gradients: Gradients, *args: Any) -> Any:
        loss = step(*args)
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        trained = (each for model in models for each in model.parameters())
        for buffer, parameter in zip(gradients.buffers(), trained, strict=True):
            if parameter.grad is not None:
                buffer.copy_(parameter.grad)
        return loss

    return kept_step, (Gradients(parameters), *args)


@functools.cache
def captured(model: str, dtype: str) -> Graph:
    """Return the graph of a model's step."""
    step, args = made(model, dtype)
    return capture(step, *args)


def sort_of(name: str, kind: str) -> str:
    """Return what a tensor is: a gradient, or the kind of its op."""
    return "gradient" if name.startswith("gradients.") else kind


def one_device(model: str, dtype: str, path: Path) -> list[Any]:
    """Train by the user's own code in a process of its own; the final tensors go to a file.

    Returns:
        The losses, and a sum of the generator's state.
    """
    graph = captured(model, dtype)

    def body(_rank: int, _store: str) -> list[Any]:
        step, args = made(model, dtype)
        torch.manual_seed(99)
        losses = [loss_of(step(*args)).item() for _ in range(STEPS)]
        random = int(torch.get_rng_state().sum())
        sources = Binding(step, args, graph, torch.device("cpu")).sources
        kept = {op.name: sources[op.name].get().detach().clone()
                for op in graph.ops if op.kind in STATE_KINDS}  # fmt: skip
        torch.save(kept, path)
        return [losses, random]

    return forked(1, body)[0]


def compared(found: dict[str, torch.Tensor], path: Path, graph: Graph) -> dict[str, Any]:
    """Return the largest difference of each sort, and whether every bit is the same.

    Args:
        found: Whole tensors by name.
        path: File of those that one device ends with.
        graph: Of the step.
    """
    expected = torch.load(path)
    kinds = {op.name: sort_of(op.name, op.kind) for op in graph.ops if op.name in expected}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    worst: dict[str, float] = {}
    for sort in dict.fromkeys(kinds.values()):
        names = [name for name in kinds if kinds[name] == sort]
        norm = sum(float(expected[name].double().square().sum()) for name in names) ** 0.5
        off = max(float((found[name].double() - expected[name].double()).norm()) for name in names)
        worst[sort] = off / norm if norm else off
    bitwise = all(torch.equal(found[name], expected[name]) for name in expected)
    return {"worst": worst, "bitwise": bitwise}


def trained(
    model: str, dtype: str, plan: Plan, path: Path, limits: Sequence[int | None]
) -> list[Row]:
    """Train by a plan; return what each rank found, or its error.

    Args:
        model: Its name.
        dtype: Of its parameters.
        plan: Of its graph.
        path: File of what one device ends with.
        limits: Most bytes of tensors of each rank; None for unlimited.
    """
    graph = captured(model, dtype)
    program = Program(graph, plan)

    def body(rank: int, store: str) -> Row:
        world = world_of(rank, plan.num_devices, store)
        step, args = made(model, dtype)
        binding = Binding(step, args, graph, CPU)
        try:
            residents = program.residents(rank)
            executor = start(program, world, lambda: binding.live_values(residents))
            executor.limit_bytes = limits[rank]
            torch.manual_seed(99)
            batch = binding.example()
            losses = [float(executor.step(binding.batch_inputs(batch))) for _ in range(STEPS)]
            row: Row = {"losses": losses, "random": int(torch.get_rng_state().sum())}
            row["peak"] = executor.peak_bytes
            whole = {
                name: whole_source(world, program, executor.live_values, name).detach()
                for name in resident_names(program)
            }
        except PardnnError as error:
            return {"error": error.code, "why": error.message.splitlines()[0]}
        finally:
            world.close()
        return row | compared(whole, path, graph)

    return forked(plan.num_devices, body, limit_s=240.0)


def case(model: str, dtype: str, kind: Kind, ranks: int, folder: Path) -> Row:
    """Plan, run and compare one case.

    Args:
        model: Its name.
        dtype: Of its parameters.
        kind: How to plan.
        ranks: Number of ranks.
        folder: Of what one device ends with.
    """
    path = folder / f"{model}-{dtype}.pt"
    if not path.exists():
        expected = one_device(model, dtype, path)
        path.with_suffix(".json").write_text(json.dumps(expected))
    losses, random = json.loads(path.with_suffix(".json").read_text())
    graph, begin = captured(model, dtype), time.perf_counter()
    try:
        plan, limit = planned(graph, kind, ranks)
    except PardnnError as error:
        return {"refused": error.code, "why": error.message.splitlines()[0]}
    assert plan.predicted is not None
    row: Row = {
        "plan_s": time.perf_counter() - begin, "keeps_bits": plan.keeps_bits,
        "algorithm": plan.algorithm, "messages": len(plan.messages), "limit": limit,
        "second_calls": len(plan.recompute or ()), "on_host": len(plan.offload or ()),
        "devices": sum(1 for order in plan.order if order), "predicted": plan.predicted.peak_bytes,
    }  # fmt: skip
    row["means"] = means_of(plan)
    row["predicted_tensors"] = tensor_peaks(graph, plan)
    found = trained(model, dtype, plan, path, [limit] * ranks)
    row["run_s"] = time.perf_counter() - begin - row["plan_s"]
    if errors := sorted({f"{each['error']} {each['why']}" for each in found if "error" in each}):
        return row | {"error": "; ".join(errors)}
    peaks = row["measured"] = [each["peak"] for each in found]
    off = max(abs(a - b) / abs(b) for each in found
              for a, b in zip(each["losses"], losses, strict=True))  # fmt: skip
    row["worst"] = {"loss": off} | {
        sort: max(each["worst"][sort] for each in found) for sort in found[0]["worst"]
    }
    row["bitwise"] = off == 0 and all(each["bitwise"] for each in found)
    row["same_random"] = all(each["random"] == random for each in found)
    if limit is not None:
        fullest = peaks.index(max(peaks))
        less = [peak - 1 if rank == fullest else None for rank, peak in enumerate(peaks)]
        ends = trained(model, dtype, plan, path, less)
        row["byte_less"] = ", ".join(sorted({each.get("error", "it ran") for each in ends}))
    return row


def write_page(path: Path, report: Row) -> None:
    """Write the page, whose notes stay as they are."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    _, title, notes = before.partition("\n## Notes\n")
    path.write_text(page(report) + title + notes, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what has not run yet, and write the page after each case."""
    parser = argparse.ArgumentParser(prog="python -m bench numbers", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--kinds", default=";".join(KINDS), help="separated by semicolons")
    parser.add_argument("--dtypes", default="float64,float32")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--date", default=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
                        help="of the page that goes on")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="after which no case starts")  # fmt: skip
    options = parser.parse_args(arguments)
    ends = time.perf_counter() + options.seconds
    torch.set_num_threads(1)  # before anything starts threads: ranks are forked
    path = options.output / f"{options.date}_numbers.json"
    report: Row = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    report |= {"date": options.date, "machine": f"{platform.machine()}, Python "
               f"{platform.python_version()}, torch {torch.__version__}, gloo"}  # fmt: skip
    ranks_of = [int(ranks) for ranks in options.ranks.split(",")]
    todo = [
        (kind, model, ranks, dtype)
        for turn in range(len(ranks_of))
        for j, model in enumerate(options.models.split(","))
        for k, dtype in enumerate(options.dtypes.split(","))
        for i, kind in enumerate(options.kinds.split(";"))
        if (ranks := max(ranks_of[(i + j + k + turn) % len(ranks_of)], KINDS[kind].least_ranks))
        in ranks_of
    ]
    with tempfile.TemporaryDirectory() as folder:
        for kind, model, ranks, dtype in todo:
            key = f"{kind} | {model} | {ranks} | {dtype}"
            begin = time.perf_counter()
            if key in report["rows"] or begin > ends:
                continue
            try:
                row: Row = case(model, dtype, KINDS[kind], ranks, Path(folder))
            except Exception as error:
                row = {"raw": f"{type(error).__name__}: {error}"}
            row["seconds"] = time.perf_counter() - begin
            report["rows"][key] = row
            path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            write_page(path.with_suffix(".md"), report)
            sys.stderr.write(f"{key}: {row}\n")


if __name__ == "__main__":
    main()
