"""The page of descriptions on torch's own samples: each operator verified, or with its reason."""

import json
import re
from pathlib import Path

from bench.common import RESULTS
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.aten.without import reason_without

LAST = sorted(RESULTS.glob("*_opinfo.json"))[-1]
TDL = Path(__file__).parents[2] / "docs" / "algorithms" / "tdl.md"


def operators() -> dict[str, set[str]]:
    """What is said of each operator's overloads."""
    found: dict[str, set[str]] = {}
    for kind, (text, _) in json.loads(LAST.read_text(encoding="utf-8"))["overloads"].items():
        found.setdefault(kind.split(".")[1].rstrip("_"), set()).add(text)
    return found


def test_at_least_430_are_verified_and_none_is_wrong() -> None:
    found = operators()
    assert sum("verified" in texts for texts in found.values()) >= 430
    assert not [name for name, texts in found.items() if "wrong" in texts]


def test_what_is_not_described_has_a_reason() -> None:
    kinds = json.loads(LAST.read_text(encoding="utf-8"))["overloads"]
    left = [kind for kind, (text, why) in kinds.items() if text == "no description" and not why]
    assert left == []
    assert not [kind for kind in kinds if description_of(kind) is None and not reason_without(kind)]


def test_what_was_verified_is_described_still() -> None:
    kinds = json.loads(LAST.read_text(encoding="utf-8"))["overloads"]
    verified = [kind for kind, (text, _) in kinds.items() if text == "verified"]
    assert [kind for kind in verified if description_of(kind) is None] == []


def test_the_page_of_tdl_says_the_figure_of_the_last_run() -> None:
    found = operators()
    verified = sum("verified" in texts for texts in found.values())
    text = " ".join(TDL.read_text(encoding="utf-8").split())
    assert f"{verified} of {len(found)} operators" in text
    assert re.search(rf"results/{re.escape(LAST.stem)}\.md", text)
