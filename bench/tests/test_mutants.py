"""Mutants: what is changed, what is left alone, and what they are called."""

import argparse
import ast
import tomllib
from pathlib import Path

from bench.mutants.mutations import Mutant, mutants_of, mutated
from bench.mutants.page import REASONS, asked_again, survivors_of, text_of
from bench.mutants.record import Record, places_of

SOURCE = '''
LIMIT = 3


def least(values, most: int = 9):
    """Return 1."""
    if not values or values[0] < most:
        raise ValueError("no 2")
    total = 0
    total += max(values[0], most)
    return total - 1
'''


def test_each_mutant_is_one_change_inside_a_function() -> None:
    found = mutants_of("a.py", SOURCE)
    changes = {mutant.change for mutant in found}
    assert {
        "values[0] < most -> values[0] <= most", "not values -> values", "total - 1 -> total + 1",
        "max -> min", "total += max(values[0], most) -> pass", "1 -> 2",
    } <= changes  # fmt: skip
    assert not any(part in change for change in changes for part in ("LIMIT", "9", "Return"))
    assert "max(values[0], most) -> max(most, values[0])" not in changes, "the same value"
    assert len({mutant.key for mutant in found}) == len(found)
    for mutant in found:
        text = ast.unparse(mutated(SOURCE, mutant.number))
        assert text != ast.unparse(ast.parse(SOURCE))
        assert mutant.line in mutant.lines


def test_those_that_run_the_statement_are_asked_the_fastest_first(tmp_path: Path) -> None:
    """Of a function that has changed since, all that run any of it."""
    (tmp_path / "src").mkdir()
    path = tmp_path / "src" / "a.py"
    path.write_text(SOURCE, encoding="utf-8")
    (change,) = (m for m in mutants_of("src/a.py", SOURCE) if m.change == "total - 1 -> total + 1")
    (begin, code) = places_of(SOURCE)["least"]
    whole, checks, other = (
        sum(1 << line - begin.start for line in lines)
        for lines in (begin, range(begin.start, change.line), range(change.line, change.line + 1))
    )
    row = {
        "functions": [("a.py", "least", code), ("a.py", "most", code)],
        "tests": {
            "slow": (2.0, [(0, f"{whole:x}")]),
            "elsewhere": (0.1, [(1, f"{whole:x}")]),
            "raises": (0.1, [(0, f"{checks:x}")]),
            "fast": (0.2, [(0, f"{other:x}"), (1, "1")]),
        },
    }
    found = Record(tmp_path, "src", {"test_a.py": row})
    assert found.tests(change) == ["fast", "slow"]
    assert found.seconds("slow") == 2.0
    path.write_text(SOURCE.replace("no 2", "not 2"), encoding="utf-8")
    assert Record(tmp_path, "src", {"test_a.py": row}).tests(change) == ["raises", "fast", "slow"]


def test_functions_and_methods_have_their_lines() -> None:
    places = places_of("def a():\n    pass\n\nclass B:\n    x = 1\n    def c(self): pass\n")
    assert {name: lines for name, (lines, _) in places.items()} == {
        "a": range(1, 3), "B.c": range(6, 7),
    }  # fmt: skip


def test_reasons_are_of_mutants_that_are_there() -> None:
    """A reason whose code has changed says nothing any more."""
    root = Path(__file__).parents[2]
    keys = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    files = {key.partition("::")[0] for key in keys}
    known = {
        mutant.key
        for path in files
        for mutant in mutants_of(path, (root / path).read_text(encoding="utf-8"))
    }
    assert keys.keys() <= known


def test_a_run_that_was_cut_says_what_it_makes_of_the_sample() -> None:
    """One of one in kernels, one of two in the rest: by 1 and 3 of them, 62.5 %."""
    path = "src/pardnn/sim/a.py"
    sample = [Mutant(path, "f", f"{n} -> 0", n, range(n, n + 1), n, n == 1) for n in range(1, 5)]
    verdicts = ("caught", "timed out", "not run")
    found = [(mutant, verdict, None) for mutant, verdict in zip(sample, verdicts, strict=False)]
    options = argparse.Namespace(seed=3, budget=4.0)
    text = text_of(found, sample, options, "today")
    assert "1 of the first 1 of 1 in kernels and 1 of the first 2 of 3 in other" in text
    assert "that is 62.5%" in text
    assert "| sim | 3 | 1 | 1 | 0 | 1 | 66.7% |" in text
    assert "| sim/a.py:3 `f` | `3 -> 0` | no test runs it |" in text
    assert "was cut" not in text_of(found, sample[:3], options, "today")


def test_survivors_on_a_page_say_which_tests_catch_them_since() -> None:
    """Run after run, as kernels and the rest are; the shares are those of the sample."""
    path = "src/pardnn/sim/a.py"
    changes = ("a | b -> a & b", "1 -> 2", "2 -> 3", "3 -> 4", "4 -> 5")
    mutants = [Mutant(path, "C.f", text, n, range(n), n) for n, text in enumerate(changes, 1)]
    known = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    key, reason = next((k, v) for k, v in known.items() if "|" not in k)
    file, function, change = key.split("::")
    old = Mutant(file, function, change, 6, range(6), 6)
    verdicts = ("survived", "survived", "not run", "survived", "caught", "survived")
    found = [(m, v, None) for m, v in zip([*mutants, old], verdicts, strict=True)]
    options = argparse.Namespace(seed=3, budget=4.0)
    page = text_of(found, [*mutants, old], options, "today").replace(reason, "no reason")
    one, other, _, gone, _ = mutants
    assert set(survivors_of(page)) == {m.key for m in [*mutants[:4], old]}
    there = {m.key for m in [*mutants, old] if m is not gone}
    test = "tests/sim/test_a.py::test_f[a|b]"
    first = asked_again(page, [(one, "caught", test), (other, "survived", None)], there)
    page_since = asked_again(first, [(other, "timed out", "tests/b.py::g")], there)
    rows = {line.split(" | ")[0]: line for line in page_since.splitlines() if "sim/a.py" in line}
    assert rows["| sim/a.py:1 `C.f`"].endswith(
        r"| `a \| b -> a & b` | caught since by `tests/sim/test_a.py::test_f[a\|b]` |"
    )
    assert rows["| sim/a.py:2 `C.f`"].endswith("| `1 -> 2` | caught since by `tests/b.py::g` |")
    assert rows["| sim/a.py:3 `C.f`"].endswith("| `2 -> 3` | no test runs it |")
    assert rows["| sim/a.py:4 `C.f`"].endswith("| `3 -> 4` | its code has changed since |")
    assert f"| {reason} |" in page_since
    told = "Of these 5, 2 are caught by tests written since, and the code of 1 has changed;"
    assert page_since.count("Of these") == page_since.count(told) == 1
    assert page_since.split("## Survivors")[0] == page.split("## Survivors")[0]
    assert set(survivors_of(page_since)) == set(survivors_of(page))
