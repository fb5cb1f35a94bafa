"""A tour of pardnn: a model that does not fit one device trains on four.

Everything is planned and run on this machine: four CPU ranks, each held to its memory limit by
the operating system. Figures are labelled predicted (from the plan), simulated or measured.
"""

import sys
import time
from pathlib import Path

from pardnn.api.advice import planned
from pardnn.api.capture import captured
from pardnn.api.draw import draw_plan
from pardnn.api.profile import profiled_links, ranks_named
from pardnn.api.run import run_checked
from pardnn.backends.entry_point import load_entry_point
from pardnn.cluster import MEASURED_LINKS, Cluster
from pardnn.plan.file import write_plan
from pardnn.plan.plan import plan_arrays
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import estimate, memory_by_device
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.text import console, memory_table, plan_text, result_text
from pardnn.units import bytes_text

TARGET = str(Path(__file__).with_name("gpt2.py")) + ":training"
DEVICES, MEMORY, STEPS = 4, "768 MiB", 5


def main() -> None:
    """Estimate, plan, run, compare."""
    started, say = time.perf_counter(), console().print
    say("1. Capture: one training step of a 51-million-parameter GPT-2, nothing allocated")
    graph, figures = captured(load_entry_point(TARGET))
    say(result_text(figures))

    say(f"\n2. Does it fit one device of {MEMORY}?")
    one = Cluster.uniform(1, memory=MEMORY)
    costs = costs_for(graph, one)  # times every distinct op once; cached afterwards
    alone = estimate(Problem(graph, one, costs))
    say(result_text(alone))

    say(f"\n3. The plan for {DEVICES} devices of {MEMORY}")
    links = profiled_links()  # between two ranks of this machine
    cluster = Cluster.uniform(
        DEVICES, memory=MEMORY, bandwidth=links.bandwidth, latency=links.latency_s,
        links=MEASURED_LINKS, named=ranks_named(),
    )  # fmt: skip
    # Whole ops: losses match bit for bit. Where ops are cut (`tofu`), sums differ by rounding.
    plan, result = planned(graph, cluster, PlanOptions(algorithm="auto-whole"))
    say(plan_text(graph, plan, result))
    kinds = memory_by_device(graph, plan_arrays(graph, plan))
    say(memory_table(kinds, [device.name for device in cluster.devices]))
    folder = Path("demo")
    folder.mkdir(exist_ok=True)
    write_plan(plan, folder / "plan.json")
    (folder / "plan.svg").write_text(draw_plan(graph, plan, costs), encoding="utf-8")
    say(f"written: {folder}/plan.json and its picture {folder}/plan.svg")

    say(f"\n4. {STEPS} training steps on {DEVICES} ranks, limits enforced, beside one device")
    done = run_checked(TARGET, graph, plan, cluster, steps=STEPS, verify=True)
    say(result_text(done))

    same = done.verified  # losses, parameters, buffers and optimizer states
    within = all(a <= b for a, b in zip(done.peak_bytes_measured, done.limit_bytes, strict=True))
    say(
        f"\nShown: a step that needs {bytes_text(max(alone.peak_bytes))} ran on {DEVICES} ranks of "
        f"{MEMORY}, losses and state {'bitwise equal' if same else 'DIFFERENT'}, every rank "
        f"{'within' if within else 'OVER'} its limit; {time.perf_counter() - started:.0f} s in all."
    )
    sys.exit(0 if same and within and not alone.fits else 1)


if __name__ == "__main__":
    main()
