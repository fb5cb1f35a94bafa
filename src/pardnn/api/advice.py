"""Plan; and where nothing fits, say what does: a larger limit, more devices, a smaller batch."""

from __future__ import annotations

from pardnn.api.max_batch import smaller_batch, takes_batch_size
from pardnn.api.targets import PlanOptions, progress_bar, status
from pardnn.backends.entry_point import is_entry_point
from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import suggestions
from pardnn.planner.make_plan import make_plan
from pardnn.report.results import PlanResult

__all__ = ["PlanOptions", "planned"]

#: Ops up to which a batch that fits is looked for: it takes two captures and some ten plans.
CHEAP_OPS = 12_000


def planned(
    graph: Graph,
    cluster: Cluster,
    options: PlanOptions,
    target: str | None = None,
    batch_size: int | None = None,
) -> tuple[Plan, PlanResult]:
    """Plan; an error that nothing fits names what was tried and does fit.

    Args:
        graph: The graph.
        cluster: What it runs on.
        options: Of the planner.
        target: The entry point or the file that the graph is from, if known.
        batch_size: At which it was captured; None is the entry point's own.

    Raises:
        InfeasibleError: E301.
    """
    with progress_bar("timing ops") as progress:
        costs = costs_for(graph, cluster, options.costs, threads=options.threads, progress=progress)
    try:
        with status("planning; the first time on a machine, kernels are compiled: a minute or two"):
            return make_plan(
                graph,
                cluster,
                costs,
                algorithm=options.algorithm,
                objective=options.objective,
                reserve=options.reserve,
                seed=options.seed,
                time_limit=options.time_limit,
            )
    except InfeasibleError as error:
        with status("nothing fits; looking for what does"):
            tried = suggestions(graph, cluster, costs, reserve=options.reserve, seed=options.seed)
            fitting, hint = _batch(graph, cluster, options, costs, target, batch_size)
        tried += fitting
        lines = [error.message, *([f"Try: {' or '.join(tried)} (tried: fits)."] if tried else [])]
        raise InfeasibleError(
            "\n".join([*lines, *hint]), code=error.code, details=error.details | {"try": tried}
        ) from None


def _batch(
    graph: Graph,
    cluster: Cluster,
    options: PlanOptions,
    costs: Costs,
    target: str | None,
    batch_size: int | None,
) -> tuple[list[str], list[str]]:
    """Return the option of a batch that was tried and fits, or else how to look for one."""
    if target is None or not is_entry_point(target):
        return [], ["Or a smaller batch: pardnn max-batch FILE.py:FUNCTION finds the largest."]
    if not takes_batch_size(target):
        return [], []
    if len(graph.ops) > CHEAP_OPS:
        return [], [f"Or a smaller batch: pardnn max-batch {target} finds the largest that fits."]
    try:
        found = smaller_batch(target, cluster, options, graph, costs, batch_size)
    except PardnnError:  # the step may not take other sizes: then it is no advice
        found = None
    return ([] if found is None else [f"--batch-size {found}"]), []
