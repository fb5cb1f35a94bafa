"""Fidelity: predicted step time and peak memory beside measured ones, on this machine.

    python -m bench fidelity [--models trn,hf_gpt2] [--ranks 1,2,4] [--algorithms pardnn,tofu]

Each model is planned for each number of ranks with roofline costs, which only decide; then

1. every call of every plan is timed in its place, by as many processes side by side as will compute
   at the same time (as many as ranks, at most as many as cores), before the runs and after them,
   the faster counts; messages are timed by `measure_links`;
2. each plan is run on ranks of one thread; its fastest step counts, as whatever else runs here
   only adds;
3. the step is predicted from 1: by the simulator, which gives each rank a core of its own,
   and with the machine's cores shared by the ranks, which move their messages themselves
   (`pardnn.sim.shared_cores`): the prediction that counts.

Peaks are those of the plan. Needs torch and transformers, and a machine with nothing else to do;
the page states its load. About eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.common import RESULTS
from bench.common.side_by_side import cores
from bench.runtime import fidelity_models
from bench.runtime.fidelity_page import page
from bench.runtime.fidelity_ranks import Case, faster, profiled, ran
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.profile.link_times import measure_links
from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs, measured_costs, preset_costs
from pardnn.cost.links import LinkCosts
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.engine import simulate
from pardnn.sim.machine import machine_of
from pardnn.sim.shared_cores import Host, simulated_step

STEPS = 12
#: Seconds per graph after which calls are timed once each.
PROFILE_S = 12.0
Row = dict[str, Any]


class Job(NamedTuple):
    """One model's plan for some ranks; `parts` is the graph whose ops it places."""

    model: str
    ranks: int
    algorithm: str
    graph: Graph
    plan: Plan
    parts: Graph


def planned(names: Sequence[str], ranks: Sequence[int], algorithms: Sequence[str]) -> list[Job]:
    """Capture the models and plan each for each number of ranks.

    Args:
        names: Of the models.
        ranks: Numbers of ranks.
        algorithms: Used from two ranks on.
    """
    jobs: list[Job] = []
    for name in names:
        step, args = getattr(fidelity_models, name)()
        graph = capture(step, *args)
        for k in ranks:
            cluster = Cluster.uniform(k, bandwidth=2e9, latency=140e-6)
            costs = preset_costs(graph, "cpu", ["accelerator"], threads=1)
            for algorithm in algorithms if k > 1 else ("single",):
                problem = Problem(
                    graph, cluster, costs, PlanOptions(algorithm=algorithm, reserve=0.0)
                )
                plan, _ = make_plan(problem)
                jobs.append(Job(name, k, algorithm, graph, plan, planned_graph(graph, plan)))
        print(f"planned: {name}, {len(graph.ops)} ops", flush=True)
    return jobs


def predicted(job: Job, costs: Costs, host: Host) -> Row:
    """Return the step time by the simulator, and with the cores shared.

    Args:
        job: The plan.
        costs: Of the ops of its graph.
        host: Cores and links of this machine.
    """
    parts, arrays = job.parts, plan_arrays(job.parts, job.plan)
    idle = host.links.idle
    cluster = Cluster.uniform(job.ranks, bandwidth=idle.bandwidth, latency=idle.latency)
    simulated = simulate(parts, machine_of(costs, cluster), arrays).makespan
    shared = simulated_step(parts, job.plan, costs.on("accelerator"), host)
    return {
        "simulated_s": simulated,
        "predicted_s": shared.seconds,
        "predicted_cpu_s": shared.work,
        "messages": len(job.plan.messages),
    }


def measure(jobs: Sequence[Job], ranks: int, host: Host, steps: int) -> list[Row]:
    """Time the calls of the jobs of so many ranks, predict, and run them.

    Args:
        jobs: Plans for this number of ranks.
        ranks: Number of ranks.
        host: Cores and links of this machine.
        steps: Steps of each run.
    """
    side_by_side = min(ranks, host.cores)
    parts = {id(job.parts): job.parts for job in jobs}
    before = profiled(list(parts.values()), side_by_side, PROFILE_S)
    found = ran(
        [Case(getattr(fidelity_models, job.model), job.graph, job.plan) for job in jobs],
        ranks,
        steps,
    )
    # A shared host gives its guests more at one time than at another.
    table = faster(before, profiled(list(parts.values()), side_by_side, PROFILE_S))
    rows: list[Row] = []
    for job, run in zip(jobs, found, strict=True):
        row: Row = {"model": job.model, "ranks": ranks, "algorithm": job.algorithm}
        row |= {"ops": len(job.graph.ops), "load": os.getloadavg()[0]}
        if "error" not in run:
            row |= predicted(job, measured_costs(job.parts, {"accelerator": table}), host)
        rows.append(row | run)
    return rows


def links_text(links: LinkCosts) -> str:
    """Say what messages cost."""
    idle, sending, taking = (
        f"{1e6 * fit.latency:.0f} us + bytes / {fit.bandwidth / 1e9:.2f} GB/s"
        for fit in (links.idle, links.sending, links.taking)
    )
    return (
        f"idle {idle}; beside computation sending {sending}, posting {1e6 * links.posting:.0f} us, "
        f"taking {taking}, waking {1e6 * links.waking:.0f} us"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench fidelity", description=__doc__)
    parser.add_argument("--models", default=",".join(fidelity_models.MODELS))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--algorithms", default="pardnn,tofu,data-parallel")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # before anything starts threads: ranks are forked
    begin = time.perf_counter()
    host = Host(cores(), measure_links())
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    report: Row = {
        "date": today,
        "command": f"python -m bench fidelity --models {options.models} --ranks {options.ranks} "
        f"--algorithms {options.algorithms}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, gloo",
        "cores": host.cores,
        "steps": options.steps,
        "link": links_text(host.links),
        "load_before": os.getloadavg()[0],
        "rows": [],
    }
    ranks = [int(text) for text in options.ranks.split(",")]
    jobs = planned(options.models.split(","), ranks, options.algorithms.split(","))
    for k in ranks:
        mine = [job for job in jobs if job.ranks == k]
        report["rows"] += _or_errors(
            lambda k=k, mine=mine: measure(mine, k, host, options.steps), mine
        )
        report["wall_s"] = time.perf_counter() - begin
        path = options.output / f"{today}_fidelity.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(page(report), encoding="utf-8")
        print(f"{k} ranks done after {report['wall_s']:.0f} s", flush=True)


def _or_errors(run: Callable[[], list[Row]], jobs: Sequence[Job]) -> list[Row]:
    """Return the rows, or for each job why there are none."""
    try:
        return run()
    except (PardnnError, RuntimeError) as error:
        text = str(error).strip().splitlines()[-1]
        return [
            {"model": job.model, "ranks": job.ranks, "algorithm": job.algorithm, "error": text}
            for job in jobs
        ]


if __name__ == "__main__":
    main()
