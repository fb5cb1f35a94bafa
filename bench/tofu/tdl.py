"""Coverage of TDL: which operators are described, and what running the pieces says of each.

    python -m bench.tofu.tdl > table.md

Lists of operators are counted from torch 2.13; samples are those of the tests.
"""

import collections
import json
import sys
from collections.abc import Iterator

from pardnn.api.verify import Verification, verify
from pardnn.shard.aten.coverage import coverage
from pardnn.shard.aten.lookup import description_of
from testbed import DATA
from testbed.op_samples import SAMPLES, Draw, with_keywords

LISTS = DATA / "aten_ops.json"
SEEDS = range(3)


def verifications(kind: str) -> Iterator[Verification]:
    for sampler in SAMPLES.get(kind, []):
        for seed in SEEDS:
            args, kwargs = with_keywords(sampler(Draw(seed)))
            yield verify(kind, *args, **kwargs)


def cell(kind: str, source: str | None, reason: str | None) -> tuple[str, str]:
    """Status and remark of one operator.

    Args:
        kind: Of the operator.
        source: Of its description; None if it has none.
        reason: Why it has none.
    """
    if source is None:
        return "out", reason or "unknown"
    done = list(verifications(kind))
    problems = [problem for v in done for problem in v.problems]
    if problems:
        return "wrong", str(problems[0])
    loops = sorted({axis for v in done for axis, _ in v.verified})
    runs = sum(len(v.verified) for v in done)
    if not done:
        return "described", "nothing to cut, or no sample"
    described = description_of(kind)
    status = "shapes verified" if described and described.is_random else "verified"
    return status, f"{runs} cuts of {', '.join(loops)}"


def main() -> None:
    lists = json.loads(LISTS.read_text())
    for title in ("training", "core"):
        counts: collections.Counter[str] = collections.Counter()
        lines = []
        for row in coverage(lists[title]):
            status, remark = cell(row.kind, row.source, row.reason)
            counts[status] += 1
            lines.append(f"| {row.kind} | {status} | {row.source or ''} | {remark} |")
        total = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        sys.stdout.write(f"## {title}: {total} of {len(lines)}\n\n")
        sys.stdout.write(
            "| operator | status | description | remark |\n| --- | --- | --- | --- |\n"
        )
        sys.stdout.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
