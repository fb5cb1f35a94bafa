"""Which tests run a line, and for how long: recorded once, so that a mutant asks no others.

Each file of tests runs in a forked child under `coverage`, test by test, each with fixtures and
caches of its own. What is found is kept in `.mutants/`: a file of tests is run again when its text
has changed. Lines are counted from the beginning of their function, so that they are still known
when code above it changes; of a function that has changed itself, all tests that run any of it
are asked.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.mutants.mutations import FUNCTIONS, Mutant

#: Lines of a file by function: where it begins, and a hash of its code.
Places = dict[str, tuple[range, str]]


class Record:
    """Tests by the lines that they run, the fastest first."""

    def __init__(self, root: Path, folder: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Make a record.

        Args:
            root: Of the repository.
            folder: Of the sources, from the root.
            rows: What `ran` has returned, by file of tests.
        """
        self._root = root
        self._seconds = dict[str, float]()
        self._ran: dict[tuple[str, str], list[tuple[str, int, str]]] = defaultdict(list)
        for row in rows.values():
            for test, (seconds, functions) in row["tests"].items():
                self._seconds[test] = seconds
                for number, bits in functions:
                    path, function, code = row["functions"][number]
                    self._ran[f"{folder}/{path}", function].append((test, int(bits, 16), code))
        self._places = dict[str, Places]()

    def seconds(self, test: str) -> float:
        """Return the processor time of a test."""
        return self._seconds[test]

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a statement which a mutant changes, the fastest first."""
        if mutant.path not in self._places:
            text = (self._root / mutant.path).read_text(encoding="utf-8")
            self._places[mutant.path] = places_of(text)
        lines, code = self._places[mutant.path][mutant.function]
        asked = sum(1 << line - lines.start for line in mutant.lines)
        found = {
            test
            for test, bits, old in self._ran[mutant.path, mutant.function]
            if old != code or bits & asked
        }
        return sorted(found, key=lambda test: (self._seconds[test], test))


def places_of(text: str) -> Places:
    """Return the lines and a hash of each function and method of a file."""
    found = Places()
    for node in ast.parse(text).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inside:
            if isinstance(each, FUNCTIONS):
                code = hashlib.sha256(ast.unparse(each).encode()).hexdigest()[:12]
                lines = range(each.lineno, (each.end_lineno or each.lineno) + 1)
                found[prefix + each.name] = lines, code
    return found


def recorded(kept: Path, root: Path, folder: str, items: Mapping[str, Any]) -> Record:
    """Return what is recorded, after running the files of tests that are not.

    Args:
        kept: Folder of what is recorded, a file each.
        root: Of the repository.
        folder: Of the sources, from the root.
        items: Collected tests by name.
    """
    from bench.mutants.session import forked

    kept.mkdir(parents=True, exist_ok=True)
    files = defaultdict[str, list[Any]](list)
    rows = dict[str, Any]()
    for test, item in items.items():
        files[test.partition("::")[0]].append(item)
    for file, tests in files.items():
        path = kept / f"{file.replace('/', '.')}.json"
        mark = hashlib.sha256((root / file).read_bytes()).hexdigest()[:16]
        row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if row.get("mark") != mark:
            start = time.monotonic()
            signal, found = forked(functools.partial(ran, tests, root / folder))
            row = {"mark": mark, **(found or {"functions": [], "tests": {}})}
            path.write_text(json.dumps(row), encoding="utf-8")
            failed = len(tests) - len(row["tests"])
            text = f"{failed} of {len(tests)} failed, signal {signal}" if failed else "passed"
            print(f"recorded in {time.monotonic() - start:.0f} s: {file}: {text}", flush=True)
        rows[file] = row
    return Record(root, folder, rows)


def ran(items: list[Any], sources: Path) -> dict[str, Any]:
    """Run tests; return the seconds of each that passes and the lines that it runs.

    Args:
        items: Tests of a file.
        sources: Folder of which lines are recorded.

    Returns:
        `functions`: path, name and hash of each function; `tests`: by name the seconds, and by
        number of a function the lines, a bit each.
    """
    import coverage
    from _pytest.runner import runtestprotocol

    cover = coverage.Coverage(
        data_file=None, config_file=False, include=[f"{sources}/*"], messages=False
    )
    cover.start()
    seconds = dict[str, float]()
    for item in items:
        empty_caches()
        cover.switch_context(item.nodeid)
        start = time.process_time()
        reports = runtestprotocol(item, log=False, nextitem=None)
        if all(report.passed for report in reports):
            seconds[item.nodeid] = round(time.process_time() - start, 4)
    cover.stop()
    data = cover.get_data()
    functions = list[tuple[str, str, str]]()
    lines: dict[str, list[tuple[int, str]]] = {test: [] for test in seconds}
    for file in sorted(data.measured_files()):
        contexts = data.contexts_by_lineno(file)
        places = places_of(Path(file).read_text(encoding="utf-8"))
        for name, (here, code) in places.items():
            bits = defaultdict[str, int](int)
            for line in here:
                for test in contexts.get(line, ()):
                    bits[test] |= 1 << line - here.start
            for test in bits.keys() & seconds.keys():
                lines[test].append((len(functions), f"{bits[test]:x}"))
            functions.append((str(Path(file).relative_to(sources)), name, code))
    return {
        "functions": functions,
        "tests": {test: (each, lines[test]) for test, each in seconds.items()},
    }


def empty_caches() -> None:
    """Empty the caches of functions, in the sources and in tests."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(("pardnn", "tests")):
            for cached in list(vars(module).values()):
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()
