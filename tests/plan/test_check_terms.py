"""Sums that devices hold the terms of: what counts as one term of each device."""

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.cut.check_terms import term_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import JOIN, REDUCE, Partition


def op(name: str, kind: str, *inputs: str, args: list[object] | None = None) -> Op:
    return Op(
        name=name, kind=kind, inputs=inputs, outputs=(Tensor(name=name, bytes=8, shape=(2,)),),
        arguments={"args": args or []},
    )  # fmt: skip


def summed(name: str, *addends: str) -> Op:
    return op(name, REDUCE, *addends, args=["sum", [{"tensor": each} for each in addends], None])


TERMS = [op("g@0", "aten.mm.default"), op("g@1", "aten.mm.default")]
MIXED = op("mixed@0", JOIN, "g@0", "g@1")


@pytest.mark.parametrize(
    ("local", "is_sum"),
    [
        ([summed("t@0", "g@0", "g@1"), summed("t@1", "g@0", "g@1")], True),
        ([MIXED, summed("t@0", "mixed@0"), summed("t@1", "g@0", "g@1")], False),
        ([MIXED, summed("t@0", "mixed@0", "g@1"), summed("t@1", "g@0", "g@1")], False),
        ([summed("t@0", "g@0"), summed("t@1", "g@0", "g@1")], False),
        ([summed("t@0", "g@0", "g@1")], False),
    ],
)
def test_one_term_of_each_device_is_added(local: list[Op], is_sum: bool) -> None:
    """What is joined of halves of two terms is neither of them."""
    whole = build_graph("step", [op("g", "aten.mm.default"), op("t", REDUCE, "g")])
    partition = Partition(
        mesh=make_mesh((2,)), sharding={"g": ("Partial()",)}, ops=(*TERMS, *local)
    )
    assert (list(term_problems(whole, partition)) == []) == is_sum
