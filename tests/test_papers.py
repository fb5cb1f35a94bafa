"""The table of the papers: every item of both is there, and every link leads to what it says."""

import re
from collections import Counter
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"

#: What each paper has, as its row begins; a row may name several.
THESIS = [
    *("1.1", "1.2", "2.1", "2.2.1", "2.2.2", "2.2.3", "2.3", "3.1.1", "3.1.2", "3.2.1", "3.2.2"),
    *("3.2.3", "4.1", "4.1.1", "4.1.2", "5.1", "6", "6.1", "6.2.1", "6.2.2", "6.3", "6.3.1"),
    *("6.3.2", "6.3.3", "6.4.1", "6.4.2", "7"),
    *(f"Eq. 4.{n}" for n in range(1, 6)),
    *("Algorithm 1", "Algorithm 2", "Table 4.1", "Table 4.2", "Table 5.1", "Table 6.1"),
    *("Fig. 2.1", "Fig. 2.2", "Fig. 4.1", "Fig. 4.2", "Fig. 4.3"),
    *(f"Fig. 6.{n}" for n in range(1, 8)),
]
TOFU = [
    *("1", "2", "3.1", "3.2", "4.1", "4.2", "5", "5.1", "5.2", "6", "7.1", "7.2", "7.3", "7.4"),
    *("8", "9", "10", "A.1", "A.2"),
    *("Eq. 1", "Eq. 2", "Eq. 3", "Eqs. 4 and 5", "Corollary 1", "Lemma 1"),
    *(f"Theorem {n}" for n in (1, 2, 3)),
    *(f"Table {n}" for n in (1, 2, 3)),
    *(f"Fig. {n}" for n in range(1, 12)),
]

#: A link's text, and the file that it leads to.
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)[^)]*\)")


def rows(paper: str) -> list[list[str]]:
    """Cells of a paper's rows."""
    text = PAGE.read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## {paper}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] not in ("paper", "---")]


@pytest.mark.parametrize(("paper", "items"), [("ParDNN", THESIS), ("Tofu", TOFU)])
def test_every_item_of_the_papers_has_a_row(paper: str, items: list[str]) -> None:
    named = Counter(item for row in rows(paper) for item in re.split(r", |: ", row[0]))
    assert [item for item in items if not named[item]] == []


@pytest.mark.parametrize("paper", ["ParDNN", "Tofu"])
def test_every_row_leads_to_code_and_to_a_test_or_says_that_there_is_none(paper: str) -> None:
    assert [problem for row in rows(paper) for problem in problems(row)] == []


def test_a_test_that_is_gone_is_noticed() -> None:
    row = [
        "Eq. 1", "what", "[a.py](../src/pardnn/gone.py)", "[test_gone](../tests/test_docs.py)", ".",
    ]  # fmt: skip
    assert problems(row) == ["Eq. 1: no ../src/pardnn/gone.py", "Eq. 1: no test_gone"]
    assert problems(["Eq. 1", "what", "somewhere", "", "."]) == [
        "Eq. 1: 'somewhere' links nothing", "Eq. 1: '' links nothing",
    ]  # fmt: skip


def problems(row: list[str]) -> list[str]:
    """What a row says that is not so."""
    if len(row) != 5:
        return [f"{row[0]}: {len(row)} cells"]
    found: list[str] = []
    for cell, nothing in ((row[2], ("no code", "not built")), (row[3], ("no test",))):
        links = LINK.findall(cell)
        if not links and not cell.startswith(nothing):
            found.append(f"{row[0]}: {cell!r} links nothing")
        for text, target in links:
            path = PAGE.parent / target
            if not path.is_file():
                found.append(f"{row[0]}: no {target}")
            elif text.startswith("test_") and f"def {text}(" not in path.read_text("utf-8"):
                found.append(f"{row[0]}: no {text}")
    return found
