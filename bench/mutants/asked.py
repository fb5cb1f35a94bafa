"""Which test runs which line, and how long it takes: measured once, test by test, then kept.

What was measured holds while neither the tests of the file nor the sources that they run changed.
Of kernels lines are seen where they run as plain Python.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple


class Asked(NamedTuple):
    """What a test runs.

    Attributes:
        seconds: Processor time; the limit for what was stopped at it or failed.
        lines: Lines by file, from the root of the repository.
    """

    seconds: float
    lines: dict[str, list[int]]


class Lines:
    """The tests that run a line, those nearest to the file first, then the quickest."""

    def __init__(self, root: Path, measured: dict[str, Asked]) -> None:
        self._root, self._seconds = root, {test: each.seconds for test, each in measured.items()}
        self._tests: dict[tuple[str, int], list[str]] = defaultdict(list)
        for test, each in measured.items():
            for path, lines in each.lines.items():
                for line in lines:
                    self._tests[path, line].append(test)

    def seconds(self, test: str) -> float:
        """Return the processor time of a test."""
        return self._seconds[test]

    def tests(self, path: str, lines: range, budget_s: float) -> list[str]:
        """Return tests of a statement, for as long as the budget lasts, at least one.

        Args:
            path: Of the file, from the root.
            lines: Of the statement.
            budget_s: Processor time of all of them.
        """
        own = path.replace("src/pardnn", "tests").rpartition("/")[0]
        name = Path(path).stem
        found = {test for line in lines for test in self._tests[path, line]}

        def rank(test: str) -> tuple[bool, int, int, float, str]:
            seconds, file = self._seconds[test], test.partition("::")[0]
            far = 0 if file.endswith(f"/test_{name}.py") else 1 if test.startswith(own) else 2
            return seconds > 2, far, turn[test], seconds, test

        # Cases of one test see much the same: one of each test first, then the next of each.
        turn: dict[str, int] = {}
        cases = Counter[str]()
        for test in sorted(found, key=lambda test: (self._seconds[test], test)):
            turn[test] = cases[test.partition("[")[0]]
            cases[test.partition("[")[0]] += 1
        chosen: list[str] = []
        for test in sorted(found, key=rank):
            budget_s -= self._seconds[test]
            if budget_s < 0 and chosen:
                break
            chosen.append(test)
        return chosen


def fingerprint(root: Path, file: str, tests: dict[str, Asked], sources: set[str]) -> str:
    """Return a hash of a file of tests and of the sources that it runs.

    Args:
        root: Of the repository.
        file: Of tests.
        tests: What its tests run.
        sources: Those that are changed, from the root.
    """
    found = hashlib.sha256((root / file).read_bytes())
    for path in sorted({path for each in tests.values() for path in each.lines} & sources):
        found.update((root / path).read_bytes() if (root / path).exists() else b"")
    return found.hexdigest()[:16]


def load(path: Path) -> dict[str, tuple[str, dict[str, Asked]]]:
    """Read what was measured: a fingerprint and tests for each file of tests."""
    if not path.exists():
        return {}
    text = json.loads(path.read_text(encoding="utf-8"))
    return {
        file: (mark, {test: Asked(*each) for test, each in tests.items()})
        for file, (mark, tests) in text.items()
    }


def save(path: Path, found: dict[str, tuple[str, dict[str, Asked]]]) -> None:
    """Write what was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.replace(path)
