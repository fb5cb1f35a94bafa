"""The page of mutants: shares by package, and each survivor with its reason."""

from __future__ import annotations

import argparse
import datetime
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from bench.mutants.mutations import Mutant

#: Why mutants survive, by what they are called.
REASONS = Path(__file__).with_name("survivors.toml")
CAUGHT = ("caught", "timed out", "crashed")


def write(found: list[tuple[Mutant, str, Any]], root: Path, options: argparse.Namespace) -> Path:
    """Write the page; return where.

    Args:
        found: Mutants, how they ended, and the tests that failed.
        root: Of the repository.
        options: Of the command line.
    """
    today = datetime.datetime.now(tz=datetime.UTC).date()
    path = Path(options.page) if options.page else RESULTS / f"{today}_mutants.md"
    path.write_text(text_of(found, options, str(today)), encoding="utf-8")
    return path


def text_of(found: list[tuple[Mutant, str, Any]], options: argparse.Namespace, today: str) -> str:
    """Return the page.

    Args:
        found: Mutants, how they ended, and the tests that failed.
        options: Of the command line.
        today: The date.
    """
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    counts: dict[str, Counter[str]] = {}
    for mutant, verdict, _ in found:
        package = mutant.path.removeprefix("src/pardnn/").rpartition("/")[0]
        counts.setdefault(package, Counter())[verdict] += 1
    total = sum(counts.values(), Counter[str]())
    left = [mutant for mutant, verdict, _ in found if verdict not in CAUGHT]
    equivalent = sum(reasons.get(m.key, "").startswith("equivalent") for m in left)
    caught = sum(total[each] for each in CAUGHT)
    share = caught / max(1, total.total())
    share_left = caught / max(1, total.total() - equivalent)
    lines = [
        f"# Mutants, {today}",
        "",
        f"`make mutants`: {total.total()} small faults of a sample of {options.sample or 'all'}",
        f"(seed {options.seed}) were planted one by one in functions: in kernels where they run as",
        "plain Python, in all others beside compiled kernels. The tests nearest to its file are",
        f"asked until they have taken {options.budget:g} s of processor time.",
        f"**{share:.1%} are caught**: a test fails, or takes over {3 * options.budget:g} s. Of",
        f"{len(left)} others {equivalent} are equivalent: no input tells them apart;",
        f"{share_left:.1%} of the rest are caught.",
        "",
        "| package | mutants | caught | timed out | survived | share caught |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for package, count in [*sorted(counts.items()), ("all", total)]:
        caught = sum(count[each] for each in CAUGHT)
        lines.append(
            f"| {package} | {count.total()} | {count['caught'] + count['crashed']} | "
            f"{count['timed out']} | {count['survived']} | "
            f"{caught / count.total():.1%} |"
        )
    lines += ["", "## Survivors", "", "| where | change | why it survives |", "| --- | --- | --- |"]
    for mutant in sorted(left, key=lambda m: (m.path, m.line, m.number)):
        where = f"{mutant.path.removeprefix('src/pardnn/')}:{mutant.line} `{mutant.function}`"
        change = mutant.change.replace("|", "\\|")
        reason = reasons.get(mutant.key, "no test that was asked tells them apart")
        lines.append(f"| {where} | `{change}` | {reason} |")
    return "\n".join(lines) + "\n"
