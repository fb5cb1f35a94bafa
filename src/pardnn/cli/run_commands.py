"""The commands that run on this machine: a step, its ops, and what the machine has."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from pardnn.cli import cluster_options as machines
from pardnn.cli import constraint_options as steer
from pardnn.cli import options as opt
from pardnn.cli import unused_options as unused
from pardnn.cli.output import print_text, show
from pardnn.errors import INTERRUPTED, UsageError

OnSignal = Literal["save", "stop"]


def run(
    context: typer.Context,
    target: opt.EntryPoint,
    *,
    given: machines.ClusterOptions,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Run this plan instead of making one.")
    ] = None,
    steps: opt.Steps = 5,
    timeout: opt.Timeout = 60.0,
    verify: opt.Verify = False,
    save: Annotated[Path | None, typer.Option("--save", help="Directory for checkpoints.")] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", min=1, help="Save every N steps. Default: after the last one."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", help="Number of checkpoints to keep. Default: all.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the latest checkpoint in --save.")
    ] = False,
    on_signal: Annotated[
        OnSignal | None,
        typer.Option(
            "--on-signal",
            help="On SIGTERM or Ctrl-C, end after the current step: `save` first, or just `stop`.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            help="Write each op's measured times, for the report.",
            callback=opt.writable,
        ),
    ] = None,
    algorithm: opt.Algorithm = "auto-whole",
    objective: opt.Objective = "seconds",
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    time_limit: opt.TimeLimit = None,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    microbatches: opt.Microbatches = None,
    recompute: opt.Recompute = False,
    offload: opt.Offload = False,
    start: opt.StartPlan = None,
    demands: steer.Demands,
    as_json: opt.Json = False,
) -> None:
    """Train on K ranks on this machine, under hard memory limits."""
    from pardnn.api.run import run_target
    from pardnn.checkpoint.options import save_options

    saving = save_options(save, every, keep, resume=resume, on_signal=on_signal)
    if plan_file is None:
        machine = machines.cluster_from_options(*given, of_this_machine=True)
    else:
        machine = unused.cluster_beside_plan(context, given)
        unused.refuse_unused(context, unused.OF_PLANNING, unused.WITH_A_PLAN)
    demanded = steer.constraints_of(demands)
    options = opt.plan_options(
        algorithm=algorithm, objective=objective, reserve=reserve, seed=seed,
        time_limit=time_limit, costs=costs, threads=threads, microbatches=microbatches,
        recompute=recompute, offload=offload, constraints=demanded,
    )  # fmt: skip
    result = run_target(
        target, machine, options, plan_file=plan_file, start_file=start, steps=steps,
        timeout=timeout, verify=verify, batch_size=batch_size, saving=saving,
        on_signal=on_signal, record=record,
    )  # fmt: skip
    show(result, as_json, None)
    if result.stopped_by is not None:
        raise SystemExit(INTERRUPTED)  # not typer's: the result has been shown
    if result.verified is False:
        raise typer.Exit(5)


def code(
    context: typer.Context,
    plan_file: opt.PlanFile,
    graph_file: opt.GraphOption = None,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Rank, from 0. Default, with -o or --run: all.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File for one rank, or folder for all (rank0.py ...)."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--run", metavar="FILE.py:FUNCTION", help="Train with the code of all ranks."),
    ] = None,
    edited: Annotated[
        Path | None,
        typer.Option("--edited", help="Run the files in this folder, written earlier by `code`."),
    ] = None,
    steps: opt.Steps = 5,
    timeout: opt.Timeout = 60.0,
    verify: opt.Verify = False,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Print what a rank runs as Python. Your lines are comments; --run trains with it."""
    from pardnn.api.code import code as code_of
    from pardnn.api.code import edited_code, run_code, write_code
    from pardnn.report.export.result import CodeResult
    from pardnn.report.text import code_text

    _check_code(context, rank, output, target, edited)
    found = code_of(*opt.read_both(graph_file, plan_file), rank)
    if target is None and output is None:
        if rank is None and len(found) > 1:
            raise UsageError("name a rank: pardnn code PLAN --rank 0", code="E247")
        text = next(iter(found.values()))
        if not as_json:
            typer.echo(text, nl=False)
        show(CodeResult(code=text), as_json, None, shown=True)
        return
    with tempfile.TemporaryDirectory() as unnamed:
        folder = output or Path(unnamed)
        given = {"steps": steps, "timeout": timeout, "verify": verify, "threads": threads}
        if edited is not None:
            paths = edited_code(found, edited)
        else:
            paths = write_code(found, folder, is_folder=rank is None)
        result = CodeResult(files=tuple(map(str, paths)))
        if target is not None:
            result = run_code(target, plan_file, paths, batch_size=batch_size, **given)
    if output is None and edited is None:
        result = dataclasses.replace(result, files=())
    note = None if output is None else f"code written to {output}"
    if target is not None and not as_json:
        print_text(code_text(result))
    show(result, as_json, note, shown=True)
    if result.verified is False:
        raise typer.Exit(5)


def _check_code(
    context: typer.Context,
    rank: int | None,
    output: Path | None,
    target: str | None,
    edited: Path | None,
) -> None:
    """Check that options of `code` go together.

    Raises:
        UsageError: E206 or E247.
    """
    if target is None:
        of_running = ("steps", "timeout", "verify", "threads", "batch_size")
        unused.refuse_unused(context, of_running, "without --run FILE.py:FUNCTION nothing runs.")
    if target is not None and rank is not None:
        raise UsageError("--run needs the code of all ranks: leave out --rank", code="E247")
    if edited is not None and (target is None or output is not None):
        raise UsageError("--edited needs --run, and no -o: it names the files", code="E247")


def profile(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns (step, args)."),
    ] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure links instead.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Cluster file to write (--links under torchrun)."),
    ] = None,
    threads: opt.Threads = 1,
    batch_size: opt.BatchSize = None,
    as_json: opt.Json = False,
) -> None:
    """Measure and cache op costs, or links between local ranks.

    Under torchrun, `--links` measures every pair of ranks, and `-o` writes a cluster file.
    """
    from pardnn.api.capture import graph_of, opened
    from pardnn.api.profile import is_of_torchrun, profiled, profiled_links, profiled_rank_links

    if links == (target is not None):
        raise UsageError("give either FILE.py:FUNCTION or --links")
    if links:
        unused.refuse_unused(context, ("threads", "batch_size"), "only links are measured.")
    if output is not None and not (links and is_of_torchrun()):
        raise UsageError(
            "-o writes the cluster measured by the ranks of torchrun: torchrun --nnodes 2 ... -m "
            "pardnn profile --links -o cluster.json",
            code="E205",
        )
    if links and is_of_torchrun():
        found = profiled_rank_links(output)
        if found is not None:
            show(found, as_json, f"cluster written to {output}" if output else None)
    elif target is None:
        show(profiled_links(), as_json, None)
    else:
        graph = graph_of(opened(target), batch_size)
        show(profiled(graph, threads), as_json, None)


def doctor(as_json: opt.Json = False) -> None:
    """Show what this machine has and what will work on it."""
    from pardnn.api.doctor import examine

    show(examine(), as_json, None)
