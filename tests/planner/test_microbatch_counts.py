"""Which numbers of pieces `--microbatches auto` tries, given what each would take."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import Costs, graph_costs
from pardnn.errors import InfeasibleError, UsageError
from pardnn.planner.microbatches import below as bounded
from pardnn.planner.microbatches import decide as microbatched
from pardnn.planner.microbatches import suitable
from pardnn.planner.microbatches.best import Best, TooManyPiecesError
from pardnn.planner.options import PlanOptions
from pardnn.planner.outcome import Outcome
from pardnn.planner.problem import Problem
from pardnn.planner.search import portfolio
from pardnn.planner.submesh import decide as submesh
from pardnn.sim.bounds import lower_bound_seconds, work_seconds
from testbed.small_graphs import small_case

#: Seconds of a step in so many pieces: in stages, and by other algorithms.
STAGED = {2: 8.0, 4: 6.0, 8: 5.0, 16: 5.5, 32: 6.0}


@pytest.mark.parametrize(
    ("whole", "others", "best", "tried"),
    [
        (9.0, {8: 4.9, 4: 4.0, 2: 7.0}, ("pardnn", 4.0), [8, 4, 2]),
        (9.0, {8: 5.2, 4: 4.0, 2: 3.0}, ("pardnn", 3.0), [8, 4, 2]),
        (9.0, {8: 5.2, 4: 5.3, 2: 3.0}, (microbatched.STAGES, 5.0), [8, 4]),
        # Slower than stages, and the faster the fewer pieces.
        (9.0, {8: 5.4, 4: 5.1, 2: 3.0}, ("pardnn", 3.0), [8, 4, 2]),
        # So many pieces cannot be faster than what is there; fewer may be.
        (9.0, {8: None, 4: None, 2: 3.0}, ("pardnn", 3.0), [8, 4, 2]),
        # The whole batch, cut over all devices, is faster than stages of 2 and of 4 pieces.
        (5.7, {8: 5.2, 4: 5.3, 2: 3.0}, (microbatched.STAGES, 5.0), [8, 4]),
        (4.5, {8: 5.2, 4: 4.0, 2: 3.0}, ("pardnn", 3.0), [8, 4, 2]),
    ],
)
def test_others_are_tried_of_fewer_pieces_than_stages_are_best_of(
    whole: float,
    others: dict[int, float | None],
    best: tuple[str, float],
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def outcome(name: str, seconds: float) -> Any:
        return Outcome(name, None, 0, seconds, 0, 0.0)  # type: ignore[arg-type]

    def in_pieces(problem: Any, count: int, names: list[str], decide: Any, **_: Any) -> Outcome:
        if names == [microbatched.STAGES]:
            return outcome(names[0], STAGED[count])
        asked.append(count)
        if (seconds := others[count]) is None:
            raise TooManyPiecesError("")
        return outcome(names[0], seconds)

    monkeypatch.setattr(microbatched, "_in_pieces", in_pieces)
    graph, cluster = small_case(0, seed=0)
    options = PlanOptions(microbatches="auto")
    problem = Problem(graph, cluster, graph_costs(graph), options)
    names = ["pardnn", microbatched.STAGES]
    found = microbatched.decide_microbatched(problem, names, lambda *_: outcome("", whole))
    assert ((found.algorithm, found.makespan_s), asked) == (best, tried)


@pytest.mark.parametrize(
    ("alone", "best"),
    [
        ({16: 6.0}, 4.0),
        ({16: 3.5, 32: 3.6}, 3.4),
        ({16: 3.5, 32: 2.5, 64: 9.0}, 2.4),
        ({16: None}, 4.0),  # they do not fit
    ],
)
def test_more_pieces_are_tried_as_long_as_a_quick_placement_of_them_is_faster(
    alone: dict[int, float | None], best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a ConvNeXt on 8 devices `pardnn` was faster in 8 pieces than the best of at most 4."""
    asked = list[int]()
    others = {8: 5.2, 4: 4.0, 2: 7.0}

    def outcome(name: str, seconds: float) -> Any:
        return Outcome(name, None, 0, seconds, 0, 0.0)  # type: ignore[arg-type]

    def in_pieces(problem: Any, count: int, names: list[str], decide: Any, **_: Any) -> Outcome:
        if names == [microbatched.STAGES]:
            return outcome(names[0], STAGED[count])
        asked.append(count)
        return outcome(names[0], others[count])

    def quickly(problem: Any, count: int, decide: Any, below: float) -> Outcome:
        if (seconds := alone[count]) is None:
            raise InfeasibleError("")
        return outcome("pardnn", seconds)

    monkeypatch.setattr(microbatched, "_in_pieces", in_pieces)

    def polished(problem: Problem, found: Outcome) -> Outcome:
        return outcome("", found.makespan_s - 0.1) if found.algorithm == "pardnn" else found

    monkeypatch.setattr(microbatched, "_alone", quickly)
    monkeypatch.setattr(microbatched, "polished_pieces", polished)
    graph, cluster = small_case(0, seed=0)
    options = PlanOptions(microbatches="auto")
    problem = Problem(graph, cluster, graph_costs(graph), options)
    names = ["pardnn", microbatched.STAGES]
    found = microbatched.decide_microbatched(problem, names, lambda *_: outcome("", 9.0))
    assert (found.makespan_s, asked) == (best, [8, 4, 2])


def test_cuts_of_the_whole_batch_are_bounded_by_what_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def in_pieces(problem: Any, count: int, names: list[str], decide: Any, **_: Any) -> Outcome:
        asked.append((names, count))
        return Outcome(names[0], None, 0, STAGED[count], 0, 0.0)  # type: ignore[arg-type]

    def whole(problem: Problem, names: Sequence[str]) -> Outcome:
        asked.append((names, problem.below))
        seconds = 4.0 if "tofu" in names else 9.0
        return Outcome(names[0], None, 0, seconds, 0, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(microbatched, "_in_pieces", in_pieces)
    graph, cluster = small_case(0, seed=0)
    options = PlanOptions(microbatches="auto")
    problem = Problem(graph, cluster, graph_costs(graph), options)
    names = ["pardnn", microbatched.STAGES, "tofu", "zero-3"]
    found = microbatched.decide_microbatched(problem, names, whole)
    stages, cuts = [microbatched.STAGES], ["tofu", "zero-3"]
    placing = ["pardnn", *stages]
    order = [each for each, _ in itertools.groupby(each for each, _ in asked)]
    assert order[:4] == [stages, placing, stages, cuts]
    below = {names[0]: below for names, below in reversed(asked)}
    assert below["pardnn"] == bounded.FAR * STAGED[2]
    assert below["tofu"] == min(STAGED.values())
    assert (found.algorithm, found.makespan_s) == ("tofu", 4.0)


def test_more_pieces_are_tried_as_long_as_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def in_pieces(problem: Any, count: int, names: list[str], decide: Any, **_: Any) -> Outcome:
        if names == [microbatched.STAGES] or count < 16:
            raise InfeasibleError("no room")
        asked.append(count)
        return Outcome(names[0], None, 0, 1.0, 0, 0.0)  # type: ignore[arg-type]

    def whole(*_: Any) -> Outcome:
        raise InfeasibleError("no room")

    monkeypatch.setattr(microbatched, "_in_pieces", in_pieces)
    graph, cluster = small_case(0, seed=0)
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(microbatches="auto"))
    names = ["pardnn", microbatched.STAGES]
    assert microbatched.decide_microbatched(problem, names, whole).algorithm == "pardnn"
    assert asked == [16]


@pytest.mark.parametrize(
    ("taken", "best", "tried"),
    [
        # Pieces that do not fit do not count as worse; of a batch of 16 there are no more.
        ({8: 3.0, 16: 2.0}, 2.0, [1, 2, 4, 8, 16, 32]),
        ({1: 3.0, 2: 4.0, 4: 5.0}, 3.0, [1, 2, 4]),
        ({}, None, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_mixed_plans_are_tried_of_more_pieces_until_they_fit(
    taken: dict[int, float],
    best: float | None,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def mixed(problem: Any, mix: Any, cutter: Any, decide: Any, below: float) -> Outcome:
        asked.append(mix.count)
        if mix.count == 32:
            raise UsageError("", code=microbatched.NO_BATCH)
        if mix.count not in taken:
            raise InfeasibleError("no room")
        return Outcome("", None, 0, taken[mix.count], 0, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(submesh, "_mixed", mixed)
    monkeypatch.setattr(submesh, "can_shard", lambda _: True)
    graph, _ = small_case(0, seed=0)
    options = PlanOptions(microbatches="auto")
    problem = Problem(graph, Cluster.uniform(4), graph_costs(graph), options)
    if best is None:
        with pytest.raises(InfeasibleError):
            submesh.decide_mixed(problem, "tofu", "heft", lambda *_: None)  # type: ignore[arg-type]
    else:
        found = submesh.decide_mixed(problem, "tofu", "heft", lambda *_: None)  # type: ignore[arg-type]
        assert found.makespan_s == best
    assert asked == tried


def test_what_cannot_be_faster_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pieces wait for each other, so more may be better; of many pieces calls are small.

    Two are tried before the whole batch, so nothing bounds them.
    """
    graph, cluster = small_case(0, seed=0)
    costs = graph_costs(graph)
    problem = Problem(graph, cluster, costs, PlanOptions(microbatches="auto"))
    slow = {kind: 100 * row for kind, row in costs.seconds.items()}
    inner = {
        2: dataclasses.replace(problem, cluster=Cluster.uniform(1024), costs=Costs(slow, "")),
        4: problem,
        8: dataclasses.replace(problem, costs=Costs(slow, "")),
    }
    looked = list[tuple[int, float]]()

    def ordered(_: Any, cut: Problem) -> Outcome:
        count = next(n for n, each in inner.items() if each.costs is cut.costs)
        looked.append((count, cut.below))
        return Outcome("", None, 0, 1.0, 0, 0.0)  # type: ignore[arg-type]

    cut = "problem_in_pieces"
    monkeypatch.setattr(bounded, cut, lambda _, count, __: (None, inner[count]))
    monkeypatch.setattr(microbatched, "in_stages", ordered)
    monkeypatch.setattr(microbatched, "completed", lambda _, __, ___, outcome: outcome)
    seconds = 1.01 * lower_bound_seconds(graph.arrays, problem.machine)
    found = microbatched.decide_microbatched(
        problem,
        [microbatched.STAGES],
        lambda *_: Outcome("", None, 0, seconds, 0, 0.0),  # type: ignore[arg-type]
    )
    assert looked == [(2, math.inf), (4, seconds)]
    assert found.makespan_s == min(seconds, 1.0)


def test_what_stages_have_too_much_work_for_is_not_cut_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, cluster = small_case(0, seed=0)
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(microbatches="auto"))
    work = work_seconds(problem.machine)
    asked = list[int | None]()

    def cut(_: Problem, count: int, accumulators: int | None) -> Any:
        asked.append(accumulators)
        return None, problem

    monkeypatch.setattr(bounded, "problem_in_pieces", cut)
    for below, accumulators in ((9 * work, None), (9 * work, 1), (1.01 * work, None), (work, None)):
        with contextlib.suppress(InfeasibleError):
            bounded.cut_below(problem, 4, accumulators, below)
    assert asked == [None, 1, None]
    with pytest.raises(TooManyPiecesError):
        bounded.cut_below(problem.without_limits(), 4, None, work)
    assert asked == [None, 1, None]


@pytest.mark.parametrize(
    ("below", "few", "is_cut", "is_tried"),
    [(9.0, 0, True, False), (math.inf, 0, True, True), (9.0, 5_000, True, True),
     (9.0, 0, False, True)],
)  # fmt: skip
def test_simple_rules_are_not_tried_of_many_ops_in_pieces_beside_a_known_plan(
    below: float, few: int, is_cut: bool, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, cluster = small_case(0, seed=0)
    problem = Problem(graph, cluster, graph_costs(graph), below=below)
    if is_cut:
        problem = dataclasses.replace(problem, cut=problem.step)
    monkeypatch.setattr(suitable, "FEW_OPS", few)
    names = ("pardnn", "single", "round-robin", "m-etf", "contiguous", "layer-round-robin")
    expected = names if is_tried else ("pardnn", "m-etf")
    assert suitable.suitable_for(problem, names) == expected
    assert suitable.suitable_for(problem, ("single",)) == ("single",)


@pytest.mark.parametrize(
    ("memory", "first", "is_tried"),
    [(1 << 40, 9.0, False), (1 << 40, 7.9, True), (1 << 40, None, False), (None, 9.0, True)],
)
def test_lists_are_tried_under_a_limit_if_what_is_before_them_comes_near(
    memory: int | None, first: float | None, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _ = small_case(0, seed=0)
    problem = Problem(graph, Cluster.uniform(4, memory=memory), graph_costs(graph), below=8.0)
    problem = dataclasses.replace(problem, cut=problem.step)
    asked = list[str]()

    def decide(_: Problem, name: str, **__: Any) -> Outcome:
        asked.append(name)
        if name == "pardnn" and first is None:
            raise InfeasibleError("no room")
        seconds = first if name == "pardnn" and first is not None else 20.0
        return Outcome(name, None, 0, seconds, 0, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(suitable, "FEW_OPS", 0)
    monkeypatch.setattr(portfolio, "decide", decide)
    portfolio._tried(problem, ("pardnn", "heft", "m-topo", "1f1b"))
    lists = ["heft", "m-topo"] if is_tried else []
    assert asked == ["pardnn", *lists, "1f1b"]
    asked.clear()
    portfolio._tried(problem, ("heft",))  # asked for
    assert asked == ["heft"]


def test_the_whole_batch_is_placed_after_stages_of_more_pieces_where_few_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A U-Net at its least limit: placements that nothing bounded took a fifth of the time."""
    asked = list[tuple[bool, float]]()

    def whole(problem: Problem, names: Sequence[str]) -> Outcome:
        asked.append(("tofu" in names, problem.below))
        return Outcome("", None, 0, 10.0, 0, 0.0)  # type: ignore[arg-type]

    def in_pieces(problem: Any, count: int, *_: Any, **__: Any) -> Outcome:
        if count < 4:
            raise InfeasibleError("no room")
        return Outcome("", None, 0, 9.0, 0, 0.0)  # type: ignore[arg-type]

    graph, cluster = small_case(0, seed=0)
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(microbatches="auto"))
    monkeypatch.setattr(microbatched, "_in_pieces", in_pieces)
    microbatched.decide_microbatched(problem, ["pardnn", microbatched.STAGES, "tofu"], whole)
    assert asked == [(False, bounded.FAR * 9.0), (True, 9.0)]


def test_placements_of_the_whole_batch_may_be_slower_before_local_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def whole(problem: Problem, names: Sequence[str]) -> Outcome:
        asked.append(("tofu" in names, problem.below))
        return Outcome("", None, 0, 10.0, 0, 0.0)  # type: ignore[arg-type]

    graph, cluster = small_case(0, seed=0)
    options = PlanOptions(microbatches="auto")
    problem = Problem(graph, cluster, graph_costs(graph), options)
    rows = Best(problem, Outcome("owners", None, 0, 9.0, 0, 0.0))  # type: ignore[arg-type]
    monkeypatch.setattr(microbatched, "best_owned", lambda *_: (rows, 4))
    monkeypatch.setattr(microbatched, "_in_pieces", lambda *_, **__: whole(problem, ["pardnn"]))
    names = ["pardnn", "owners", microbatched.STAGES, "tofu"]
    microbatched.decide_microbatched(problem, names, whole)
    assert asked[1] == (False, bounded.FAR * 9.0)
    assert (True, 9.0) in asked


@pytest.mark.parametrize("few", [0, 5_000])
def test_local_search_starts_from_schedules_that_cannot_be_fast_enough_themselves(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves their ops to other devices, which their own bound says nothing of."""
    graph, cluster = small_case(0, seed=0)
    problem = Problem(graph, cluster, graph_costs(graph), PlanOptions(microbatches="auto"))
    below = 1.01 * lower_bound_seconds(graph.arrays, problem.machine)
    asked = []

    def decide(cut: Problem, names: Any) -> Outcome:
        asked.append((cut.below, "1f1b" in names))
        return Outcome("", None, 0, 1.0, 0, 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(bounded, "FEW_OPS", few)
    monkeypatch.setattr(bounded, "problem_in_pieces", lambda *_: (None, problem))
    monkeypatch.setattr(microbatched, "completed", lambda *all_: all_[-1])
    microbatched._in_pieces(problem, 4, ["pardnn"], decide, below=below)
    times = bounded.FAR if few else bounded.FAR_OF_LARGE
    assert asked == [(times * below, True)]


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        ({4: 8.0, 8: 5.0, 16: 6.0, 32: 6.5}, 8, [4, 8, 16, 32]),
        ({4: 5.0, 8: 6.0, 16: 7.0, 2: 5.5}, 4, [4, 8, 16, 2]),
        ({4: 5.0, 8: 6.0, 16: 7.0, 2: 4.0}, 2, [4, 8, 16, 2]),
        ({2: 4.0}, 2, [4, 8, 2]),  # the batch has two samples
        ({}, 1, [4, 8, 2]),
    ],
)
def test_stages_begin_with_a_quarter_of_the_devices(
    seconds: dict[int, float], best: int, tried: list[int]
) -> None:
    asked = []
    graph, cluster = small_case(0, seed=0)
    staged = Best(Problem(graph, cluster, graph_costs(graph)))

    def planned(number: int) -> Outcome:
        asked.append(number)
        if number not in seconds:
            raise UsageError("too few samples", code="E226")
        return Outcome("", None, 0, seconds[number], 0, 0.0)  # type: ignore[arg-type]

    def try_(number: int) -> bool:
        return staged.try_(lambda: planned(number))

    with microbatched._until_no_batch():
        try_(4)
    assert (microbatched._best_number(staged, try_, 4), asked) == (best, tried)


@pytest.mark.parametrize(
    ("of_stages", "more", "expected"),
    [
        (1.1, {}, "better"),
        (2.0, {}, "pardnn"),
        (1.1, {"offload": True}, "pardnn"),  # its graph has copies, which the search would lose
        (1.1, {"recompute": True}, "pardnn"),
        (1.1, {"objective": "bytes"}, "pardnn"),
    ],
)
def test_only_stages_near_the_best_plan_are_improved(
    of_stages: float, more: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, cluster = small_case(0, seed=0)
    options = PlanOptions(microbatches="auto", **more)
    problem = Problem(graph, cluster, graph_costs(graph), options)
    made = SimpleNamespace(graph=graph)

    def outcome(name: str, seconds: float) -> Outcome:
        sent = int(10 * seconds)
        return Outcome(name, None, 0, seconds, sent, 0.0, sharded=made)  # type: ignore[arg-type]

    stages = outcome(microbatched.STAGES, of_stages)
    monkeypatch.setattr(microbatched, "_in_pieces", lambda *_, **__: stages)
    monkeypatch.setattr(microbatched, "polished_pieces", lambda _, each: outcome("better", 0.5))
    whole = outcome("pardnn", 1.0)
    names = ["pardnn", microbatched.STAGES]
    found = microbatched.decide_microbatched(problem, names, lambda *_: whole)
    assert found.algorithm == expected


def test_the_failure_that_is_told_is_of_the_plan_that_came_closest() -> None:
    graph, cluster = small_case(0, seed=0)
    found = Best(Problem(graph, cluster, graph_costs(graph)))

    def needs(size: int | None) -> Callable[[], Outcome]:
        details = {} if size is None else {"bytes": size, "usable_bytes": 10}

        def fails() -> Outcome:
            raise InfeasibleError(f"{size} bytes", details=details)

        return fails

    for size in (None, 30, 12, 20, None):
        found.try_(needs(size))
    with pytest.raises(InfeasibleError, match="12 bytes"):
        found.best()
