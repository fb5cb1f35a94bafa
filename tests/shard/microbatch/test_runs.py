"""Dims in which the batch stands behind others, against positions worked out by enumeration."""

import itertools

import numpy as np
import pytest

from pardnn.graph.ir import Op, Tensor
from pardnn.shard.microbatch.call_cut import BatchDim, CallCut, Mark
from pardnn.shard.microbatch.runs import at_after_view, cut_in_runs
from pardnn.shard.partition.call import call_of, skeleton_of
from pardnn.shard.partition.interning import add_call
from pardnn.shard.tdl.language import Reducer

SAMPLES, POINTS = 3, (0, 1, 3)
#: 4 tokens of 3 texts in one dim.
ROWS = Mark(BatchDim(0, 1, 4), True)


def sample_of(shape: tuple[int, ...], at: BatchDim) -> np.ndarray:
    """The sample of each element, by what the three numbers mean."""
    row = np.arange(shape[at.dim])
    assert len(row) == at.outer * SAMPLES * at.scale
    found = row // at.scale % SAMPLES
    return np.broadcast_to(found.reshape(-1, *(1,) * (len(shape) - at.dim - 1)), shape)


SHAPES = [
    (24,), (3, 8), (8, 3), (4, 6), (6, 4), (2, 12), (12, 2), (1, 24), (24, 1), (2, 3, 4), (4, 3, 2),
    (3, 2, 4), (2, 4, 3), (2, 2, 6), (2, 6, 2), (6, 2, 2), (1, 3, 8), (2, 1, 12), (4, 2, 3),
]  # fmt: skip


def test_a_view_has_the_samples_where_its_elements_are() -> None:
    """All pairs of shapes of 24 elements, and all places of a batch of 3 in the first."""
    found = 0
    for before, after in itertools.product(SHAPES, SHAPES):
        for dim, size in enumerate(before):
            if size % SAMPLES:
                continue
            for scale in (s for s in range(1, size + 1) if size % (SAMPLES * s) == 0):
                at = BatchDim(dim, scale, size // SAMPLES // scale)
                samples = sample_of(before, at).reshape(after)
                then = at_after_view(before, after, at, SAMPLES)
                if then is not None:
                    assert (sample_of(after, then) == samples).all(), (before, after, at, then)
                    found += 1
                else:
                    others = [
                        BatchDim(d, s, n // SAMPLES // s)
                        for d, n in enumerate(after)
                        for s in range(1, n + 1)
                        if n % (SAMPLES * s) == 0
                    ]
                    assert not any((sample_of(after, o) == samples).all() for o in others)
    assert found > 300


def cut(
    kind: str, args: list, shapes: dict[str, tuple[int, ...]], output: tuple[int, ...],
    marks: dict[str, Mark],
) -> CallCut | None:  # fmt: skip
    tensors = {name: Tensor(name=name, bytes=8, shape=s) for name, s in shapes.items()}
    made = (Tensor(name="out", bytes=8, shape=output),)
    op = Op(name="h", kind=kind, inputs=tuple(shapes), outputs=made, arguments={"args": args})
    call = call_of(op, tensors | {"out": made[0]})
    key = ("runs", kind, repr(args), tuple(shapes.items()), output)
    return cut_in_runs(
        add_call(key, call, skeleton_of(kind, call.args, {})), marks, POINTS, frozenset()
    )


def tensor(name: str) -> dict[str, str]:
    return {"tensor": name}


X = {"x": (12, 5)}


def test_a_product_keeps_the_rows() -> None:
    args = [tensor("x"), tensor("w")]
    found = cut("aten.mm.default", args, X | {"w": (5, 2)}, (12, 2), {"self": ROWS})
    assert found is not None
    assert found.outputs == (BatchDim(0, 1, 4),)
    assert found.inputs == {"self": BatchDim(0, 1, 4), "mat2": None}
    assert [piece.call.shapes["self"] for piece in found.pieces] == [(4, 5), (8, 5)]


def test_a_sum_over_rows_is_a_partial_one_if_both_have_the_same_rows() -> None:
    args, shapes = [tensor("g"), tensor("x")], {"g": (2, 12), **X}
    ours, others = Mark(BatchDim(1, 1, 4), True), Mark(BatchDim(1, 4, 1), True)
    found = cut("aten.mm.default", args, shapes, (2, 5), {"self": ours, "mat2": ROWS})
    assert found is not None
    assert isinstance(found.outputs[0], Reducer)
    assert cut("aten.mm.default", args, shapes, (2, 5), {"self": others, "mat2": ROWS}) is None
    assert cut("aten.mm.default", args, shapes, (2, 5), {"mat2": ROWS}) is None  # g is sliced


@pytest.mark.parametrize(
    ("kind", "args", "shapes", "output", "mark"),
    [
        ("aten.tril.default", [tensor("x")], {"x": (12, 12)}, (12, 12), ROWS),
        ("aten.relu.default", [tensor("x")], X, (12, 5), ROWS._replace(is_made=False)),
        ("aten.cumsum.default", [tensor("x"), 0], X, (12, 5), ROWS),
        ("aten.flip.default", [tensor("x"), [0]], X, (12, 5), ROWS),
        ("aten.view.default", [tensor("x"), [20, 3]], X, (20, 3), ROWS),
        ("aten.avg_pool1d.default", [tensor("x"), [2]], {"x": (1, 12)}, (1, 6),
         Mark(BatchDim(1, 1, 4), True)),
    ],
)  # fmt: skip
def test_what_depends_on_where_rows_stand_is_whole(
    kind: str, args: list, shapes: dict, output: tuple[int, ...], mark: Mark
) -> None:
    assert cut(kind, args, shapes, output, {"self": mark}) is None


def test_what_does_the_same_to_each_row_is_cut() -> None:
    for kind, args in (("aten.relu.default", []), ("aten._softmax.default", [1, False])):
        found = cut(kind, [tensor("x"), *args], X, (12, 5), {"self": ROWS})
        assert found is not None
        assert found.outputs == (BatchDim(0, 1, 4),)
