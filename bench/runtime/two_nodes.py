"""What it is worth to know the link: two nodes with 1 Gbit/s and 1 ms between them, measured.

    python -m bench two-nodes [--rounds 8] [--out FILE]

torchrun runs two ranks in two network namespaces of this machine (`testbed/two_nodes.py`; needs
root). The same step is placed for links of 300 GB/s, the default of `plan`, and for the links that
the ranks have measured at the start, without memory limits and with a limit of two thirds of what
one device needs, so that both ranks are needed. Steps are taken in turn, and those of the user's
own step on one rank too, while the other rank waits.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import Cluster
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from testbed.small_models import classify_step

#: Of what one device needs.
SHARE = 0.67


def made() -> Any:
    """A perceptron of six layers and two towers: both ranks can work at once."""
    torch.manual_seed(0)

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def tower() -> nn.Module:
                layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
                return nn.Sequential(*layers)

            self.left, self.right, self.last = tower(), tower(), nn.Linear(512, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.left(x) + self.right(x))

    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return classify_step, (model, optimizer, torch.randn(512, 512), torch.randint(16, (512,)))


def planned(
    cluster: Cluster | None, share: float | None, found: list[Any], plans: dict[str, Any]
) -> Any:
    """Return what plans on rank 0, for links as given or, if None, as measured.

    Args:
        cluster: The devices; None: those that were measured.
        share: Of the memory that one device needs: limit of each; None: no limit.
        found: The measured cluster.
        plans: Takes what a plan for one rank is simulated to take.
    """

    def decide(graph: Graph, _: int, state: StateInPlace | None) -> Plan:
        from pardnn.planner.next_plan import next_plan
        from pardnn.planner.options import PlanOptions

        options = PlanOptions(algorithm="auto-whole", reserve=0.0)
        target = cluster or found[0].cluster
        alone = next_plan(graph, Cluster.uniform(1), options, None, state)
        assert alone.predicted is not None
        plans["one rank"] = [0, 0, alone.predicted.makespan_s, 0]
        if share is not None:
            limit = int(share * max(alone.predicted.peak_bytes))
            devices = [dataclasses.replace(each, memory=limit) for each in target.devices]
            target = dataclasses.replace(target, devices=tuple(devices))
        return next_plan(graph, target, options, None, state)

    return decide


def rank_main(rounds: int) -> None:
    """Run as one of the two ranks; rank 0 prints what was measured, as JSON."""
    torch.set_num_threads(1)
    found: list[Any] = []
    steps: dict[str, Any] = {}
    taken: dict[str, list[float]] = {}
    losses: dict[str, list[str]] = {}
    plans: dict[str, Any] = {}
    for name, cluster, share in (
        ("measured links", None, None), ("300 GB/s", Cluster.uniform(2), None),
        ("measured links, limited", None, SHARE), ("300 GB/s, limited", Cluster.uniform(2), SHARE),
    ):  # fmt: skip
        step, args = made()
        fast = parallelize(
            step, *args, decide=planned(cluster, share, found, plans), timeout=300, device="cpu",
            on_cluster=found.append,
        )  # fmt: skip
        plan = fast.plan
        assert plan.predicted is not None
        sent = [len(plan.messages), plan.predicted.transfer_bytes, plan.predicted.makespan_s]
        plans[name] = [*sent, sum(place == 1 for place in plan.placement.values())]
        steps[name] = lambda fast=fast, batch=args[2:]: fast(*batch)
    step, args = made()
    is_first = dist.get_rank() == 0
    steps["one rank"] = lambda: step(*args) if is_first else torch.zeros(())
    for _ in range(rounds + 2):
        for name, take in steps.items():
            dist.barrier()
            start = time.perf_counter()
            loss = take()
            taken.setdefault(name, []).append(time.perf_counter() - start)
            losses.setdefault(name, []).append(loss.item().hex())
    if is_first:
        rate = found[0].between
        told = {"seconds": {name: row[2:] for name, row in taken.items()}, "plans": plans}
        told |= {"link": [rate.bandwidth, rate.latency], "measured_s": found[0].seconds}
        told["equal"] = all(row == losses["one rank"] for row in losses.values())
        sys.stdout.write(json.dumps(told) + "\n")


def page(found: dict[str, Any], head: str) -> str:
    """Return the page in Markdown."""
    bandwidth, latency = found["link"]
    base = statistics.median(found["seconds"]["one rank"])
    measured = (
        f"Measured at the start, in {found['measured_s']:.1f} s: {bandwidth / 1e6:.0f} MB/s + "
        f"{1e3 * latency:.2f} ms. Losses of all ways in all steps equal in every bit: "
        f"{'yes' if found['equal'] else 'NO'}.\n"
    )
    columns = (
        "plan for", "fastest step, ms", "median, ms", "times one rank", "simulated, ms",
        "messages", "MB sent", "ops on the second rank",
    )  # fmt: skip
    lines = [head, measured, f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for name, seconds in found["seconds"].items():
        middle = statistics.median(seconds)
        row = f"| {name} | {1e3 * min(seconds):.1f} | {1e3 * middle:.1f} | {middle / base:.2f} | "
        messages, sent, makespan, ops = found["plans"][name]
        row += f"{1e3 * makespan:.1f} | {messages} | {sent / 1e6:.2f} | {ops} |"
        lines.append(row)
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench two-nodes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        rank_main(options.rounds)
        return
    from testbed.two_nodes import two_nodes, why_not

    if why_not():
        sys.exit(f"two nodes cannot be made here: {why_not()}")
    load = os.getloadavg()[0]
    script = ["-m", "bench", "two-nodes", "--rounds", str(options.rounds)]
    with two_nodes() as nodes:
        done = nodes.torchrun(script, limit_s=900)
    if any(each.status for each in done):
        sys.exit("\n".join(each.err[-3000:] for each in done))
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    head = (
        f"# Two nodes\n\n{date}, {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}, gloo, one thread a rank, {options.rounds} rounds; two network "
        "namespaces, 1 Gbit/s and 1 ms each way between them. Load of the machine before: "
        f"{load:.1f}.\n`python -m bench two-nodes {' '.join(arguments)}`\n"
    )
    text = page(json.loads(done[0].out.splitlines()[-1]), head)
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
