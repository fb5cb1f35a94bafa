"""What `run --verify` says of losses beside those of one device."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from pardnn.api import run
from pardnn.api.run import _compared, _limits
from pardnn.cluster import Cluster, Device
from pardnn.errors import MismatchError
from pardnn.graph.build import build_graph
from pardnn.graph.file import read_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.file import read_plan
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.plan import Plan
from pardnn.planner.options import PlanOptions
from pardnn.report.results import RunResult

PLACED = Plan(placement={}, order=((), ()))
CUT = dataclasses.replace(PLACED, partition=Partition(mesh=make_mesh((2,)), sharding={}, ops=()))


def graph_of(dtype: str) -> Graph:
    loss = Tensor(name="l", bytes=8, shape=(), dtype=dtype)
    return build_graph("g", (Op(name="l", kind="input", outputs=(loss,)),
                             Op(name="loss", kind="pardnn.loss", inputs=("l",))))  # fmt: skip


def test_without_reference_nothing_is_said() -> None:
    assert _compared(graph_of("float32"), CUT, (1.0,), None) == {}


@pytest.mark.parametrize(
    ("plan", "dtype", "found", "is_equal"),
    [
        (PLACED, "float32", 1.0, True),
        (PLACED, "float32", math.nextafter(1.0, 2.0), False),
        (CUT, "float32", 1.00009, True),
        (CUT, "float32", 1.0002, False),
        (CUT, "float64", 1 + 9e-11, True),
        (CUT, "float64", 1 + 2e-10, False),
        (CUT, "bfloat16", 1.005, True),
        (CUT, "float32", math.nan, False),
        (CUT, "float32", math.inf, False),
    ],
)
def test_the_tolerance_is_that_of_the_plan_and_the_dtype(
    plan: Plan, dtype: str, found: float, is_equal: bool
) -> None:
    said = _compared(graph_of(dtype), plan, (0.5, found), (0.5, 1.0))
    assert said["verified"] == is_equal
    if math.isfinite(found):
        assert said["largest_difference"] == pytest.approx(found - 1, rel=1e-2)
    else:
        assert said["largest_difference"] is None


def test_losses_that_are_both_no_numbers_are_equal() -> None:
    said = _compared(graph_of("float32"), PLACED, (math.nan,), (math.nan,))
    assert said == {"verified": True, "tolerance": 0.0, "largest_difference": 0.0, "state": None}


@pytest.mark.parametrize(
    ("plan", "differing", "is_equal"),
    [(PLACED, 0, True), (PLACED, 1, False), (CUT, 1, True)],
)
def test_where_ops_run_whole_every_bit_of_the_state_counts(
    plan: Plan, differing: int, is_equal: bool
) -> None:
    state = {"tensors": 3, "differing": differing, "largest_difference": 1e-9, "worst": "w"}
    said = _compared(graph_of("float32"), plan, (1.0,), (1.0,), state)
    assert said["verified"] == is_equal
    assert said["state"].differing == differing


def test_a_limit_below_what_the_plan_needs_is_refused_before_ranks_start(tiny: Path) -> None:
    graph, plan = read_graph(tiny / "graph.json"), read_plan(tiny / "plan.json")
    peaks = json.loads((tiny / "expected.json").read_text())["peak_bytes"]
    assert _limits(graph, plan, _limited(peaks)) == peaks
    for device in range(len(peaks)):
        limits = [peak - (i == device) for i, peak in enumerate(peaks)]
        with pytest.raises(MismatchError, match=f"device {device} .*\n.*{max(peaks)}B") as error:
            _limits(graph, plan, _limited(limits))
        assert error.value.code == "E504"


def _limited(limits: Sequence[int]) -> Cluster:
    return Cluster(
        devices=tuple(Device(name=str(i), memory=limit) for i, limit in enumerate(limits))
    )


@pytest.mark.parametrize("given", [True, False])
def test_a_run_starts_from_a_plan_and_says_what_is_said_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, given: bool
) -> None:
    path, seen = tiny / "plan.json", []
    graph, plan = read_graph(tiny / "graph.json"), read_plan(path)
    told = dataclasses.replace(plan, notes=("preference met: pin a to 1",))
    result = RunResult(
        losses=(1.0,), reference_losses=None, step_s=(1.0,), makespan_s=None,
        peak_bytes_predicted=(1,), peak_bytes_measured=(1,), limit_bytes=(None,),
        allowance_bytes=0, algorithm=None, notes=("of a rank",),
    )  # fmt: skip

    def planned(*_: object, start: Plan | None) -> tuple[Plan, None]:
        seen.append(start)
        return told, None

    entry = SimpleNamespace(factory=lambda _: None)
    monkeypatch.setattr(run, "load_entry_point", lambda _: entry)
    monkeypatch.setattr(run, "captured", lambda *_: (graph, None))
    monkeypatch.setattr(run, "planned", planned)
    monkeypatch.setattr(run, "run_checked", lambda *_, **__: result)
    cluster = Cluster.uniform(plan.num_devices)
    found = (
        run.run_target("x.py:f", cluster, PlanOptions(), plan_file=path)
        if given
        else run.run_target("x.py:f", cluster, PlanOptions(), start_file=path)
    )
    assert seen == ([] if given else [plan])
    assert found.notes == (("of a rank",) if given else ("preference met: pin a to 1", "of a rank"))
