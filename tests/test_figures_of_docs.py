"""Figures in docs are those of a page that is linked beside them, or of the code.

README.md and docs/papers.md have tests of their own (`test_figures.py`); what stands in
docs/decisions are records of when a choice was made.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from pardnn import files, pipes
from pardnn.api import max_batch
from pardnn.backends.torch.capture.assigned import large_contents
from pardnn.backends.torch.comm import stop_signal
from pardnn.backends.torch.deferred_init import blocks
from pardnn.backends.torch.launch import processes, rank
from pardnn.backends.torch.profile import of_file, ping_pong
from pardnn.backends.torch.runtime.memory import limits as memory_limits
from pardnn.backends.torch.user_step.guards import held_content
from pardnn.checkpoint import pieces
from pardnn.cost import host_link
from pardnn.place.baselines import exact
from pardnn.place.pardnn import step1_makespan
from pardnn.place.polish import polish
from pardnn.place.recompute import search
from pardnn.planner.options import PlanOptions
from pardnn.planner.sharded import complete, memory
from pardnn.shard.search import free_gradients, memory_estimate, tofu

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(
    {*DOCS.glob("*.md"), *DOCS.glob("algorithms/*.md"), *DOCS.glob("guides/*.md")}
    - {DOCS / "papers.md"}
)
NUMBER = r"(?<![\w.])[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?"
UNIT = r"(?:%|(?:times|m?s|us|GiB|MiB|seconds|minutes|CPU seconds|microseconds)\b)"
#: A number, or several, with a unit of what is measured; sizes of graphs have none of these.
FIGURE = re.compile(rf"({NUMBER})(?=(?: (?:and|to|or) {NUMBER})* ?{UNIT})")
CELL = re.compile(r"(?<=\| )([0-9]+\.[0-9]{2,})(?= \|)")
MIB, GIB = 1 << 20, 1 << 30
AGENT = inspect.signature(LocalElasticAgent)
ALL_END_S = rank.GRACE_S + processes.SHUTDOWN_S
#: By page and figure as it is written: what the code says.
CONSTANTS = {
    ("auto.md", "0.8"): complete.OPTIMISM,
    ("auto.md", "0.9"): complete.LIKENESS,
    ("auto.md", "1.1"): polish.NEAR,
    ("baselines.md", "60"): exact.SOLVER_SECONDS,
    ("checkpoints.md", "2"): stop_signal.ONE_SIGNAL_S,
    ("checkpoints.md", "10"): ALL_END_S,
    ("checkpoints.md", "16"): 2 * pieces.CHUNK_BYTES / MIB,
    ("checkpoints.md", "30"): AGENT.parameters["shutdown_timeout"].default,
    ("commands.md", "10"): 100 * PlanOptions().reserve,
    ("concepts.md", "1"): held_content._MAX_BYTES / MIB,
    ("concepts.md", "16"): large_contents._MAX_BYTES / MIB,
    ("concepts.md", "48"): memory_limits.ALLOWANCE_BYTES / MIB,
    ("errors.md", "1"): files.MAX_BYTES / GIB,
    ("max-batch.md", "1"): 100 * max_batch.PRECISION,
    ("offload.md", "10"): 1e6 * host_link.LATENCY,
    ("pardnn-scale.md", "5"): 100 * (step1_makespan.REFINED_WITHIN - 1),
    ("recompute.md", "2"): 100 * search.STRIDE / search.RANGES,
    ("reliability.md", "10"): ALL_END_S,
    ("reliability.md", "60"): pipes.PIPE_S,
    ("security.md", "4"): files.SMALL_BYTES / MIB,
    ("security.md", "100"): files.MAX_RATIO,
    ("security.md", "2"): of_file.ALLOWANCE_BYTES / GIB,
    ("security.md", "60"): of_file.GRACE_SECONDS,
    ("sharded-plans.md", "2"): 100 * (complete.RELAYED - 1),
    ("sharded-plans.md", "1.15"): memory.ROOM,
    ("tofu.md", "1.5"): tofu.FAR,
    ("tofu.md", "2"): 100 * (1 - free_gradients.WORTH["bytes"]),
    ("tofu.md", "5"): 100 * (memory_estimate.SAME_MEMORY - 1),
    ("tofu.md", "0.5"): 100 * (1 - free_gradients.WORTH["seconds"]),
    ("two-nodes.md", "9"): 1e3 * (1e6 / 125e6 + 1e-3),  # a megabyte over the link of its figures
    ("two-nodes.md", "8"): ping_pong.SIZES[-1] / MIB,
    ("when-it-does-not-fit.md", "8"): blocks.BLOCK_BYTES / MIB,
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


def commands(page: Path) -> str:
    """What stands in blocks of code and between backquotes: a guide speaks of what it runs."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```.*?^```$|`[^`\n]+`", text, flags=re.M | re.S)
    return re.sub(r"(?<=[0-9])(?=[KMG]iB)", " ", "\n".join(found))


def has(text: str, figure: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(figure)}(?!\w|\.[0-9])", text) is not None


def linked(page: Path, text: str) -> str:
    """What stands on the pages of results and decisions, and in the tests, that it links."""
    links = re.findall(r"\]\(([^)#]+\.(?:md|py))", text)
    pages = {(page.parent / each).resolve() for each in links}
    return "\n".join(each.read_text(encoding="utf-8") for each in sorted(pages - set(PAGES)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_stand_on_a_linked_page_or_in_the_code(page: Path) -> None:
    for text in paragraphs(page):
        known = linked(page, text) + (commands(page) if page.parent.name == "guides" else "")
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
