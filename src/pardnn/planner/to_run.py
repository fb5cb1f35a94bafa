"""Which algorithms are run on a problem: those that options, constraints and kept state allow."""

from __future__ import annotations

from pardnn.errors import UsageError
from pardnn.plan.constraints import cutting, hard, placing
from pardnn.planner.algorithms import (
    BEFORE,
    BEST,
    BEST_WHOLE,
    CUTS,
    OF_PERIOD,
    RULES,
    SHARDED,
    SMALL_OPS,
    STAGED,
    algorithms_to_try,
)
from pardnn.planner.kept_state import Kind, check_no_layout, kind_of_plan
from pardnn.planner.problem import Problem
from pardnn.planner.sharded.decide import can_shard, may_shard
from pardnn.planner.submesh.decide import demanded_parts


def algorithms_of(problem: Problem) -> tuple[str, ...]:
    """Return the algorithms to run: those whose plans can leave state where it is.

    Raises:
        UsageError: E225, if the requested algorithm makes no such plans.
    """
    if problem.start is not None:
        return _near_start(problem)
    pair = demanded_parts(problem.options)
    if pair is not None:  # tells for itself what state it leaves where it is
        return ("*".join(pair),)
    algorithm, demanded = problem.options.algorithm, problem.options.constraints
    kind = _kind_of_state(problem)
    if cutting(demanded) or kind == "cut":
        return (algorithm,) if algorithm in SHARDED else ("tofu",)
    names = algorithms_to_try(algorithm, len(problem.graph.ops))
    if kind is None and not placing(demanded):
        may_cut = algorithm == BEST and _may_cut(problem)
        names = (*names, *(("tofu", *CUTS, *RULES) if may_cut else ()), *_pipelines(problem))
    if problem.state is not None and algorithm in (BEST, BEST_WHOLE):
        return (names[0], BEFORE, *names[1:])
    return names


def _kind_of_state(problem: Problem) -> Kind | None:
    """Return the kind of plan that state in place demands; None if none or either will do.

    Raises:
        UsageError: E225, if what is asked for would move it.
    """
    if problem.state is None:
        return None
    kind, algorithm = kind_of_plan(problem.graph, problem.state), problem.options.algorithm
    demanded = hard(problem.options.constraints)
    check_no_layout(demanded)
    placed = placing(demanded)
    if kind == "cut" and placed:
        raise UsageError(
            f"the state is cut over all devices, and constraint {str(placed[0])!r:.120} "
            "places whole ops, which moves the state.\nPlan without constraints.",
            code="E225",
        )
    if kind is not None and algorithm != BEST and (algorithm in SHARDED) != (kind == "cut"):
        raise _moves_state(algorithm, kind)
    return kind


def _moves_state(algorithm: str, kind: Kind) -> UsageError:
    """Return E225: an algorithm makes no plan of the kind that leaves state where it is."""
    cuts, other = ("cuts", "auto-whole") if kind == "whole" else ("places", "tofu")
    lies = "whole on single devices" if kind == "whole" else "cut over all devices"
    return UsageError(
        f"{algorithm} {cuts} ops, but the state is {lies}: no such plan leaves it where it is.\n"
        f"Use {other}, or auto.",
        code="E225",
    )


def _may_cut(problem: Problem) -> bool:
    """Whether a plan may cut ops; an engine with its own scheduler runs whole ones."""
    return problem.options.policy == "order" and may_shard(problem.graph, problem.cluster)


def _pipelines(problem: Problem) -> tuple[str, ...]:
    """Return the pipelines of the whole batch that `auto` tries."""
    options, graph = problem.options, problem.graph
    is_best = options.algorithm in (BEST, BEST_WHOLE) and problem.cluster.num_devices > 1
    is_plain = not (options.recompute or options.offload) and options.policy == "order"
    if not (is_best and is_plain and len(graph.ops) <= SMALL_OPS):
        return ()
    in_a_row = OF_PERIOD if options.objective == "period" else ()
    return (*(STAGED if can_shard(graph) else ()), *in_a_row)


def _near_start(problem: Problem) -> tuple[str, ...]:
    """Return the algorithms to run near a plan to start from."""
    algorithm, start = problem.options.algorithm, problem.start
    if problem.options.objective == "period":
        raise UsageError(
            "plans that start from another plan are compared by makespan only, not yet by "
            "period; use the objective seconds."
        )
    cuts = ("tofu",) if algorithm not in SHARDED else (algorithm,)
    return cuts if start is not None and start.partition is not None else (BEFORE, "pardnn")
