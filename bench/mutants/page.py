"""The page of mutants: shares by package, and each survivor with its reason."""

from __future__ import annotations

import argparse
import datetime
import re
import tomllib
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from bench.mutants.mutations import Mutant

#: Packages of `src/pardnn` that are changed.
PACKAGES = (
    "place/pardnn", "place/ordering", "place/thesis", "sim", "plan", "shard/partition",
    "shard/search",
)  # fmt: skip
#: A test does not end any more: it has taken as many times its time, and as many seconds at least.
SLOWER = 10
LEAST_S = 5.0
#: Why mutants survive, by what they are called.
REASONS = Path(__file__).with_name("survivors.toml")
CAUGHT = ("caught", "timed out", "crashed")

#: A survivor on a page: its file, line, function and change, and why it survives.
ROW = re.compile(r"\| (\S+):\d+ `(.+?)` \| `(.+?)` \| (.*) \|")
SINCE, GONE = "caught since by", "its code has changed since"

#: A mutant, how it ended, and the test that says so.
Found = tuple[Mutant, str, Any]


def write(found: Sequence[Found], sample: Sequence[Mutant], options: argparse.Namespace) -> Path:
    """Write the page; return where.

    Args:
        found: Of the mutants that were asked.
        sample: All mutants that were chosen.
        options: Of the command line.
    """
    today = str(datetime.datetime.now(tz=datetime.UTC).date())
    path = Path(options.page) if options.page else RESULTS / f"{today}_mutants.md"
    path.write_text(text_of(found, sample, options, today), encoding="utf-8")
    return path


def text_of(
    found: Sequence[Found], sample: Sequence[Mutant], options: argparse.Namespace, today: str
) -> str:
    """Return the page.

    Args:
        found: Of the mutants that were asked.
        sample: All mutants that were chosen.
        options: Of the command line.
        today: The date.
    """
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    counts: dict[str, Counter[str]] = {}
    for mutant, verdict, _ in found:
        package = next(p for p in PACKAGES if mutant.path.startswith(f"src/pardnn/{p}/"))
        counts.setdefault(package, Counter())[verdict] += 1
    total = sum(counts.values(), Counter[str]())
    left = [mutant for mutant, verdict, _ in found if verdict not in CAUGHT]
    unseen = {mutant for mutant, verdict, _ in found if verdict == "not run"}
    equivalent = sum(reasons.get(m.key, "").startswith("equivalent") for m in left)
    caught = sum(total[each] for each in CAUGHT)
    share = caught / max(1, total.total())
    share_left = caught / max(1, total.total() - equivalent)
    lines = [
        f"# Mutants, {today}",
        "",
        f"`make mutants`: {total.total()} small faults of a sample of {len(sample)}",
        f"(seed {options.seed}) were planted one by one in functions: in kernels where they run as",
        "plain Python, in all others beside compiled kernels. Which tests run which lines was",
        "recorded once. A mutant is shown to those that run its statement, the fastest first, till",
        f"they have taken {options.budget:g} s of processor time, each in a process that is forked",
        "for it with all modules loaded.",
        f"**{share:.1%} are caught**: a test fails, ends the process, or takes over {SLOWER} times",
        f"its time ({LEAST_S:g} s at least). Of {len(left)} others {equivalent} are equivalent: no",
        f"input tells them apart; {share_left:.1%} of the rest are caught.",
        *_cut(found, sample),
        "",
        "| package | mutants | caught | timed out | survived | run by no test | share caught |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for package, count in [*sorted(counts.items()), ("all", total)]:
        caught = sum(count[each] for each in CAUGHT)
        lines.append(
            f"| {package} | {count.total()} | {count['caught'] + count['crashed']} | "
            f"{count['timed out']} | {count['survived']} | {count['not run']} | "
            f"{caught / count.total():.1%} |"
        )
    lines += ["", "## Survivors", "", "| where | change | why it survives |", "| --- | --- | --- |"]
    for mutant in sorted(left, key=lambda m: (m.path, m.line, m.number)):
        where = f"{mutant.path.removeprefix('src/pardnn/')}:{mutant.line} `{mutant.function}`"
        change = mutant.change.replace("|", "\\|")
        unknown = "no test runs it" if mutant in unseen else "no test tells them apart"
        reason = reasons.get(mutant.key, unknown)
        lines.append(f"| {where} | `{change}` | {reason} |")
    return "\n".join(lines) + "\n"


def survivors_of(text: str) -> list[str]:
    """Return what the survivors on a page are called."""
    return [_key(row) for row in map(ROW.fullmatch, text.splitlines()) if row]


def _key(row: re.Match[str]) -> str:
    change = row[3].replace("\\|", "|")
    return f"src/pardnn/{row[1]}::{row[2]}::{change}"


def asked_again(text: str, found: Sequence[Found], there: Container[str]) -> str:
    """Return a page whose survivors say which tests catch them now; its shares stay as they are.

    Args:
        text: The page.
        found: Of the survivors that were asked; the others say what they said.
        there: What mutants of the code of today are called.
    """
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    tests = {mutant.key: test for mutant, verdict, test in found if verdict in CAUGHT}
    lines = list[str]()
    for line in text.splitlines():
        row = ROW.fullmatch(line)
        if row is None:
            lines += [] if line.startswith("Of these ") else [line]
            continue
        key, why = _key(row), row[4]
        if key in tests:
            why = f"{SINCE} `{tests[key]}`".replace("|", "\\|")
        elif not why.startswith(SINCE):
            why = reasons.get(key, why) if key in there else GONE
        lines.append(f"{line[: row.start(4)]}{why} |")
    rows = [row[4] for row in map(ROW.fullmatch, lines) if row]
    caught, gone = (sum(why.startswith(each) for why in rows) for each in (SINCE, GONE))
    at = lines.index("## Survivors") + 1
    lines.insert(
        at + 1,
        f"Of these {len(rows)}, {caught} are caught by tests written since, and the code of {gone} "
        "has changed; shares above are those of the run.",
    )
    if lines[at + 2]:
        lines.insert(at + 2, "")
    return "\n".join(lines) + "\n"


def _cut(found: Sequence[Found], sample: Sequence[Mutant]) -> list[str]:
    """Say of a run that was cut how far it came, and what that makes of the whole sample."""
    if len(found) == len(sample):
        return []
    words, share = list[str](), 0.0
    for is_kernel, of in ((True, "kernels"), (False, "other functions")):
        asked = [verdict in CAUGHT for mutant, verdict, _ in found if mutant.is_kernel == is_kernel]
        size = sum(mutant.is_kernel == is_kernel for mutant in sample)
        words.append(f"{sum(asked)} of the first {len(asked)} of {size} in {of}")
        share += sum(asked) / max(1, len(asked)) * size / len(sample)
    text = f"The run was cut: {' and '.join(words)} are caught. By their numbers in the sample"
    return ["", f"{text}, that is {share:.1%}."]
