"""How the command line shows results and failures."""

from __future__ import annotations

import json
import os
from typing import Any

import typer

from pardnn.errors import PardnnError, UserCodeError, printable, users_traceback

#: Columns of what is no terminal, a file or a pipe: lines stay whole there, as `grep` needs them.
WIDE = 10_000


def print_text(renderable: Any) -> None:
    """Print text or a table for people."""
    from pardnn.report.text import console, printable_renderable

    out = console()
    if out.is_terminal or "COLUMNS" in os.environ:
        out.print(printable_renderable(renderable))
        return
    out.width = WIDE
    with out.capture() as shown:
        out.print(printable_renderable(renderable))
    typer.echo("\n".join(line.rstrip() for line in shown.get().split("\n")), nl=False)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of which parts may come from a file, as a terminal may show it.

    Args:
        text: May span lines.
        err: Whether to print on stderr.
        nl: Whether to end the line.
    """
    typer.echo(printable(text, lines=True), err=err, nl=nl)


def show(result: Any, as_json: bool, note: str | None, *, shown: bool = False) -> None:
    """Print a result as one JSON object, or for people.

    Args:
        result: A value of `report.results`.
        as_json: Whether `--json` was given.
        note: Printed last, for people.
        shown: Whether the result itself was printed for people already.
    """
    if as_json:
        from pardnn.report.results import result_to_dict

        typer.echo(json.dumps(result_to_dict(result), allow_nan=False))
        return
    if not shown:
        from pardnn.report.text import result_text

        print_text(result_text(result))
    if note:
        echo(note)


def fail(error: PardnnError, as_json: bool) -> int:
    """Print an error and return the exit status."""
    if as_json:
        body = {
            "code": error.code,
            "exit": error.exit_status,
            "message": error.message,
            "details": error.details,
        }
        try:
            typer.echo(json.dumps({"error": body}, default=str))
        except OSError:  # stdout is what cannot be written: a full disk
            as_json = False
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        echo(error.message, err=True)
        echo(users_traceback(error.__cause__), err=True, nl=False)
    elif not as_json:
        echo(str(error), err=True)
    return error.exit_status
