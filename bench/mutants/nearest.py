"""Which tests are asked about a mutant: those nearest to its file, in an order that asks much soon.

Nothing is measured beforehand. A test is near a file by its name (`tests/sim/test_levels.py` for
`sim/levels.py`), then by what its file imports, then by its folder. Of each test one case is asked
before the next of any, since cases of one test see much the same.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

_IMPORT = re.compile(r"^ *(?:from (pardnn[\w.]*) import \(?([^#\n]*)|import (pardnn[\w.]*))", re.M)


class Nearest:
    """Tests by how near their files are to a file of the sources."""

    def __init__(self, root: Path, tests: Iterable[str]) -> None:
        self._tests: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            self._tests[test.partition("::")[0]].append(test)
        self._imports = {
            file: _imported((root / file).read_text(encoding="utf-8")) for file in self._tests
        }

    def tests(self, path: str) -> list[str]:
        """Return tests of a file, the nearest first.

        Args:
            path: Of the file, from the root.
        """
        module = ".".join(Path(path).with_suffix("").parts[1:]).removesuffix(".__init__")
        files = [(self._distance(path, module, file), file) for file in self._tests]
        found: list[str] = []
        for distance in range(FAR):
            here = [file for far, file in files if far == distance]
            found += _in_turn([test for file in sorted(here) for test in self._tests[file]])
        return found

    def _distance(self, path: str, module: str, file: str) -> int:
        own = path.replace("src/pardnn", "tests").rpartition("/")[0]
        is_own = file.rpartition("/")[0] == own
        if is_own and Path(file).stem == f"test_{Path(path).stem}":
            return 0
        if module in self._imports[file]:
            return 1 if file.startswith(own) else 2
        if is_own:
            return 3
        return 4 if file.startswith(own.rpartition("/")[0]) and own.count("/") > 1 else FAR


#: What is as far as this is not asked.
FAR = 5


def _imported(text: str) -> set[str]:
    """Return modules that a file imports, or imports from."""
    found = set[str]()
    for origin, names, module in _IMPORT.findall(text):
        found |= {origin or module, *(f"{origin}.{name.strip()}" for name in names.split(","))}
    return found


def _in_turn(tests: list[str]) -> list[str]:
    """Return the first case of each test, then the second of each, and so on."""
    seen, turn = Counter[str](), dict[str, int]()
    for test in tests:
        name = test.partition("[")[0]
        turn[test] = seen[name]
        seen[name] += 1
    return sorted(tests, key=turn.__getitem__)
