"""Whether mixed plans that are predicted to be faster are measured to be.

    python -m bench mixed-ranks [--models NAMES] [--ranks 2,4] [--rounds 8] [--output FILE]

torchrun runs the ranks on two nodes with a slow link between them, network namespaces of this
machine (`testbed/two_nodes.py`; needs root). Each step is planned for the links and the costs that
were measured at the start: cut alone (`tofu`), placed alone (`auto-whole`), both with the batch
whole, mixed (`auto` with `microbatches=auto`), and mixed by the objective `period`. Steps of all
ways are taken in turn, twice: the loss of each step read at once, and those of `ROW` steps read
after the last. The first should take a makespan, the second a period.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.runtime.fidelity_models import hf_gpt2, hf_llama
from bench.runtime.head_models import Entry, faces, sentences, speech
from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import cluster_to_dict
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.planner.options import PlanOptions
from testbed.small_models import Block, classify_step

#: Steps whose losses are read together.
ROW = 5
WAYS = {
    "cut": PlanOptions(algorithm="tofu", costs="measured", reserve=0.0),
    "placed": PlanOptions(algorithm="auto-whole", costs="measured", reserve=0.0),
    "mixed": PlanOptions(microbatches="auto", costs="measured", reserve=0.0),
    "period": PlanOptions(
        microbatches="auto", costs="measured", reserve=0.0, objective="period"
    ),
}  # fmt: skip


def mlp() -> Entry:
    """Return a step of eight linear layers of 768, 256 samples."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(768, 768), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(768, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return classify_step, (model, optimizer, torch.randn(256, 768), torch.randint(64, (256,)))


def frozen(layers: int, trained: int) -> Entry:
    """Return a step of layers that are not trained, and of some behind them that are."""
    torch.manual_seed(0)
    linear = [nn.Linear(768, 768) for _ in range(layers + trained)]
    for layer in linear[:layers]:
        layer.requires_grad_(False)
    stack = [module for layer in linear for module in (layer, nn.GELU())]
    model = nn.Sequential(*stack, nn.Linear(768, 64))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return classify_step, (model, optimizer, torch.randn(256, 768), torch.randint(64, (256,)))


def resnet() -> Entry:
    """Return a step of a residual network without batch norm, whose batch may be cut freely."""
    torch.manual_seed(0)

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        found = Block(inputs, outputs, stride)
        for i, layer in enumerate(found.convolutions):
            if isinstance(layer, nn.BatchNorm2d):
                found.convolutions[i] = nn.GroupNorm(8, layer.num_features)
        return found

    widths = (128, 128, 256, 256, 512, 512)
    blocks = [block(a, b, 2 if a != b else 1) for a, b in zip((64, *widths), widths, strict=False)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(512, 64),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return classify_step, (model, optimizer, torch.randn(16, 3, 16, 16), torch.randint(64, (16,)))


MODELS: dict[str, Callable[[], Entry]] = {
    "gpt2": lambda: hf_gpt2(16, layers=6, width=256, words=512, length=32),
    "llama": lambda: hf_llama(16, layers=6, width=256, words=512, length=32),
    "mlp": mlp, "resnet": resnet,
    "faces": faces, "sentences": sentences, "speech": speech,
    "sentences-6": lambda: sentences(6), "speech-4": lambda: speech(4),
    "frozen-8": lambda: frozen(8, 3), "frozen-12": lambda: frozen(12, 4),
}  # fmt: skip


def planned(way: str, options: PlanOptions, found: list[Any], kept: dict[str, Any]) -> Any:
    """Return what plans in a way on rank 0, and keeps what is predicted.

    Args:
        way: Its name.
        options: Of planning.
        found: The measured cluster.
        kept: Takes the predictions.
    """

    def decide(graph: Graph, _: int, state: StateInPlace | None) -> Plan:
        from pardnn.api.simulate import simulate
        from pardnn.planner.next_plan import next_plan

        begin = time.perf_counter()
        plan = next_plan(graph, found[0].cluster, options, None, state)
        named = dataclasses.replace(plan, cluster=found[0].cluster, checksum=None)
        result = simulate(graph, named, costs="measured")
        cut_in = len(plan.pieces.points) - 1 if plan.pieces else 1
        kept[way] = {
            "algorithm": plan.algorithm, "pieces": cut_in,
            "makespan_s": result.makespan_s, "period_s": result.period_s,
            "bytes": plan.predicted.transfer_bytes if plan.predicted else 0,
            "devices": sum(1 for order in plan.order if order),
            "plan_s": time.perf_counter() - begin,
        }  # fmt: skip
        return plan

    return decide


def rank_main(name: str, rounds: int) -> None:
    """Run as one of the ranks; rank 0 prints what was measured, as JSON."""
    torch.set_num_threads(1)
    found: list[Any] = []
    steps: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for way, options in WAYS.items():
        step, args = MODELS[name]()
        batch = tuple(each for each in args if isinstance(each, torch.Tensor))
        fast = parallelize(
            step, *args, decide=planned(way, options, found, kept), timeout=300, device="cpu",
            on_cluster=found.append,
        )  # fmt: skip
        steps[way] = lambda fast=fast, batch=batch: fast(*batch)
    is_first = dist.get_rank() == 0
    taken: dict[str, list[float]] = {way: [] for way in steps}
    in_a_row: dict[str, list[float]] = {way: [] for way in steps}
    losses: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(rounds + 1):
        for way, take in steps.items():
            torch.manual_seed(number)  # dropout
            dist.barrier()
            start = time.perf_counter()
            for _ in range(ROW):
                losses[way].append(take().item())
            taken[way].append((time.perf_counter() - start) / ROW)
            dist.barrier()
            start = time.perf_counter()
            losses[way] += [loss.item() for loss in [take() for _ in range(ROW)]]
            in_a_row[way].append((time.perf_counter() - start) / ROW)
    if is_first:
        rate = found[0].between or found[0].within
        first, *others = (row[:ROW] for row in losses.values())
        off = max(
            (abs(a - b) / abs(b) for row in others for a, b in zip(row, first, strict=True)),
            default=0.0,
        )
        told = {"plans": kept, "link": [rate.bandwidth, rate.latency], "losses_differ": off}
        told["sharing"] = cluster_to_dict(found[0].cluster).get("sharing")
        told["taken_s"] = {way: row[1:] for way, row in taken.items()}
        told["in_a_row_s"] = {way: row[1:] for way, row in in_a_row.items()}
        sys.stdout.write(json.dumps(told) + "\n")


def gain(plans: dict[str, Any], number: str) -> float:
    """Return how many times as fast the mixed plan is as the better pure one, as predicted."""
    return min(plans[way][number] for way in ("cut", "placed")) / plans["mixed"][number]


def gain_by_period(found: dict[str, Any]) -> tuple[float, float] | None:
    """Return how many times shorter the period is by that objective than by any other way.

    As predicted, and as measured; None where it is predicted to be less than 1.1 times.
    """
    plans, row = found["plans"], found["in_a_row_s"]
    others = [way for way in plans if way != "period" and plans[way]["period_s"]]
    if "period" not in plans or not others:
        return None
    first = min(others, key=lambda way: plans[way]["period_s"])
    predicted = plans[first]["period_s"] / plans["period"]["period_s"]
    seen = min(statistics.median(row[way]) for way in others) / statistics.median(row["period"])
    return (predicted, seen) if predicted >= 1.1 else None


def rows_of(found: dict[str, Any]) -> list[str]:
    """Return a model's rows of the page: one a way."""
    lines, name = [], f"{found['model']}, {found['ranks']} ranks"
    for way, plan in found["plans"].items():
        pieces = f" in {plan['pieces']} pieces" if plan["pieces"] > 1 else ""
        numbers = [plan["makespan_s"], statistics.median(found["taken_s"][way])]
        numbers += [min(found["taken_s"][way]), plan["period_s"] or 0.0]
        numbers += [statistics.median(found["in_a_row_s"][way]), min(found["in_a_row_s"][way])]
        shown = " | ".join(f"{1e3 * number:.1f}" for number in numbers)
        sent = f"{plan['devices']} | {plan['bytes'] / 1e6:.1f}"
        lines.append(f"| {name} | {way}: `{plan['algorithm']}`{pieces} | {sent} | {shown} |")
    return lines


def verdicts(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return what holds of the claims: where a plan is predicted to be 10 % faster, it is."""
    lines, right, asked = [], [0, 0], [0, 0]
    told = [0, 0]
    for found in reports:
        plans, taken, row = found["plans"], found["taken_s"], found["in_a_row_s"]
        name = f"{found['model']} on {found['ranks']} ranks"
        if (predicted := gain(plans, "makespan_s")) >= 1.1:
            middle = {way: statistics.median(seconds) for way, seconds in taken.items()}
            better = min(("cut", "placed"), key=middle.__getitem__)
            seen = middle[better] / middle["mixed"]
            told[0] += 1
            right[0] += seen > 1
            lines.append(f"- {name}: mixed is {seen:.2f} times as fast as {better}, "
                         f"{predicted:.2f} predicted.")  # fmt: skip
        for way, plan in plans.items():
            predicted = plan["makespan_s"] / plan["period_s"] if plan["period_s"] else 1.0
            if predicted >= 1.1:
                seen = statistics.median(taken[way]) / statistics.median(row[way])
                told[1] += 1
                right[1] += seen > 1
                lines.append(f"- {name}, {way}: steps in a row are {seen:.2f} times as fast as "
                             f"those whose loss is read, {predicted:.2f} predicted.")  # fmt: skip
        if (gains := gain_by_period(found)) is not None:
            predicted, seen = gains
            asked[0] += 1
            asked[1] += seen > 1
            lines.append(f"- {name}: steps in a row by the objective `period` are {seen:.2f} times "
                         f"as fast as the best others, {predicted:.2f} predicted.")  # fmt: skip
    by_period = (
        "- **Objective `period`**: predicted to have a shorter period than all other plans by a "
        f"factor of 1.1 in {asked[0]} cases, measured to have one in {asked[1]}."
    )
    mixed = (
        "- **Mixed**: predicted to be at least 1.1 times as fast as the better pure plan in "
        f"{told[0]} cases, measured to be faster in {right[0]}."
    )
    period = (
        "- **Period**: predicted to be shorter than the makespan by a factor of 1.1 in "
        f"{told[1]} plans, measured to be shorter in {right[1]}."
    )
    return [mixed, period, by_period, *lines]


def sharing_of(found: dict[str, Any]) -> list[str]:
    """Return what the ranks of a model measured of each other at the start."""
    shared = found.get("sharing")
    if shared is None:
        return []
    own = shared["overhead"] or {"latency": 0.0, "bandwidth": float("inf")}
    least, most = (1e6 * (own["latency"] + size / own["bandwidth"]) for size in (0, 64 << 10))
    line = (
        f"- {found['model']} on {found['ranks']} ranks: at the start they measured that ops take "
        f"{shared['slowdown'][-1]:.3g} times as long when all compute, and that an empty message "
        f"takes {least:.0f} us of each end, one of 64 KiB {most:.0f} us."
    )
    return [line]


def page(reports: Sequence[dict[str, Any]], head: str) -> str:
    """Return the page in Markdown."""
    columns = (
        "step", "plan", "devices", "MB sent", "makespan, predicted", "measured, median", "least",
        "period, predicted", "measured, median", "least",
    )  # fmt: skip
    table = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    table += [line for found in reports for line in rows_of(found)]
    off = max(found["losses_differ"] for found in reports)
    rounds, loads = ({found[key] for found in reports} for key in ("rounds", "load"))
    head += (
        f"{min(rounds)} to {max(rounds)} rounds, load of the machine before: {min(loads):.1f} "
        f"to {max(loads):.1f}.\n"
        "`python -m bench mixed-ranks`\n"
    )
    shared = [line for found in reports for line in sharing_of(found)]
    notes = [
        *verdicts(reports),
        *shared,
        f"- Losses of the first {ROW} steps differ by at most {off:.1e}.",
    ]
    return "\n".join([head, *table, "", *notes]) + "\n"


def main(arguments: list[str]) -> None:
    """Run the ranks of each model, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench mixed-ranks")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--bandwidth", type=float, default=125e6, help="bytes/s of the link")
    parser.add_argument("--latency", type=float, default=1e-3, help="seconds of the link, one way")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        rank_main(options.models, options.rounds)
        return
    from testbed.two_nodes import two_nodes, why_not

    if why_not():
        sys.exit(f"two nodes cannot be made here: {why_not()}")
    kept = options.output.with_suffix(".json") if options.output else None
    reports = json.loads(kept.read_text()) if kept and kept.exists() else []
    link = f"{8 * options.bandwidth / 1e9:g} Gbit/s and {1e3 * options.latency:g} ms"
    head = (
        "# Mixed plans and steps in a row, measured\n\nMilliseconds of a step; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}, gloo, one thread a rank, rounds of "
        f"{ROW} steps; half of the ranks in each of two network namespaces with {link} each way "
        "between them. Makespan: the loss of each step is read; period: those of a row after its "
        "last step. "
    )
    for ranks in map(int, options.ranks.split(",")):
        for name in options.models.split(","):
            script = ["-m", "bench", "mixed-ranks", "--models", name]
            script += ["--rounds", str(options.rounds)]
            load = os.getloadavg()[0]
            with two_nodes(bandwidth=options.bandwidth, latency=options.latency) as nodes:
                done = nodes.torchrun(script, per_node=ranks // 2, limit_s=900)
            if any(each.status for each in done):
                sys.exit("\n".join(each.err[-6000:] for each in done))
            found = json.loads(done[0].out.splitlines()[-1])
            case = {"model": name, "ranks": ranks, "load": load, "rounds": options.rounds}
            reports = [old for old in reports if (old["model"], old["ranks"]) != (name, ranks)]
            reports.append(case | found)
            sys.stderr.write("\n".join(rows_of(reports[-1])) + "\n")
            if options.output is not None and kept is not None:
                options.output.write_text(page(reports, head), encoding="utf-8")
                kept.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(page(reports, head))
