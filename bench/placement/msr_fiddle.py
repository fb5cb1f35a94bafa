"""Published placement problems (msr-fiddle/dnn-partitioning) under three objectives.

`python -m bench msr-fiddle [FOLDER]` plans every input in a folder for its own accelerators
and prints a table of

- makespan: simulated, ops one at a time per device, a copy between accelerators takes twice the
  time to host memory and overlaps with computation;
- latency: that project's own measure. What an accelerator holds is cut into pieces wherever data
  leaves it and comes back; a piece is one call, which starts when all its inputs are there, fetches
  what other pieces made (of the same accelerator, too), computes and sends its outputs; one
  accelerator runs its pieces in turn;
- load: the largest sum, over accelerators, of op times and of each output that leaves or enters.

Memory is that format's static sum of sizes, in which copies that arrive weigh nothing. So messages
are made 1024 times smaller and links 1024 times slower than `convert` makes them: the times are the
same, and copies count for a thousandth. `--copies` counts them as they are; some of the published
problems then have no solution: `op_bert_l-3_inference` cannot do with less than 716 MiB on some
device, and its limit is 600 MiB.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pardnn import files
from pardnn.api.convert import msr_cluster
from pardnn.cluster import Cluster, Rate
from pardnn.cost.costs import graph_costs
from pardnn.errors import PardnnError
from pardnn.graph.build import build_graph
from pardnn.graph.interchange import HOST_BANDWIDTH, MsrMachine, graph_from_msr
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.planner.algorithms import ALGORITHMS
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from testbed import DATA

#: How many times smaller messages are.
LIGHTER = 1024

FOLDER = DATA / "msr-fiddle"


class Instance(NamedTuple):
    """An input, by node.

    Attributes:
        graph: The graph.
        machine: The devices it names.
        reads: Nodes that each node reads.
        order: A topological order.
        seconds: Of each node on an accelerator.
        send: Seconds of each node's output between an accelerator and host memory; 0 if unread.
    """

    graph: Graph
    machine: MsrMachine
    reads: list[list[int]]
    order: list[int]
    seconds: list[float]
    send: list[float]


def read(path: Path, *, with_colors: bool = True, with_copies: bool = False) -> Instance:
    """Read an input.

    Args:
        path: Of the file.
        with_colors: Whether co-location classes hold.
        with_copies: Whether copies that arrive count in full, not for a `LIGHTER`-th.
    """
    graph, machine = graph_from_msr(files.read_bytes(path), str(path), path.name.split(".")[0])
    sent = [op.outputs[0].bytes for op in graph.ops]
    ops = graph.ops
    if not with_colors:
        ops = tuple(dataclasses.replace(op, group=None) for op in ops)
    if not with_copies:
        ops = tuple(_with_light_message(op) for op in ops)
    graph = build_graph(graph.name, ops)
    index = {op.name: i for i, op in enumerate(graph.ops)}
    reads = [[index[name.rpartition(":")[0]] for name in op.inputs] for op in graph.ops]
    read_by_any = {i for row in reads for i in row}
    return Instance(
        graph,
        machine,
        reads,
        topological(reads),
        [(op.seconds or {}).get("accelerator", float("inf")) for op in graph.ops],
        [
            num_bytes / HOST_BANDWIDTH if i in read_by_any else 0.0
            for i, num_bytes in enumerate(sent)
        ],
    )


def _with_light_message(op: Op) -> Op:
    """Return an op that holds as much as before, and sends `LIGHTER` times less."""
    message, *rest = op.outputs
    light = dataclasses.replace(message, bytes=message.bytes // LIGHTER)
    held = message.bytes - light.bytes + sum(tensor.bytes for tensor in rest)
    if op.memory == "reference":
        return dataclasses.replace(op, outputs=(light,))
    return dataclasses.replace(op, outputs=(light, Tensor(name=f"{op.name}:rest", bytes=held)))


def cluster_of(problem: Instance, *, with_copies: bool = False) -> Cluster:
    """Return the input's accelerators, with the links that go with its messages."""
    cluster = msr_cluster(dataclasses.replace(problem.machine, cpus=0))
    rate = Rate(bandwidth=HOST_BANDWIDTH / 2 / (1 if with_copies else LIGHTER))
    return dataclasses.replace(cluster, default_link=rate)


def topological(reads: Sequence[Iterable[int]]) -> list[int]:
    """Return an order in which everything comes after what it reads, or a part if there is none."""
    missing = [len(set(row)) for row in reads]
    after: list[list[int]] = [[] for _ in reads]
    for i, row in enumerate(reads):
        for j in set(row):
            after[j].append(i)
    order = [i for i, count in enumerate(missing) if count == 0]
    for i in order:  # grows while it is read
        for j in after[i]:
            missing[j] -= 1
            if missing[j] == 0:
                order.append(j)
    return order


def pieces(problem: Instance, place: Sequence[int]) -> list[tuple[int, int]]:
    """Return (device, number of the piece on it) of each node.

    A node is in piece p if p is the largest number of times that a path to it has left its device
    after entering it.
    """
    found = [(device, 0) for device in place]
    for device in set(place):
        entered = [0] * len(place)
        for i in problem.order:
            entered[i] = max(
                (entered[j] + (place[j] == device != place[i]) for j in problem.reads[i]),
                default=0,
            )
            if place[i] == device:
                found[i] = (device, entered[i])
    return found


def latency(problem: Instance, place: Sequence[int]) -> float | None:
    """Return that project's latency in seconds; None if pieces wait for each other in a circle."""
    of = pieces(problem, place)
    names = sorted(set(of))
    number = {name: i for i, name in enumerate(names)}
    waits: list[set[int]] = [set() for _ in names]
    fetched: list[set[int]] = [set() for _ in names]
    sent: list[set[int]] = [set() for _ in names]
    work = [0.0] * len(names)
    for i, row in enumerate(problem.reads):
        mine = number[of[i]]
        work[mine] += problem.seconds[i]
        for j in row:
            if of[j] != of[i]:
                waits[mine].add(number[of[j]])
                fetched[mine].add(j)
                sent[number[of[j]]].add(j)
    for name in names:  # one device runs its pieces in turn
        before = max(
            (other for other in names if other[0] == name[0] and other < name), default=None
        )
        if before is not None:
            waits[number[name]].add(number[before])
    finish = [0.0] * len(names)
    order = topological(waits)
    for p in order:
        start = max((finish[q] for q in waits[p]), default=0.0)
        moved = sum(problem.send[j] for j in fetched[p]) + sum(problem.send[j] for j in sent[p])
        finish[p] = start + work[p] + moved
    return max(finish) if len(order) == len(names) else None


def load(problem: Instance, place: Sequence[int]) -> float:
    """Return the largest load of a device, seconds."""
    loads = [0.0] * (max(place) + 1)
    crossing: set[tuple[int, int]] = set()  # (node, a device that its output leaves or enters)
    for i, row in enumerate(problem.reads):
        loads[place[i]] += problem.seconds[i]
        for j in row:
            if place[j] != place[i]:
                crossing |= {(j, place[j]), (j, place[i])}
    for node, device in crossing:
        loads[device] += problem.send[node]
    return max(loads)


def rows(
    path: Path, algorithms: Sequence[str], *, with_colors: bool, with_copies: bool
) -> Iterator[str]:
    """Yield a line of the table per algorithm.

    Args:
        path: Of the input.
        algorithms: By name.
        with_colors: Whether co-location classes hold.
        with_copies: Whether copies that arrive count in full.
    """
    problem = read(path, with_colors=with_colors, with_copies=with_copies)
    cluster = cluster_of(problem, with_copies=with_copies)
    for algorithm in algorithms:
        start = f"| {problem.graph.name} | {cluster.num_devices} | {algorithm} |"
        try:
            given = Problem(
                problem.graph,
                cluster,
                graph_costs(problem.graph),
                PlanOptions(algorithm=algorithm, reserve=0.0),
            )
            plan, result = make_plan(given)
        except PardnnError as error:
            yield f"{start} {error.code} | | | |"
            continue
        place = [plan.placement[op.name] for op in problem.graph.ops]
        theirs = latency(problem, place)
        yield (
            f"{start} {1e3 * result.makespan_s:.2f} | "
            f"{'circle' if theirs is None else f'{1e3 * theirs:.2f}'} | "
            f"{1e3 * load(problem, place):.2f} | {result.planning_s:.1f} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench msr-fiddle", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--algorithms", default="auto", help=f"Of {', '.join(ALGORITHMS)}.")
    parser.add_argument("--no-colors", action="store_true", help="Ignore co-location classes.")
    parser.add_argument("--copies", action="store_true", help="Count copies that arrive.")
    options = parser.parse_args(arguments)
    print("| input | K | algorithm | makespan, ms | latency, ms | load, ms | planning, s |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(options.folder.glob("*.json*")):
        for line in rows(
            path,
            options.algorithms.split(","),
            with_colors=not options.no_colors,
            with_copies=options.copies,
        ):
            print(line, flush=True)


if __name__ == "__main__":
    main()
