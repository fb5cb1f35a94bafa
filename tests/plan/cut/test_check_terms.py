"""Sums that devices hold the terms of: what counts as one term of each device."""

import pytest

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.cut.check_terms import term_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE, Partition
from pardnn.plan.pieces import ADD


def op(name: str, kind: str, *inputs: str, args: list[object] | None = None) -> Op:
    return Op(
        name=name, kind=kind, inputs=inputs, outputs=(Tensor(name=name, bytes=8, shape=(2,)),),
        arguments={"args": args or []},
    )  # fmt: skip


def summed(name: str, *addends: str) -> Op:
    return op(name, REDUCE, *addends, args=["sum", [{"tensor": each} for each in addends], None])


TERMS = [op(f"{name}@{d}", "aten.mm.default") for name in "gx" for d in range(2)]
MIXED = op("mixed@0", JOIN, "g@0", "g@1")
PART = op("part@0", SLICE, "g@0")
ZEROS = op("zeros@0", FETCH)
PADDED = op("padded@0", FETCH, "part@0", "zeros@0")
TOTAL = summed("total@0", "g@0", "g@1")
LARGEST: list[object] = ["max", [{"tensor": "g@0"}, {"tensor": "g@1"}], None]


@pytest.mark.parametrize(
    ("local", "is_sum"),
    [
        ([summed("t@0", "g@0", "g@1"), summed("t@1", "g@0", "g@1")], True),
        ([MIXED, summed("t@0", "mixed@0"), summed("t@1", "g@0", "g@1")], False),
        ([MIXED, summed("t@0", "mixed@0", "g@1"), summed("t@1", "g@0", "g@1")], False),
        ([summed("t@0", "g@0"), summed("t@1", "g@0", "g@1")], False),
        ([summed("t@0", "g@0", "g@1")], False),
        ([summed("t@0", "g@0", "nothing"), summed("t@1", "g@0", "g@1")], False),
        ([summed("t@0", "g@0", "x@0"), summed("t@1", "g@0", "g@1")], False),
        ([PART, summed("t@0", "part@0", "g@1"), summed("t@1", "g@0", "g@1")], True),
        ([PART, PADDED, summed("t@0", "padded@0", "g@1"), summed("t@1", "g@0", "g@1")], False),
        ([TOTAL, summed("t@0", "total@0"), summed("t@1", "total@0")], True),
        ([TOTAL, summed("t@0", "total@0", "g@0"), summed("t@1", "total@0")], False),
        ([summed("t@0", "g@0", "g@1"), op("t@1", REDUCE, "g@0", "g@1", args=LARGEST)], False),
    ],
)
def test_one_term_of_each_device_is_added(local: list[Op], is_sum: bool) -> None:
    """What is joined of halves of two terms is neither of them."""
    whole = build_graph("step", [op("g", "aten.mm.default"), op("t", REDUCE, "g")])
    partition = Partition(
        mesh=make_mesh((2,)), sharding={"g": ("Partial()",)}, ops=(*TERMS, ZEROS, *local)
    )
    assert (list(term_problems(whole, partition)) == []) == is_sum


def test_what_an_axis_cuts_may_be_brought_together_from_all_its_devices() -> None:
    """With terms along the first of two axes, devices 0 and 1 hold the halves of one."""
    mesh = make_mesh((2, 2))
    whole = build_graph("step", [op("g", "aten.mm.default"), op("t", REDUCE, "g")])

    def is_sum(*halves: tuple[int, int]) -> bool:
        local = [op(f"g@{d}", "aten.mm.default") for d in range(4)]
        joined = [op(f"g:{a}{b}@0", FETCH, f"g@{a}", f"g@{b}") for a, b in halves]
        totals = [summed(f"t@{d}", *(each.name for each in joined)) for d in range(4)]
        partition = Partition(
            mesh=mesh, sharding={"g": ("Partial()", "Shard(0)")}, ops=(*local, *joined, *totals)
        )
        return list(term_problems(whole, partition)) == []

    assert is_sum((0, 1), (2, 3))
    assert not is_sum((0, 2), (1, 3)), "halves of two terms"
    assert not is_sum((0, 1), (0, 1)), "one term twice"
    assert not is_sum((0, 1)), "one of two terms"


def problems_of(*ops: Op, **sharding: str) -> list[str]:
    """What is wrong with a step whose tensors are laid out so, one device each half."""
    partition = Partition(
        mesh=make_mesh((2,)), sharding={name: (word,) for name, word in sharding.items()},
        ops=tuple(
            op(f"{each.name}@{d}", each.kind, *(f"{name}@{d}" for name in each.inputs))
            for each in ops for d in range(2)
        ),
    )  # fmt: skip
    return list(term_problems(build_graph("step", list(ops)), partition))


def test_terms_are_read_by_sums_alone() -> None:
    """Of terms only terms are added, which then are terms of the sum."""
    g, h = op("g", "aten.mm.default"), op("h", "aten.mm.default")
    terms = {"g": "Partial()", "h": "Partial()"}
    told = ["partition: op 's' reads terms of 'g', which is not a sum"]
    assert problems_of(g, h, op("s", ADD, "g", "h"), **terms, s="Partial()") == []
    assert problems_of(g, h, op("s", ADD, "g", "h"), **terms, s="Replicate()") == told
    assert problems_of(g, h, op("s", ADD, "g", "h"), g="Partial()", h="Replicate()",
                       s="Partial()") == told  # fmt: skip
    assert problems_of(g, h, op("s", "aten.mul.Tensor", "g", "h"), **terms, s="Partial()") == told
    assert problems_of(g, op("s", REDUCE, "g"), g="Partial()", s="Partial()") == told
    assert problems_of(g, h, op("s", REDUCE, "g", "h"), **terms, s="Replicate()") == told
    assert problems_of(op("x", "input"), x="Partial()") == [
        "partition.sharding: 'x' exists before the step and is not a sum"
    ]
