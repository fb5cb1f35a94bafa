"""Unit pipelines: plans of graphs with groups alone, against schedules that experts draw by hand.

`python -m bench pipelines` plans the pipelines of torch's own schedules (4 and 8 devices, 8 to 32
microbatches) with one stage per device and two, under four limits, and prints a table: simulated
makespans, the best of torch's schedules that keeps within the limit, the optimum where it is
proven, and planning times in CPU seconds. `--unlike` plans others: numbers of microbatches that
devices do not divide, three, five and six devices, unlike ops and stages, messages that take time.
"""

from __future__ import annotations

import argparse
import sys
import time

from pardnn.cost.costs import graph_costs
from pardnn.errors import PardnnError
from pardnn.graph.ir import Graph
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.bounds import lower_bound_seconds
from pardnn.sim.machine import machine_of
from testbed.hand_graphs import StageTimes, pipeline, pipeline_cluster

#: Makespan and peak, in activations, of torch 2.13's schedules: one stage per device, two.
TORCH: dict[tuple[int, int], tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {
    (4, 8): ([(33, 8), (33, 4)], [(28.5, 5.5), (28.5, 8), (25.5, 4), (25.5, 4.5)]),
    (4, 16): ([(57, 16), (57, 4)], [(52.5, 5.5), (52.5, 16), (49.5, 4), (49.5, 4.5)]),
    (8, 16): ([(69, 16), (69, 8)], [(58.5, 11.5), (58.5, 16), (51.5, 8), (51.5, 8.5)]),
    (8, 32): ([(117, 32), (117, 8)], [(106.5, 11.5), (106.5, 32), (99.5, 8), (99.5, 8.5)]),
}
#: By CP-SAT, with stages fixed (there and back) and microbatches in order: devices, microbatches,
#: stages per device, limit in activations.
OPTIMA = {
    (4, 8, 1, 2): 41.0, (4, 8, 1, 4): 27.0, (4, 8, 1, 8): 27.0,
    (4, 8, 2, 2): 29.5, (4, 8, 2, 3): 26.5, (4, 8, 2, 4): 25.5,
}  # fmt: skip
#: Limits, in activations per device.
CAPS = (0.5, 0.75, 1.0, 2.0)


def planned(graph: Graph, devices: int, cap: float, algorithm: str, latency: float = 0.0) -> str:
    """Return makespan and CPU seconds of planning, or the error's code.

    Args:
        graph: A pipeline.
        devices: How many.
        cap: Activations that each may hold.
        algorithm: What plans.
        latency: Seconds of a message.
    """
    cluster = pipeline_cluster(devices, cap, latency=latency)
    options = PlanOptions(algorithm=algorithm, reserve=0.0)
    begin = time.process_time()
    try:
        _, result = make_plan(Problem(graph, cluster, graph_costs(graph), options))
    except PardnnError as error:
        return error.code
    return f"{result.makespan_s:.4g} ({time.process_time() - begin:.1f} s)"


def unlike() -> list[tuple[str, Graph, int, float]]:
    """Return pipelines that no schedule was made for: name, graph, devices, seconds of messages."""
    times = StageTimes(1.0, 1.2, 0.8)
    found = []
    for devices, microbatches in ((3, 7), (5, 8), (6, 10), (4, 11)):
        for chunks in (1, 2):
            scales = [1 + 0.25 * (s % 3) for s in range(devices * chunks)]
            graph = pipeline(devices, microbatches, chunks=chunks)
            found.append((graph.name, graph, devices, 0.0))
            graph = pipeline(devices, microbatches, chunks=chunks, times=times, scales=scales)
            found.append((f"{graph.name} unlike stages", graph, devices, 0.0))
            graph = pipeline(devices, microbatches, chunks=chunks, times=times, message_bytes=64)
            found.append((f"{graph.name} messages 0.1 s", graph, devices, 0.1))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Plan the pipelines and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench pipelines", description=__doc__)
    parser.add_argument("--algorithms", default="m-etf,pardnn,modulo,auto-whole")
    parser.add_argument("--unlike", action="store_true")
    parser.add_argument("--sizes", default="4x8,4x16,8x16,8x32")
    options = parser.parse_args(sys.argv[2:] if arguments is None else arguments)
    names = options.algorithms.split(",")
    columns = ["bound"] if options.unlike else ["torch", "optimum"]
    print("| pipeline | limit |", *(f"{name} |" for name in [*columns, *names]))
    print("| --- " * (2 + len(columns) + len(names)) + "|")
    if options.unlike:
        for name, graph, devices, latency in unlike():
            for cap in CAPS:
                row = [planned(graph, devices, cap * devices * 1.25, n, latency) for n in names]
                machine = machine_of(graph_costs(graph), pipeline_cluster(devices, None))
                bound = f"{lower_bound_seconds(graph.arrays, machine):.4g}"
                print(f"| {name} | {cap * devices * 1.25:g} |", *(f"{x} |" for x in [bound, *row]))
        return
    for devices, microbatches in [tuple(map(int, s.split("x"))) for s in options.sizes.split(",")]:
        for chunks in (1, 2):
            graph = pipeline(devices, microbatches, chunks=chunks)
            for cap in (part * devices for part in CAPS):
                known = TORCH.get((devices, microbatches), ([], []))[chunks - 1]
                best = min((seconds for seconds, act in known if act <= cap), default="")
                optimum = OPTIMA.get((devices, microbatches, chunks, int(cap)), "")
                row = [planned(graph, devices, cap, name) for name in names]
                print(f"| {graph.name} | {cap:g} |", *(f"{x} |" for x in [best, optimum, *row]))


if __name__ == "__main__":
    main()
