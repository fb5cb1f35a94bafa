"""The command line. Every command is a thin shell over `pardnn.api`.

With `--json`, stdout is exactly one JSON object, also on failure; the first digit of an error's
code is the exit status.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from pardnn.cli import options as opt
from pardnn.cli.layout import layout
from pardnn.cli.max_batch import max_batch
from pardnn.cli.output import fail, print_text, show
from pardnn.errors import PardnnError, UsageError

app = typer.Typer(
    name="pardnn",
    help="Train a network that does not fit one device, without rewriting it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    callback=opt.no_command,
)


@app.command()
def capture(
    target: opt.EntryPoint,
    output: opt.Output,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Write the graph of one training step. Allocates no tensor data."""
    from pardnn.api.targets import captured
    from pardnn.graph.file import write_graph

    graph, result = captured(target, batch_size)
    write_graph(graph, output)
    show(result, as_json, f"graph written to {output}")


@app.command()
def plan(
    target: opt.Target,
    output: opt.OptionalOutput = None,
    devices: opt.Devices = None,
    max_memory: opt.MaxMemory = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    links: opt.Links = None,
    cluster: opt.ClusterChoice = None,
    algorithm: opt.Algorithm = "auto",
    objective: opt.Objective = "seconds",
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    time_limit: opt.TimeLimit = None,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Decide where and in which order every op runs; check the plan; write it."""
    from pardnn.api.advice import PlanOptions, planned
    from pardnn.plan.file import write_plan
    from pardnn.planner.make_plan import check_algorithm, check_reserve

    check_algorithm(algorithm)
    check_reserve(reserve)
    machine = opt.cluster_from_options(devices, max_memory, bandwidth, latency, links, cluster)
    options = PlanOptions(
        algorithm=algorithm,
        objective=objective,  # pyright: ignore[reportArgumentType]
        reserve=reserve,
        seed=seed,
        time_limit=time_limit,
        costs=costs,
        threads=threads,
    )
    graph = opt.graph_of(target, batch_size)
    found, result = planned(graph, machine, options, target, batch_size)
    if output is not None:
        write_plan(found, output)
    if not as_json:
        from pardnn.report.text import plan_text

        print_text(plan_text(graph, found, result))
    show(result, as_json, f"plan written to {output}" if output else None, shown=True)


@app.command()
def check(
    plan_file: opt.PlanFile,
    graph_file: opt.GraphOption,
    as_json: opt.Json = False,
) -> None:
    """Verify a plan independently of how it was made: exit 0 if valid, 4 if not."""
    from pardnn.graph.file import read_graph
    from pardnn.plan.check import plan_problems
    from pardnn.plan.file import check_fingerprint, read_plan
    from pardnn.report.results import CheckResult

    graph, found = read_graph(graph_file), read_plan(plan_file)
    check_fingerprint(found, graph)
    problems = tuple(plan_problems(graph, found))
    show(CheckResult(valid=not problems, problems=problems), as_json, None)
    if problems:
        raise typer.Exit(4)


@app.command()
def simulate(
    plan_file: opt.PlanFile,
    graph_file: opt.GraphOption,
    policy: Annotated[str, typer.Option("--policy", help="order, fifo or priority.")] = "order",
    devices: opt.Devices = None,
    max_memory: opt.MaxMemory = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    links: opt.Links = None,
    cluster: opt.ClusterChoice = None,
    costs: opt.CostChoice = None,
    as_json: opt.Json = False,
) -> None:
    """Judge a plan: simulated time, and peak memory from the order alone."""
    import dataclasses

    from pardnn import api
    from pardnn.graph.file import read_graph
    from pardnn.plan.file import read_plan

    graph, found = read_graph(graph_file), read_plan(plan_file)
    if cluster is not None or devices is not None:
        machine = opt.cluster_from_options(devices, max_memory, bandwidth, latency, links, cluster)
        found = dataclasses.replace(found, cluster=machine)
    show(api.simulate(graph, found, policy=policy, costs=costs), as_json, None)


@app.command()
def compare(
    target: opt.Target,
    devices: opt.Devices = None,
    max_memory: opt.MaxMemory = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    links: opt.Links = None,
    cluster: opt.ClusterChoice = None,
    algorithms: Annotated[
        str | None, typer.Option("--algorithms", help="Names, separated by commas.")
    ] = None,
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Plan with several algorithms, side by side under one judge."""
    from pardnn.planner import make_plan
    from pardnn.planner.algorithms import ALGORITHMS, SHARDED, check_algorithm
    from pardnn.planner.costs import costs_for
    from pardnn.report.results import CompareResult

    names = [*ALGORITHMS, *SHARDED] if algorithms is None else algorithms.split(",")
    for name in names:
        check_algorithm(name)
    make_plan.check_reserve(reserve)
    machine = opt.cluster_from_options(devices, max_memory, bandwidth, latency, links, cluster)
    graph = opt.graph_of(target, batch_size)
    chosen = costs_for(graph, machine, costs, threads=threads)
    rows = make_plan.compare(graph, machine, chosen, names=names, reserve=reserve, seed=seed)
    show(CompareResult(rows=rows), as_json, None)


@app.command()
def estimate(
    target: opt.Target,
    devices: opt.Devices = None,
    max_memory: opt.MaxMemory = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    links: opt.Links = None,
    cluster: opt.ClusterChoice = None,
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Tell whether the step fits, where the memory goes, and which limit would do."""
    from pardnn.planner.costs import costs_for
    from pardnn.planner.estimate import estimate as estimate_graph
    from pardnn.planner.make_plan import check_reserve

    check_reserve(reserve)
    machine = opt.cluster_from_options(devices, max_memory, bandwidth, latency, links, cluster)
    graph = opt.graph_of(target, batch_size)
    chosen = costs_for(graph, machine, costs, threads=threads)
    show(estimate_graph(graph, machine, chosen, reserve=reserve, seed=seed), as_json, None)


@app.command()
def run(
    target: opt.EntryPoint,
    devices: opt.Devices = None,
    max_memory: opt.MaxMemory = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    links: opt.Links = None,
    cluster: opt.ClusterChoice = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Run this plan instead of making one.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps to run.")] = 5,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds that a wait for a rank may last.")
    ] = 60.0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the step on one device too and compare.")
    ] = False,
    algorithm: opt.Algorithm = "auto-whole",
    objective: opt.Objective = "seconds",
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    time_limit: opt.TimeLimit = None,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Train for some steps on K ranks of this machine, under hard memory limits."""
    from pardnn.api.run import run_target
    from pardnn.api.targets import PlanOptions

    machine = None
    if plan_file is None or cluster is not None or devices is not None:
        machine = opt.cluster_from_options(devices, max_memory, bandwidth, latency, links, cluster)
    options = PlanOptions(
        algorithm=algorithm,
        objective=objective,  # pyright: ignore[reportArgumentType]
        reserve=reserve,
        seed=seed,
        time_limit=time_limit,
        costs=costs,
        threads=threads,
    )
    result = run_target(
        target,
        machine,
        options,
        plan_file=plan_file,
        steps=steps,
        timeout=timeout,
        verify=verify,
        batch_size=batch_size,
    )
    show(result, as_json, None)
    if result.verified is False:
        raise typer.Exit(5)


app.command(name="max-batch")(max_batch)
app.command()(layout)


@app.command()
def profile(
    target: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:FUNCTION]", help="Graph to profile.")
    ] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure the links instead.")] = False,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Measure op costs, or links between local ranks, into the cache."""
    from pardnn.api.targets import profiled, profiled_links

    if links == (target is not None):
        raise UsageError("give either FILE.py:FUNCTION or --links")
    result = (
        profiled_links() if target is None else profiled(opt.graph_of(target, batch_size), threads)
    )
    show(result, as_json, None)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Graph, plan or placement.")],
    output: Annotated[Path | None, typer.Argument(metavar="OUT", help="File to write.")] = None,
    output_option: opt.OptionalOutput = None,
    graph_file: Annotated[
        Path | None, typer.Option("--graph", help="Graph file of a plan, placement or split.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Format, where IN can become several: pardnn.plan/1, placement, msr-fiddle-split.",
        ),
    ] = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option("--write-cluster", help="Where to write an msr-fiddle input's cluster."),
    ] = None,
    devices: opt.Devices = None,
    max_memory: opt.MaxMemory = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    links: opt.Links = None,
    cluster: opt.ClusterChoice = None,
    reserve: opt.Reserve = 0.1,
    costs: opt.CostChoice = None,
    as_json: opt.Json = False,
) -> None:
    """Read and write graphs, plans and placements in the formats of others."""
    from pardnn.api.convert import ConvertOptions
    from pardnn.api.convert import convert as convert_file

    if (output is None) == (output_option is None):
        raise UsageError("name one file to write: pardnn convert IN OUT")
    machine = None
    if cluster is not None or devices is not None:
        machine = opt.cluster_from_options(devices, max_memory, bandwidth, latency, links, cluster)
    options = ConvertOptions(
        to=to, graph_file=graph_file, cluster=machine, cluster_file=cluster_file,
        reserve=reserve, costs=costs,
    )  # fmt: skip
    target = output or output_option
    assert target is not None
    show(convert_file(source, target, options), as_json, None)


@app.command()
def doctor(as_json: opt.Json = False) -> None:
    """Tell what this machine has and what will work on it."""
    from pardnn.api.doctor import examine

    show(examine(), as_json, None)


@app.command()
def schema(
    name: Annotated[str | None, typer.Argument(help="Of one format or command; all if absent.")] = (
        None
    ),
) -> None:
    """Print the JSON Schema of the files and of every --json object."""
    from pardnn.api.schemas import json_schemas

    found = json_schemas()
    if name is not None and name not in found:
        raise UsageError(f"no schema {name!r:.40}; there are {', '.join(found)}")
    typer.echo(json.dumps(found if name is None else found[name], indent=1))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = app(args=arguments, standalone_mode=False)
    except typer.Exit as error:
        status = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        status = 130
        if as_json:
            status = fail(PardnnError("interrupted", code="E130"), as_json) and 130
    except PardnnError as error:
        status = fail(error, as_json)
    except typer.TyperException as error:  # of the parser
        message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        status = fail(UsageError(message, code="E200"), as_json)
    except Exception as error:
        typer.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        message = f"internal error, a bug in pardnn: {type(error).__name__}: {error}"
        status = fail(PardnnError(message, code="E199"), as_json)
    sys.exit(status if isinstance(status, int) else 0)
