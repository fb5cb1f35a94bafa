"""`make mutants`: plant small faults in the algorithms one by one and count those that tests find.

Mutants are sampled by a seed. What was found is kept in `.mutants/`, so a run that was cut goes on
where it was, and after new tests only survivors are asked again. `--only PATH` takes the files
below a path, `--sample 0` all mutants, `--again` forgets survivors' verdicts.

Kernels are changed where they run as plain Python (`NUMBA_DISABLE_JIT=1`), all other functions
where kernels are compiled, beside the tests that are too large for plain Python. So a sample takes
two runs; the page is of what both have found.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

#: Packages of `src/pardnn` that are changed.
PACKAGES = (
    "place/pardnn", "place/ordering", "place/thesis", "sim", "plan", "shard/partition",
    "shard/search",
)  # fmt: skip
#: Tests that are asked: those of the packages, and of what calls them.
TESTS = (
    "tests/place/pardnn", "tests/place/ordering", "tests/place/thesis",
    "tests/place/test_missing_links.py", "tests/sim", "tests/plan", "tests/shard", "tests/planner",
)  # fmt: skip
#: Of the tests below a directory named `torch`, those below this one alone are asked.
TORCH = Path("tests/shard")
ROOT = Path(__file__).parents[2]
#: Whether kernels are changed, or all but kernels.
KERNELS = os.environ.get("NUMBA_DISABLE_JIT") == "1"
KEPT = ROOT / ".mutants"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=400, help="mutants; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a file or folder")
    parser.add_argument("--tests", action="append", default=[], help="ask tests below it alone")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests per mutant")
    parser.add_argument("--limit", type=float, default=3.0, help="seconds of a test that is asked")
    parser.add_argument("--again", action="store_true", help="ask survivors again")
    parser.add_argument("--page", help="write the page here; default: none if --only is given")
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # children are forked
    import hypothesis
    import pytest

    # A failure is enough: its smallest example does not matter. As many examples as always.
    hypothesis.settings.register_profile(
        "mutants", deadline=None, derandomize=True, max_examples=60, database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    files = [
        str(path.relative_to(ROOT))
        for each in options.tests or TESTS
        for path in _test_files(ROOT / each)
        if "torch" not in path.parts or (path.is_relative_to(ROOT / TORCH) and not KERNELS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-q", "-p", "no:cacheprovider", "-s", f"--basetemp={folder}/tests", *files]
        # hypothesis was imported before.
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        sys.exit(pytest.main([*arguments, "--rootdir", str(ROOT)], plugins=[_Plugin(options)]))


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


class _Plugin:
    """Replaces pytest's loop over tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def pytest_runtestloop(self, session: Any) -> bool:
        from bench.mutants import page

        _import_all()
        items = {
            item.nodeid: item
            for item in session.items
            if item.get_closest_marker("jit" if KERNELS else "long") is None
        }
        paths = _paths(self._options.only)
        verdicts = run(items, paths, self._options)
        if self._options.page or not self._options.only:
            where = page.write(verdicts, ROOT, self._options)
            print(f"written: {where}")
        return True


def _paths(only: list[str]) -> list[Path]:
    """Return the files that are changed."""
    sources = ROOT / "src" / "pardnn"
    paths = [path for each in PACKAGES for path in sorted((sources / each).rglob("*.py"))]
    asked = [(ROOT / each).resolve() for each in only]
    return [p for p in paths if not asked or any(p.is_relative_to(each) for each in asked)]


def _import_all() -> None:
    """Import once what children would import again and again."""
    for name in ("pardnn.planner.algorithms", "pardnn.place.polish.polish"):
        importlib.import_module(name)
    for path in sorted((ROOT / "src" / "pardnn").rglob("*.py")):
        relative = path.relative_to(ROOT / "src").with_suffix("")
        if not {"torch", "cli", "api", "solvers", "__main__"} & set(relative.parts):
            importlib.import_module(".".join(relative.parts).removesuffix(".__init__"))
    if not KERNELS:
        from pardnn.planner.algorithms import ALGORITHMS
        from pardnn.planner.warm_up import warm_up

        warm_up(ALGORITHMS, polished=True)


def run(items: dict[str, Any], paths: list[Path], options: argparse.Namespace) -> list[Any]:
    """Return each mutant of the sample with how it ended and the test that failed.

    Args:
        items: Collected tests by name.
        paths: Files to change.
        options: Of the command line.
    """
    from bench.mutants import asked, mutations, session

    kept = KEPT / ("asked-of-kernels.json" if KERNELS else "asked.json")
    lines = asked.Lines(ROOT, _measured(items, kept, options.limit))
    mutants = mutations.sampled(ROOT, paths, options.sample or sys.maxsize, options.seed)
    journal = KEPT / "verdicts.jsonl"
    known = _known(journal)
    found = []
    start = time.monotonic()
    with journal.open("a", encoding="utf-8") as out:
        for number, mutant in enumerate(mutants):
            if mutant.is_kernel != KERNELS:
                if old := known.get(mutant.key):
                    found.append((mutant, old["verdict"], old["test"]))
                continue
            tests = lines.tests(mutant.path, mutant.lines, options.budget)
            mark, old = _mark(mutant.path, tests), known.get(mutant.key)
            verdict, test = "no test", None
            if (
                old
                and _holds(old, mark, mutant.path)
                and not (options.again and old["verdict"] not in ("caught", "timed out"))
            ):
                verdict, test = old["verdict"], old["test"]
            else:
                if tests:
                    verdict, test = session.ended(
                        mutant, [items[t] for t in tests], [lines.seconds(t) for t in tests]
                    )
                row = {"key": mutant.key, "verdict": verdict, "test": test, "mark": mark}
                row["caught_mark"] = _mark(mutant.path, [test] if test else [])
                out.write(json.dumps(row) + "\n")
                out.flush()
                if verdict != "caught":
                    print(f"{verdict}: {mutant.path}:{mutant.line} {mutant.change}")
                if number % 20 == 19:
                    print(f"{number + 1} of {len(mutants)}, {time.monotonic() - start:.0f} s")
            found.append((mutant, verdict, test))
    return found


def _holds(old: dict[str, Any], mark: str, path: str) -> bool:
    """A caught mutant stays caught while file and test are the same; others, while all tests."""
    if old["verdict"] == "caught":
        return old["caught_mark"] == _mark(path, [old["test"]])
    return old["mark"] == mark


def _mark(path: str, tests: list[str]) -> str:
    files = sorted({test.partition("::")[0] for test in tests})
    found = hashlib.sha256("\n".join(sorted(tests)).encode())
    for each in (path, *files):
        found.update((ROOT / each).read_bytes() if (ROOT / each).exists() else b"")
    return found.hexdigest()[:16]


def _known(journal: Path) -> dict[str, dict[str, Any]]:
    """Return the latest verdicts by mutant; a last line that was cut is left out."""
    journal.parent.mkdir(exist_ok=True)
    known = {}
    if journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            known[row["key"]] = row
    return known


def _measured(items: dict[str, Any], kept: Path, limit_s: float) -> dict[str, Any]:
    """Measure the files of tests that changed since; return what each test runs."""
    from bench.mutants import asked, session

    sources = {str(path.relative_to(ROOT)) for path in _paths([])}
    found, by_file = asked.load(kept), defaultdict(list)
    for name, item in items.items():
        by_file[name.partition("::")[0]].append(item)
    for file, tests in by_file.items():
        known = found.get(file)
        if known and known[0] == asked.fingerprint(ROOT, file, known[1], sources):
            continue
        start = time.monotonic()
        ended_by, rows = session.forked(lambda tests=tests: session.measured(tests, ROOT, limit_s))
        rows = rows or []
        print(
            f"{file}: {len(rows)} of {len(tests)} tests in {time.monotonic() - start:.0f} s"
            + (f", ended by {signal.Signals(ended_by).name}" if ended_by else "")
        )
        measured = {name: asked.Asked(s, lines) for name, s, lines in rows}
        found[file] = asked.fingerprint(ROOT, file, measured, sources), measured
        asked.save(kept, found)
    return {name: each for file in by_file for name, each in found[file][1].items()}
