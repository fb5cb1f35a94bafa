"""The call of a piece beside that of the whole op: what its results are called."""

from typing import Any

import pytest

from pardnn.graph.ir import Op, Tensor
from pardnn.plan.rewritten.check_piece_calls import Share, call_problem


def problem_of(stated: Any, named: Any, outputs: tuple[str, ...] = ("y", "z")) -> str | None:
    """What is wrong with piece 1 of an op of two results, of which the piece makes some."""

    def op(name: str, reads: str, results: tuple[str, ...], returns: Any) -> Op:
        arguments: dict[str, Any] = {"args": [{"tensor": reads}]}
        arguments |= {"returns": returns} if returns is not None else {}
        made = tuple(Tensor(name=each, bytes=4) for each in results)
        return Op(name=name, kind="aten.var_mean.correction", inputs=(reads,), outputs=made,
                  arguments=arguments)  # fmt: skip

    whole = op("y", "x", ("y", "z"), stated)
    piece = op("y@1", "x@1", tuple(f"{name}@1" for name in outputs), named)
    args = [{"tensor": "x@1"}]
    return call_problem(piece, args, whole, 1, Share(1, 2), lambda a, b: a == f"{b}@1")


def test_a_piece_names_its_results_where_the_op_does_or_where_it_lacks_some() -> None:
    other = "it gives its results other names"
    assert problem_of(None, None) is None
    assert problem_of(["y", "z"], ["y@1", "z@1"]) is None
    assert problem_of(["y", "z"], None) == other
    assert problem_of(None, ["y@1", "z@1"]) == other
    assert problem_of(["y", None, "z"], ["y@1", None, "z@1"]) is None
    assert problem_of(None, ["y@1", None], outputs=("y",)) is None
    assert problem_of(None, None, outputs=("y",)) == other


@pytest.mark.parametrize(
    ("stated", "given", "is_same"),
    [
        ([4, 6], [2, 6], True),  # half of the batch
        ([6, 6], [3, 6], True),
        ([4, 6], [1, 6], False),
        ([-1, 6], [2, 6], True),  # what -1 stood for
        ([-1, 6], [0, 6], True),
        ([-1, 6], [-2, 6], False),
        ([4.0, 6.0], [2.0, 6.0], False),  # no sizes: scales, of which a piece has no share
        ([4.0, 6.0], [4.0, 6.0], True),
        (4, 2, False),
        ([True, 6], [1, 6], False),
    ],
)
def test_sizes_alone_may_be_a_share_of_those_of_the_batch(
    stated: Any, given: Any, is_same: bool
) -> None:
    def op(name: str, reads: str, number: Any) -> Op:
        return Op(name=name, kind="aten.view.default", inputs=(reads,),
                  outputs=(Tensor(name=name, bytes=4),),
                  arguments={"args": [{"tensor": reads}, number]})  # fmt: skip

    piece = op("y@1", "x@1", given)
    args = [{"tensor": "x@1"}, given]
    problem = call_problem(
        piece, args, op("y", "x", stated), 1, Share(1, 2), lambda a, b: a == f"{b}@1"
    )
    assert problem == (None if is_same else "its arguments differ")


@pytest.mark.parametrize(
    ("whole", "piece", "is_same"),
    [
        (["x"], ["x@1"], True), (["x"], [], False), ([], ["x@1"], False), (["x"], ["z@1"], False),
        (["x", "z"], ["x@1"], False), (None, None, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["aten.add_.Tensor", "mylib::op"])
def test_a_piece_changes_what_the_op_does_in_place(
    kind: str, whole: Any, piece: Any, is_same: bool
) -> None:
    def op(name: str, reads: str, mutates: Any) -> Op:
        arguments: dict[str, Any] = {"args": [{"tensor": reads}, [{"tensor": reads}]]}
        arguments |= {} if mutates is None else {"mutates": mutates}
        return Op(name=name, kind=kind, inputs=(reads,), outputs=(Tensor(name=name, bytes=4),),
                  arguments=arguments)  # fmt: skip

    made = op("y@1", "x@1", piece)
    args = [{"tensor": "x@1"}, [{"tensor": "x@1"}]]
    problem = call_problem(
        made, args, op("y", "x", whole), 1, Share(1, 2), lambda a, b: a == f"{b}@1"
    )
    assert problem == (None if is_same else "it changes other tensors in place")
    other = [{"tensor": "x@1"}, [{"tensor": "z@1"}]]
    found = call_problem(
        made, other, op("y", "x", whole), 1, Share(1, 2), lambda a, b: a == f"{b}@1"
    )
    assert found is not None


@pytest.mark.parametrize("given", [None, "x@1", ["tensor"], 1, {"tensor": "z@1"}, {"other": "x@1"}])
def test_a_tensor_stands_where_the_op_has_one(given: Any) -> None:
    def op(name: str, reads: str, given: Any) -> Op:
        return Op(name=name, kind="aten.neg.default", inputs=(reads,),
                  outputs=(Tensor(name=name, bytes=4),), arguments={"args": [given]})  # fmt: skip

    problem = call_problem(
        op("y@1", "x@1", given), [given], op("y", "x", {"tensor": "x"}), 1, Share(1, 2),
        lambda a, b: a == f"{b}@1",
    )  # fmt: skip
    assert problem == "its arguments differ"


@pytest.mark.parametrize("kind", ["aten.slice.Tensor", "mylib::op", "aten.neg.default"])
def test_numbers_that_say_where_elements_are_may_differ_and_tensors_may_not(kind: str) -> None:
    def op(name: str, *args: Any) -> Op:
        return Op(name=name, kind=kind, outputs=(Tensor(name=name, bytes=4),),
                  arguments={"args": list(args)})  # fmt: skip

    def problem(*args: Any) -> str | None:
        whole = op("y", {"tensor": "x"}, 0, [{"tensor": "z"}, 6])
        return call_problem(
            op("y@1", *args), list(args), whole, 1, Share(1, 2), lambda a, b: a == f"{b}@1"
        )

    told = "its arguments differ" if kind == "aten.neg.default" else "it reads other tensors"
    first, second = {"tensor": "x@1"}, {"tensor": "z@1"}
    assert problem(first, 0, [second, 6]) is None
    assert (problem(first, 3, [second, 5]) is None) == (kind != "aten.neg.default")
    assert problem(second, 0, [first, 6]) == told
    assert problem(first, 0, [6]) == told
