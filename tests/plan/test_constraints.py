"""What a placement breaks of what a user demands, on three ops."""

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.constraints import Constraint, apart, forbid, pin, together
from pardnn.plan.demands.check_constraints import constraint_problems
from pardnn.plan.plan import Plan

GRAPH = build_graph("three", [
    Op(name=name, kind="aten.neg.default" if reads else "input", inputs=reads,
       outputs=(Tensor(name=name, bytes=4),))
    for name, reads in (("a", ()), ("b", ("a",)), ("c", ("b",)))
])  # fmt: skip
PLAN = Plan(placement={"a": 0, "b": 1, "c": 0}, order=(("a", "c"), ("b",)))


@pytest.mark.parametrize(
    ("demand", "broken"),
    [
        (pin("a", 1), "'a' is on device 0"),
        (pin("a", 0), None),
        (pin("b", 0, 1), None),
        (forbid(1), "'b' is on device 1"),
        (forbid(1, what="a"), None),
        (together("a", "c"), None),
        (together("c", "b"), "'c' is on device 0 and 'b' is on device 1"),
        (apart("a", "b"), None),
        (apart("a", "c"), "'a' is on device 0 and 'c' is on device 0"),
        (pin("nobody", 0), "nobody"),
        (pin("a", 7), "7"),
    ],
    ids=str,
)
def test_what_a_placement_breaks_is_said_with_the_ops(
    demand: Constraint, broken: str | None
) -> None:
    found = list(constraint_problems((demand,), GRAPH, GRAPH, PLAN, None))
    assert len(found) == (broken is not None)
    assert broken is None or broken in found[0]
    held = pin("c", 0)
    both = list(constraint_problems((held, demand), GRAPH, GRAPH, PLAN, None))
    assert both == found
