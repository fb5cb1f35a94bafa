"""The factor graph: what is a variable, and what is free."""

from pardnn.shard.search.coarsening import NEEDED
from pardnn.shard.search.problem import make_problem
from testbed.hand_graphs import Steps


def test_tensors_without_dims_are_the_first_variable() -> None:
    steps = Steps()
    steps.source("x", (4, 6))
    steps.source("w", (6, 8))
    steps.source("s", ())
    steps.call("y", "aten.mul.Tensor", ["x", "s"], (4, 6))
    steps.mm("z", "y", "w")
    problem = make_problem(steps.graph(), NEEDED)
    assert problem.variables[0].root == ""
    assert problem.numbers["s"] == 0
    roots = [variable.root for variable in problem.variables[1:]]
    assert [problem.numbers[root] for root in roots] == list(range(1, len(roots) + 1))
    assert {problem.classes.root[name] for name in "xywz"} == set(roots)
    layouts = [(), *[(0,)] * len(roots)]
    assert problem.layout("w", layouts) == (0,)
    assert problem.layout("s", layouts) == ()
