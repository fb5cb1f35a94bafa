"""The page of `python -m bench numbers`."""

from __future__ import annotations

from collections import Counter
from typing import Any

Row = dict[str, Any]
#: Largest relative difference.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
PEAK_TOLERANCE = 0.01
#: Of a rank that a limit stops: it ran out of memory, as the others are told.
STOPPED = "E603"
WHAT = (
    "Five steps beside the user's own step on one device. Worst: the largest relative difference "
    "of losses, gradients, parameters, buffers and optimizer states. A fault is a difference above "
    "1e-10 (float64) or 1e-4 (float32), another bit where a plan cuts nothing, a generator that "
    "ends elsewhere, a peak above the predicted one or its limit, or more than 1 % off the "
    "predicted one without what calls hold while they run, a limit that does not stop a step, an "
    "error while running, a plan that is refused other than by its options or limits."
)


def ratios(row: Row, of: str) -> list[float]:
    """Return measured over predicted peak bytes of each rank that has any.

    Args:
        row: Of the case.
        of: "predicted", or "predicted_tensors" without what calls hold while they run.
    """
    pairs = zip(row["measured"], row[of], strict=True)
    return [measured / predicted for measured, predicted in pairs if predicted]


def faults(row: Row, dtype: str) -> list[str]:
    """Return what is wrong with a case, for people.

    Args:
        row: Of the case.
        dtype: Of its parameters.
    """
    if "refused" in row:
        return [] if row["refused"][1] in "23" else [f"{row['refused']} {row['why']}"]
    for key in ("raw", "error"):
        if key in row:
            return [row[key].strip().splitlines()[-1]]
    found = [f"{sort} off by {off:.1e}" for sort, off in row["worst"].items()
             if not off <= TOLERANCE[dtype]]  # fmt: skip
    if row["keeps_bits"] and not row["bitwise"]:
        found.append("other bits")
    if not row["same_random"]:
        found.append("the generator ends elsewhere")
    same = ratios(row, "predicted_tensors")
    if max(1 - min(same), max(same) - 1) > PEAK_TOLERANCE or max(ratios(row, "predicted")) > 1:
        found.append(f"peaks {min(same):.3f} to {max(same):.3f} of the predicted")
    if row["limit"] is not None and max(row["measured"]) > row["limit"]:
        found.append("more than its limit")
    if "byte_less" in row and row["byte_less"] != STOPPED:
        found.append(f"with a byte less: {row['byte_less']}")
    return found


def summary(kind: str, rows: dict[tuple[str, str, str], Row]) -> str:
    """Return a line of the table.

    Args:
        kind: Of the plans.
        rows: Its cases, by model, ranks and dtype.
    """
    ran = {key: row for key, row in rows.items() if "worst" in row}
    refused = Counter(row["refused"] for row in rows.values() if "refused" in row)
    worst = [
        max(
            (max(row["worst"].values()) for key, row in ran.items() if key[2] == dtype), default=0.0
        )
        for dtype in TOLERANCE
    ]
    peaks = [[ratio for row in ran.values() for ratio in ratios(row, of)]
             for of in ("predicted", "predicted_tensors")]  # fmt: skip
    uses = [sum(1 for row in ran.values() if row[what]) for what in ("second_calls", "on_host")]
    limited = [row for row in ran.values() if row["limit"] is not None]
    stops = sum(1 for row in limited if row["byte_less"] == STOPPED)
    cells = [
        kind, str(len(rows)), str(len(ran)),
        ", ".join(f"{n} {code}" for code, n in sorted(refused.items())) or "0",
        str(sum(1 for key, row in rows.items() if faults(row, key[2]))),
        str(sum(row["bitwise"] for row in ran.values())),
        *(f"{each:.1e}" for each in worst),
        *(f"{min(each):.3f} to {max(each):.3f}" if each else "" for each in peaks),
        str(uses[0]), str(uses[1]), f"{stops} of {len(limited)}" if limited else "",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def mixes(rows: list[Row]) -> list[str]:
    """Return a table of what plans use together, the most of them first.

    Args:
        rows: Of the cases that ran.
    """
    counts = Counter(" + ".join(row["means"]) for row in rows)
    each = sorted(counts.items(), key=lambda pair: (-pair[0].count(" + "), -pair[1]))
    lines = [f"| {means or 'one device'} | {count} | {count / len(rows):.0%} |"
             for means, count in each]  # fmt: skip
    return ["| together | plans | share |", "| --- | ---: | ---: |", *lines]


def page(report: Row) -> str:
    """Return the Markdown page of what has run so far.

    Args:
        report: As in the JSON beside it.
    """
    rows: dict[str, dict[tuple[str, str, str], Row]] = {}
    for key, row in report["rows"].items():
        kind, model, ranks, dtype = key.split(" | ")
        rows.setdefault(kind, {})[model, ranks, dtype] = row
    every = [(kind, key, row) for kind, cases in rows.items() for key, row in cases.items()]
    wrong = [(kind, key, told) for kind, key, row in every if (told := faults(row, key[2]))]
    counts = (len(every), sum("worst" in row for *_, row in every),
              sum("refused" in row for *_, row in every), len(wrong))  # fmt: skip
    titles = ["plans", "cases", "ran", "refused", "faults", "same bits", "worst in float64",
              "worst in float32", "measured / predicted peak", "without what calls hold",
              "with second calls", "state on the host", "stopped with a byte less"]  # fmt: skip
    models = ", ".join(dict.fromkeys(key[0] for _, key, _ in every))
    about = (
        f"{report['date']}, {report['machine']}, ranks of one thread. `python -m bench numbers`; "
        f"{models}; 2, 3 and 4 ranks (cuts inside of submeshes: 4); float64 and float32."
    )
    cases, ran, refused, faulty = counts
    total = f"**{cases} cases: {ran} ran, {refused} were refused, {faulty} faults.**"
    lines = [
        "# Plans beside one device", "", about, "", WHAT, "", total, "",
        "| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1),
        *(summary(kind, cases) for kind, cases in rows.items()), "", "## Mixed", "",
        *mixes([row for *_, row in every if "worst" in row]), "", "## Faults", "",
        *(f"- {kind}, {', '.join(key)}: {'; '.join(told)}" for kind, key, told in wrong),
        *(["None."] if not wrong else []), "", "## Refused", "",
        *(f"- {kind}, {', '.join(key)}: {row['refused']} {row['why']}"
          for kind, key, row in every if "refused" in row),
        *(["None."] if not counts[2] else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
