"""Figures of README.md and docs/papers.md are those of the dated pages that they come from.

Each test makes the words of a sentence or a row from the cells of a page's tables, and looks for
them. So a figure that is edited by hand, or left behind by a new page, fails.
"""

import math
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")

Table = list[dict[str, str]]


def tables(page: str) -> list[tuple[str, Table]]:
    """The tables of a page of results, each with the heading above it."""
    found: list[tuple[str, Table]] = []
    heading, head, rows = "", [""], Table()
    for line in [*(RESULTS / page).read_text(encoding="utf-8").splitlines(), ""]:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
        if not line.startswith("|"):
            found += [(heading, rows)] if rows else []
            heading, head, rows = line if line.startswith("#") else heading, [""], []
        elif head == [""]:
            head = cells
        elif set(line) - set("|- :"):
            rows.append(dict(zip(head, cells, strict=True)))
    return found


def table(page: str, heading: str, column: str) -> Table:
    """The first table below a heading that has a column."""
    return next(t for h, t in tables(page) if heading in h and column in t[0])


def rounded(text: str, digits: int = 0) -> str:
    """A number as a table has it, rounded as one does by hand."""
    unit = Decimal(1).scaleb(-digits)
    return f"{Decimal(text.rstrip('%').strip()).quantize(unit, ROUND_HALF_UP)}"


def significant(text: str, digits: int = 3) -> str:
    return rounded(text, digits - 1 - math.floor(math.log10(float(text))))


def row_of(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(
    ("graph", "label"),
    [
        ("rnn_4_8k, batch 512", "RNN-4-8K, batch 512, step"),
        ("wresnet_152_10, batch 8", "WResNet-152-10, batch 8, step"),
    ],
)
def test_steps_cut_over_k80s(graph: str, label: str) -> None:
    """`tofu` by seconds, its default; the baselines by bytes, which they minimise."""
    rows = table("2026-11-22_tofu.md", f"Figure 10: {graph}", "step, s")
    found = {row["algorithm, objective"]: row for row in rows}
    tofu, dealt = found["tofu, seconds"], found["layer-round-robin (placement)"]
    cut = [significant(found[f"{n}, bytes"]["step, s"]) for n in
           ("equal-chop", "allrow-greedy", "icml18")]  # fmt: skip
    over = ", does not fit" if "does not fit" in dealt["peak, GiB"] else ""
    assert row_of(README, label) == [
        f"{significant(tofu['step, s'])} s, {rounded(tofu['of ideal'])} % of ideal",
        *[f"{seconds} s" for seconds in cut],
        f"{significant(dealt['step, s'])} s{over}",
    ]


def test_the_plan_that_is_drawn() -> None:
    text = (RESULTS / "2026-11-23_readme-plan.md").read_text(encoding="utf-8")
    (times,) = re.findall(r"simulated, (2\S+) times as fast as one device", text)
    (peak,) = re.findall(r"gpu:0 +3783 +(\S+ GiB)", text)
    assert f"on one device it needs {peak}" in README
    assert f"its batch in 4 pieces: {times} times as fast as one device (simulated)" in README


def test_samples_of_the_thesis_s_models() -> None:
    rows = table("2026-11-21_thesis.md", "Beyond the thesis", "cut, samples/s")
    found = {row["model, K"].removesuffix(", 4"): row for row in rows}
    models = row_of(README, "4 V100s, samples/s (simulated)")
    for label, column in (("placed: `pardnn`", "placed"), ("cut: `tofu`", "cut")):
        rates = [found[model][f"{column}, samples/s"] for model in models]
        expected = [rate if float(rate) < 100 else rounded(rate) for rate in rates]
        assert row_of(README, label) == expected


def test_predicted_against_measured() -> None:
    page = "2026-11-21_fidelity.md"
    rows = {row["runs"]: row for row in table(page, "Summary", "step, mean error")}
    errors = [rounded(rows[r]["step, mean error"]) for r in ("1 rank", "2 ranks", "4 ranks")]
    text = "step times are off by {}, {} and {} % on average".format(*errors)
    peaks = [cell for _, rows in tables(page) for row in rows for cell in [*row.values()][-1:]]
    worst = max(abs(float(c.rstrip("%"))) for c in peaks if re.fullmatch(r"[+-][\d.]+%", c))
    assert f"{text}, peaks by at most {worst:g} %" in README


def test_steps_beside_ddp_and_fsdp() -> None:
    times = {"tofu": list[str](), "FSDP2": list[str]()}
    for _, rows in tables("2026-11-21_steps.md"):
        for row in rows:
            if row.get("way") in times:
                times[row["way"]].append(row["times DDP"])
    tofu, fsdp = (sorted(each, key=float) for each in times.values())
    assert f"step takes {tofu[0]} to {tofu[-1]} times DDP's" in README
    assert f"FSDP2 {fsdp[0]} to {fsdp[-1]} times" in README


def test_placements_relative_to_heft() -> None:
    rows = table("2026-11-21_placement.md", "", "linear-clustering")
    graphs, mean = [row for row in rows if row["ops"]], rows[-1]
    assert mean["graph"] == "/ heft"
    names = [name for name in mean if mean[name]]
    for name in names[1:]:
        ratios = [float(row[name]) / float(row["heft"]) for row in graphs]
        assert statistics.geometric_mean(ratios) == pytest.approx(float(mean[name]), abs=2e-3)
    assert f"Placing {len(graphs)} graphs of 1,000 to 20,000 ops" in README
    assert min(int(row["ops"]) for row in graphs) // 500 == 2
    assert max(int(row["ops"]) for row in graphs) // 1000 == 20
    text = f"`auto` {mean['auto']}, `pardnn` {mean['pardnn']}, m-ETF {mean['m-etf']}"
    assert f"{text}, linear clustering {mean['linear-clustering']};" in README
    others = set(names[1:]) - {"auto", "pardnn"}
    assert not any(float(row[o]) < float(row["auto"]) for row in graphs for o in others)
    beaten = {(row["graph"], o) for row in graphs for o in others
              if float(row[o]) < float(row["pardnn"])}  # fmt: skip
    assert len({o for _, o in beaten}) == 1


def test_small_graphs_and_seconds_of_planning() -> None:
    rows = {r[""]: r for r in table("2026-11-21_placement.md", "Gaps", "worst")}
    worst = Decimal(rows["all"]["worst"].rstrip("%")).quantize(Decimal("0.1"), "ROUND_UP")
    assert f"On {rows['all']['graphs']} small graphs `auto` is at most {worst} % above" in README
    plans = {row["ops"]: row["plan"] for row in table("2026-11-21_scale.md", "Scale", "gap")[:3]}
    small, large = rounded(plans["200000"], 1), rounded(plans["1000000"])
    assert f"200,000 ops on 16 devices takes {small} s, a million {large} s" in README
    assert f"A million ops take {large} s" in PAPERS
    first: list[list[float]] = []
    for page in ("2026-11-21_tofu.md", "2026-11-22_tofu.md"):
        searches = table(page, "Table 1", "first, s")
        first.append([float(r["first, s"]) for r in searches if not r["graph"].startswith("rnn_4")])
    (low, high), (slow, slowest) = ((min(each), max(each)) for each in first)
    assert f"for 8 devices {low:.1f} to {high:.1f} s of CPU time" in README
    assert f"({slow:.1f} to {slowest:.1f} on a busy machine)" in README


def test_batches_of_the_thesis_s_steps_alone() -> None:
    page = (RESULTS / "2026-11-23_thesis.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"same batch in (\d+) of (\d+) cells; a smaller one in (\d+)", page)
    said = "The thesis's steps alone fit the same batch in {} of {} cells, a smaller one in {}."
    assert said.format(*found) in PAPERS


def test_mutants() -> None:
    """Of packages with at most ten mutants in the sample no share is told."""
    rows = table("2026-11-27_mutants.md", "Mutants", "share caught")
    whole = rows[-1]
    share = {row["package"]: rounded(row["share caught"], 1) for row in rows[:-1]
             if int(row["mutants"]) > 10}  # fmt: skip
    least, most = (f(share, key=lambda name: float(share[name])) for f in (min, max))
    found = f"{rounded(whole['share caught'], 1)} % were found"
    text = f"of {whole['mutants']} in a fresh sample, {found}, from {share[least]} % in `{least}`"
    assert f"{text} to {share[most]} % in `{most}`" in PAPERS
    found_in_time = int(whole["caught"]) + int(whole["timed out"])
    assert found_in_time - math.ceil(0.85 * int(whole["mutants"])) == 4
    why = [row["why it survives"] for row in table("2026-11-27_mutants.md", "Survivors", "change")]
    caught = sum(each.startswith("caught since by") for each in why)
    changed = why.count("its code has changed since")
    text = f"Of the other {len(why)}, {caught} are caught by tests written since, the code of"
    assert f"{text} {changed} has changed, and the page gives a reason for each" in PAPERS
    assert not {each for each in why if each.startswith("no test")}
    assert "four more than the goal of 85 %" in PAPERS


def test_second_calls_beside_checkpoints() -> None:
    rows = table("2026-11-30_checkpointing.md", "on every block", "checkpointed")
    own = {(row["model"], row["limit"]): row for row in rows if row["batch"] == "16"}
    models = ("GPT-2", "Llama", "BERT")

    def told(limit: str, column: str) -> str:
        one, other, last = (rounded(own[name, limit][column]) for name in models)
        return f"{one}, {other} and {last} %"

    beside = f"{told('1', '`--recompute`')} longer with `--recompute`"
    assert f"GPT-2, Llama and BERT of 24 layers take {beside}" in README
    assert f"{told('1', 'checkpointed')} with those checkpoints" in README
    assert f"at twice that peak {told('2', '`--recompute`')} (simulated)" in README


def test_seconds_per_op_of_the_whole_command() -> None:
    rows = table("2026-11-23_scale-files.md", "Scale", "microseconds per op")
    each = sorted(int(row["microseconds per op"]) for row in rows)
    page = (ROOT / "docs" / "algorithms" / "pardnn-scale.md").read_text(encoding="utf-8")
    assert f"they cost {each[0]} to {each[-1]} microseconds per op" in page


def test_table_3_and_gradients_in_place() -> None:
    (line,) = [line for line in PAPERS.splitlines() if line.startswith("| Table 3 |")]
    page = (RESULTS / "2026-11-21_tofu.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"are (\S+ %) above Table 3's, those of placement are (.*?) above", page)
    assert f"{found[0]} above the paper's numbers, placement {found[1]} above" in line
    (line,) = [each for each in PAPERS.splitlines() if "in-place gradient aggregation" in each]
    name = "2026-11-23_tofu-in-place.md"
    assert f"results/{name}" in line
    for row in (RESULTS / name).read_text(encoding="utf-8").splitlines()[-2:]:
        cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        step, batch, *_ = cells
        new, old, _, _, before, after, _, _, most, more = cells[4:]
        assert f"at batch {batch}" in line
        label = step.replace("_", "-").upper()
        assert re.search(rf"{label} at {old}( GiB)?, {new} with new sums", line)
        assert before == after, "no step gets faster"
        assert re.search(rf"{more} of {label}, {most}", line) or most == "-"


def test_sums_in_place_of_whole_ops_are_those_of_their_page() -> None:
    page = "2026-11-23_in-place-sums.md"
    text = (ROOT / "docs" / "decisions" / "030-sums-are-not-rewritten.md").read_text("utf-8")
    rows = tables(page)[0][1]
    assert f"results/{page}" in text
    for row in rows:
        label = row["step"].replace("_", "-").upper()
        peaks = [row[each] for each in ("peak, GiB", "weights in place", "all in place")]
        seconds = [row[each] for each in ("step, s", "weights, s", "all, s")]
        assert f"| {label} | {' | '.join([*peaks, *seconds])} |" in text
        assert float(peaks[0]) <= min(map(float, peaks[1:])), "no peak is lower"
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(rows) + 2


def test_operators_of_torch() -> None:
    text = (RESULTS / "2026-11-22_opinfo.md").read_text(encoding="utf-8")
    (verified,) = re.findall(r"\*\*(\d+ of \d+) operators are verified\*\*", text)
    assert f"A cut of {verified} operators that torch's own samples call" in PAPERS
    tdl = (ROOT / "docs" / "algorithms" / "tdl.md").read_text(encoding="utf-8")
    assert f"a cut of {verified} operators is verified" in tdl


def test_figures_8_and_9() -> None:
    for number, kind in ((8, "WResNets"), (9, "RNNs")):
        rows = table("2026-11-21_tofu.md", f"Figure {number}:", "tofu")
        shares = sorted(int(re.findall(r"(\d+)%", row["tofu"])[0]) for row in rows)
        (line,) = [each for each in PAPERS.splitlines() if f"| 7.2, Fig. {number} |" in each]
        assert f"{shares[0]} to {shares[-1]} % of ideal for the {len(rows)} {kind}" in line


def test_figures_of_mixed_plans_are_those_of_the_corners() -> None:
    name = "2026-11-30_corners.md"
    text = (ROOT / "docs" / "algorithms" / "mixed.md").read_text(encoding="utf-8")
    page = (RESULTS / name).read_text(encoding="utf-8")
    for links in ("5 GB/s", "25 GB/s", "300 GB/s"):
        (auto,) = [row for row in table(name, f"## {links}", "640 MiB") if row[""] == "`auto`"]
        assert row_of(text, links) == [cell.split()[0] for at, cell in auto.items() if at]
    assert "a plan faster than that of `auto`: none" in page
    for pattern in (r"is ([\d.]+) times as fast", r"([\d.]+) times as long"):
        (found,) = re.findall(rf"Its plan at 300 GB/s .*?{pattern}", page)
        assert found in text
    (bound,) = re.findall(r"is more than ([\d.]+) times as fast", page)
    assert bound in text


def test_plans_that_cut_and_place() -> None:
    rows = table("2026-11-23_mixed.md", "Cut and place", "mixed")
    best = [min(float(row[kind]) for kind in ("cut", "placed")) for row in rows]
    gains = [other / float(row["mixed"]) for other, row in zip(best, rows, strict=True)]
    won = f"in {sum(gain > 1 for gain in gains)} of {len(rows)}"
    most = f"at most {max(gains):.2f} times as fast as the better of"
    text = (ROOT / "docs" / "algorithms" / "mixed.md").read_text(encoding="utf-8")
    assert f"{won} cases of a wide GPT-2, {most} cut and placed" in README
    taken = sum("*" in row["taken"] for row in rows)
    assert f"{won} rows, {most} the others, and `auto` takes one in {taken}." in text
    by_samples = {n: [g for g, row in zip(gains, rows, strict=True) if row["samples"] == n]
                  for n in ("2", "8")}  # fmt: skip
    assert min(by_samples["2"]) > 1.15 > max(by_samples["8"])
