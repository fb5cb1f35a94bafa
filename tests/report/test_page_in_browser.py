"""The report in Chromium, offline: what people see, click and type.

`make browser` runs this; where there is no Chromium it fails. `make long` skips it and says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pardnn.api.report import report
from pardnn.errors import printable
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.run_record import RankTimes, RunRecord, write_run
from pardnn.report import page as page_module
from pardnn.report.page.html import page_html
from testbed.families import training_step
from tests.report.steps import HOSTILE, LAYERS, hostile_step, planned

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None and "CHROMIUM" not in os.environ:
    pytest.skip("chromium is not installed", allow_module_level=True)

Page = Any
GO_TO = "name => { location.hash = `op=${encodeURIComponent(name)}` }"
MODULES = "all => all.map((one) => one.dataset.module)"
#: Elements beyond the right edge that are in no part with a scroll bar of its own.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter((each) =>
  !each.closest('.scroll') && each.getBoundingClientRect().right > innerWidth + 1).length"""
#: The least contrast of any text with what is behind it (WCAG 2.1).
CONTRAST = """() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (each) => {
    for (let at = each; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let least = 21;
  for (const each of document.querySelectorAll('body *')) {
    const said = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!said || !each.getClientRects().length) continue;
    const both = [light(rgb(getComputedStyle(each).color)), light(behind(each))];
    least = Math.min(least, (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05));
  }
  return least;
}"""

#: Texts that overlap another one, in two elements of which neither holds the other.
OVERLAPS = """() => {
  const all = [...document.querySelectorAll('body *')].filter((each) =>
    [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) &&
    !each.closest('script, style, noscript, select, svg') && each.checkVisibility());
  const seen = (box, of) => {  // without what is scrolled out of sight
    let { left, right, top, bottom } = box;
    for (let at = of; at !== document.body; at = at.parentElement) {
      if (getComputedStyle(at).overflow === 'visible') continue;
      const clip = at.getBoundingClientRect();
      [left, right] = [Math.max(left, clip.left), Math.min(right, clip.right)];
      [top, bottom] = [Math.max(top, clip.top), Math.min(bottom, clip.bottom)];
    }
    return { left, right, top, bottom };
  };
  const boxes = all.flatMap((each) => {
    const range = document.createRange();
    return [...each.childNodes].filter((node) => node.nodeType === 3 && node.data.trim())
      .flatMap((node) => {
        range.selectNodeContents(node);
        const text = node.data.trim();
        return [...range.getClientRects()].map((box) => ({ box: seen(box, each), text }));
      });
  });
  const found = [];
  for (const [i, a] of boxes.entries()) for (const b of boxes.slice(i + 1)) {
    const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
    const high = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
    if (wide > 2 && high > 4) found.push([a.text, b.text]);
  }
  return found;
}"""
#: Linear RGB as people see it who lack red, green or blue cones (Viénot 1999, Brettel 1997).
LACKING = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "red": ((0.1124, 0.8876, 0), (0.1124, 0.8876, 0), (0.004, -0.004, 1)),
    "green": ((0.2927, 0.7073, 0), (0.2927, 0.7073, 0), (-0.0223, 0.0223, 1)),
    "blue": ((1, 0.1461, -0.1461), (0, 0.8569, 0.1431), (0, 0.8569, 0.1431)),
}


READY = "document.documentElement?.dataset.ready === '1'"


def shown_op(name: str) -> str:
    """Return what is true once the details of this op are shown."""
    return f"document.querySelector('#op-detail dd')?.textContent === {json.dumps(name)}"


def wait_until(page: Page, expression: str, seconds: float = 60.0) -> None:
    """Ask from outside till an expression is true.

    Playwright's own waiting evaluates text in the page, which the page's policy forbids.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {expression}"
        page.wait_for_timeout(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as running:
        found = running.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    graph = hostile_step()
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page_html(report(graph, planned(graph, memory="4KiB"))), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser) -> Iterator[Any]:
    """Opens a page and holds it to rule 1: no request but for itself, no error, no dialog."""
    contexts, heard, asked, given = [], [], [], set()

    def go(path: Path, *, fragment: str = "", **options: Any) -> Page:
        contexts.append(browser.new_context(offline=True, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("dialog", lambda dialog: heard.append(dialog.message) or dialog.dismiss())
        page.on("request", lambda request: asked.append(request.url.partition("#")[0]))
        page.on(
            "console",
            lambda said: heard.append(said.text) if said.type in ("error", "warning") else None,
        )
        given.add(f"file://{path}")
        page.goto(f"file://{path}{fragment}")
        if options.get("java_script_enabled", True):
            wait_until(page, READY)
        return page

    yield go
    for context in contexts:
        context.close()
    assert heard == []
    assert set(asked) <= given


def test_hostile_names_are_only_text(opened, hostile):
    """Rules 1 to 4: on every section and after every click, names are what they are."""
    page = opened(hostile)
    assert page.title() == page.inner_text("h1") == f"{HOSTILE[0]} on 2 devices"
    for number, name in enumerate(map(printable, HOSTILE)):
        page.evaluate(
            "name => { location.hash = `op=${encodeURIComponent(name)}` }", f"{name}{number}"
        )
        wait_until(page, shown_op(f"{name}{number}"))
        page.fill("#find-input", name)
        assert page.locator("#find-results button").count() > 0
        assert name in page.locator("#find-results button").first.text_content()
    page.click("text=Open all")
    modules = page.eval_on_selector_all(
        "tr[data-module]", "all => all.map(one => one.dataset.module)"
    )
    assert f"net.0{HOSTILE[0]}".partition(".")[0] in modules
    for name in page.eval_on_selector_all("summary", "all => all.map(one => one.click())"):
        assert name is None
    assert page.evaluate("window.PWNED") is None
    policy = page.get_attribute("meta[http-equiv]", "content")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_the_policy_stops_a_script_that_is_not_ours(browser, hostile):
    page = browser.new_page()
    page.goto(f"file://{hostile}")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: 'window.PWNED = 1'}))"
    )
    assert page.evaluate("window.PWNED") is None
    page.close()


def test_the_numbers_in_the_page_are_those_of_the_plan(opened, hostile):
    graph = hostile_step()
    plan = planned(graph, memory="4KiB")
    page = opened(hostile)
    data = json.loads(page.text_content("#report"))
    placed = dict(zip(data["bars"]["name"], data["bars"]["device"], strict=True))
    assert placed == {printable(name): device for name, device in plan.placement.items()}
    assert tuple(row["peak_bytes"] for row in data["devices"]) == plan.predicted.peak_bytes
    assert data["times"]["makespan_s"] == plan.predicted.makespan_s
    sent = sum(data["messages"]["bytes"])
    assert sent == plan.predicted.transfer_bytes


def test_the_timeline_answers(opened, hostile):
    """Rules 5 and 6: drawn, clicked, zoomed, by mouse and by keyboard."""
    page = opened(hostile, viewport={"width": 1000, "height": 800})
    for canvas in ("#timeline-view > canvas", ".memory canvas"):
        drawn = f"""(() => {{ const one = document.querySelector('{canvas}');
          const all = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
          return new Set(new Uint32Array(all.buffer)).size; }})()"""
        assert page.evaluate(drawn) > 4
    data = json.loads(page.text_content("#report"))
    bars, step = data["bars"], data["times"]["makespan_s"]
    op = bars["name"].index("d2")
    canvas = page.locator("#timeline-view > canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    middle = (bars["start_s"][op] + bars["seconds"][op] / 2) / step
    left = 108
    canvas.click(
        position={"x": left + middle * (box["width"] - left), "y": 38 * bars["device"][op] + 10}
    )
    wait_until(page, shown_op("d2"))
    assert "1 ms" in page.inner_text("#op-detail")
    assert "backward" in page.inner_text("#op-detail")
    assert page.evaluate("location.hash") == "#op=d2"
    said = page.inner_text("#timeline-state")
    canvas.focus()
    seen = {said}
    for pressed in ("+", "ArrowRight", "-", "0"):
        page.keyboard.press(pressed)
        seen.add(page.inner_text("#timeline-state"))
    assert len(seen) >= 3
    page.keyboard.press(".")
    wait_until(page, "location.hash !== '#op=d2'")
    chart = page.locator(".memory canvas").first
    before = page.inner_text(".memory .quiet >> nth=0")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".memory .quiet >> nth=0") != before


def test_search_and_links_by_keyboard_alone(opened, hostile):
    page = opened(hostile, fragment="#op=g3")
    assert page.inner_text("#op-detail dd >> nth=0") == "g3"
    page.keyboard.press("/")
    page.keyboard.type("u4")
    page.keyboard.press("Enter")
    wait_until(page, shown_op("u4"))
    assert "update" in page.inner_text("#op-detail")
    page.select_option("#module-order", "by time")
    assert "modules of its own" in page.inner_text("#modules-view > .quiet")
    assert opened(hostile, fragment="#module=net").locator("tr.chosen").count() == 1


@pytest.mark.parametrize("width", [375, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(opened, hostile, width, scheme):
    """Rules 7 and 8: no sideways scrolling, contrast, names for canvases."""
    page = opened(
        hostile, viewport={"width": width, "height": 800}, color_scheme=scheme,
        reduced_motion="reduce",
    )  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(TOO_WIDE) == 0
    assert page.evaluate(CONTRAST) >= 4.5
    assert page.get_attribute("html", "lang") == "en"
    unnamed = "canvas:not([role=img][aria-label]):not([aria-hidden=true])"
    assert page.locator(unnamed).count() == 0
    assert page.locator("main, header, nav").count() == 3
    colours = "getComputedStyle(document.body).backgroundColor"
    assert (page.evaluate(colours) == "rgb(255, 255, 255)") == (scheme == "light")


def test_measured_times_beside_simulated_ones(opened, tmp_path):
    graph = hostile_step()
    plan = planned(graph)
    ranks = tuple(
        RankTimes(step_s=(2.0,), peak_bytes=1, op=row, seconds=(0.1,) * len(row),
                  start_s=tuple(0.1 * i for i in range(len(row))))
        for row in plan.order
    )  # fmt: skip
    write_run(RunRecord(ranks=ranks), tmp_path / "run.json")
    path = tmp_path / "report.html"
    page_text = page_html(report(graph, plan, run=tmp_path / "run.json"))
    path.write_text(page_text, encoding="utf-8")
    page = opened(path, fragment="#op=d2")
    assert "100 ms" in page.inner_text("#op-detail")
    page.select_option("#timeline-times", "measured")
    assert page.inner_text("#timeline-state") == "Shows 0 s to 2 s of 2 s."
    page.select_option("#timeline-times", "simulated")
    assert "ms of " in page.inner_text("#timeline-state")
    assert page.locator("#measured table").count() == 2


def test_printed_and_without_scripts(opened, hostile):
    page = opened(hostile, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#find").is_visible()
    bare = opened(hostile, java_script_enabled=False)
    for section in ("timeline", "modules"):
        assert bare.locator(f"#{section} noscript table").count() == 1
    assert bare.locator("#devices tbody tr").count() == 2
    assert f"{HOSTILE[2]}2" in bare.content().replace("&#x27;", "'")


def test_nothing_and_one_op(opened, tmp_path):
    one = Op(name="a", kind="input", outputs=(Tensor(name="a", bytes=4),))
    for name, ops in (
        ("given", [one]),
        ("one", [dataclasses.replace(one, kind="call", seconds={"accelerator": 0.5})]),
    ):
        graph = build_graph(name, ops)
        path = tmp_path / f"{name}.html"
        path.write_text(page_html(report(graph, planned(graph, 1))), encoding="utf-8")
        assert opened(path).inner_text("h1") == f"{name} on 1 device"


def test_20_000_ops_are_ready_in_3_seconds(opened, tmp_path):
    graph = training_step(20_000)
    page = page_html(report(graph, planned(graph, LAYERS)))
    assert len(page) < 5_000_000
    path = tmp_path / "large.html"
    path.write_text(page, encoding="utf-8")
    shown = opened(path)
    # Of the page's own thread: the machine may be busy with other tests.
    session = shown.context.new_cdp_session(shown)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    shown.reload()
    wait_until(shown, READY)
    metrics = {
        each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]
    }
    assert metrics["TaskDuration"] < 3


@pytest.mark.parametrize("width", [375, 768, 1440])
def test_no_text_covers_another(opened, hostile, width):
    page = opened(hostile, viewport={"width": width, "height": 800})
    page.click("text=Open all")
    assert page.evaluate(OVERLAPS) == []


def seen(colour: str, lacking: str) -> tuple[float, float, float]:
    """Return a colour as Oklab, as people see it who lack one kind of cones."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    r, g, b = (
        max(0.0, sum(m * c for m, c in zip(row, linear, strict=True))) for row in LACKING[lacking]
    )
    long = (0.4122 * r + 0.5363 * g + 0.0514 * b) ** (1 / 3)
    middle = (0.2119 * r + 0.6807 * g + 0.1074 * b) ** (1 / 3)
    short = (0.0883 * r + 0.2817 * g + 0.6300 * b) ** (1 / 3)
    return (
        0.2105 * long + 0.7936 * middle - 0.0041 * short,
        1.9780 * long - 2.4286 * middle + 0.4506 * short,
        0.0259 * long + 0.7828 * middle - 0.8087 * short,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("lacking", LACKING)
def test_the_colour_blind_tell_phases_and_kinds_apart(opened, hostile, scheme, lacking):
    """By colour, of 0.08 in Oklab at least, or by the pattern on it."""
    page = opened(hostile, color_scheme=scheme)
    style = (
        "name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()"
    )
    source = (Path(page_module.__file__).parent / "assets" / "palette.js").read_text()
    patterns = dict(re.findall(r'(\w+): "(rising|crossed|dotted|level|upright)"', source))
    charts = (
        ("forward", "backward", "weight", "update", "message"),
        ("parameters", "optimizer", "gradients", "activations", "transfers", "workspace"),
    )
    for names in charts:
        for one, other in itertools.combinations(names, 2):
            apart = math.dist(*(seen(page.evaluate(style, name), lacking) for name in (one, other)))
            assert apart >= 0.08 or patterns.get(one) != patterns.get(other), (one, other, apart)


def test_modules_are_sorted_by_what_is_chosen(opened, hostile):
    page = opened(hostile)
    rows = {row["path"]: row for row in json.loads(page.text_content("#report"))["modules"]}
    leaves = [path for path in rows if path and not any(p.startswith(f"{path}.") for p in rows)]
    values = {
        "time": lambda row: sum(row["phase_s"]),
        "weights and states": lambda row: row["state_bytes"],
        "activations": lambda row: row["made_bytes"],
    }
    options = page.eval_on_selector_all("#module-order option", "all => all.map(o => o.value)")
    for option in options[1:]:
        page.select_option("#module-order", option)
        shown = page.eval_on_selector_all("tr[data-module]", MODULES)
        by = next(value for word, value in values.items() if word.split()[0] in option)
        found = [by(rows[path]) for path in shown]
        assert sorted(shown) == sorted(leaves)
        assert found == sorted(found, reverse=True), option
    page.select_option("#module-order", options[0])
    assert page.eval_on_selector_all("tr[data-module]", MODULES)[0] == ""


def test_100_000_ops_are_drawn_as_runs_and_a_note_says_so(opened, tmp_path):
    graph = training_step(100_000)
    page = page_html(report(graph, planned(graph, LAYERS)))
    assert len(page.encode()) < 5_000_000
    path = tmp_path / "larger.html"
    path.write_text(page, encoding="utf-8")
    shown = opened(path)
    note = shown.locator("#notes li", has_text="are drawn as")
    assert note.is_visible()
    assert note.inner_text().startswith(f"{len(graph.ops):,} ops are drawn as ")
