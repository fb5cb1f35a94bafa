"""Strategies as data: which loops of an operator can be cut, and what each worker needs."""

import math
from fractions import Fraction
from typing import Any

import pytest

from pardnn.plan.mesh import cut_points
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.partition.analysis import analyse
from pardnn.shard.partition.axis_strategies import axis_strategies_of
from pardnn.shard.partition.call import Call, walk
from pardnn.shard.partition.interning import cuttable_loops, intern_call
from pardnn.shard.partition.regions import tile
from pardnn.shard.partition.strategy import (
    Cut,
    Reduce,
    Strategy,
    Unread,
    Whole,
    can_combine,
    strategies,
)
from pardnn.shard.partition.worker_ops import WorkerOp, partition, worker_ops_of
from pardnn.shard.search.alignment import alignment_of
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.language import Local, Max, Mean, Once, Opaque, Prod, Reducer, Sum
from pardnn.shard.tdl.registry import describe

pytestmark = pytest.mark.usefixtures("own_registry")


def call(kind: str, *args: Any, outputs: tuple[Any, ...], **shapes: Any) -> Call:
    """A call; strings among the arguments name tensors."""
    data = tuple({"tensor": arg} if isinstance(arg, str) else arg for arg in args)
    return Call(kind, data, {}, shapes, outputs)


def by_loop(made: Call) -> dict[str, Strategy]:
    return {strategy.loop: strategy for strategy in strategies(made)}


def boxes(ops: tuple[WorkerOp, ...] | None, slot: str) -> list[Any]:
    assert ops is not None
    return [op.regions[slot].box for op in ops]


MM = call("aten.mm.default", "a", "b", outputs=((8, 4),), a=(8, 6), b=(6, 4))


def test_a_matrix_product_has_three() -> None:
    assert strategies(MM) == (
        Strategy("i", 8, {"self": Cut(0), "mat2": Whole()}, (Cut(0),)),
        Strategy("j", 4, {"self": Whole(), "mat2": Cut(1)}, (Cut(1),)),
        Strategy("k", 6, {"self": Cut(1), "mat2": Cut(0)}, (Reduce("sum"),)),
    )


def conv1d(stride: int = 1, padding: int = 1) -> Call:
    length = (16 + 2 * padding - 3) // stride + 1
    window = ([stride], [padding], [1], False, [0], 1)
    return call(
        "aten.convolution.default", "x", "w", None, *window, outputs=((8, 32, length),),
        x=(8, 16, 16), w=(32, 16, 3),
    )  # fmt: skip


def test_a_convolution_is_cut_with_a_halo() -> None:
    """Fig. 3: b, co and x cut the output, ci and dx leave partial sums."""
    found = by_loop(conv1d())
    assert list(found) == ["b", "co", "x0", "ci", "dx0"]
    assert found["x0"].inputs == {"input": Cut(2, 1, 1), "weight": Whole()}
    assert found["x0"].outputs == (Cut(2),)
    assert found["ci"].outputs == found["dx0"].outputs == (Reduce("sum"),)
    assert found["ci"].inputs == {"input": Cut(1), "weight": Cut(1)}
    # What lies across a cut of 8 rows of 16 channels: 2 slices, 256 elements (case E).
    halo = found["x0"].inputs["input"]
    assert isinstance(halo, Cut)
    assert (halo.before + halo.after) * 8 * 16 == 256


def test_padding_is_out_of_bounds_and_the_call_pads_no_more() -> None:
    ops = partition(conv1d(), "x0", 2)
    assert boxes(ops, "input") == [
        ((0, 8), (0, 16), (-1, 9)), ((0, 8), (0, 16), (7, 17)),
    ]  # fmt: skip
    assert ops is not None
    assert [op.call.args[4] for op in ops] == [[0], [0]]
    assert [op.call.outputs for op in ops] == [((8, 32, 8),)] * 2
    whole = partition(conv1d(), "b", 2)
    assert whole is not None
    assert whole[0].call.args[4] == [1]  # space is not cut, so the call pads as ever


def test_strides_scale_the_halo() -> None:
    halo = by_loop(conv1d(stride=2))["x0"].inputs["input"]
    assert halo == Cut(2, 1, 0, Fraction(2))


def test_one_loop_joins_several_outputs() -> None:
    made = call(
        "aten.convolution_backward.default", "g", "x", "w", [6], [1], [1], [1], False, [0], 1,
        [True, True, True], outputs=((4, 5, 9), (6, 5, 3), (6,)), g=(4, 6, 9), x=(4, 5, 9),
        w=(6, 5, 3),
    )  # fmt: skip
    found = {loop: strategy.outputs for loop, strategy in by_loop(made).items()}
    assert found["b"] == (Cut(0), Reduce("sum"), Reduce("sum"))
    assert found["co"] == (Reduce("sum"), Cut(0), Cut(0))
    assert found["ci"] == (Cut(1), Cut(1), Whole())
    assert found["x0"] == (Reduce("sum"), Reduce("sum"), Reduce("sum"))


@pytest.mark.parametrize(
    ("offsets", "before", "after"),
    [((0,), 0, 0), ((1,), 0, 1), ((-2,), 2, 0), ((0, 1), 0, 1), ((1, 0), 0, 1), ((0, -2, 1), 2, 1),
     ((-1, 0), 1, 0)],
)  # fmt: skip
def test_the_halo_is_of_all_places_that_an_input_is_read_at(
    offsets: tuple[int, ...], before: int, after: int
) -> None:
    """Wherever else it reads, an op is not element-wise: neighbours send what lies across a cut."""

    @describe("test::stencil")
    def stencil(x: Any) -> Any:
        return lambda i, j: Opaque()(*[x.padded()[i + offset, j] for offset in offsets])

    made = call("test::stencil", "x", outputs=((8, 6),), x=(8, 6))
    found = by_loop(made)
    assert found["i"].inputs["x"] == Cut(0, before, after)
    assert found["j"].inputs["x"] == Cut(1)
    aligned = alignment_of(intern_call(made))
    is_free = not before and not after
    assert aligned.is_total == is_free
    assert aligned.pairs == ({"x": (0, 1)} if is_free else {})
    assert aligned.loops == {"i": {0: 0} | ({"x": 0} if is_free else {}), "j": {"x": 1, 0: 1}}


def test_opaque_results_are_not_cut() -> None:
    made = call("aten._softmax.default", "x", 1, False, outputs=((4, 5, 6),), x=(4, 5, 6))
    assert list(by_loop(made)) == ["i0", "i2"]


@pytest.mark.parametrize(
    ("before", "after", "cut"),
    [
        ((4, 6), (24,), [Cut(0)]), ((24,), (4, 6), [Cut(0)]), ((6, 4), (8, 3), [Cut(0)]),
        ((2, 3, 4), (2, 12), [Cut(0), Cut(1)]), ((4, 1, 6), (4, 6), [Cut(0), Cut(2)]),
        ((4, 3), (3, 4), []), ((1, 7), (7,), [Cut(1)]),
    ],
)  # fmt: skip
def test_views_are_cut_along_the_leading_dim_of_each_group(before, after, cut) -> None:
    made = call("aten.view.default", "x", list(after), outputs=(after,), x=before)
    found = strategies(made)
    assert [s.inputs["self"].dim for s in found if isinstance(s.inputs["self"], Cut)] == [
        layout.dim for layout in cut
    ]
    for strategy in found:
        ops = partition(made, strategy.loop, 2)
        assert ops is not None
        for op in ops:
            assert math.prod(op.call.args[1]) == math.prod(op.call.shapes["self"])


def test_factories_read_nothing() -> None:
    made = call("aten.new_zeros.default", "x", [6, 4], outputs=((6, 4),), x=(3, 3))
    assert [s.inputs["self"] for s in strategies(made)] == [Unread(), Unread()]
    ops = partition(made, "i0", 3)
    assert ops is not None
    assert [op.call.args[1] for op in ops] == [[2, 4]] * 3


def test_an_op_without_description_has_no_strategy_and_no_error() -> None:
    made = call("mylib::unknown.default", "x", outputs=((4,),), x=(4,))
    assert description_of(made.kind) is None
    assert strategies(made) == ()
    with pytest.raises(DescriptionError, match="no description.*whole"):
        partition(made, "i", 2)


def test_a_dim_turned_around_is_cut_in_reverse() -> None:
    made = call("aten.flip.default", "x", [0], outputs=((7, 4),), x=(7, 4))
    assert by_loop(made)["i0"].inputs["self"] == Cut(0, scale=Fraction(-1))
    assert boxes(partition(made, "i0", 2), "self") == [((4, 7), (0, 4)), ((0, 4), (0, 4))]


def test_extents_of_workers_differ_by_one() -> None:
    assert cut_points(7, 3) == (0, 2, 4, 7)
    assert cut_points(8, 4) == (0, 2, 4, 6, 8)
    assert cut_points(3, 4) is None
    assert cut_points(10, 2, multiple=4) == (0, 4, 10)
    assert boxes(partition(MM, "j", 3), "mat2") == [
        ((0, 6), (0, 1)), ((0, 6), (1, 2)), ((0, 6), (2, 4)),
    ]  # fmt: skip


def test_an_operator_that_is_described_anew_is_what_was_said_last() -> None:
    """By the same function: a view that reads a neighbour cannot be cut there."""

    def neighbours(x: Any) -> Any:
        return lambda i, j: Opaque()(x.padded()[i, j], x.padded()[i + 1, j])

    made = call("test::neighbours", "x", outputs=((8, 6),), x=(8, 6))
    for is_exact, loops in ((False, ["i", "j"]), (True, ["j"]), (False, ["i", "j"])):
        describe("test::neighbours", is_exact=is_exact)(neighbours)
        assert list(by_loop(made)) == loops
        assert cuttable_loops(intern_call(made)) == tuple(loops)


def test_rounded_indices_keep_cuts_to_multiples() -> None:
    @describe("test::repeat_each")
    def repeat_each(x: Any) -> Any:
        return lambda i: x[i // 3]

    made = call("test::repeat_each", "x", outputs=((12,),), x=(4,))
    assert boxes(partition(made, "i", 3), "x") == [((0, 1),), ((1, 2),), ((2, 4),)]
    assert by_loop(made)["i"].inputs["x"] == Cut(0, scale=Fraction(1, 3))


def test_a_description_that_reads_no_size_is_run_once_for_all_sizes() -> None:
    runs: list[int] = []

    @describe("test::product")
    def product(x: Any, y: Any) -> Any:
        runs.append(1)
        return lambda i, j: Sum(lambda k: x[i, k] * y[k, j])

    for n in range(2, 9):
        made = call("test::product", "x", "y", outputs=((n, 5),), x=(n, n + 1), y=(n + 1, 5))
        assert [strategy.extent for strategy in strategies(made)] == [n, 5, n + 1]
    assert len(runs) == 1


def described(function: Any, *shapes: Any, outputs: tuple[Any, ...] = ((4, 4),)) -> Any:
    describe("test::made")(function)
    names = "xyz"[: len(shapes)]
    made = call("test::made", *names, outputs=outputs, **dict(zip(names, shapes, strict=True)))
    return strategies(made)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: lambda i, j: x[i], "has 2 dims and is indexed with 1"),
        (lambda x: lambda i: x[i, i], "output has 2 dims and is described with 1"),
        (lambda x: lambda i, j: x[i * j, j], "multiplied by another index"),
        (lambda x: lambda i, j: x[i if i < 2 else j, j], "is compared"),
        (lambda x: lambda i, j: x[i + 1, j], "outside of it"),
        (lambda x: lambda i, j: Sum(lambda k: x[i, 0 * k]), "range of variable 'k'"),
        (lambda x: (lambda i, j: x[i, j], lambda i: 0), "it has 2 outputs, the call 1"),
        (lambda: lambda i, j: 0, "does not take the arguments"),
        (lambda x: lambda i, j: x[i:, j], "one end"),
        (lambda x: lambda i, j: x[:i, j], "one end"),
        (lambda x: lambda i, j: x[::2, j], "step"),
        (lambda x: lambda i, j: Sum(lambda i: x[i, j]), "index 'i' of a reduction is one of the"),
        (lambda x: lambda i, j: Sum(lambda k: Max(lambda k: x[i, k])), "the index 'k'"),
        (lambda x: lambda i, j: Max(lambda k: x[i, k]) + Once(x[i, j], {}), "is used with max"),
        (lambda x: lambda i, j: Mean(lambda k: x[i, k]) - Once(x[i, j], {}), "used with mean"),
        (lambda x: lambda i, j: Once(x[i, j], {}) + 2 * Prod(lambda k: x[i, k]), "used with prod"),
        (lambda x: lambda i, j: Sum(lambda k: x[i, k]) * Once(x[i, j], {}), "used with 'mul'"),
    ],
)  # fmt: skip
def test_errors_teach(function: Any, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        described(function, (4, 4))


@pytest.mark.parametrize("shape", [(4,), None])
@pytest.mark.parametrize("is_described", [True, False])
def test_a_result_that_is_not_computed_has_no_layout(
    shape: tuple[int, ...] | None, is_described: bool
) -> None:
    """By the call or by the description."""
    second = (lambda j: 0) if is_described else None
    (found,) = described(
        lambda x: (lambda i: Max(lambda k: x[i, k]), second), (4, 1), outputs=((4,), shape)
    )[:1]
    is_computed = shape is not None and is_described
    assert (found.loop, found.outputs) == ("i", (Cut(0), Whole() if is_computed else None))


def test_calls_on_numbers_alone_cannot_be_cut() -> None:
    made = call("aten.add.Tensor", "x", "y", outputs=((),), x=(), y=())
    assert strategies(made) == ()
    assert loops_of(made) == []


def test_points_of_a_cut_keep_to_multiples() -> None:
    """Each of four elements three times: a cut after four results would need one of them twice."""

    @describe("test::repeat_each")
    def repeat_each(x: Any) -> Any:
        return lambda i: x[i // 3]

    made = call("test::repeat_each", "x", outputs=((12,),), x=(4,))
    description = description_of(made.kind)
    assert description is not None
    known = description, *analyse(description, made)
    assert boxes(worker_ops_of(*known, "i", 2, (0, 3, 12)), "x") == [((0, 1),), ((1, 4),)]
    assert worker_ops_of(*known, "i", 2, (0, 4, 12)) is None


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([(0, 2), (2, 5)], True), ([(0, 2), (2, 4)], False), ([(0, 2), (3, 5)], False),
     ([(0, 3), (2, 5)], False), ([(1, 2), (2, 5)], False), ([(2, 5), (0, 2)], False),
     ([(0, 5), (0, 5)], False), ([(0, 1), (1, 2), (2, 5)], True)],
)  # fmt: skip
def test_boxes_tile_a_tensor_in_order_without_gaps(
    rows: list[tuple[int, int]], expected: bool
) -> None:
    """Along either dim of 5 x 5, if the other is whole."""
    whole, part = (0, 5), (0, 4)
    assert tile([(row, whole) for row in rows], (5, 5)) == expected
    assert tile([(whole, row) for row in rows], (5, 5)) == expected
    assert not tile([(row, part) for row in rows], (5, 5))
    assert not tile([(part, row) for row in rows], (5, 5))


def test_a_loop_of_two_lengths_is_an_error() -> None:
    function = lambda x: (lambda i: x[i, 0], lambda i: x[0, i])  # noqa: E731
    with pytest.raises(DescriptionError, match=r"runs over dims of sizes \[4, 5\]"):
        described(function, (4, 5), outputs=((4,), (5,)))


def test_reductions_inside_of_functions_are_not_cut() -> None:
    """A softmax written out: its sum is no partial result of the whole."""
    exp = Opaque("exp")
    found = described(lambda x: lambda i, j: exp(x[i, j]) / Sum(lambda k: exp(x[i, k])), (4, 4))
    assert [strategy.loop for strategy in found] == ["i"]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_only_known_reducers_are_combined(rank: int) -> None:
    """A quotient of sums, such as a weighted mean, is one number or nothing that plans can add."""
    known = {"sum", "mean", "max", "min", "prod", None}
    assert {r for r in (*known, "quotient", "logaddexp") if can_combine(r, rank)} == (
        known | {"quotient"} if rank == 0 else known
    )


def test_attributes_become_local() -> None:
    function = lambda x: Local(lambda i, j: x[i, j], x=None)  # noqa: E731
    describe("test::made")(function)
    ops = partition(call("test::made", "x", outputs=((4, 4),), x=(4, 4)), "i", 2)
    assert ops is not None
    assert [(op.call.args, op.regions) for op in ops] == [((None,), {})] * 2


@pytest.mark.parametrize(
    "args", [(3, {"tensor": "b"}, {"tensor": "c"}), ({"tensor": "a"}, [{"tensor": "b"}], "x")]
)
def test_arguments_of_a_wrong_type_are_told(args: tuple[Any, ...]) -> None:
    """A file may give anything; what a description raises on it is no bare exception."""
    shapes = {name: (4, 4) for name in "abc" if f"'{name}'" in repr(args)}
    call = Call("aten.addmm.default", args, {}, shapes, ((4, 4),))
    with pytest.raises(DescriptionError, match=r"'aten.addmm'.* does not take these arguments"):
        strategies(call)


def loops_of(made: Call) -> list[str]:
    """What can be cut of a call, and combined, by two workers."""
    found = [loop for loop in axis_strategies_of(intern_call(made), 2).places if loop is not None]
    assert set(found) <= set(cuttable_loops(intern_call(made)))
    return found


def test_an_input_that_is_needed_cut_and_whole_at_once_is_not_cut() -> None:
    """Column 0 by rows and row 0 by columns: a call takes one part of x."""
    made = call("test::cross", "x", outputs=((4, 6),), x=(4, 4, 6))

    @describe("test::cross")
    def cross(x: Any) -> Any:
        return lambda i, j: x[i, 0, j] + x[0, i, j]

    assert list(by_loop(made)) == loops_of(made) == ["j"]
    assert partition(made, "i", 2) is None


def test_a_loop_is_cut_only_if_all_that_it_leaves_in_parts_can_be_combined() -> None:
    strange = Reducer("strange")

    @describe("test::two")
    def two(x: Any) -> Any:
        return lambda i: Sum(lambda k: x[i, k]), lambda i: strange(lambda k: x[i, k])

    made = call("test::two", "x", outputs=((4,), (4,)), x=(4, 6))
    assert list(by_loop(made)) == ["i", "k"]
    assert loops_of(made) == ["i"]


def test_a_reduction_inside_of_another_kind_is_not_cut() -> None:
    """The greatest of sums: parts of the sums have no greatest that would help."""

    @describe("test::norm")
    def norm(x: Any) -> Any:
        return lambda i: Max(lambda j: Sum(lambda k: x[i, j, k]))

    made = call("test::norm", "x", outputs=((4,),), x=(4, 6, 8))
    assert list(by_loop(made)) == loops_of(made) == ["i", "j"]


def test_a_variable_that_runs_over_two_sizes_is_a_wrong_description() -> None:
    @describe("test::product")
    def product(x: Any, y: Any) -> Any:
        return lambda i, j: Sum(lambda k: x[i, k] * y[k, j])

    right = call("test::product", "x", "y", outputs=((4, 3),), x=(4, 6), y=(6, 3))
    assert loops_of(right) == ["i", "j", "k"]
    wrong = call("test::product", "x", "y", outputs=((4, 3),), x=(4, 6), y=(5, 3))
    assert loops_of(wrong) == []


def test_a_description_that_reads_one_size_is_run_for_each() -> None:
    """Whoever reads the size of one of two inputs: what is known of it is of that size."""

    @describe("test::repeated")
    def repeated(x: Any, y: Any) -> Any:
        times = 12 // x.shape[0]
        return lambda i: x[i // times] + y[i]

    for n in (3, 4, 6):
        made = call("test::repeated", "x", "y", outputs=((12,),), x=(n,), y=(12,))
        ops = partition(made, "i", 2)
        assert boxes(ops, "x") == [((0, n // 2),), ((n // 2, n),)]
        assert boxes(ops, "y") == [((0, n // 2 * 12 // n),), ((n // 2 * 12 // n, 12),)]


def test_of_arguments_tensors_alone_are_taken_for_tensors() -> None:
    """A dictionary with other keys is one of the op's own."""
    value = [
        {"tensor": "a"},
        {"tensor": "b", "dim": 1},
        {"dtype": "float32"},
        3,
        ({"tensor": "c"},),
    ]
    seen: list[tuple[str, str]] = []

    def noted(name: str, slot: str) -> str:
        seen.append((name, slot))
        return name.upper()

    walked = walk(value, "x", noted)
    assert walked == ["A", {"tensor": "b", "dim": 1}, {"dtype": "float32"}, 3, ["C"]]
    assert seen == [("a", "x.0"), ("c", "x.4.0")]
