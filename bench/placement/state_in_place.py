"""What it costs to leave state where it is: kept steps of the zoo, planned around an older plan.

`python -m bench state-in-place [NAMES]` writes `bench/results/<date>_state-in-place.md`. Each graph
is planned freely, and again with the state where that plan has it; then at half the batch size,
freely and around the plan of the whole one; where memory is limited also the other way round.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from bench.common import RESULTS
from bench.thesis.batch import captured
from pardnn.api.batch_scaling import graph_at
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace, state_in_place
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.sim.peak import one_device_peak
from testbed.kept_graphs import GRAPHS, load

NAMES = ("wresnet_50_4", "wresnet_152_10", "rnn_4_8k", "word_rnn_2", "gpt2")
#: What each device may hold of what one device needs; None for no limit.
SHARES = (None, 0.4)
DEVICES, COSTS = 4, "v100"


class Row(NamedTuple):
    """One case: the makespans of a free plan and of one around state, in seconds."""

    name: str
    how: str
    case: str
    free: float
    kept: float


def _planned(
    graph: Graph, cluster: Cluster, algorithm: str, state: StateInPlace | None = None
) -> tuple[Plan, float]:
    options = PlanOptions(algorithm=algorithm, costs=COSTS, reserve=0.0)
    costs = costs_for(graph, cluster, COSTS)
    plan, result = make_plan(Problem(graph, cluster, costs, options, state))
    return plan, result.makespan_s


def rows_of(name: str, algorithm: str, share: float | None) -> Iterator[Row]:
    """Yield the cases of a graph.

    Args:
        name: Of a kept graph.
        algorithm: "auto-whole" or "tofu".
        share: Of `SHARES`.
    """
    graph = load(name)
    try:
        half = graph_at(captured(name), GRAPHS[name].batch_size // 2)
    except FileNotFoundError:
        half = None
    limit = None if share is None else int(share * one_device_peak(graph.arrays))
    cluster = Cluster.uniform(DEVICES, memory=limit)
    how = f"{algorithm}, {'no limit' if share is None else f'limit {share:g}'}"

    def around(case: str, graph: Graph, free: float, state: StateInPlace) -> Row:
        return Row(name, how, case, free, _planned(graph, cluster, algorithm, state)[1])

    plan, free = _planned(graph, cluster, algorithm)
    state = state_in_place(graph, plan)
    yield around("the same graph", graph, free, state)
    if half is not None:
        plan, least = _planned(half, cluster, algorithm)
        yield around("half the batch", half, least, state)
        yield around("twice the batch", graph, free, state_in_place(half, plan))


def page(rows: Sequence[Row], date: str, names: Sequence[str]) -> str:
    """Return the page.

    Args:
        rows: All cases.
        date: Of the run.
        names: Of the graphs, as given.
    """
    lines = [
        f"# State in place, {date}",
        "",
        f"`python -m bench state-in-place {' '.join(names)}`;",
        f"{DEVICES} devices, costs of {COSTS}, simulated.",
        "",
        "Makespans in s of a free plan, and of one that leaves parameters and states where another",
        "plan has them: that of the same graph, of twice or of half the batch size. A limit is a",
        "share of what one device needs for the graph. Below 1: what was found before is a start.",
        "",
        "| graph | plan | case | free | kept | kept / free |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratio = f"{row.free:.6g} | {row.kept:.6g} | {row.kept / row.free:.4f}"
        lines.append(f"| {row.name} | {row.how} | {row.case} | {ratio} |")
    lines += ["", "| plan | case | geometric mean | largest | cases |", "| --- " * 5 + "|"]
    for kind in ("auto-whole", "tofu"):
        for case in dict.fromkeys(row.case for row in rows):
            found = [row.kept / row.free for row in rows if row.case == case and kind in row.how]
            if found:
                mean = geometric_mean(found)
                lines.append(f"| {kind} | {case} | {mean:.4f} | {max(found):.4f} | {len(found)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan all cases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    names: Sequence[str] = parser.parse_args(arguments).names
    rows: list[Row] = []
    for name in names:
        for algorithm, shares in (("auto-whole", SHARES), ("tofu", SHARES[:1])):
            for share in shares:
                try:
                    rows += rows_of(name, algorithm, share)
                except InfeasibleError as error:
                    print(f"{name}, {algorithm}, {share}: {error}")
    date = datetime.date.today().isoformat()
    (RESULTS / f"{date}_state-in-place.md").write_text(page(rows, date, names))


if __name__ == "__main__":
    main()
