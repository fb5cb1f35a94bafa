"""What a command reads is not what it writes: no name typed twice costs a user's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from pardnn.cli.graph_beside import graph_beside
from pardnn.errors import UsageError, shown

#: Parameters that name a file to write.
_WRITTEN = ("output", "output_option", "cluster_file", "record")
#: Of those that name what is read, the ones that are no paths: FILE.py:FUNCTION, or a preset.
_READ = ("target", "cluster")


class Command(TyperCommand):
    """A command that finds the graph of its plan, and does not write over what it reads."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run the command, if it names different files.

        Raises:
            UsageError: E201, if it would write over what it reads; E215, if a plan's graph is not
                named and not beside it.
        """
        plan = ctx.params.get("plan_file", ctx.params.get("first"))
        if plan is not None and ctx.params.get("graph_file", plan) is None:
            ctx.params["graph_file"] = graph_beside(plan)
        refuse_overwriting(ctx.params)
        return super().invoke(ctx)


def refuse_overwriting(given: Mapping[str, Any]) -> None:
    """Raise if a file to write is also read, or named twice.

    A plan that is repaired (`--start`) may take the old one's place.

    Args:
        given: The parameters of a command.

    Raises:
        UsageError: E201.
    """
    named = [path for name in _WRITTEN if (path := given.get(name)) is not None]
    written = [path for path in named if not _is_device(path)]
    for i, path in enumerate(written):
        if any(_is_same(path, other) for other in (*written[:i], *_read(given))):
            raise UsageError(
                f"the command names {shown(str(path))} twice and would overwrite it.\n"
                "Name another file to write."
            )


def _read(given: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that the parameters name as read."""
    for name, value in given.items():
        if name in _READ and isinstance(value, str):
            yield from map(Path, (value, value.rpartition(":")[0]))
        elif name not in (*_WRITTEN, "start"):
            several = value if isinstance(value, tuple) else (value,)
            yield from (path for path in several if isinstance(path, Path))


def _is_device(path: Path) -> bool:
    """Whether nothing is lost by writing there, as to /dev/null."""
    try:
        return path.exists() and not path.is_file()
    except OSError:  # a name that is too long; writing tells
        return False


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path == other or path.samefile(other)
    except (OSError, ValueError):  # one is not there
        return False
