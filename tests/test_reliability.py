"""The table of faults: all of them are there, and every test that it names exists."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
LINK = re.compile(r"\[(test_\w+)\]\(([^)]+\.py)\)")


def rows() -> list[list[str]]:
    """Cells of all rows, headings left out."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[-1] not in ("test", "---")]


def problems(row: list[str]) -> list[str]:
    """Return which tests of a row are not there; a row without any must say so."""
    links = LINK.findall(row[-1])
    if not links and "no test" not in row[-1]:
        return [f"{row[0]}: names no test and does not say so"]
    return [
        f"{row[0]}: no {name} in {path}"
        for name, path in links
        if not (PAGE.parent / path).exists()
        or f"def {name}(" not in (PAGE.parent / path).read_text(encoding="utf-8")
    ]


def test_the_seventy_cases_have_a_row_each() -> None:
    numbers = [int(row[0]) for row in rows() if row[0].isdigit()]
    assert numbers == list(range(1, 71))


def test_every_row_names_tests_that_exist_or_says_that_there_is_none() -> None:
    assert [problem for row in rows() for problem in problems(row)] == []


def test_a_test_that_is_gone_is_noticed() -> None:
    assert problems(["1", "what", "[test_gone](../tests/test_docs.py)"]) == [
        "1: no test_gone in ../tests/test_docs.py"
    ]
    assert problems(["1", "what", "some words"]) == ["1: names no test and does not say so"]
