"""Kernels that are compiled are told; those that are loaded, and kernels of others, are not."""

import sys
from collections.abc import Callable

import numba
import pytest

from pardnn.cluster import Cluster
from pardnn.cost.costs import graph_costs
from pardnn.kernels.compilations import COMPILATIONS, Compilations
from pardnn.planner import make_plan as planning
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.planner.warm_up import _warm_up_graph
from pardnn.report import progress
from pardnn.report.text import console, plan_text


def test_who_watches_is_told_when_compiling_begins_and_ends() -> None:
    found, told = Compilations(), []
    with found.watched(told.append):
        found.begin()
        found.begin()  # within the first
        found.end()
        assert told == [True]
        found.end()
        found.begin()
    found.end()
    assert told == [True, False, True]
    assert found.begun == 3


def compiled(module: str) -> Callable[[int], int]:
    """Return a function of a module, to be compiled at its first call."""

    def one_more(number: int) -> int:
        return number + 1

    one_more.__module__ = module
    return numba.njit(one_more)  # pyright: ignore[reportReturnType]


@pytest.mark.jit
def test_a_kernel_counts_once_and_the_user_s_own_never() -> None:
    ours, theirs = compiled("pardnn.kernels.made_up"), compiled("their_module")
    before = COMPILATIONS.begun
    assert (theirs(1), COMPILATIONS.begun) == (2, before)
    assert (ours(1), COMPILATIONS.begun) == (2, before + 1)
    assert (ours(2), COMPILATIONS.begun) == (3, before + 1)


class Spinner:
    """A line on a terminal."""

    lines: list[str]

    def __init__(self, *_: object, **__: object) -> None:
        self.lines = []

    def status(self, text: str) -> "Spinner":
        self.lines.append(text)
        Spinner.last = self
        return self

    def __enter__(self) -> "Spinner":
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, text: str) -> None:
        self.lines.append(text)


def test_a_status_says_that_kernels_are_compiled_while_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "Console", Spinner)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.status("planning") as show:
        COMPILATIONS.begin()
        show("planning: heft")
        COMPILATIONS.end()
    compiling = "; compiling kernels, which are kept for later: up to a minute or two"
    assert Spinner.last.lines == [
        "planning",
        f"planning{compiling}",
        f"planning: heft{compiling}",
        "planning: heft",
    ]


@pytest.mark.parametrize("cold", [False, True])
def test_a_plan_says_whether_its_kernels_were_compiled_or_loaded(
    monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    monkeypatch.setattr(planning, "warm_up", lambda *_, **__: cold and COMPILATIONS.begin())
    graph = _warm_up_graph()
    problem = Problem(
        graph, Cluster.uniform(2), graph_costs(graph), PlanOptions(algorithm="round-robin")
    )
    plan, result = planning.make_plan(problem)
    if cold:
        COMPILATIONS.end()
    assert result.compiled is cold
    with (terminal := console()).capture() as shown:
        terminal.print(plan_text(graph, plan, result), soft_wrap=True)
    assert ("to compile kernels, kept for later)" in shown.get()) is cold
    assert ("to load kernels)" in shown.get()) is not cold
