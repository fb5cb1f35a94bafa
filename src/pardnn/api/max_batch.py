"""The largest batch size that fits.

A capture and a measurement for each size tried would take minutes, so the search runs over graphs
that two captures predict (`batch_scaling`), and of each it only asks whether it fits: the first
algorithm that finds a plan is enough. Its answer is then planned from a capture of its own, as is
the next larger size, which must not fit; where the prediction was wrong, captures go on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pardnn.api.batch_scaling import Family, costs_at, family_of, graph_at
from pardnn.api.capture import captured
from pardnn.backends.entry_point import EntryPoint
from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs
from pardnn.errors import InfeasibleError, UsageError, UserCodeError
from pardnn.graph.ir import Graph
from pardnn.plan.check import capacities
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import PlanArrays
from pardnn.planner.algorithms import algorithms_to_try, cuts_ops
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.offload.placed import all_on_host
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.recomputed import first_recomputed
from pardnn.planner.search.portfolio import decide
from pardnn.planner.warm_up import warm_up
from pardnn.planner.without_plan.baselines import estimated_baselines
from pardnn.report.progress import progress_bar, status
from pardnn.report.results import CompareRow, MaxBatchResult, PlanResult, TriedBatch
from pardnn.sim.peak import least_bytes

#: Where the search starts if FUNCTION names no default for its `batch_size`.
DEFAULT_START = 8
#: The answer is exact to this fraction: below 200, to one.
PRECISION = 0.01
_MAX_BATCH_SIZE = 1 << 40
#: A guess whether second calls of ops let a size fit: seconds, and work of each search.
SECONDS, WORK = 10.0, 200_000_000


def max_batch(entry: EntryPoint, cluster: Cluster, options: PlanOptions) -> MaxBatchResult:
    """Return the largest batch size of an entry point whose step fits a cluster.

    Args:
        entry: Its function takes a keyword `batch_size`.
        cluster: Devices, with limits.
        options: How to plan.

    Raises:
        InfeasibleError: E301, if nothing fits at the smallest batch size.
        UsageError: E223, if FUNCTION takes no `batch_size`; E216, if nothing limits it.
        UnsupportedError: E8xx, if the step cannot be captured.
        UserCodeError: The user's own code raised.
    """
    if any(limit is None for limit in capacities(cluster, options.reserve)):
        raise UsageError(
            "a device without a memory limit takes any batch size.\n"
            "Give each a limit: --max-memory 16GiB, or a cluster whose devices have one.",
            code="E216",
        )
    search = _Search(entry, cluster, options, start=own_batch_size(entry))
    best = search.confirmed(search.predicted_largest())
    result = search.plans[best]
    return MaxBatchResult(
        batch_size=best,
        step=search.step(best),
        peak_bytes=result.peak_bytes,
        capacity_bytes=result.capacity_bytes,
        makespan_s=result.makespan_s,
        algorithm=result.algorithm,
        tried=tuple(search.tried),
    )


def smaller_batch(problem: Problem, entry: EntryPoint, batch_size: int | None = None) -> int | None:
    """Return a batch size that was planned from a capture and fits; None if none was found.

    Predictions from the given graph and a capture at half its batch lead there; the answer is near
    the largest, which `max_batch` finds.

    Args:
        problem: A graph that does not fit; guesses use its costs at every size.
        entry: Where it was captured; its function takes `batch_size`.
        batch_size: Of that graph; None: the entry point's own.

    Raises:
        PardnnError: The entry point cannot be captured at a smaller size.
    """
    size = batch_size or own_batch_size(entry)
    graph, costs, options = problem.graph, problem.costs, problem.options
    search = _Search(entry, problem.cluster, options, start=size)
    search.graphs[size] = graph
    if size < 2 or search.captured(size // 2) is None:
        return None
    family = family_of(search.graphs[size // 2], size // 2, graph, size)
    guess = size // 2
    if family is not None and not cuts_ops(options.algorithm):
        search.anchors = family, costs, costs
        guess = search.predicted_between(0, size)
    for tried in dict.fromkeys((guess, guess * 7 // 8, guess // 2)):
        if tried and search.captured(tried) is not None and search.fits(tried):
            return tried
    return None


def baselines_of(
    problem: Problem, source: EntryPoint | str, batch_size: int | None
) -> tuple[CompareRow, ...]:
    """Return the rows of ideal, small batch and swapping; a graph file has no other batch sizes.

    Args:
        problem: A graph, and what it would run on.
        source: Where it is from.
        batch_size: Of that graph; None: the entry point's own.
    """
    if isinstance(source, str) or "batch_size" not in source.parameters:
        return estimated_baselines(problem)
    size = batch_size or own_batch_size(source)
    return estimated_baselines(problem, size, lambda batch: captured(source, batch)[0])


def own_batch_size(entry: EntryPoint) -> int:
    """Return FUNCTION's own batch size.

    Raises:
        UsageError: E222, if it needs arguments; E223, if it takes no `batch_size`.
    """
    entry.factory()  # raises if it has no default for one of its arguments
    if "batch_size" not in entry.parameters:
        entry.factory(DEFAULT_START)  # raises, saying how to write it
    default = entry.parameters["batch_size"].default
    if isinstance(default, int) and not isinstance(default, bool) and default > 0:
        return default
    return DEFAULT_START


@dataclass(repr=False)
class _Search:
    """What is known so far of which batch sizes fit.

    Attributes:
        entry: The entry point.
        cluster: With limits.
        options: How to plan.
        start: A batch size that the entry point is known to take.
        multiple: Batch sizes are multiples of it.
        graphs: Captured, by batch size.
        costs: Of those.
        anchors: What predictions are made from, with the costs of its two captures.
        plans: Made from captures, by batch size; those that fit.
        misfits: Why nothing fits, by batch size, from captures.
        tried: All that was tried, in order.
    """

    entry: EntryPoint
    cluster: Cluster
    options: PlanOptions
    start: int
    multiple: int = 1
    graphs: dict[int, Graph] = field(default_factory=dict)
    costs: dict[int, Costs] = field(default_factory=dict)
    anchors: tuple[Family, Costs, Costs] | None = None
    plans: dict[int, PlanResult] = field(default_factory=dict)
    misfits: dict[int, InfeasibleError] = field(default_factory=dict)
    tried: list[TriedBatch] = field(default_factory=list)

    def step(self, batch_size: int) -> int:
        """Distance to the next larger batch size that is tried."""
        return max(self.multiple, int(batch_size * PRECISION) // self.multiple * self.multiple)

    # Predicted.

    def predicted_largest(self) -> int:
        """Return the largest batch size that is predicted to fit, at least the smallest."""
        first, second = self.start, 2 * self.start
        # What cuts ops or a batch reads arguments of calls, which are not predicted.
        is_readable = not cuts_ops(self.options.algorithm) and self.options.microbatches is None
        # The first size may be a special case, such as a batch of one.
        pairs = ((first, second), (second, 2 * second)) if is_readable else ()
        if not any(self._anchored(*pair) for pair in pairs):
            return self.start  # captures alone will tell
        with status("loading kernels"):
            warm_up(algorithms_to_try(self.options.algorithm, len(self.graphs[self.start].ops)))
        low, high = 0, self.start
        while self._is_predicted(high):
            low, high = high, 2 * high
            if high > _MAX_BATCH_SIZE:
                raise _unlimited()
        return max(self.predicted_between(low, high), 1)

    def _anchored(self, low: int, high: int) -> bool:
        """Predict from captures at these two sizes from now on, if they have the same ops."""
        one, other = self.captured(low), self.captured(high)
        family = one and other and family_of(one, low, other, high)
        if family:
            self.anchors = family, self._costs(low), self._costs(high)
        return family is not None

    def predicted_between(self, good: int, bad: int) -> int:
        """Return the largest size from `good` to below `bad` that is predicted to fit."""
        while bad - good > self.step(good):
            middle = max(_rounded((good + bad) // 2, self.multiple), good + self.multiple)
            if self._is_predicted(middle):
                good = middle
            else:
                bad = middle
        return good

    def _is_predicted(self, batch_size: int) -> bool:
        assert self.anchors is not None
        family, low, high = self.anchors
        graph = graph_at(family, batch_size)
        costs = costs_at(family, low, high, batch_size)
        problem = Problem(graph, self.cluster, costs, self.options)
        limits = [limit for limit in problem.capacities if limit is not None]
        names = algorithms_to_try(self.options.algorithm, len(graph.ops))
        is_here = not self.options.offload  # else state may be on the host
        if is_here and least_bytes(graph.arrays, self.cluster.num_devices) > max(limits):
            names = ()
        graph, found = _first_plan(problem, names)
        if found is not None:
            self._note(batch_size, tuple(peak_bytes(graph, found)), is_captured=False)
            return True
        self._note(batch_size, None, is_captured=False)
        return False

    def _note(self, size: int, peaks: tuple[int, ...] | None, *, is_captured: bool) -> None:
        self.tried.append(
            TriedBatch(
                batch_size=size, fits=peaks is not None, peak_bytes=peaks, captured=is_captured
            )
        )

    # Confirmed.

    def confirmed(self, guess: int) -> int:
        """Return the largest batch size that fits, near a guess, by captures and whole plans.

        Raises:
            InfeasibleError: E301, if none fits.
        """
        size, good, bad = guess, 0, _MAX_BATCH_SIZE
        stride = self.step(guess)
        while True:
            if not self._takes(size):
                # FUNCTION raises at this size: only multiples of its own are known to be good.
                self.multiple, bad = self.start, _MAX_BATCH_SIZE
                good = 0 if good % self.start else good
                size = max(_rounded(size, self.start), self.start)
                stride = self.step(size)
            elif self.fits(size):
                good = size
                if bad - good <= self.step(good):
                    return good
                size, stride = self._above(good, bad, stride), 2 * stride
            else:
                bad = size
                if size <= self.multiple:
                    raise self._none_fits(size)
                if good and bad - good <= self.step(good):
                    return good
                size, stride = self._below(good, bad, stride), 2 * stride

    def _above(self, good: int, bad: int, stride: int) -> int:
        """Return the next size to try after one that fits: first the next, then larger strides."""
        step = self.step(good)
        guess, high = good, bad
        if stride > step and self._is_anchored_at(good):
            if bad == _MAX_BATCH_SIZE:
                high = 2 * good
                while high < bad and self._is_predicted(high):
                    high *= 2
            guess = self.predicted_between(good, high)
        middle = _rounded((good + bad) // 2, self.multiple)
        return max(good + step, min(max(guess, min(good + stride, middle)), bad - step))

    def _below(self, good: int, bad: int, stride: int) -> int:
        """Return the next size to try after a misfit, between the two and not next to it twice."""
        lowest = good + self.step(good) if good else self.multiple
        guess = _rounded((good + bad) // 2, self.multiple)
        if self._is_anchored_at(bad):
            guess = self.predicted_between(good, bad)
        return max(lowest, min(guess, _rounded(bad - stride, self.multiple)))

    def _is_anchored_at(self, size: int) -> bool:
        """Predict from a size that was just captured, if it has the same ops as the start."""
        if self.anchors is None or size == self.start:
            return False
        return self._anchored(min(self.start, size), max(self.start, size))

    def _takes(self, size: int) -> bool:
        """Whether the entry point can be captured at a size that need not be one of its own."""
        return size % self.start == 0 or self.captured(size) is not None

    def captured(self, size: int) -> Graph | None:
        """Return the graph at a batch size; None if FUNCTION raises at one that is not its own."""
        if size > _MAX_BATCH_SIZE // 2:
            raise _unlimited()
        if size not in self.graphs:
            try:
                with status(f"capturing at batch size {size}"):
                    self.graphs[size] = captured(self.entry, size)[0]
            except UserCodeError:
                if size % self.start == 0:
                    raise
                return None
        return self.graphs[size]

    def fits(self, size: int) -> bool:
        """Plan a captured batch size in full, once."""
        if size not in self.plans and size not in self.misfits:
            graph = self.captured(size)
            assert graph is not None  # `_takes` has seen to that
            problem = Problem(graph, self.cluster, self._costs(size), self.options)
            try:
                with status(f"planning at batch size {size}"):
                    self.plans[size] = make_plan(problem)[1]
            except InfeasibleError as error:
                self.misfits[size] = error
            found = self.plans.get(size)
            self._note(size, found and found.peak_bytes, is_captured=True)
        return size in self.plans

    def _costs(self, size: int) -> Costs:
        """Return the costs of a captured batch size."""
        if size not in self.costs:
            with progress_bar("timing ops") as progress:
                self.costs[size] = costs_for(
                    self.graphs[size],
                    self.cluster,
                    self.options.costs,
                    threads=self.options.threads,
                    progress=progress,
                )
        return self.costs[size]

    def _none_fits(self, size: int) -> InfeasibleError:
        error = self.misfits[size]
        return InfeasibleError(
            f"no batch size fits; at the smallest, {size}: {error.message}",
            code=error.code,
            details=error.details | {"tried": [t.batch_size for t in self.tried]},
        )


def _first_plan(problem: Problem, names: Sequence[str]) -> tuple[Graph, PlanArrays | None]:
    """Return the first plan found that fits, and its graph; with second calls where asked for."""
    for name in names:
        try:
            return problem.graph, decide(problem, name).plan
        except InfeasibleError:
            continue
    if names and problem.options.offload:
        try:
            found = all_on_host(problem, names, _any_plan).sharded
        except InfeasibleError:
            found = None
        if found is not None:
            return found.graph, found.arrays
    if names and problem.options.recompute:
        first = first_recomputed(problem, names, _any_plan, seconds=SECONDS, work=WORK)
        if first is not None and first.sharded is not None:
            return first.sharded.graph, first.plan
    return problem.graph, None


def _any_plan(problem: Problem, names: Sequence[str]) -> Outcome:
    """Return the outcome of the first algorithm that finds one.

    Raises:
        InfeasibleError: E301, of the last algorithm, if none does.
    """
    for name in names[:-1]:
        try:
            return decide(problem, name)
        except InfeasibleError:
            continue
    return decide(problem, names[-1])


def _unlimited() -> UsageError:
    return UsageError(
        "the step's memory does not grow with `batch_size`. Does FUNCTION use it?", code="E216"
    )


def _rounded(size: int, multiple: int) -> int:
    return size // multiple * multiple
