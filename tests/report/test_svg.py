"""The picture of a plan: everything within its frame, round ticks, names as text."""

import math
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pardnn.report.svg import LEFT, RIGHT, WIDTH, Bar, Track, _ticks, plan_svg

NAMES = {"svg": "http://www.w3.org/2000/svg"}


def _picture(title: str = "a plan") -> ElementTree.Element:
    bars = [Bar(0.0, 1.0, "forward", "a"), Bar(1.0, 2.0, "forward", "b</title>")]
    bars += [Bar(2.5, 3.0, "backward", "c")]
    track = Track("gpu:0", bars, [0.0, 1.0, 2.0], [10, 1 << 20, 5], 2 << 20)
    return ElementTree.fromstring(plan_svg(title, "on two devices", [track, track], 3.0))


def test_bars_lie_in_the_frame_and_say_what_they_are() -> None:
    picture = _picture()
    for bar in picture.findall("svg:rect", NAMES):
        assert 0 <= float(bar.get("x", 0)) <= WIDTH
        assert float(bar.get("x", 0)) + float(bar.get("width", 0)) <= WIDTH
    tips = [tip.text for tip in picture.findall("svg:rect/svg:title", NAMES)]
    assert tips == ["a to b</title>, 2 s", "c, 500 ms"] * 2


def test_the_limit_is_a_line_with_its_value() -> None:
    picture = _picture()
    texts = [text.text for text in picture.findall("svg:text", NAMES)]
    assert texts.count("2.00 MiB") == 2
    assert len([line for line in picture.findall("svg:line", NAMES) if line.get("y1")]) == 3


def test_a_long_title_is_squeezed_into_the_frame() -> None:
    for text, is_long in ("short", False), ("W" * 300, True):
        title = _picture(text).findall("svg:text", NAMES)[0]
        assert title.text == text
        assert title.get("textLength") == (str(WIDTH - LEFT - RIGHT) if is_long else None)


@given(makespan=st.floats(1e-9, 1e6))
def test_ticks_are_few_and_round(makespan: float) -> None:
    ticks = _ticks(makespan)
    assert 5 <= len(ticks) <= 11
    assert ticks[0] == 0
    assert ticks[-1] <= makespan * (1 + 1e-9)
    step = ticks[1] / 10 ** math.floor(math.log10(ticks[1]) + 1e-9)
    assert round(step, 9) in (1, 2, 5)
    assert all(re.fullmatch(r"\d(\.\d{1,2})?(e[-+]\d+)?", f"{tick:.2e}") for tick in ticks)
    assert _ticks(0.0) == [0.0]
