"""The page of the sweep; every figure comes from its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.sweep.measure import TOLERANCE

Row = Mapping[str, Any]
STAGES = ("captured", "placed", "cut")
ALL = ("case", *STAGES)


def page(report: Row) -> str:
    """Return the results as Markdown."""
    rows = [row for row in report["rows"] if row["group"] != "changes"]
    changes = [row for row in report["rows"] if row["group"] == "changes"]
    lines = [f"# Sweep of models and idioms, {report['date']}", "", *_heading(report)]
    lines += ["## Counts", "", *_counts(rows), "", *_change_counts(changes), ""]
    lines += ["## Why refused", "", *_reasons(report["rows"]), ""]
    lines += ["## Found wanting", "", *_wanting(report["rows"]), ""]
    lines += ["## Cases", "", *_cases(rows), ""]
    lines += ["## Values that change between calls", "", *_changes(changes), ""]
    lines += ["## Refusals and failures in full", "", *_texts(report["rows"])]
    return "\n".join(lines).rstrip() + "\n"


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def _heading(report: Row) -> Iterator[str]:
    done, chosen = len(report["rows"]), report["chosen"]
    yield f"`{report['command']}`, commit {report['commit'] or 'unknown'}."
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield f"{report['machine']}; {versions}."
    yield f"Every factory seeds itself; plans have seed {report['seed']}."
    again = (
        f"; {report['kept']} of them by an earlier call of the command" if report["kept"] else ""
    )
    yield f"**{done} of {chosen} cases and changes were run{again}.**"
    yield ""
    yield f"Each case is captured, placed on {report['ranks']} gloo ranks (`round-robin`) and cut"
    yield f"over them (`tofu`, objective bytes), {report['steps']} steps each, another batch at"
    yield "each. Losses are compared with those of as many eager steps, and all parameters, buffers"
    yield "and states that are left, relative to the largest number in each. Where losses of cut"
    yield "ops differ by more than the tolerance, so may those of eager steps from parameters that"
    yield "differ in the last bit: the largest difference of three is given beside."
    yield ""


def is_bitwise(stage: Row) -> bool:
    """Whether a run ended with the numbers of the eager one."""
    return stage["loss_difference"] == 0 and stage["state_difference"] == 0


def _ok(rows: Sequence[Row], stage: str) -> list[Row]:
    return [row[stage] for row in rows if row.get(stage, {}).get("status") == "ok"]


def _ended(rows: Sequence[Row], stage: str, status: str) -> int:
    return sum(row.get(stage, {}).get("status") == status for row in rows)


def _counts(rows: Sequence[Row]) -> list[str]:
    groups = list(dict.fromkeys(row["group"] for row in rows))
    body = [_count([row for row in rows if row["group"] == group], group) for group in groups]
    titles = ["group", "cases", "captured", "placed", "of these bitwise", "cut"]
    titles += [f"within {TOLERANCE:g}", "refused at capture", "placed: refused", "cut: refused"]
    titles += ["failed", "timed out", "peak above prediction"]
    return table(titles, [*body, _count(rows, "all")])


def _count(rows: Sequence[Row], name: str) -> list[object]:
    placed, cut = _ok(rows, "placed"), _ok(rows, "cut")
    return [
        name, len(rows), len(_ok(rows, "captured")), len(placed), sum(map(is_bitwise, placed)),
        len(cut), sum(each["loss_difference"] <= TOLERANCE for each in cut),
        *(_ended(rows, stage, "refused") for stage in STAGES),
        sum(_ended(rows, stage, each) for stage in ALL for each in ("failed", "broken")),
        sum(_ended(rows, stage, "timeout") for stage in ALL),
        sum(map(exceeds, [*placed, *cut])),
    ]  # fmt: skip


def exceeds(stage: Row) -> bool:
    """Whether a rank held more than its plan said."""
    pairs = zip(stage["measured_bytes"], stage["predicted_bytes"], strict=True)
    return any(measured > predicted for measured, predicted in pairs)


def _change_counts(rows: Sequence[Row]) -> list[str]:
    found = Counter(row.get("change", row.get("case"))["status"] for row in rows)
    titles = ["changes", "equal", "refused", "silently wrong", "failed", "timed out"]
    failed = found["failed"] + found["broken"]
    values = [found["equal"], found["refused"], found["silently wrong"], failed, found["timeout"]]
    return table(titles, [[len(rows), *values]])


def _stages(row: Row) -> Iterator[tuple[str, Row]]:
    for stage in ("case", *STAGES, "change"):
        if stage in row:
            yield stage, row[stage]


def _first(text: str) -> str:
    return " ".join(text.split("\n")[0].split())[:110].replace("|", "\\|")


def _reasons(rows: Sequence[Row]) -> list[str]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for stage, each in _stages(row):
            if each["status"] == "refused":
                key = stage, each["code"], _first(each["text"])
                found.setdefault(key, []).append(row["name"])
    body = [
        [stage, code, len(names), ", ".join(names), text]
        for (stage, code, text), names in sorted(found.items())
    ]
    return table(["stage", "code", "cases", "which", "its text begins"], body)


def _wanting(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        for stage, each in _stages(row):
            what = ""
            if each["status"] in ("failed", "broken", "timeout", "silently wrong"):
                what = f"{each['status']} {each.get('code', '')}"
            elif stage == "placed" and each["status"] == "ok" and not is_bitwise(each):
                what = "not bitwise"
            elif stage == "cut" and each["status"] == "ok" and each["loss_difference"] > TOLERANCE:
                is_noise = each["loss_difference"] <= 2 * each["noise"]
                what = f"above the tolerance, {'as' if is_noise else 'unlike'} eager with other "
                what += f"last bits ({each['noise']:.1e})"
            if what:
                body.append([row["name"], stage, what, *_differences(each)])
            if stage in ("placed", "cut") and each["status"] == "ok" and exceeds(each):
                bytes_ = f"peak {each['measured_bytes']} of {each['predicted_bytes']} predicted"
                body.append([row["name"], stage, bytes_, *_differences(each)])
    return table(["case", "stage", "what", "loss", "state", "which state"], body)


def _differences(each: Row) -> list[str]:
    if "loss_difference" not in each:
        return ["", "", ""]
    where = each["state_where"]
    return [f"{each['loss_difference']:.1e}", f"{each['state_difference']:.1e}", where]


def _cases(rows: Sequence[Row]) -> list[str]:
    titles = ["group", "case", "ops", "captured", "placed", "cut", "peak placed", "peak cut"]
    body = [
        [row["group"], row["name"], row.get("captured", {}).get("ops", ""),
         *(_cell(stage, row.get(stage)) for stage in STAGES),
         _peak(row, "placed"), _peak(row, "cut")]
        for row in rows
    ]  # fmt: skip
    lines = ["Peaks: the largest of measured / predicted bytes of a rank.", ""]
    return lines + table(titles, body)


def _cell(stage: str, each: Row | None) -> str:
    if each is None:
        return "-"
    if each["status"] != "ok":
        return f"{each['status']} {each.get('code', '')}".strip()
    if stage == "captured":
        return "yes"
    off = max(each["loss_difference"], 0.0)
    return "bitwise" if is_bitwise(each) else f"{off:.1e}"


def _peak(row: Row, stage: str) -> str:
    each = row.get(stage, {})
    if each.get("status") != "ok":
        return ""
    pairs = zip(each["measured_bytes"], each["predicted_bytes"], strict=True)
    return f"{max(measured / max(predicted, 1) for measured, predicted in pairs):.3f}"


def _changes(rows: Sequence[Row]) -> list[str]:
    lines = ["Four calls on one rank, the change after the second, compared with eager calls.", ""]
    body = []
    for row in rows:
        each = row.get("change", row.get("case"))
        felt = "" if each.get("felt", True) else "the change changes nothing"
        text = _first(each.get("text", "")) if each["status"] == "refused" else felt
        body.append([row["name"], each["status"], each.get("when", ""), text])
    return lines + table(["what changes", "found", "said at", "first line"], body)


def _texts(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        for stage, each in _stages(row):
            if each.get("text"):
                yield from (f"**{row['name']}**, {stage}:", "", "```")
                yield from (line.rstrip() for line in each["text"].strip().split("\n"))
                yield from ("```", "")
