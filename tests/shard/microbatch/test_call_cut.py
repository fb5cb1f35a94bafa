"""Calls cut along the batch, against boxes worked out by hand."""

from pardnn.graph.ir import Op, Tensor
from pardnn.shard.microbatch.call_cut import BatchDim, CallCut, Mark, batch_dim, cut_call
from pardnn.shard.partition.call import call_of, skeleton_of
from pardnn.shard.partition.interning import add_call
from pardnn.shard.tdl.language import Reducer

#: Three pieces of eight samples: 2, 3 and 3.
POINTS = (0, 2, 5, 8)
MADE = Mark(BatchDim(0, 1), True)


def cut(
    kind: str, args: list, shapes: dict[str, tuple[int, ...]], outputs: list[tuple[int, ...]],
    marks: dict[str, Mark], written: frozenset[str] = frozenset(),
) -> CallCut | None:  # fmt: skip
    tensors = {name: Tensor(name=name, bytes=8, shape=s) for name, s in shapes.items()}
    made = tuple(Tensor(name=f"out{i}", bytes=8, shape=s) for i, s in enumerate(outputs))
    op = Op(name="h", kind=kind, inputs=tuple(shapes), outputs=made, arguments={"args": args})
    tensors |= {tensor.name: tensor for tensor in made}
    call = call_of(op, tensors)
    skeleton = skeleton_of(kind, call.args, {})
    number = add_call((kind, repr(args), tuple(shapes.items())), call, skeleton)
    return cut_call(number, marks, POINTS, written)


def boxes(found: CallCut | None, slot: str) -> list:
    assert found is not None
    return [piece.regions[slot].box for piece in found.pieces]


def tensor(name: str) -> dict[str, str]:
    return {"tensor": name}


def test_a_product_is_cut_by_rows_and_reads_its_weight_whole() -> None:
    args, shapes = [tensor("x"), tensor("w")], {"x": (8, 4), "w": (4, 6)}
    found = cut("aten.mm.default", args, shapes, [(8, 6)], {"self": MADE})
    assert boxes(found, "self") == [((0, 2), (0, 4)), ((2, 5), (0, 4)), ((5, 8), (0, 4))]
    assert boxes(found, "mat2") == [((0, 4), (0, 6))] * 3
    assert found is not None
    assert found.inputs == {"self": BatchDim(0, 1), "mat2": None}
    assert found.outputs == (BatchDim(0, 1),)


def test_a_weight_gradient_is_a_partial_sum() -> None:
    args, shapes = [tensor("g"), tensor("x")], {"g": (6, 8), "x": (8, 4)}
    marks = {"self": Mark(BatchDim(1, 1), True), "mat2": MADE}
    found = cut("aten.mm.default", args, shapes, [(6, 4)], marks)
    assert found is not None
    assert isinstance(found.outputs[0], Reducer)
    assert found.outputs[0].name == "sum"
    assert boxes(found, "self") == [((0, 6), (0, 2)), ((0, 6), (2, 5)), ((0, 6), (5, 8))]


def test_texts_become_rows_of_tokens_and_stay_in_pieces() -> None:
    found = cut("aten.view.default", [tensor("x"), [40, 3]], {"x": (8, 5, 3)}, [(40, 3)],
                {"self": MADE})  # fmt: skip
    assert found is not None
    assert found.outputs == (BatchDim(0, 5),)
    assert [p.results[0] and p.results[0].box[0] for p in found.pieces] == [
        (0, 10), (10, 25), (25, 40)
    ]  # fmt: skip
    assert [p.call.args[1] for p in found.pieces] == [[10, 3], [15, 3], [15, 3]]


def test_batch_norm_in_training_stays_whole() -> None:
    names = ("x", "weight", "bias")
    args = [*map(tensor, names), None, None, True, 0.1, 1e-5]
    shapes = {"x": (8, 4, 2, 2), "weight": (4,), "bias": (4,)}
    outputs = [(8, 4, 2, 2), (4,), (4,)]
    assert cut("aten.native_batch_norm.default", args, shapes, outputs, {"input": MADE}) is None


def test_similarities_of_all_pairs_join_the_smaller_side() -> None:
    args, shapes = [tensor("a"), tensor("b")], {"a": (8, 4), "b": (4, 8)}
    marks = {"self": MADE, "mat2": Mark(BatchDim(1, 1), True)}
    found = cut("aten.mm.default", args, shapes, [(8, 8)], marks)
    assert found is not None
    assert list(found.inputs.values()).count(None) == 1


def test_storage_that_is_whole_is_not_written_by_pieces() -> None:
    args, shapes = [tensor("a"), tensor("b")], {"a": (8, 4), "b": (8, 4)}
    marks = {"operands.0": Mark(BatchDim(0, 1), False), "operands.1": MADE}
    written = frozenset({"operands.0"})
    assert cut("aten.add_.Tensor", args, shapes, [(8, 4)], marks, written) is None
    marks["operands.0"] = MADE
    assert cut("aten.add_.Tensor", args, shapes, [(8, 4)], marks, written) is not None


def test_boxes_that_are_no_samples_are_no_batch() -> None:
    assert batch_dim([((0, 2),), ((2, 5),), ((5, 8),)], (8,), POINTS) == BatchDim(0, 1)
    assert batch_dim([((0, 3),), ((3, 6),), ((6, 8),)], (8,), POINTS) is None
    assert batch_dim([((0, 8),)] * 3, (8,), POINTS) is None
