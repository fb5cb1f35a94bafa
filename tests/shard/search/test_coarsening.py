"""Which tensors of time steps, layers and gradients share a layout, and which ops one factor."""

import dataclasses
from collections.abc import Sequence

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.shard.search.coarsening import NEEDED, REPEATED, TRAINING
from pardnn.shard.search.problem import Problem, make_problem
from testbed.hand_graphs import Steps


def _with_lines(steps: Steps, of: dict[str, tuple[str, str | None]]) -> Graph:
    """The graph of some steps, with the line and the module of each op named."""
    return build_graph("by hand", [
        dataclasses.replace(op, source=of[op.name][0], module=of[op.name][1])
        if op.name in of else op
        for op in steps.ops
    ])  # fmt: skip


def unrolled(lines: Sequence[str]) -> Graph:
    """h[t+1] = relu(h[t] W): one product and one relu per time step, at the lines given."""
    s, of = Steps(), {}
    last = s.source("h0", (8, 6), "input")
    s.source("w", (6, 6))
    for t, line in enumerate(lines, 1):
        product = s.mm(f"p{t}", last, "w")
        last = s.call(f"h{t}", "aten.relu.default", [product], (8, 6))
        of |= {f"p{t}": (line, "cell"), f"h{t}": (line, "cell")}
    return _with_lines(s, of)


def _together(problem: Problem, *names: str) -> bool:
    return len({problem.classes.root[name] for name in names}) == 1


def test_time_steps_of_one_line_share_layouts_and_factors() -> None:
    """The first step reads another tensor than the others, a batch: it stays free to differ."""
    graph = unrolled(["net.py:7"] * 5)
    repeated, training = make_problem(graph, REPEATED), make_problem(graph, TRAINING)
    assert _together(repeated, "h2", "h3", "h4", "h5")
    assert not _together(training, "h2", "h3")
    assert len(training.factors) > len(repeated.factors)
    assert max(len(factor.ops) for factor in repeated.factors) >= 3


def test_equal_ops_of_other_lines_are_no_time_steps() -> None:
    repeated = make_problem(unrolled(["net.py:7", "net.py:7", "net.py:9", "net.py:7"]), REPEATED)
    assert not _together(repeated, "h2", "h3")


def test_every_second_of_equal_layers_shares_layouts() -> None:
    """So that one may be cut by columns and the next by rows."""
    s, of = Steps(), {}
    last = s.source("x", (8, 6), "input")
    for i in range(4):
        s.source(f"net.{i}.weight", (6, 6))
        last = s.mm(f"y{i}", last, f"net.{i}.weight")
        of[last] = ("net.py:7", f"net.{i}")
    repeated = make_problem(_with_lines(s, of), REPEATED)
    weights = [f"net.{i}.weight" for i in range(4)]
    assert _together(repeated, weights[0], weights[2])
    assert _together(repeated, weights[1], weights[3])
    assert not _together(repeated, weights[0], weights[1])


@pytest.mark.parametrize(("level", "is_tied"), [(NEEDED, False), (TRAINING, True)])
def test_a_tensor_is_tied_to_its_gradient_from_training_on(level: int, is_tied: bool) -> None:
    """No op is element-wise here: only that `dh` is the gradient of `h` ties the two."""
    s = Steps()
    s.source("x", (4, 6), "input")
    s.source("g", (4, 10), "input")
    s.source("w", (6, 10))
    s.mm("h", "x", "w")
    s.call("p", "aten._softmax.default", ["h", 1, False], (4, 10))
    s.call("dh", "aten.cumsum.default", ["g", 0], (4, 10), of="p")
    s.mm("dw", s.t("x.t", "x", of="h"), "dh", of="h")
    problem = make_problem(s.graph(), level)
    assert _together(problem, "h", "dh") == is_tied
