"""The commands about checkpoints: show, verify, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pardnn.cli import options as opt
from pardnn.cli.output import show as show_result

app = typer.Typer(no_args_is_help=True, help="Show, verify and export saved training state.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory given to --save.")]
Step = Annotated[
    int | None,
    typer.Option("--step", min=0, help="Checkpoint after this many steps. Default: the latest."),
]


@app.command()
def show(directory: Directory, step: Step = None, as_json: opt.Json = False) -> None:
    """Show what a checkpoint holds and which steps there are."""
    from pardnn.api.checkpoint import show_checkpoint

    show_result(show_checkpoint(directory, step), as_json, None)


@app.command()
def verify(directory: Directory, step: Step = None, as_json: opt.Json = False) -> None:
    """Check every byte against the checksums; exit 0 if all match, else 4."""
    from pardnn.api.checkpoint import verify_checkpoint

    show_result(verify_checkpoint(directory, step), as_json, None)


@app.command()
def export(
    directory: Directory,
    output: opt.Output,
    step: Step = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Argument name of one model. Default: all.")
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Also write optimizer states.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Write the whole model to one safetensors file, under its state dict's keys."""
    from pardnn.api.checkpoint import export_checkpoint

    found = export_checkpoint(directory, output, step, model=model, optimizer=optimizer)
    show_result(found, as_json, None)
