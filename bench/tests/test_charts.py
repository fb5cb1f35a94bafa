"""Charts draw each value that they are given, and the same values give the same bytes."""

from xml.etree import ElementTree

from bench.common.charts import Bar, Line, bars_svg, dots_svg, lines_svg

SPACE = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SPACE}text")]


def test_lines_are_drawn_and_names_escaped() -> None:
    lines = [
        Line("a & b", {1: 1.0, 4: 8.0}, 0),
        Line("published", {1: 1.0, 4: 2.0}, 0, dashed=True, named=False),
    ]
    svg = lines_svg("a <title>", "note", lines, axes=("devices", "samples"), base=2)
    found = texts(svg)
    assert {"a <title>", "note", "a & b", "devices", "samples", "8"} <= set(found)
    assert "published" not in found
    assert svg.count("stroke-dasharray: 3.7,1.6") == 1
    assert svg == lines_svg("a <title>", "note", lines, axes=("devices", "samples"), base=2)


def test_each_bar_carries_its_label() -> None:
    bars = {"ours": [Bar(0.5, "12"), Bar(0.0, "OOM")], "theirs": [Bar(1.0, "24"), Bar(0.25, "6")]}
    found = texts(bars_svg("title", "note", ["small", "large"], bars))
    assert {"12", "OOM", "24", "6", "ours", "theirs", "small", "large", "100%"} <= set(found)


def test_groups_that_do_not_fit_side_by_side_are_drawn_below() -> None:
    names = [f"model {number}" for number in range(8)]
    found = texts(bars_svg("title", "note", names, {"ours": [Bar(1.0, name) for name in names]}))
    assert all(found.count(name) == 2 for name in names)
    assert found.count("ours") == 1


def test_a_row_of_dots_may_lack_a_value() -> None:
    rows = {"first": {"CCR 1": 1.5, "CCR 10": 3.0}, "second": {"CCR 10": 2.0}}
    found = texts(dots_svg("title", "note", rows, axis="makespan / lower bound"))
    assert {"first", "second", "CCR 1", "CCR 10", "makespan / lower bound"} <= set(found)
