"""Plan; where nothing fits, suggest what does: a larger limit, more devices, a smaller batch."""

from __future__ import annotations

from pardnn.api.max_batch import smaller_batch
from pardnn.backends.entry_point import EntryPoint
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import suggestions
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.progress import progress_bar, status
from pardnn.report.results import PlanResult

#: Ops up to which a batch that fits is looked for: it takes two captures and some ten plans.
CHEAP_OPS = 12_000


def planned(
    graph: Graph,
    cluster: Cluster,
    options: PlanOptions,
    entry: EntryPoint | None = None,
    batch_size: int | None = None,
    *,
    state: StateInPlace | None = None,
) -> tuple[Plan, PlanResult]:
    """Plan; an error that nothing fits names what was tried and does fit.

    Args:
        graph: The graph.
        cluster: What it runs on.
        options: How to plan.
        entry: The entry point that the graph is from, if it is from one.
        batch_size: At which it was captured; None is the entry point's own.
        state: What lies on the devices already and stays; then nothing else is tried.

    Raises:
        InfeasibleError: E301.
    """
    with progress_bar("timing ops") as progress:
        costs = costs_for(graph, cluster, options.costs, threads=options.threads, progress=progress)
    problem = Problem(graph, cluster, costs, options, state)
    try:
        with status("planning; the first time on a machine, kernels are compiled: a minute or two"):
            return make_plan(problem)
    except InfeasibleError as error:
        if state is not None:
            raise
        with status("nothing fits; looking for what does"):
            tried = suggestions(problem, error.details.get("peak_bytes"))
            fitting, hint = _batch(problem, entry, batch_size)
        tried += fitting
        lines = [error.message, *([f"Try: {' or '.join(tried)} (tried: fits)."] if tried else [])]
        raise InfeasibleError(
            "\n".join([*lines, *hint]), code=error.code, details=error.details | {"try": tried}
        ) from None


def _batch(
    problem: Problem, entry: EntryPoint | None, batch_size: int | None
) -> tuple[list[str], list[str]]:
    """Return the option of a batch that was tried and fits, or else how to look for one."""
    if entry is None:
        return [], ["Or a smaller batch: pardnn max-batch FILE.py:FUNCTION finds the largest."]
    if "batch_size" not in entry.parameters:
        return [], []
    if len(problem.graph.ops) > CHEAP_OPS:
        hint = f"Or a smaller batch: pardnn max-batch {entry.target} finds the largest that fits."
        return [], [hint]
    try:
        found = smaller_batch(problem, entry, batch_size)
    except PardnnError:  # the step may not take other sizes: then it is no advice
        found = None
    return ([] if found is None else [f"--batch-size {found}"]), []
