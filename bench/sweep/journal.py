"""The journal of a sweep: each finished row, by the commit and versions that it was measured at.

A sweep takes the better part of an hour. One that is cut short goes on where it was when the same
command is given again, and a page is still that of one commit: rows of other code, committed or
not, are in other files.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What decides the rows.
CODE = ("src", "bench/sweep", "bench/common", "testbed", "constraints.txt")


def commit() -> str:
    """Return the commit, with a hash of what is not committed of the code; "" without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        files = _git("ls-files", "--others", "--exclude-standard", "--", *CODE).split()
        changed = _git("diff", "HEAD", "--", *CODE)
    except (OSError, subprocess.CalledProcessError):
        return ""
    if not changed and not files:
        return head
    texts = [changed, *((ROOT / file).read_text(encoding="utf-8") for file in files)]
    return f"{head}+{hashlib.sha256('|'.join(texts).encode()).hexdigest()[:8]}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Journal:
    """The rows of one key; without a key nothing is kept.

    Args:
        folder: Of the journals; made with the first row.
        key: What tells the rows from those of other code: commit and versions.
    """

    def __init__(self, folder: Path, key: Sequence[str]) -> None:
        name = hashlib.sha256("|".join(key).encode()).hexdigest()[:8]
        self.path = folder / f"{key[0]}-{name}.jsonl" if key[0] else None

    def rows(self, wanted: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        """Return the rows that are there of some cases.

        Args:
            wanted: Group and name of each.
        """
        if self.path is None or not self.path.exists():
            return []
        found = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # cut short as it was written
                continue
            found[row["group"], row["name"]] = row
        return [found[case] for case in wanted if case in found]

    def add(self, row: dict[str, Any]) -> None:
        """Write a row that has ended."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                # A line of its own also behind one that was cut short.
                file.write(f"\n{json.dumps(row)}\n")

    def clear(self) -> None:
        """Forget all rows."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
