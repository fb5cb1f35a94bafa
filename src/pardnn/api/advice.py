"""Plan; where nothing fits, suggest what does.

A larger limit, more devices, ops that are called a second time, a batch in pieces, a smaller batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from pardnn.api.max_batch import smaller_batch
from pardnn.backends.entry_point import EntryPoint
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError, PardnnError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.planner.algorithms import ALGORITHMS, BEST, BEST_WHOLE, SHARDED
from pardnn.planner.costs import costs_for
from pardnn.planner.estimate import (
    larger_clusters,
    limit_tried,
    rounded_up,
    suggestions,
    with_limit,
)
from pardnn.planner.make_plan import best_once, make_plan
from pardnn.planner.offload.placed import all_on_host
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.recomputed import first_recomputed
from pardnn.planner.search.log import Watch
from pardnn.planner.start.earlier import started
from pardnn.planner.steering.conflicts import steered
from pardnn.planner.steering.constrained import constrained
from pardnn.planner.submesh.decide import demanded_parts
from pardnn.planner.to_run import algorithms_of
from pardnn.report.progress import progress_bar, status
from pardnn.report.results import PlanResult
from pardnn.report.text import seconds_text
from pardnn.sim.peak import least_bytes
from pardnn.time_limit import OutOfTimeError, check_time, time_limit

#: Ops up to which a batch that fits is looked for, which takes two captures and some ten plans,
#: and a plan with second calls or a batch in pieces.
CHEAP_OPS = 12_000
#: Seconds after which no other way of running the step is tried, once it is known not to fit. They
#: change no plan; what is left untried is named.
SECONDS = 10.0
#: Seconds after which a try is cut off: cuts of many devices take a minute.
MOST_SECONDS = 30.0
#: Numbers of pieces.
COUNTS = (2, 4, 8)


def planned(
    graph: Graph,
    cluster: Cluster,
    options: PlanOptions,
    entry: EntryPoint | None = None,
    batch_size: int | None = None,
    *,
    state: StateInPlace | None = None,
    start: Plan | None = None,
    keep_best: bool = False,
) -> tuple[Plan, PlanResult]:
    """Plan; if nothing fits, the error names options that were tried and do fit.

    Args:
        graph: The graph.
        cluster: What it runs on.
        options: How to plan.
        entry: The entry point that the graph is from, if it is from one.
        batch_size: At which it was captured; None is the entry point's own.
        state: What is already on the devices and stays; then nothing else is tried.
        start: The plan to start from.
        keep_best: Whether an interrupt ends the search, and its best plan is returned.

    Raises:
        InfeasibleError: E301; E303, if constraints cannot hold together.
    """
    with progress_bar("timing ops") as progress:
        costs = costs_for(graph, cluster, options.costs, threads=options.threads, progress=progress)
    options = options if start is None else started(options, start)
    problem = Problem(graph, cluster, costs, options, state, start)
    with time_limit(options.time_limit):
        try:
            with status("planning") as show:
                return make_plan(problem, _watch(show, options.time_limit), keep_best=keep_best)
        except InfeasibleError as error:
            if state is not None or error.code == "E303" or "try" in error.details:
                raise
            with status("nothing fits; looking for what does"):
                raise _with_advice(error, problem, entry, batch_size) from None


def _with_advice(
    error: InfeasibleError, problem: Problem, entry: EntryPoint | None, batch_size: int | None
) -> InfeasibleError:
    """Return an error that nothing fits, with tried options that do; unchanged if out of time."""
    tried, late, is_cut_off = list[str](), list[str](), False
    try:
        asked = steered(problem)
        left = min(MOST_SECONDS, problem.options.time_limit or MOST_SECONDS)
        with time_limit(left):
            for option, fits in _tried(asked.with_options(time_limit=left), error):
                (tried if fits else late).append(option)
    except OutOfTimeError:
        is_cut_off = True
    try:
        check_time()  # the limit that the user set
        fitting, hint = _batch(problem, entry, batch_size)
    except OutOfTimeError:
        return error
    tried += fitting
    if late:
        hint = [f"Not tried, after {SECONDS:g} s: {', '.join(late)}.", *hint]
    if is_cut_off:
        hint = [f"More was not tried: the search for what fits ended after {left:g} s.", *hint]
    lines = [error.message, *([f"Try: {' or '.join(tried)} (tried: fits)."] if tried else [])]
    return InfeasibleError(
        "\n".join([*lines, *hint]), code=error.code, details=error.details | {"try": tried}
    )


def _tried(problem: Problem, error: InfeasibleError) -> Iterator[tuple[str, bool]]:
    """Yield options with which the step fits, or that were not tried for want of time: False.

    Args:
        problem: What no plan was found for.
        error: Why not.
    """
    begin = time.monotonic()
    if _is_as_usual(problem):
        yield from (
            (option, True) for option in suggestions(problem, error.details.get("peak_bytes"))
        )
    else:
        yield from _as_asked(problem, error, begin)
    yield from _rewrites(problem, begin)


def _watch(show: Callable[[str], None], time_limit: float | None) -> Watch:
    """Return a function that reports the progress of a search to whoever watches."""
    begin = time.monotonic()

    def told(what: str, tried: int, best_s: float | None) -> None:
        line = f"planning: {what}"
        if tried:
            best = "none fits" if best_s is None else f"the best {seconds_text(best_s)} a step"
            line += f"; {tried} tried, {best}"
        if time_limit is not None:
            left = max(0.0, time_limit - (time.monotonic() - begin))
            line += f"; {left:.0f} s left"
        show(line)

    return told


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


def _is_as_usual(problem: Problem) -> bool:
    """Whether quick plans of the whole step tell what fits, as `estimate` takes them."""
    options = problem.options
    is_rewritten = options.recompute or options.offload or options.microbatches not in (None, 1)
    is_usual = options.algorithm in (BEST, BEST_WHOLE) or options.algorithm in (
        *ALGORITHMS, *SHARDED
    )  # fmt: skip
    return is_usual and not is_rewritten and problem.start is None


def _as_asked(problem: Problem, error: InfeasibleError, begin: float) -> Iterator[tuple[str, bool]]:
    """Yield a limit and a number of devices with which the step, planned as asked, fits.

    Args:
        problem: What no plan was found for.
        error: Why not.
        begin: When tries began, on the monotonic clock.
    """

    def tried(limited: Problem) -> tuple[bool, int | None]:
        try:
            make_plan(limited)
            check_time()  # past the limit, it may be of another algorithm
        except OutOfTimeError:
            raise
        except PardnnError as failure:  # so many devices may not share a piece of the batch
            return False, _bytes_of(failure)
        return True, None

    limit = limit_tried(problem, _bytes_of(error), tried)
    if limit is None:
        try:
            peaks = make_plan(with_limit(problem, None))[1].peak_bytes
        except InfeasibleError:  # memory is not what is missing
            return
        limit = limit_tried(problem, max(peaks), tried)
    if limit is not None:
        yield f"--max-memory {rounded_up(limit)}", True
    for more in larger_clusters(problem.cluster):
        option = f"--devices {more.num_devices}"
        if time.monotonic() - begin > SECONDS:
            yield option, False
            return
        if tried(dataclasses.replace(problem, cluster=more))[0]:
            yield option, True
            return


def _bytes_of(error: PardnnError) -> int | None:
    """Return what the plan that came nearest needs on a device; None if that is not known."""
    return error.details.get("bytes", error.details.get("peak_bytes"))


def _rewrites(problem: Problem, begin: float) -> Iterator[tuple[str, bool]]:
    """Yield options with which a plan that fits was found, or that were not tried for want of time.

    Args:
        problem: What no plan was found for.
        begin: When tries began, on the monotonic clock.
    """
    options, num_ops = problem.options, len(problem.graph.ops)
    if options.policy != "order" or num_ops > CHEAP_OPS:
        return
    again = _fits_recomputed(problem)
    if again:
        yield "--recompute", True
    if _fits_offloaded(problem):
        yield "--offload", True
    for given, option in _in_pieces(problem, recompute=not again):
        if num_ops * given["microbatches"] > CHEAP_OPS:
            continue
        if time.monotonic() - begin > SECONDS:
            yield option, False
        elif _is_planned(problem.with_options(**given)):
            yield option, True
            return


def _fits_recomputed(problem: Problem) -> bool:
    """Whether second calls alone let the step fit."""
    options, arrays = problem.options, problem.graph.arrays
    if options.recompute or options.microbatches is not None:
        return False
    limits = [limit for limit in problem.capacities if limit is not None]
    least = least_bytes(arrays, problem.cluster.num_devices)  # in any order, with any calls
    if len(limits) == len(problem.capacities) and least > max(limits):
        return False
    if demanded_parts(options):
        return _is_planned(problem.with_options(recompute=True))
    names, asked = algorithms_of(problem), constrained(problem)
    return first_recomputed(asked, names, best_once, seconds=SECONDS) is not None


def _fits_offloaded(problem: Problem) -> bool:
    """Whether optimizer state on the host alone lets the step fit."""
    options = problem.options
    if options.offload or options.constraints or options.microbatches is not None:
        return False
    if demanded_parts(options):
        return _is_planned(problem.with_options(offload=True))
    try:
        all_on_host(problem, algorithms_of(problem), best_once)
    except OutOfTimeError:
        raise
    except PardnnError:  # it does not fit, or the state is cut
        return False
    return True


def _is_planned(problem: Problem) -> bool:
    """Whether a plan of a problem is found; it may also be refused, or the batch too small."""
    try:
        make_plan(problem)
        check_time()  # past the limit, it may be of another algorithm
    except OutOfTimeError:
        raise
    except PardnnError:
        return False
    return True


def _in_pieces(problem: Problem, *, recompute: bool) -> Iterator[tuple[dict[str, int], str]]:
    """Yield options that cut the batch, and how they are written; then with second calls, too."""
    options = problem.options
    if options.microbatches is not None:
        return
    for again in (False, True)[: 1 + (recompute and not options.recompute)]:
        for count in COUNTS:
            given = {"microbatches": count, "recompute": again or options.recompute}
            yield given, f"{'--recompute ' if again else ''}--microbatches {count}"
