"""Why Figures 8 and 9 and Table 3 differ from the paper's: prose whose numbers are the rows'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]

#: Samples/s on RNN-L-4K that Table 3 of the paper prints: Tofu, operator placement.
PUBLISHED_RATE = {"rnn_6_4k": (210, 107), "rnn_8_4k": (154, 95), "rnn_10_4k": (122, 59)}
#: WResNets whose weights, gradients and history the paper's small batch has no memory for.
NOT_IN_THE_PAPER = "wresnet_152_4"


def notes(models: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines of the section.

    Args:
        models: What `models.measure` returns, by name.
    """
    wresnets, rnns = (
        [row for name, row in models.items() if name.startswith(kind)]
        for kind in ("wresnet", "rnn")
    )
    yield from ("## Where this differs from the paper, and why", "")
    for text in (
        _ideal(wresnets, rnns, models),
        _batches(wresnets, rnns),
        _small(wresnets, rnns, models),
        _swapping(rnns),
        _placement(rnns),
    ):
        if text:
            yield f"- {text}"


def _ideal(wresnets: list[Row], rnns: list[Row], models: Mapping[str, Row]) -> str:
    shares = [_shares(rows, "tofu") for rows in (wresnets, rnns)]
    found = [
        f"{_range(each)} of ideal for the {name} (the paper: {paper})"
        for each, name, paper in zip(
            shares, ("WResNets", "RNNs"), ("60 to 95 %", "70 to 98 %"), strict=True
        )
        if each
    ]
    text = f"**Tofu is close to ideal**: {', '.join(found)}. "
    text += "The roofline grants pieces of an op nearly the efficiency of the whole, and links "
    text += "carry 21 GB/s between any two devices at once, which PCI Express does not."
    for number, (system, subject) in enumerate(
        (("tofu", "Samples/s of the RNNs of 4K"), ("operator placement", "those of placement"))
    ):
        above = [
            models[name][system]["samples_per_s"] / paper[number] - 1
            for name, paper in PUBLISHED_RATE.items()
            if "samples_per_s" in models.get(name, {}).get(system, {})
        ]
        if above:
            text += f"{',' if number else ''} {subject} are {_range(above)} above Table 3's"
    return text.removesuffix(".") + "."


def _batches(wresnets: list[Row], rnns: list[Row]) -> str:
    found = [
        f"{_between(row['tofu']['batch'] for row in rows if 'batch' in row['tofu'])} {of}"
        for rows, of in ((wresnets, "images"), (rnns, "sentences"))
        if rows
    ]
    return (
        f"**Batches**: Tofu fits {' and '.join(found)} here. The paper has 128 images for "
        "WResNet-50-4 down to 8 for WResNet-152-10, and 128 sentences for RNN-10-8K. A plan holds "
        "nothing after its last use. Gradients of time steps are not added up in place, as they "
        "are in the paper; `python -m bench tofu-in-place` measures what that would bring."
    )


def _small(wresnets: list[Row], rnns: list[Row], models: Mapping[str, Row]) -> str:
    found: list[str] = []
    for rows, name in ((wresnets, "WResNets"), (rnns, "RNNs")):
        over = [
            row["small batch"]["samples_per_s"] / row["tofu"]["samples_per_s"]
            for row in rows
            if "samples_per_s" in row["small batch"] and "samples_per_s" in row["tofu"]
        ]
        if over:
            times = f"{min(over):.2f} to {max(over):.2f}"
            found.append(f"{len(over)} of {len(rows)} {name}, at {times} times Tofu's samples/s")
    text = f"**Small batch** fits {' and '.join(found)}."
    if "samples_per_s" in models.get(NOT_IN_THE_PAPER, {}).get("small batch", {}):
        text += " One of them is WResNet-152-4, which does not fit in the paper: weights, gradients"
        text += " and history take 10.5 of 12 GiB (Table 2)."
    return text + " Where it fits in the paper it is 12 % and 15 % above Tofu."


def _swapping(rnns: list[Row]) -> str:
    large = [row for row in rnns if not row["graph"].endswith("_4k")]
    if not large:
        return ""
    few = sum(row["swapping"]["devices"] < 8 for row in large)
    return (
        "**Swapping** is an optimum: it knows the future, and hides what it can. Of the "
        f"{len(large)} RNNs of 6K and 8K {few} are fastest on fewer than 8 devices, as all share "
        f"the link, and it has {_range(_shares(large, 'swapping'))} of ideal."
    )


def _placement(rnns: list[Row]) -> str:
    system = "operator placement"
    failed = [row["graph"] for row in rnns if "error" in row.get(system, {})]
    if not rnns:
        return ""
    text = "**Operator placement** keeps its pipeline in the planner's order, and pays little for "
    text += "the links. The paper cannot train RNN-10-8K so; "
    return text + (f"{', '.join(failed)} runs out of memory here." if failed else "all fit here.")


def _shares(rows: Iterable[Row], system: str) -> list[float]:
    return [
        row[system]["samples_per_s"] / row["ideal"]["samples_per_s"]
        for row in rows
        if "samples_per_s" in row[system]
    ]


def _range(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}".rstrip("%"), f"{max(shares):.0%}".rstrip("%")
    return f"{low} %" if low == high else f"{low} to {high} %"


def _between(values: Iterable[int]) -> str:
    found = sorted(values)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
