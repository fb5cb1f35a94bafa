"""What fuzzing found, one case each: a command that raised now says what is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.targets import built_once, command, fill
from tests.long_cases import long_but


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with built_once():
        fill(tmp_path / "files")
        yield tmp_path / "files"


def changed(path: Path, change: Callable[[Any], None]) -> Path:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_converting_a_plan_that_lacks_an_op(folder: Path) -> None:
    plan = changed(folder / "tiny-plan.json", lambda data: data["placement"].pop("a"))
    graph = ("--graph", folder / "tiny-graph.json")
    assert command("convert", plan, folder / "out", *graph) == 5


@pytest.mark.parametrize("device", [999_999_999, -1])
def test_converting_a_plan_on_a_device_that_is_none(folder: Path, device: int) -> None:
    plan = changed(folder / "tiny-plan.json", lambda data: data["placement"].update(a=device))
    graph = ("--graph", folder / "tiny-graph.json")
    for to in ("placement", "msr-fiddle-split"):
        assert command("convert", plan, folder / "out", *graph, "--to", to) == 4


def test_converting_a_placement_on_a_device_that_is_none(folder: Path) -> None:
    path = folder / "tiny.txt"
    path.write_text(path.read_text().replace("a 0", "a 999999999"))
    words = ("--graph", folder / "tiny-graph.json", "--to", "msr-fiddle-split")
    assert command("convert", path, folder / "out", *words) == 4


def test_keeping_the_state_of_a_plan_that_is_not_valid(folder: Path) -> None:
    def no_points(data: Any) -> None:
        data["recompute"][0]["readers"] = []

    graph, plan = folder / "graph.json", changed(folder / "recompute.json", no_points)
    words = ("--algorithm", "heft", "--keep-state", graph, plan)
    assert command("plan", graph, "--devices", 2, *words) == 4


def test_cutting_an_op_that_does_not_take_what_it_writes(folder: Path) -> None:
    def other_operand(data: Any) -> None:
        op = next(op for op in data["ops"] if op["kind"] == "aten.mul_.Tensor")
        op["arguments"]["args"][0] = "a"
        del data["checksum"]

    graph = changed(folder / "graph.json", other_operand)
    assert command("plan", graph, "--devices", 2, "--algorithm", "tofu") == 4


@pytest.mark.jit
def test_no_limit_helps_where_a_link_is_missing(folder: Path) -> None:
    def no_links(data: Any) -> None:
        data["default_link"] = None

    cluster = changed(folder / "tiny-cluster.json", no_links)
    words = ("--cluster", cluster, "--algorithm", "round-robin")
    assert command("plan", folder / "tiny-graph.json", *words) == 3


QUICK = [("step_s", 1e308), ("start_s", -1e308), ("seconds", -1.0), ("wait_start_s", 1e308),
         ("wait_s", -1.0)]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "seconds"),
    long_but(
        QUICK,
        itertools.product(
            ("step_s", "start_s", "seconds", "wait_start_s", "wait_s"), (1e308, -1e308, -1.0)
        ),
    ),
)
def test_a_run_record_of_seconds_that_no_clock_tells(
    folder: Path, key: str, seconds: float
) -> None:
    def absurd(data: Any) -> None:
        data["ranks"][0][key][0] = seconds

    record = changed(folder / "record.json", absurd)
    of = (folder / "plan.json", "--graph", folder / "graph.json", "--run", record)
    out = ("-o", folder / "out.json")
    assert command("export", *of, "--to", "perfetto", *out) == 4
    assert command("report", *of, *out) == 4
    assert not (folder / "out.json").exists()
