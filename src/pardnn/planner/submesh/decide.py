"""Mixed plans: ops are cut over the devices of a submesh, and placed on submeshes.

Problem: inside of an island of fast links an expert cuts tensors; across islands he places layers
and pieces of the batch. A cut over all devices sends what it cuts over the slow links, and a
placement leaves an op to one device.
Idea: the graph of the pieces is cut over one submesh (`shard`), and what each of its positions does
is placed on as many devices as there are submeshes, by whatever places whole ops (`columns`). Local
ops then run where their column is, at their position, in the order of the columns. The result is an
ordinary placement of the local ops, with messages and memory as of any other.
Complexity: that of a partition and of the placement.
Reference: Zheng et al., "Alpa", OSDI 2022, which cuts stages over submeshes likewise.
Deviations: all submeshes are alike, and one cut is that of all layers. Stages, pieces and their
order are not fixed beforehand: any placement will do.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import NamedTuple, final

from pardnn.errors import InfeasibleError, UsageError
from pardnn.planner.algorithms import BEST
from pardnn.planner.microbatches.decide import NO_BATCH
from pardnn.planner.microbatches.in_pieces import problem_in_pieces
from pardnn.planner.portfolio import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.search_log import SearchLog
from pardnn.planner.sharded.decide import can_shard
from pardnn.planner.submesh.spread import cut_of_submesh, placed_on_submeshes
from pardnn.planner.submesh.submeshes import submesh_sizes
from pardnn.time_limit import check_time, seconds_left

#: Cuts that `auto` tries inside of submeshes; the batch is in pieces already.
INSIDE = ("megatron", "tofu")
#: Local ops of a cut graph, without what moves data, up to which `auto` cuts inside of submeshes.
MANY_LOCAL_OPS = 30_000
#: Numbers of pieces without a better plan after which no more are tried.
PATIENCE = 2
#: Numbers of pieces that are tried, each twice the one before.
MOST_DOUBLINGS = 6


def decide_mixed(problem: Problem, cut: str, placement: str, decide: Decide) -> Outcome:
    """Return the best plan of a cut inside of submeshes and a placement on them.

    All sizes of submeshes are tried, and as many pieces as the options say.

    Args:
        problem: What to plan.
        cut: A key of `SHARDED`.
        placement: Of `ALGORITHMS` or `RECIPES`.
        decide: Runs the placement on a problem.

    Raises:
        InfeasibleError: E301, if none fits.
        UsageError: E250, if the devices make up no submeshes, the graph cannot be cut, or state
            lies on devices; E226 to E229, if the step has no such cut or pieces.
    """
    sizes = submesh_sizes(problem.cluster)
    name = f"{cut}*{placement}"
    if not sizes or not can_shard(problem.graph):
        why = "the graph does not say what its ops call" if sizes else (
            f"{problem.cluster.num_devices} devices make up no two submeshes that are alike"
        )  # fmt: skip
        raise UsageError(
            f"{name} cuts ops inside of submeshes, but {why}.\nUse {cut} or {placement} alone.",
            code="E250",
        )
    if problem.state is not None and problem.state.held:
        raise UsageError(
            f"{name} lays state out anew, but it is to stay where it lies.\n"
            "Plan without the state.",
            code="E225",
        )
    wanted = problem.options.microbatches
    doublings = [1 << power for power in range(MOST_DOUBLINGS + 1)]
    found = _Best(problem)
    for size in sizes:
        worse = 0
        for count in doublings if wanted == "auto" else [wanted or 1]:
            try:
                is_better = found.try_(Mix(cut, placement, size, count), decide)
            except UsageError as error:
                if error.code != NO_BATCH or found.best is None:
                    raise
                break
            worse = 0 if is_better else worse + 1
            if worse >= PATIENCE:
                break
    return found.get()


def better_mixed(problem: Problem, best: Outcome, decide: Decide) -> Outcome:
    """Return the best of an outcome and mixed plans, of as many pieces as there are submeshes.

    What computing alone makes slower than the outcome is not placed.

    Args:
        problem: What was planned.
        best: The best plan without submeshes.
        decide: Runs placements on a problem.
    """
    options, found = problem.options, _Best(problem, best)
    for size in submesh_sizes(problem.cluster):
        submeshes = problem.cluster.num_devices // size
        wanted = options.microbatches
        counts = [submeshes, 2 * submeshes] if wanted == "auto" else [wanted or 1]
        for cut in INSIDE:
            for count in counts:
                if count < 2 or len(problem.graph.ops) * count * size > MANY_LOCAL_OPS:
                    break
                if seconds_left() <= 0:
                    return found.get()
                try:
                    is_better = found.try_(Mix(cut, "pardnn", size, count), decide)
                except UsageError:  # no such cut, or no such pieces
                    break
                if not is_better:
                    break
    return found.get()


def may_mix(problem: Problem) -> bool:
    """Whether `auto` tries mixed plans: of steps in pieces, where nothing is fixed."""
    options = problem.options
    is_free = problem.state is None and problem.start is None and not options.constraints
    is_plain = not (options.recompute or options.offload) and options.policy == "order"
    asks = options.algorithm == BEST and options.microbatches not in (None, 1)
    return asks and is_free and is_plain and can_shard(problem.graph)


class Mix(NamedTuple):
    """A mixed plan to be made: cut, placement, devices of a submesh, pieces of the batch."""

    cut: str
    placement: str
    size: int
    count: int

    def __str__(self) -> str:
        return f"{self.count} pieces, submeshes of {self.size}: {self.cut}*{self.placement}"


@final
class _Best:
    """The best of mixed plans, and of one that was there."""

    def __init__(self, problem: Problem, best: Outcome | None = None) -> None:
        self.problem, self.best = problem, best
        self.failure: InfeasibleError | None = None
        self.spent = 0.0 if best is None else best.planning_s

    def try_(self, mix: Mix, decide: Decide) -> bool:
        """Return whether a mixed plan is better than those before."""
        check_time()
        problem, best, started = self.problem, self.best, time.perf_counter()
        problem.log.trying(str(mix))
        below = math.inf if best is None else best.makespan_s
        try:
            outcome = _mixed(problem, mix, decide, below)
        except InfeasibleError as error:
            self.failure = self.failure or error
            problem.log.note(str(mix), None, error.message.splitlines()[0])
            return False
        finally:
            self.spent += time.perf_counter() - started
        problem.log.note(str(mix), outcome.makespan_s)
        objective = problem.options.objective
        is_better = best is None or outcome.score(objective) < best.score(objective)
        if is_better:
            self.best = outcome
            problem.log.keep(outcome, objective)
        return is_better

    def get(self) -> Outcome:
        """Return the best; its planning time is that of all.

        Raises:
            InfeasibleError: E301, the first, if there is none.
        """
        if self.best is None:
            assert self.failure is not None
            raise self.failure
        return self.best._replace(planning_s=self.spent)


def _mixed(problem: Problem, mix: Mix, decide: Decide, below: float) -> Outcome:
    """Return a mixed plan.

    Raises:
        InfeasibleError: E301, if it does not fit, or takes as long as `below`.
        UsageError: E226 to E229, if the step has no such pieces or cut.
    """
    pieces, cut = None, problem
    if mix.count > 1:
        pieces, cut = problem_in_pieces(problem, mix.count, 1)
    cut = dataclasses.replace(cut, log=SearchLog())
    sharding = cut_of_submesh(problem, cut, mix.cut, mix.size)
    outcome = placed_on_submeshes(problem, cut, pieces, sharding, mix.placement, decide, below)
    return outcome._replace(algorithm=f"{mix.cut}*{mix.placement}")
