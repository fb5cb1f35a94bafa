"""The graph of a plan, where no option names it: the file beside the plan that it was made for."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from pardnn.errors import PardnnError, UsageError, shown

#: Bytes in which a graph file tells its format.
_HEAD = 200


def graph_beside(plan_file: Path) -> Path:
    """Return the graph file in the folder of a plan that the plan was made for.

    Files there that cannot be read count only if no other is the plan's. O(ops of all of them).

    Args:
        plan_file: The plan.

    Raises:
        UsageError: E215, if no graph file there is the plan's.
        FileError: E403 to E408, if the plan cannot be read, or one of the graph files.
        MismatchError: E502, if one of them is of another version.
    """
    from pardnn.graph.file import fingerprint, read_graph
    from pardnn.plan.file import read_plan

    plan = read_plan(plan_file)
    there = [path for path in _files(plan_file.parent) if _is_graph(path)]
    failure: PardnnError | None = None
    for path in there:
        try:
            if fingerprint(read_graph(path)) == plan.graph_fingerprint:
                return path
        except PardnnError as error:
            failure = error
    raise failure or UsageError(
        f"the graph of {shown(str(plan_file))} is not beside it ({len(there)} graph files are).\n"
        "Name it: --graph g.json. If there is none: pardnn capture FILE.py:FUNCTION -o g.json",
        code="E215",
    )


def _files(folder: Path) -> Iterator[Path]:
    """Yield what may be graph files, by name; none of a folder that cannot be listed."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in paths if path.name.endswith((".json", ".json.gz")))


def _is_graph(path: Path) -> bool:
    """Return whether a file begins as a graph file does."""
    from pardnn.graph.file import GraphFile

    try:
        if not path.is_file():
            return False
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return f'"{GraphFile.format}"'.encode() in stream.read(_HEAD)
    except (OSError, EOFError, zlib.error):
        return False
