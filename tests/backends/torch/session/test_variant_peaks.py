"""A graph that takes over state where it is keeps to its prediction, after every switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.runtime.program import Program
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.session.test_variants import double_made, planner, scattered

#: Rows of the batch, whether the loss is doubled, whether the first layer trains: back and forth.
CALLS = ((5, False, True), (3, False, True), (5, True, False), (5, False, True), (3, False, True))


def measure(fast: Parallel) -> None:
    """Let every graph measure its next step, not its first alone."""
    for variant in fast._variants:
        variant.executor._is_measured = False


def ran(fast: Parallel) -> Executor:
    """What ran last; captured anew, it has measured its first step."""
    return fast._variants.current.executor


@pytest.mark.long
@pytest.mark.parametrize("decide", [scattered, planner("tofu")], ids=["placed", "cut"])
def test_no_peak_is_above_its_prediction_after_a_switch(decide: Any) -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        m = double_made()
        args = (m.model, m.criterion, m.optimizer, *m.batch)
        fast = parallelize(m.step, *args, decide=decide, timeout=20, device="cpu")
        found = []
        for rows, is_doubled, trains in CALLS:
            m.model.first.requires_grad_(trains)
            m.batch[:2] = [torch.randn(rows, 6).double(), torch.randint(4, (rows,))]
            m.batch[3] = is_doubled
            measure(fast)
            fast(*m.batch)
            found.append((ran(fast).peak_bytes, ran(fast).program.peaks[rank]))
        captures = fast.captures
        fast.close()
        return [found, captures]

    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        found, captures = outcome.value
        assert captures == 3
        for measured, predicted in found:
            assert 0 < measured <= predicted


def test_the_peak_that_is_told_is_that_of_the_plan_that_is_told() -> None:
    m = double_made()
    long = [torch.randn(200, 6).double(), torch.randint(4, (200,)), *m.batch[2:]]
    args = (m.model, m.criterion, m.optimizer, *long)
    fast = parallelize(m.step, *args, decide=scattered, device="cpu")
    peaks = []
    for batch in (long, m.batch):
        fast(*batch)
        peaks.append(fast.peak_bytes)
        assert fast.peak_bytes <= Program(fast.graph, fast.plan).peaks[0]
    assert fast.captures == 2
    assert peaks[1] < peaks[0]
