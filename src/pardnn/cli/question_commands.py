"""The commands that answer questions about plans: nothing is decided and nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pardnn.cli import options as opt
from pardnn.cli.output import print_text, show
from pardnn.errors import UsageError


def explain(
    plan_file: opt.PlanFile,
    graph_file: opt.GraphOption = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="OP|TENSOR|DEVICE|LAYER",
            help="What to explain; with --memory, a change such as +2GiB; with --time, +1.",
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what makes up each peak; +2GiB plans with more.")
    ] = False,
    time: Annotated[
        bool, typer.Option("--time", help="Show where the time goes; +1 plans with another device.")
    ] = False,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Show each layer's cost and the gain from halving it."),
    ] = False,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="For new plans. Default: the best of the plan's kind."),
    ] = None,
    costs: opt.PlanCosts = None,
    as_json: opt.Json = False,
) -> None:
    """Explain a plan, and what other decisions would cost."""
    from pardnn.explain.ask import ask
    from pardnn.report.explained_text import explained_text
    from pardnn.report.progress import status

    if name is not None and name.startswith("-") and not (memory or time):
        raise UsageError(f"no such option: {name:.40}", code="E200")
    topic = _topic(memory=memory, time=time, layers=layers)
    graph, plan = opt.read_both(graph_file, plan_file)
    with status("planning anew" if topic and name else "simulating"):
        found = ask(graph, plan, name, topic=topic, algorithm=algorithm, costs=costs)
    if not as_json:
        print_text(explained_text(found))
    show(found, as_json, None, shown=True)


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Plan file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another plan file.")],
    graph_file: opt.GraphOption = None,
    other_file: Annotated[
        Path | None, typer.Option("--other-graph", help="Graph file of B, if different.")
    ] = None,
    costs: opt.PlanCosts = None,
    as_json: opt.Json = False,
) -> None:
    """Show how plan B differs from plan A. Show what moved and what each move gains."""
    from pardnn.explain.differences import differences
    from pardnn.graph.file import read_graph
    from pardnn.plan.file import read_plan
    from pardnn.report.differences import diff_text
    from pardnn.report.progress import status

    graph, plan = opt.read_both(graph_file, first)
    other = graph if other_file is None else read_graph(other_file)
    with status("judging what moved"):
        found = differences(graph, plan, other, read_plan(second), costs)
    if not as_json:
        print_text(diff_text(found))
    show(found, as_json, None, shown=True)


def _topic(**asked: bool) -> Literal["memory", "time", "layers"] | None:
    """Return which option was given.

    Raises:
        UsageError: E240, if it is more than one.
    """
    given = [name for name, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"ask for one thing: --{given[0]} or --{given[1]}", code="E240")
    return given[0] if given else None  # pyright: ignore[reportReturnType]
