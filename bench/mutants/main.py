"""`make mutants`: plant small faults in the algorithms one by one and count those that tests find.

Mutants are sampled by a seed. What was found is kept in `.mutants/`, so a run that was cut goes on
where it was, and after new tests only survivors are asked again. `--only PATH` takes the files
below a path, `--sample 0` all mutants, `--again` forgets survivors' verdicts.

`--survivors PAGE` asks those that survived on a page, and writes there which tests, written since,
catch them; the shares on the page are still those of its sample.

Kernels are changed where they run as plain Python (`NUMBA_DISABLE_JIT=1`), all other functions
where kernels are compiled, beside the tests that are too large for plain Python. So a sample takes
two runs; the page is of what both have found. `--told` writes the page of a run that was cut.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.mutants import mutations, page
from bench.mutants.mutations import Mutant

#: Tests that are asked: those of the packages, and of what calls them.
TESTS = (
    "tests/place", "tests/sim", "tests/plan", "tests/shard", "tests/planner", "tests/report",
    "tests/explain", "tests/api", "tests/test_tiny.py",
)  # fmt: skip
#: Of the tests below a directory named `torch`, those below this one alone are asked.
TORCH = Path("tests/shard")
ROOT = Path(__file__).parents[2]
SOURCES = "src/pardnn"
#: Whether kernels are changed, or all but kernels.
KERNELS = os.environ.get("NUMBA_DISABLE_JIT") == "1"
KEPT = ROOT / ".mutants"
#: Marks of tests that are not asked.
LEFT_OUT = ("jit", "long") if KERNELS else ("long",)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=400, help="mutants; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a file or folder")
    parser.add_argument("--tests", action="append", default=[], help="ask tests below it alone")
    parser.add_argument(
        "--budget", type=float, default=20.0, help="processor time of tests per mutant, in seconds"
    )
    parser.add_argument("--told", action="store_true", help="ask nothing: write the page")
    parser.add_argument("--again", action="store_true", help="ask survivors again")
    parser.add_argument("--survivors", help="ask the survivors on this page, and write it anew")
    parser.add_argument("--page", help="write the page here; default: none if --only is given")
    options = parser.parse_args(argv)
    if options.told:
        _write(run({}, _paths(options.only), options), options)
        return
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
        _import_all(warm=not KERNELS and not self._options.tests)
        items = {
            item.nodeid: item
            for item in session.items
            if not any(item.get_closest_marker(mark) for mark in LEFT_OUT)
        }
        paths = _paths(self._options.only)
        verdicts = run(items, paths, self._options)
        if self._options.page or self._options.survivors or not self._options.only:
            _write(verdicts, self._options)
        return True


def _write(found: list[page.Found], options: argparse.Namespace) -> None:
    if options.survivors is None:
        print(f"written: {page.write(found, _sample(_paths(options.only), options), options)}")
        return
    text = Path(options.survivors).read_text(encoding="utf-8")
    there = {mutant.key for mutant in _all(_paths([]))}
    path = Path(options.page or options.survivors)
    path.write_text(page.asked_again(text, found, there), encoding="utf-8")
    print(f"written: {path}")


def _sample(paths: list[Path], options: argparse.Namespace) -> list[Mutant]:
    if options.survivors is None:
        return mutations.sampled(ROOT, paths, options.sample or sys.maxsize, options.seed)
    survived = page.survivors_of(Path(options.survivors).read_text(encoding="utf-8"))
    return [mutant for mutant in _all(paths) if mutant.key in survived]


def _all(paths: list[Path]) -> list[Mutant]:
    return mutations.sampled(ROOT, paths, sys.maxsize, 0)


def _paths(only: list[str]) -> list[Path]:
    """Return the files that are changed."""
    sources = ROOT / "src" / "pardnn"
    paths = [path for each in page.PACKAGES for path in sorted((sources / each).rglob("*.py"))]
    asked = [(ROOT / each).resolve() for each in only]
    return [p for p in paths if not asked or any(p.is_relative_to(each) for each in asked)]


def _import_all(warm: bool) -> None:
    """Import once what children would import again and again."""
    for name in ("pardnn.planner.algorithms", "pardnn.place.polish.polish"):
        importlib.import_module(name)
    for path in sorted((ROOT / "src" / "pardnn").rglob("*.py")):
        relative = path.relative_to(ROOT / "src").with_suffix("")
        if not {"torch", "cli", "api", "solvers", "__main__"} & set(relative.parts):
            importlib.import_module(".".join(relative.parts).removesuffix(".__init__"))
    if warm:
        from pardnn.planner.algorithms import ALGORITHMS
        from pardnn.planner.warm_up import warm_up

        warm_up(ALGORITHMS, polished=True)


def run(items: dict[str, Any], paths: list[Path], options: argparse.Namespace) -> list[page.Found]:
    """Return each mutant of the sample that was asked, how it ended and the test that said so.

    Args:
        items: Collected tests by name.
        paths: Files to change.
        options: Of the command line.
    """
    from bench.mutants import record, session

    kept = KEPT / ("tests-of-kernels" if KERNELS else "tests")
    tests_of = record.recorded(kept, ROOT, SOURCES, items)
    mutants = _sample(paths, options)
    journal = KEPT / "verdicts.jsonl"
    known = _known(journal)
    found = []
    start = time.monotonic()
    with journal.open("a", encoding="utf-8") as out:
        for number, mutant in enumerate(mutants):
            old = known.get(mutant.key)
            if mutant.is_kernel != KERNELS or options.told:
                found += [(mutant, old["verdict"], old["test"])] if old else []
                continue
            tests = [test for test in tests_of.tests(mutant) if test in items]
            mark = _mark(mutant.path, tests)
            again = options.again and old and old["verdict"] not in page.CAUGHT
            if old and _holds(old, mark, mutant.path) and not again:
                found.append((mutant, old["verdict"], old["test"]))
                continue
            if old and old["test"] in tests:  # what has found it once
                tests.remove(old["test"])
                tests.insert(0, old["test"])
            seconds = [tests_of.seconds(test) for test in tests]
            verdict, test = "not run", None
            if tests:
                asked = [items[test] for test in tests]
                verdict, test = session.ended(mutant, asked, seconds, options.budget)
            row = {"key": mutant.key, "verdict": verdict, "test": test, "mark": mark}
            row["caught_mark"] = _mark(mutant.path, [test] if test else [])
            out.write(json.dumps(row) + "\n")
            out.flush()
            if verdict != "caught":
                print(f"{verdict}: {mutant.path}:{mutant.line} {mutant.change}", flush=True)
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
