"""Mixed plans: ops are cut over the devices of a submesh, and placed on submeshes.

Problem: an expert cuts tensors inside an island of fast links, and places layers and pieces of the
batch across islands. A cut over all devices also sends over the slow links, and a placement leaves
each op to one device.
Idea: the graph of the pieces is cut over one submesh (`shard`), and what each of its positions does
is placed on as many devices as there are submeshes, by whatever places whole ops (`columns`). Local
ops then run where their column is, at their position, in the order of the columns. The result is an
ordinary placement of the local ops, with messages and memory as of any other.
Complexity: that of a partition and of the placement.
Reference: Zheng et al., "Alpa", OSDI 2022, which cuts stages over submeshes likewise.
Deviations: all submeshes are equal, and all layers have the same cut. Stages, pieces and their
order are not fixed in advance: any placement works.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from pardnn.errors import InfeasibleError, UsageError
from pardnn.plan.constraints import cutting, hard, placing
from pardnn.plan.pieces import Pieces
from pardnn.planner.algorithms import BEST, mixed_parts
from pardnn.planner.kept_state import check_no_layout, kept, submesh_size
from pardnn.planner.microbatches.best import PATIENCE, Best
from pardnn.planner.microbatches.cut_pieces import NO_BATCH
from pardnn.planner.microbatches.in_pieces import problem_in_pieces
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Decide, Outcome, makespan_s
from pardnn.planner.problem import Problem
from pardnn.planner.search.log import SearchLog
from pardnn.planner.sharded.decide import MORE_LOCAL_OPS, can_shard
from pardnn.planner.submesh.columns import check_computing, estimated_columns
from pardnn.planner.submesh.spread import cut_of_submesh, placed_on_submeshes
from pardnn.planner.submesh.submeshes import part_of, submesh_sizes
from pardnn.time_limit import seconds_left

#: Cuts that `auto` tries inside submeshes; the batch is in pieces already.
INSIDE = ("megatron", "tofu")
#: Numbers of pieces that are tried, each twice the one before.
MOST_DOUBLINGS = 6


def decide_mixed(problem: Problem, cut: str, placement: str, decide: Decide) -> Outcome:
    """Return the best plan of a cut inside submeshes and a placement on them.

    All sizes of submeshes are tried, and as many pieces as the options say.

    Args:
        problem: What to plan.
        cut: A key of `SHARDED`.
        placement: Of `ALGORITHMS` or `RECIPES`.
        decide: Runs the placement on a problem.

    Raises:
        InfeasibleError: E301, if none fits.
        UsageError: E250, if the devices form no submeshes, the graph cannot be cut, or state
            is on devices; E226 to E229, if the step has no such cut or pieces.
    """
    sizes = submesh_sizes(problem.cluster)
    name = f"{cut}*{placement}"
    if not sizes or not can_shard(problem.graph):
        why = "the graph does not say what its ops call" if sizes else (
            f"{problem.cluster.num_devices} devices do not form two or more equal submeshes"
        )  # fmt: skip
        raise UsageError(
            f"{name} cuts ops inside submeshes, but {why}.\nUse {cut} or {placement} alone.",
            code="E250",
        )
    sizes = _sizes_for_state(problem, sizes, name)
    wanted = problem.options.microbatches
    doublings = [1 << power for power in range(MOST_DOUBLINGS + 1)]
    found, cutter = Best(problem), _cutter(problem)
    for size in sizes:
        worse = failed = 0
        for count in doublings if wanted == "auto" else [wanted or 1]:
            try:
                is_better = _is_better(found, Mix(cut, placement, size, count), cutter, decide)
            except UsageError as error:
                if error.code != NO_BATCH or (found.found is None and found.failure is None):
                    raise
                break
            failed += found.had_no_room  # more pieces take less memory
            worse = 0 if is_better else worse + (not found.had_no_room)
            is_many = len(problem.graph.ops) * count * size > MORE_LOCAL_OPS
            if worse >= PATIENCE or (is_many and worse + failed >= PATIENCE):
                break
    return found.best()


def _sizes_for_state(problem: Problem, sizes: list[int], name: str) -> list[int]:
    """Return the sizes of submeshes that leave state where it is: all, if none has to.

    Raises:
        UsageError: E225, if state is laid out otherwise, or a constraint sets a layout.
    """
    if problem.state is None or not kept(problem.graph, problem.state):
        return sizes
    check_no_layout(hard(problem.options.constraints))
    size = submesh_size(problem.graph, problem.state)
    if size not in sizes:
        raise UsageError(
            f"{name} changes the layout of the state, but the state has to stay where it is.\n"
            "Use auto, or plan without the state.",
            code="E225",
        )
    return [size]


def like_state(problem: Problem) -> Problem:
    """Return a problem whose `auto` is a mixed plan if its state is that of one."""
    options, state = problem.options, problem.state
    if state is None or options.algorithm != BEST or submesh_size(problem.graph, state) is None:
        return problem
    return problem.with_options(algorithm="tofu*pardnn")


def better_mixed(problem: Problem, best: Outcome, decide: Decide) -> Outcome:
    """Return the best of an outcome and mixed plans with as many pieces as submeshes.

    Plans whose computation alone takes longer than the outcome are not placed.

    Args:
        problem: What was planned.
        best: The best plan without submeshes.
        decide: Runs placements on a problem.
    """
    wanted, found, cutter = problem.options.microbatches, Best(problem, best), _cutter(problem)
    for size in submesh_sizes(problem.cluster):
        submeshes = problem.cluster.num_devices // size
        counts = [submeshes, 2 * submeshes] if wanted == "auto" else [wanted or 1]
        for cut in INSIDE:
            for count in counts:
                if count < 2 or len(problem.graph.ops) * count * size > MORE_LOCAL_OPS:
                    break
                if seconds_left() <= 0:
                    return found.best()
                try:
                    is_better = _is_better(found, Mix(cut, "pardnn", size, count), cutter, decide)
                except UsageError:  # no such cut, or no such pieces
                    break
                if not is_better and not found.had_no_room:
                    break
    return found.best()


def may_mix(problem: Problem) -> bool:
    """Whether `auto` tries mixed plans: of steps in pieces, where no state and no start is."""
    options = problem.options
    is_free = problem.state is None and problem.start is None
    is_plain = not (options.recompute or options.offload) and options.policy == "order"
    asks = options.algorithm == BEST and options.microbatches not in (None, 1)
    return asks and is_free and is_plain and can_shard(problem.graph)


def demanded_parts(options: PlanOptions) -> tuple[str, str] | None:
    """Return the cut and the placement of a mixed plan that is asked for; None if none is.

    It is asked for by its name, or by constraints that cut tensors and place ops, which `auto`
    cannot meet otherwise.
    """
    demanded = options.constraints
    is_both = options.algorithm == BEST and cutting(demanded) and placing(demanded)
    return ("tofu", "pardnn") if is_both else mixed_parts(options.algorithm)


class Mix(NamedTuple):
    """A mixed plan to be made: cut, placement, devices of a submesh, pieces of the batch."""

    cut: str
    placement: str
    size: int
    count: int

    def __str__(self) -> str:
        return f"{self.count} pieces, submeshes of {self.size}: {self.cut}*{self.placement}"


#: Cuts the batch in so many pieces.
_Cutter = Callable[[int], tuple[Pieces | None, Problem]]


def _cutter(problem: Problem) -> _Cutter:
    """Return what cuts a batch, once for each number of pieces; constraints are for columns."""
    free = problem.with_options(constraints=()) if problem.options.constraints else problem

    @functools.cache
    def cut(count: int) -> tuple[Pieces | None, Problem]:
        pieces, cut = (None, free) if count == 1 else problem_in_pieces(free, count, 1)
        return pieces, dataclasses.replace(cut, log=SearchLog())

    return cut


def _is_better(found: Best, mix: Mix, cutter: _Cutter, decide: Decide) -> bool:
    """Try a mixed plan; return whether it is better than those before.

    Raises:
        UsageError: E226 to E229, if the step has no such pieces or cut.
    """
    log = found.problem.log
    log.trying(str(mix))

    def made() -> Outcome:
        try:
            outcome = _mixed(found.problem, mix, cutter, decide, found.seconds)
        except InfeasibleError as error:
            log.note(str(mix), None, error.message.splitlines()[0])
            raise
        log.note(str(mix), makespan_s(found.problem, outcome))
        return outcome

    return found.try_(made)


def _mixed(problem: Problem, mix: Mix, cutter: _Cutter, decide: Decide, below: float) -> Outcome:
    """Return a mixed plan.

    Raises:
        InfeasibleError: E301, if it does not fit, or takes as long as `below`.
        UsageError: E226 to E229, if the step has no such pieces or cut.
    """
    started = time.perf_counter()
    pieces, cut = cutter(mix.count)
    inside = dataclasses.replace(cut, cluster=part_of(problem.cluster, range(mix.size)))
    submeshes = problem.cluster.num_devices // mix.size
    check_computing(inside.least_cut_s / submeshes, below)
    sharding = cut_of_submesh(problem, cut, mix.cut, mix.size)
    check_computing(estimated_columns(inside, sharding) / submeshes, below)
    outcome = placed_on_submeshes(problem, cut, pieces, sharding, mix.placement, decide, below)
    return outcome._replace(
        algorithm=f"{mix.cut}*{mix.placement}", planning_s=time.perf_counter() - started
    )
