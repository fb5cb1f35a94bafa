"""Figures of docs/algorithms are those of a page that is linked beside them, or of the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pardnn.api import max_batch
from pardnn.cost import host_link
from pardnn.place.baselines import exact
from pardnn.place.pardnn import step1_makespan
from pardnn.place.recompute import search
from pardnn.planner.sharded import complete
from pardnn.shard.search import free_gradients, memory_estimate, tofu

PAGES = sorted((Path(__file__).parents[1] / "docs" / "algorithms").glob("*.md"))
NUMBER = r"(?<![\w.])[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?"
UNIT = r"(?:%|(?:times|m?s|us|GiB|MiB|seconds|minutes|CPU seconds|microseconds)\b)"
#: A number, or several, with a unit of what is measured; sizes of graphs have none of these.
FIGURE = re.compile(rf"({NUMBER})(?=(?: (?:and|to|or) {NUMBER})* ?{UNIT})")
CELL = re.compile(r"(?<=\| )([0-9]+\.[0-9]{2,})(?= \|)")
#: By page and figure as it is written: what the code says.
CONSTANTS = {
    ("auto.md", "0.8"): complete.OPTIMISM,
    ("baselines.md", "60"): exact.SOLVER_SECONDS,
    ("max-batch.md", "1"): 100 * max_batch.PRECISION,
    ("offload.md", "10"): 1e6 * host_link.LATENCY,
    ("pardnn-scale.md", "5"): 100 * (step1_makespan.REFINED_WITHIN - 1),
    ("recompute.md", "2"): 100 * search.STRIDE / search.RANGES,
    ("sharded-plans.md", "2"): 100 * (complete.RELAYED - 1),
    ("sharded-plans.md", "1.15"): complete.ROOM,
    ("tofu.md", "1.5"): tofu.FAR,
    ("tofu.md", "2"): 100 * (1 - free_gradients.WORTH["bytes"]),
    ("tofu.md", "5"): 100 * (memory_estimate.SAME_MEMORY - 1),
    ("tofu.md", "0.5"): 100 * (1 - free_gradients.WORTH["seconds"]),
}


def paragraphs(page: Path) -> Iterator[str]:
    """Its paragraphs and points; a table belongs to what stands above it."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"\n\n(?=\|)", "\n", text)
    yield from re.split(r"\n\n|\n(?=- |[0-9]+\. )", text)


def figures(text: str) -> list[str]:
    """Numbers with a unit, and decimal ones that fill a cell of a table."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    return FIGURE.findall(text) + CELL.findall(text)


def has(text: str, figure: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(figure)}(?!\w|\.[0-9])", text) is not None


def linked(page: Path, text: str) -> str:
    """What stands on the pages that a paragraph links, but for other pages of algorithms."""
    pages = {(page.parent / each).resolve() for each in re.findall(r"\]\(([^)#]+\.md)", text)}
    return "\n".join(each.read_text(encoding="utf-8") for each in sorted(pages - set(PAGES)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_stand_on_a_linked_page_or_in_the_code(page: Path) -> None:
    for text in paragraphs(page):
        known = linked(page, text)
        for figure in figures(text):
            constant = CONSTANTS.get((page.name, figure))
            if constant is None:
                assert has(known, figure), f"{figure} is on no page that is linked in: {text}"
            else:
                assert constant == pytest.approx(float(figure)), text


def test_figures_are_found() -> None:
    assert figures("up to 50,000 ops, 0.3 to 1 % more, `9 %`, 2.5 GiB, [3 s](x.md), 7 times") == [
        "0.3", "1", "2.5", "3", "7",
    ]  # fmt: skip
    assert figures("| limit | 640 MiB |\n| --- | --- |\n| a | 2.819 |") == ["640", "2.819"]
    assert has("took 2.5 %", "2.5")
    assert not has("took 12.5 % of 2.51", "2.5")


def test_every_constant_is_of_a_figure() -> None:
    found = {(page.name, f) for page in PAGES for text in paragraphs(page) for f in figures(text)}
    assert set(CONSTANTS) <= found
