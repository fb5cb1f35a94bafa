"""What `run --verify` says of losses beside those of one device."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pardnn.api.run import _compared
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.plan import Plan

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
