"""A step captured, placed on one and two ranks and cut over two, beside the same step eager."""

from __future__ import annotations

import struct
from collections.abc import Callable

from pardnn.graph.ir import Graph
from tests.backends.torch import executors, models
from tests.backends.torch.capture import test_capture_equal
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import cut_plan

STEPS = 4
TOLERANCE = 1e-4


def assert_equal(factory: Callable[[], models.Entry], *, cut: bool = True) -> Graph:
    """Compare losses, states and the generator over some steps; return the graph.

    Args:
        factory: Makes the step and its arguments, the same at each call; losses are float32.
        cut: Whether its ops can be cut, too.
    """
    graph = test_capture_equal.assert_equal(factory)
    for size in (1, 2):
        executors.assert_equal(factory, random_plan(graph, size, seed=3), steps=STEPS)
    if cut:
        _assert_cut(factory, graph)
    return graph


def _assert_cut(factory: Callable[[], models.Entry], graph: Graph) -> None:
    plan = cut_plan(graph, 2)
    expected = _floats(executors.eager(factory, None, STEPS)[0])
    for outcome in executors.on_ranks(factory, plan, steps=STEPS):
        assert outcome.status == 0, outcome.error
        for found, loss in zip(_floats(outcome.value[0]), expected, strict=True):
            assert abs(found - loss) <= TOLERANCE * abs(loss)


def _floats(losses: list[str]) -> list[float]:
    return [struct.unpack("<f", bytes.fromhex(loss))[0] for loss in losses]
