"""Plans with microbatches: the batch is cut in pieces, and the cut graph placed like any other."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

from pardnn.errors import InfeasibleError, UsageError
from pardnn.place.recipes.schedules import suitable
from pardnn.plan.constraints import placing
from pardnn.planner.algorithms import BEST, BEST_WHOLE, RECIPES, SHARDED, is_polished
from pardnn.planner.microbatches.below import check_may_be_below, cut_below, far, only_below
from pardnn.planner.microbatches.best import MOST_OPS_IN_PIECES, Best
from pardnn.planner.microbatches.cut_pieces import NO_BATCH, counts
from pardnn.planner.microbatches.in_pieces import completed, polished_pieces, problem_in_pieces
from pardnn.planner.microbatches.owned import OWNERS, best_owned, in_rows
from pardnn.planner.microbatches.staged import decide_staged
from pardnn.planner.outcome import Decide, Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.search.unlimited import reused
from pardnn.planner.steering.constrained import obeyed
from pardnn.sim.engine import simulate

#: The algorithm that places layers in stages.
STAGES = "modulo"
#: What tells quickly whether a placement of more pieces may be faster.
FIRST = "pardnn"
#: What is tried if the whole batch was best.
FEW_PIECES = 4


def decide_microbatched(problem: Problem, names: Sequence[str], decide: Decide) -> Outcome:
    """Return the best plan over the requested numbers of pieces.

    Args:
        problem: What to plan; its options say how many pieces, two at least.
        names: Algorithms to run; not all of them cut every op.
        decide: Runs them on a problem, and returns the best outcome.

    Raises:
        InfeasibleError: E301, if none fits.
        UsageError: E226, if the batch cannot be cut into that many.
    """
    wanted = problem.options.microbatches
    assert wanted is not None
    is_asked = problem.options.algorithm in RECIPES  # else `_recipes` are tried of pieces
    placing = [n for n in names if n not in SHARDED and (is_asked or n not in RECIPES)]
    if wanted == "auto":
        return _best(problem, names, placing, decide)
    return _in_pieces(problem, wanted, placing, decide)


def _best(
    problem: Problem, names: Sequence[str], placing: Sequence[str], decide: Decide
) -> Outcome:
    """Return the best plan over 1, 2, 4 pieces and so on.

    Rows are tried first, with as many pieces as devices or a few times as many, then stages with a
    quarter as many pieces as devices (fewer pieces keep a pipeline of as many stages busy for less
    than a fifth of the time). Both bound placements of the whole batch, which cost 5 s of 60 for a
    step that takes three times as long whole. Stages with more pieces follow; all of these are
    quick, and their time bounds cuts of the whole batch, each of which takes seconds to partition.
    The other algorithms then use the best number of pieces (`_others`), or, without stages, are
    tried with each number.
    """
    others = [name for name in placing if name != STAGES]
    quick = [name for name in placing if name == STAGES] or others
    # Beside others of their kind: a step that is cut whole may be as fast as stages of few pieces,
    # and slower than those of more.
    found, staged = Best(problem), Best(problem)

    def in_pieces(number: int, algorithms: Sequence[str], below: float) -> Outcome:
        return _in_pieces(problem, number, algorithms, decide, below=below)

    def tried(number: int) -> bool:
        below = min(found.seconds, staged.seconds)
        return staged.try_(lambda: in_pieces(number, quick, below))

    def in_whole(algorithms: Sequence[str], times: float = 1.0) -> None:
        below = times * min(found.seconds, staged.seconds)
        if algorithms:
            found.try_(lambda: decide(only_below(problem, below), algorithms))

    def place_whole() -> None:
        near = _may_be_below(problem, names, min(found.seconds, staged.seconds))
        in_whole([name for name in near if name not in SHARDED], far(problem.graph))

    count = 1
    if OWNERS in others:
        owned, count = best_owned(problem, lambda number: _owned(problem, number, decide))
        found.take(owned)
    rows = found.seconds
    first = 2 if quick == others else max(2, 1 << problem.cluster.num_devices.bit_length() >> 3)
    number = _stages_and_whole(staged, rows, first, tried, place_whole)
    count = number if staged.seconds < rows else count
    if quick != others:
        _polish(problem, staged, found.seconds)
    found.take(staged)
    in_whole([name for name in names if name in SHARDED])
    if others and quick != others:
        with _until_no_batch():
            _others(found, count, lambda number, below: in_pieces(number, others, below))
            if FIRST in others:
                _more_pieces(problem, found, count, decide)
    return found.best()


def _stages_and_whole(
    staged: Best,
    rows: float,
    first: int,
    tried: Callable[[int], bool],
    place_whole: Callable[[], None],
) -> int:
    """Try stages, and place the whole batch once something bounds that; return the best number.

    Where neither rows nor the first stages fit, stages with more pieces may.

    Args:
        staged: Takes the stages.
        rows: Seconds of the best rows; infinite if none fits.
        first: Pieces of the first stages.
        tried: Tries stages with a number of pieces.
        place_whole: Places the whole batch.
    """
    with _until_no_batch():
        tried(first)
    is_bounded = math.isfinite(min(rows, staged.seconds))
    if is_bounded:
        place_whole()
    number = _best_number(staged, tried, first)
    if not is_bounded:
        place_whole()
    return number


def _more_pieces(problem: Problem, found: Best, count: int, decide: Decide) -> None:
    """Try more pieces than stages need, by one algorithm, as long as that is faster.

    Small calls of convolutions lose less than those of products, so a placement of small pieces
    may be faster than stages of larger ones: of a ConvNeXt on 8 devices in a quarter less time.

    Args:
        problem: The step with its batch whole.
        found: What was found before.
        count: Pieces that were best in stages or rows; 1 if none was.
        decide: Runs the algorithm.
    """
    options = problem.options
    is_plain = not (options.recompute or options.offload) and problem.start is None
    if not is_plain or options.objective != "seconds" or options.policy != "order":
        return
    number = 2 * (count if count > 1 else FEW_PIECES)
    while number * len(problem.graph.ops) <= MOST_OPS_IN_PIECES and found.try_(
        lambda number=number: _alone(problem, number, decide, found.seconds)
    ):
        best = found.best()
        if is_polished(options.algorithm, number * len(problem.graph.ops)):
            found.try_(lambda best=best: polished_pieces(problem, best))
        number *= 2


def _alone(problem: Problem, count: int, decide: Decide, below: float) -> Outcome:
    """Place the pieces of a batch by one algorithm, without local search."""
    pieces, inner = cut_below(problem, count, _accumulators_before(problem), below)
    quick = inner.with_options(algorithm=FIRST)  # without `below`, far from which it ends early
    return completed(problem, inner, pieces, decide(quick, [FIRST]))


def _polish(problem: Problem, staged: Best, below: float) -> None:
    """Improve the best stages by local search: of 12 layers of T5 on 16 devices by 8 to 14 %.

    Args:
        problem: The step with its batch whole.
        staged: The best stages of any number of pieces.
        below: Seconds of the best plan of another kind; stages far above it are not improved.
    """
    options, outcome = problem.options, staged.found
    is_plain = not (options.recompute or options.offload) and problem.start is None
    is_timed = options.objective == "seconds" and options.policy == "order"
    if outcome is None or outcome.sharded is None or not (is_plain and is_timed):
        return
    cut = outcome.sharded.graph
    is_near = outcome.makespan_s < far(cut) * below
    if is_near and is_polished(options.algorithm, len(cut.ops)):
        staged.try_(lambda: polished_pieces(problem, outcome))


def _best_number(staged: Best, tried: Callable[[int], bool], first: int) -> int:
    """Try numbers of pieces, after a first one; return the best one, 1 if there is none.

    Fewer are tried if the first number was best, or nothing fits.

    Args:
        staged: What was found with the first number.
        tried: Tries one number; whether it is better than those before.
        first: A power of 2.
    """
    best = 1 if staged.found is None else first
    with _until_no_batch():
        for number in (each for each in counts() if each > first):
            if staged.is_done(number // 2):
                break
            best = number if tried(number) else best
    with _until_no_batch():
        while (first := first // 2) > 1 and (best == 2 * first or staged.found is None):
            best = first if tried(first) else best
    return best


def _others(found: Best, count: int, in_pieces: Callable[[int, float], Outcome]) -> None:
    """Try algorithms that need fewer pieces than stages do, and keep the better plan.

    They are tried with the best number of pieces and half of it, then with fewer as long as that is
    faster, and with more if nothing fits.

    Args:
        found: What was found before.
        count: Pieces that were best; 1 if none was.
        in_pieces: Runs them on a number of pieces, to find a plan below some seconds.
    """
    rest = Best(found.problem)

    def tried(number: int) -> bool:
        below = min(found.seconds, rest.seconds)
        is_better = rest.try_(lambda: in_pieces(number, below))
        found.take(rest)
        return is_better

    least = (count if count > 1 else FEW_PIECES) // 2
    number = 2 * least
    while number > 1:
        is_better = tried(number)
        if number <= least and not is_better and not rest.had_too_many:
            break
        number //= 2
    for number in counts():  # more pieces take less memory
        if found.found or rest.is_done(number // 2):
            break
        if number > 2 * least:
            tried(number)


@contextlib.contextmanager
def _until_no_batch() -> Iterator[None]:
    """Stop once the batch cannot be cut into this many pieces."""
    try:
        yield
    except UsageError as error:
        if error.code != NO_BATCH:
            raise


def _in_pieces(
    problem: Problem,
    count: int,
    placing: Sequence[str],
    decide: Decide,
    *,
    below: float = math.inf,
) -> Outcome:
    """Return the best plan of a cut batch: in stages, and by the other requested algorithms.

    Args:
        problem: The step with its batch whole.
        count: Pieces.
        placing: Algorithms.
        decide: Runs them.
        below: Seconds of a known plan; anything that cannot be faster is skipped.

    Raises:
        InfeasibleError: E301, the first, if none fits, or can be faster.
    """
    asked = [name for name in placing if name in RECIPES]
    others = [name for name in placing if name != STAGES and name not in asked]
    tries: list[Callable[[], Outcome]] = []
    if STAGES in placing:
        tries.append(lambda: _staged(problem, count, decide, below))
    if asked:
        tries.append(lambda: _as_drawn(problem, count, asked, decide))
    if others == [OWNERS]:
        tries.append(lambda: _owned(problem, count, decide))
    elif others:
        tries.append(lambda: _spread(problem, count, others, decide, below))
    return _fastest(problem, tries)


def _fastest(problem: Problem, tries: Sequence[Callable[[], Outcome]]) -> Outcome:
    """Return the best of several outcomes; its planning time is that of all.

    Raises:
        InfeasibleError: E301, the first, if there is none.
    """
    best = Best(problem)
    for one in tries:
        best.try_(one)
    return best.best()


def _staged(problem: Problem, count: int, decide: Decide, below: float) -> Outcome:
    """Cut the batch with one accumulator for each sum, and place layers in stages."""
    pieces, inner = cut_below(problem, count, 1, below)
    inner = only_below(inner, below)
    quick, recipes = inner.with_options(algorithm=STAGES), _recipes(problem, count)
    # Each is complete before the next: an interrupt takes the best that was kept.
    tries = [
        lambda: completed(
            problem, inner, pieces,
            reused(inner, (STAGES,), lambda each, _: in_stages(problem, each)),
        )
    ]  # fmt: skip
    if recipes:
        tries.append(lambda: completed(problem, inner, pieces, decide(quick, recipes)))
    return _fastest(problem, tries)


def _owned(problem: Problem, count: int, decide: Decide) -> Outcome:
    """Cut the batch with an accumulator of each sum on each device, and spread the pieces."""
    pieces, inner = problem_in_pieces(problem, count, problem.cluster.num_devices)
    return completed(problem, inner, pieces, in_rows(inner, decide))


def _as_drawn(problem: Problem, count: int, recipes: Sequence[str], decide: Decide) -> Outcome:
    """Cut the batch with one accumulator for each sum, and place pipelines by name."""
    pieces, inner = problem_in_pieces(problem, count, 1)
    return completed(problem, inner, pieces, decide(inner, recipes))


def in_stages(problem: Problem, inner: Problem) -> Outcome:
    """Search for stages of a cut graph, and orders of them."""
    started = time.perf_counter()
    inner.log.trying("stages")
    plan = obeyed(inner, decide_staged(problem.graph, inner)).plan
    timeline = simulate(inner.graph, inner.machine, plan)
    inner.log.note("stages", timeline.makespan)
    return Outcome(
        algorithm=STAGES, plan=plan, moved_ops=0, makespan_s=timeline.makespan,
        transfer_bytes=timeline.transfer_bytes(inner.graph),
        planning_s=time.perf_counter() - started,
    )  # fmt: skip


def _recipes(problem: Problem, count: int) -> list[str]:
    """Return the named pipelines that are tried in addition to the search."""
    options = problem.options
    is_best = options.algorithm in (BEST, BEST_WHOLE) and not placing(options.constraints)
    is_best = is_best and problem.start is None
    return suitable(problem.cluster.num_devices, count) if is_best else []


def _spread(
    problem: Problem, count: int, placing: Sequence[str], decide: Decide, below: float
) -> Outcome:
    """Cut the batch with an accumulator for each piece, and place each piece anywhere."""
    pieces, inner = cut_below(problem, count, _accumulators_before(problem), below)
    inner = only_below(inner, far(inner.graph) * below)
    outcome = decide(inner, [*placing, *_recipes(problem, count)])
    return completed(problem, inner, pieces, outcome)


def _may_be_below(problem: Problem, names: Sequence[str], seconds: float) -> list[str]:
    """Return the algorithms that may be faster on the whole batch than a known plan."""
    options = problem.options
    if not math.isfinite(seconds) or options.recompute or options.offload:
        return list(names)
    try:
        check_may_be_below(problem, seconds)
    except InfeasibleError:
        return [name for name in names if name in SHARDED]
    return list(names)


def _accumulators_before(problem: Problem) -> int | None:
    """Return the accumulators of each sum in the plan to start from: 1, or one for each piece."""
    pieces = problem.start and problem.start.pieces
    return 1 if pieces and not any(":gather@" in op.name for op in pieces.ops) else None
