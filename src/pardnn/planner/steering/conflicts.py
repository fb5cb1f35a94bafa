"""Constraints that cannot hold together for what kind of plan they ask for, or as nothing fits."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence

from pardnn.errors import InfeasibleError, PardnnError, UsageError
from pardnn.place.constraints import irreducible
from pardnn.place.pardnn import place_pardnn
from pardnn.plan.constraints import Constraint, cutting, hard, placing
from pardnn.plan.demands.layout_demands import layout_demands, layouts_of_demands
from pardnn.plan.demands.named import named
from pardnn.planner.algorithms import BEST, mixed_parts
from pardnn.planner.microbatches.decide import decide_microbatched
from pardnn.planner.problem import Problem
from pardnn.planner.search.portfolio import decide_best
from pardnn.planner.sharded.decide import can_shard, decide_sharded
from pardnn.planner.steering.constrained import at_odds, constrained, refused
from pardnn.planner.submesh.decide import decide_mixed, demanded_parts
from pardnn.planner.submesh.demanded import may_hold
from pardnn.planner.submesh.submeshes import submesh_sizes
from pardnn.shard.mesh_of_cluster import mesh_of
from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.problem import make_problem

#: Seconds after which no further part of the constraints is planned, to tell which do not fit.
SECONDS = 10.0
#: The cut and the placement of the mixed plans that tell which parts fit.
_QUICK = ("tofu", "pardnn")


def steered(problem: Problem) -> Problem:
    """Return a problem whose options select the kind of plan that its constraints require.

    Raises:
        InfeasibleError: E303, with constraints that ask for two kinds of plan.
        UsageError: E246, if options ask for another kind; E245, if a name does not exist.
    """
    demanded, options = hard(problem.options.constraints), problem.options
    odds = next(_at_odds(problem, demanded), ())
    if odds:
        is_mixed = mixed_parts(options.algorithm) is not None
        where = " inside submeshes" if is_mixed else ""
        more = _whole_submesh(problem, odds) if is_mixed else ""
        raise refused(odds, f"cannot hold together{where}", more)
    pieces = [each for each in demanded if each.kind == "pieces"]
    wanted = options.microbatches
    if not pieces:
        return problem
    count = pieces[0].count
    if wanted not in (None, "auto", count):
        raise UsageError(
            f"a constraint asks for {count} pieces, --microbatches for {wanted}: leave out one.",
            code="E246",
        )
    return problem.with_options(microbatches=count)


def _whole_submesh(problem: Problem, odds: Sequence[Constraint]) -> str:
    """Say what a pin would have to name, if it alone cannot hold."""
    if len(odds) > 1 or odds[0].kind != "pin":
        return ""
    graph, cluster = problem.graph, problem.cluster
    size = submesh_sizes(cluster)[0]
    pinned = named(odds, graph, graph, cluster, cluster.num_devices)[0].devices
    first = min(pinned) // size * size
    devices = ", ".join(map(str, range(first, first + size)))
    return f"\nA pin names all devices of a submesh, such as {devices}: an op runs on all of them."


def _at_odds(problem: Problem, demanded: Sequence[Constraint]) -> Iterator[tuple[Constraint, ...]]:
    """Yield constraints that no single plan can meet, alone or in pairs."""
    cuts, placed = cutting(demanded), placing(demanded)
    pieces = [each for each in demanded if each.kind == "pieces"]
    mesh = mesh_of(problem.cluster)
    if cuts and mesh.size == 1:
        yield (cuts[0],)
    _, odds = layouts_of_demands([*layout_demands(demanded, problem.graph, mesh)], mesh)
    if odds:
        yield odds
    yield from (
        (one, other) for one, other in itertools.pairwise(pieces) if one.count != other.count
    )
    parts = (placed, cuts, demanded) if cuts and placed else ()
    if mixed_parts(problem.options.algorithm):
        parts = (demanded,) if may_hold(problem, ()) else ()
    for part in parts:
        if _is_odd(problem, part):
            yield irreducible(part, functools.partial(_is_odd, problem))


def _is_odd(problem: Problem, demanded: Sequence[Constraint]) -> bool:
    """Whether no plan can meet constraints, be it placed, cut over all devices, or mixed."""
    is_mixed = mixed_parts(problem.options.algorithm) is not None
    cuts, placed = cutting(demanded), placing(demanded)
    if not (is_mixed or cuts or at_odds(problem, placed)):
        return False
    if not (is_mixed or placed or _is_torn(problem, cuts)):
        return False
    may_mix = is_mixed or problem.options.algorithm == BEST
    return not (may_mix and may_hold(problem, demanded))


def with_constraints(error: InfeasibleError, problem: Problem) -> InfeasibleError:
    """Return E303 with the constraints without which a plan was found, or else what was tried.

    Args:
        error: Nothing was found that fits.
        problem: With its constraints.
    """
    demanded, options = hard(problem.options.constraints), problem.options
    is_asked = any(each.kind == "pieces" for each in demanded)
    is_rewritten = options.recompute or options.offload  # parts are not planned so
    if not demanded or is_rewritten or (options.microbatches is not None and not is_asked):
        return error
    pair = demanded_parts(options)
    if pair is None and _is_torn(problem, demanded):
        odds = irreducible(demanded, lambda part: _is_torn(problem, part))
        return refused(odds, "cannot hold together")
    begin = time.monotonic()

    def fails(part: Sequence[Constraint]) -> bool:
        if part and time.monotonic() - begin > SECONDS:
            return False  # untried: it stays among those that are named
        try:
            _planned_quickly(problem.with_options(constraints=tuple(part), microbatches=None))
        except PardnnError:
            return True
        return False

    if fails(()):
        return error
    if not fails(demanded):
        other = "tofu" if cutting(demanded) else "pardnn"
        other = other if pair is None else "*".join(_QUICK)
        why = error.message.splitlines()[0].rstrip(".")
        return InfeasibleError(
            f"{options.algorithm} found no plan that meets the constraints: {why}.\n"
            f"Use {other}, which does, or auto.",
            details=error.details | {"try": [f"--algorithm {other}"]},
        )
    odds = irreducible(demanded, fails)
    return refused(odds, "could not be met together (not proven)", f"\n{error.message}")


def _is_torn(problem: Problem, demanded: Sequence[Constraint]) -> bool:
    """Whether tensors of one storage, or an op's loops, cannot have the required layouts."""
    mesh = mesh_of(problem.cluster)
    demands = [*layout_demands(demanded, problem.graph, mesh)]
    if not demands or not can_shard(problem.graph):
        return False
    fixed = problem.with_options(constraints=tuple(demanded)).fixed
    try:
        make_problem(problem.graph, NEEDED, fixed=fixed)
    except InfeasibleError:
        return bool(cutting(demanded))
    return False


def _planned_quickly(problem: Problem) -> None:
    """Raise unless one quick algorithm finds a plan that meets the constraints."""
    problem = steered(problem)
    pair = demanded_parts(problem.options)
    if pair is not None:
        decide_mixed(problem, *_QUICK, decide_best)
    elif cutting(problem.options.constraints):
        decide_sharded(problem, "tofu")
    elif problem.options.microbatches not in (None, 1):
        decide_microbatched(
            problem, ["pardnn"], lambda inner, names: decide_best(constrained(inner), names)
        )
    else:
        tried = constrained(problem)
        place_pardnn(tried.graph, tried.machine, tried.capacities, known=tried.known)
