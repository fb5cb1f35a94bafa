"""The commands that decide, check and compare: nothing runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from pardnn.cli import cluster_options as machines
from pardnn.cli import constraint_options as steer
from pardnn.cli import options as opt
from pardnn.cli import unused_options as unused
from pardnn.cli.output import print_text, show

if TYPE_CHECKING:
    from pardnn.cluster import Cluster
    from pardnn.graph.ir import Graph
    from pardnn.plan.plan import Plan
    from pardnn.planner.options import PlanOptions


def capture(
    target: opt.EntryPoint,
    output: opt.Output,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Write the graph of one training step. Allocate no tensor data."""
    from pardnn.api.capture import captured
    from pardnn.backends.entry_point import load_entry_point
    from pardnn.graph.file import write_graph

    graph, result = captured(load_entry_point(target), batch_size)
    write_graph(graph, output)
    show(result, as_json, f"graph written to {output}")


def plan(
    target: opt.Target,
    *,
    output: opt.OptionalOutput = None,
    given: machines.ClusterOptions,
    algorithm: opt.Algorithm = "auto",
    objective: opt.Objective = "seconds",
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    time_limit: opt.TimeLimit = None,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    keep_state: opt.KeepState = None,
    start: opt.StartPlan = None,
    policy: opt.PolicyChoice = "order",
    microbatches: opt.Microbatches = None,
    recompute: opt.Recompute = False,
    offload: opt.Offload = False,
    demands: steer.Demands,
    as_json: opt.Json = False,
) -> None:
    """Decide where and in which order every op runs. Check the plan and write it.

    Ctrl-C ends the search: the best plan so far, if any, is checked and written.
    """
    from pardnn.api.advice import planned
    from pardnn.api.capture import opened
    from pardnn.backends.entry_point import EntryPoint
    from pardnn.plan.file import read_plan, write_plan
    from pardnn.report.text import plan_text

    options = opt.plan_options(
        algorithm=algorithm,
        objective=objective,
        reserve=reserve,
        seed=seed,
        time_limit=time_limit,
        costs=costs,
        threads=threads,
        microbatches=microbatches,
        recompute=recompute,
        offload=offload,
        policy=policy,
        constraints=steer.constraints_of(demands),
    )
    machine = machines.cluster_from_options(*given, named=machines.devices_named(target, costs))
    source = opened(target)
    graph = opt.graph_of(source, batch_size)
    entry = source if isinstance(source, EntryPoint) else None
    state = opt.state_of(keep_state)
    found, result = planned(
        graph, machine, options, entry, batch_size,
        state=state, start=None if start is None else read_plan(start), keep_best=True,
    )  # fmt: skip
    if output is not None:
        write_plan(found, output)
    if not as_json:
        print_text(plan_text(graph, found, result))
        _print_grid(graph, machine, found, options)
    show(result, as_json, f"plan written to {output}" if output else None, shown=True)


def _print_grid(graph: Graph, cluster: Cluster, plan: Plan, options: PlanOptions) -> None:
    """Print when each device runs which piece of the batch, if a plan cuts it."""
    if plan.pieces is None:
        return
    from pardnn.api.draw import schedule_grid
    from pardnn.planner.costs import costs_for
    from pardnn.report.text import console

    costs = costs_for(graph, cluster, options.costs, threads=options.threads)
    print_text("\n".join(schedule_grid(graph, plan, console().width, costs)))


def check(
    plan_file: opt.PlanFile,
    graph_file: opt.GraphOption = None,
    constraints: steer.ConstraintsFile = None,
    as_json: opt.Json = False,
) -> None:
    """Verify a plan independently of how it was made. Exit 0 if it is valid, else 4."""
    from pardnn.api.simulate import plan_problems
    from pardnn.plan.file import check_fingerprint
    from pardnn.report.results import CheckResult

    graph, found = opt.read_both(graph_file, plan_file)
    check_fingerprint(found, graph)
    # The fingerprint is compared: of a million ops that takes seconds.
    found = dataclasses.replace(found, graph_fingerprint=None)
    if constraints is not None:
        demanded = (*(found.constraints or ()), *steer.constraints_of(steer.Demands(constraints)))
        found = dataclasses.replace(found, constraints=demanded)
    problems = tuple(plan_problems(graph, found))
    show(CheckResult(valid=not problems, problems=problems), as_json, None)
    if problems:
        raise typer.Exit(4)


def simulate(
    context: typer.Context,
    plan_file: opt.PlanFile,
    *,
    graph_file: opt.GraphOption = None,
    policy: opt.PolicyChoice = "order",
    given: machines.ClusterOptions,
    costs: opt.PlanCosts = None,
    as_json: opt.Json = False,
) -> None:
    """Simulate a plan's step time and memory peaks. --policy chooses the scheduler."""
    from pardnn.api.simulate import simulate as simulate_plan

    graph, found = opt.read_both(graph_file, plan_file)
    machine = unused.cluster_beside_plan(context, given)
    if machine is not None:
        found = dataclasses.replace(found, cluster=machine)
    show(simulate_plan(graph, found, policy=policy, costs=costs), as_json, None)


def compare(
    target: opt.Target,
    *,
    given: machines.ClusterOptions,
    algorithms: Annotated[
        str | None, typer.Option("--algorithms", help="Comma-separated names.")
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines", help="Add estimates that are not run: ideal, small batch, swapping."
        ),
    ] = False,
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    microbatches: opt.Microbatches = None,
    recompute: opt.Recompute = False,
    offload: opt.Offload = False,
    demands: steer.Demands,
    as_json: opt.Json = False,
) -> None:
    """Compare several algorithms under one simulator."""
    from pardnn.api.capture import opened
    from pardnn.api.max_batch import baselines_of
    from pardnn.planner.algorithms import ALGORITHMS, RECIPES, SHARDED, check_algorithm
    from pardnn.planner.compare import compare as compare_algorithms
    from pardnn.planner.costs import costs_for
    from pardnn.planner.problem import Problem
    from pardnn.report.progress import status
    from pardnn.report.results import CompareResult

    others = RECIPES if microbatches is not None else () if recompute or offload else SHARDED
    names = [*ALGORITHMS, *others] if algorithms is None else algorithms.split(",")
    for name in names:
        check_algorithm(name)
    options = opt.plan_options(
        reserve=reserve, seed=seed, costs=costs, threads=threads, microbatches=microbatches,
        recompute=recompute, offload=offload, constraints=steer.constraints_of(demands),
    )  # fmt: skip
    machine = machines.cluster_from_options(*given, named=machines.devices_named(target, costs))
    source = opened(target)
    graph = opt.graph_of(source, batch_size)
    problem = Problem(graph, machine, costs_for(graph, machine, costs, threads=threads), options)
    with status("comparing") as tell:
        rows = compare_algorithms(problem, names, tell)
    estimated = baselines_of(problem, source, batch_size) if baselines else ()
    show(CompareResult(rows=(*rows, *estimated)), as_json, None)
    if not any(row.fits for row in rows):
        raise typer.Exit(3)


def estimate(
    target: opt.Target,
    given: machines.ClusterOptions,
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Show whether a step fits and where its memory goes. Show which limit would do."""
    from pardnn.api.capture import opened
    from pardnn.planner.costs import costs_for
    from pardnn.planner.estimate import estimate as estimate_problem
    from pardnn.planner.problem import Problem

    options = opt.plan_options(reserve=reserve, seed=seed, costs=costs, threads=threads)
    machine = machines.cluster_from_options(*given, named=machines.devices_named(target, costs))
    graph = opt.graph_of(opened(target), batch_size)
    chosen = costs_for(graph, machine, costs, threads=threads)
    found = estimate_problem(Problem(graph, machine, chosen, options))
    show(found, as_json, None)
    if not found.fits:
        raise typer.Exit(3)


def max_batch(
    target: opt.EntryPoint,
    *,
    given: machines.ClusterOptions,
    algorithm: opt.Algorithm = "auto",
    objective: opt.Objective = "seconds",
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    microbatches: opt.Microbatches = None,
    recompute: opt.Recompute = False,
    offload: opt.Offload = False,
    demands: steer.Demands,
    as_json: opt.Json = False,
) -> None:
    """Find the largest batch size that fits. FUNCTION takes a keyword batch_size."""
    from pardnn.api.max_batch import max_batch as find_max_batch
    from pardnn.backends.entry_point import load_entry_point

    machine = machines.cluster_from_options(*given, named=machines.devices_named(target, costs))
    options = opt.plan_options(
        algorithm=algorithm,
        objective=objective,
        reserve=reserve,
        seed=seed,
        costs=costs,
        threads=threads,
        microbatches=microbatches,
        recompute=recompute,
        offload=offload,
        constraints=steer.constraints_of(demands),
    )
    show(find_max_batch(load_entry_point(target), machine, options), as_json, None)
