"""Loop cuts: the boxes and local calls that they give are those of the workers' ops."""

import itertools
import math

import pytest

from pardnn.shard.aten.lookup import description_of
from pardnn.shard.cache import forget
from pardnn.shard.partition.analysis import analyse
from pardnn.shard.partition.axis_strategies import axis_strategies_of
from pardnn.shard.partition.interning import (
    classified,
    cuttable_loops,
    intern_call,
    interned_call,
)
from pardnn.shard.partition.shape_class import loop_nest_of
from pardnn.shard.partition.worker_ops import worker_ops_of
from pardnn.shard.search.coarsening import op_calls
from testbed.hand_graphs import Steps, conv1d, mlp
from tests.shard.partition.test_kept_strategies import ALL

pytestmark = pytest.mark.jit


def _padded():
    """Ops whose workers call with other padding, other sizes, or without the bias."""
    g = Steps()
    x, w = g.source("x", (6, 4, 11), "input"), g.source("w", (8, 4, 4))
    b = g.source("b", (8,))
    args = [x, w, b, [2], [1], [1], False, [0], 1]
    y = g.call("y", "aten.convolution.default", args, (6, 8, 5))
    g.call("z", "aten.view.default", [y, [6, 40]], (6, 40))
    return g.graph()


@pytest.mark.parametrize("graph", [conv1d(8, 6, 10, 32, 3), mlp(6, 10, 7, 9), _padded()])
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_loop_cuts_give_the_local_ops(graph, num_workers):
    forget()
    assert assert_cuts({call.number for call in op_calls(graph)}, num_workers) > 4


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", ALL)
def test_all_kinds_of_loop_cuts_give_the_local_ops(name, num_workers):
    forget()
    assert_cuts({intern_call(ALL[name])}, num_workers)


def assert_cuts(numbers, num_workers):
    todo = [(number, 0) for number in numbers]
    count = 0
    while todo:
        number, depth = todo.pop()
        call, axis_strategies = interned_call(number), axis_strategies_of(number, num_workers)
        description = description_of(call.kind)
        if description is None:
            assert list(axis_strategies.places) == [None]
            continue
        known = description, *analyse(description, call)
        assert list(axis_strategies.places)[-1] is None
        for loop in cuttable_loops(number):
            ops = worker_ops_of(*known, loop, num_workers)
            assert (loop in axis_strategies.places) == (ops is not None)
            if ops is None:
                continue
            rows = axis_strategies.boxes[axis_strategies.places[loop]].tolist()
            for op, box_row, local in zip(ops, rows, axis_strategies.calls(loop), strict=True):
                assert intern_call(op.call) == local
                assert_boxes(axis_strategies, loop, op, box_row)
                count += 1
                todo += [(local, depth + 1)] if depth < 1 else []
            reducers = [result and result.reducer for result in ops[0].results]
            assert axis_strategies.flags[loop] == tuple(r is not None for r in reducers)
            assert_tiles(call, ops)
        assert axis_strategies.out_of_bounds == is_outside(axis_strategies, call)
    return count


def is_outside(axis_strategies, call):
    """Whether a box of what is cut begins before its tensor, or ends after it."""
    dims = axis_strategies.dim_slices
    shapes = [*call.shapes.values(), *(s for s in call.outputs if s is not None)]
    slices = [*dims.inputs.values(), *(d for d in dims.outputs if d is not None)]
    return any(
        a < 0 or b > n
        for box, shape in zip(slices, shapes, strict=True)
        for loop in axis_strategies.boxes[..., box, :].tolist()
        for row in loop
        for (a, b), n in zip(row, shape, strict=True)
    )


def elements(box, shape):
    """The elements of a box that lie in a tensor."""
    return set(itertools.product(*(
        range(max(a, 0), min(b, n)) for (a, b), n in zip(box, shape, strict=True)
    )))  # fmt: skip


def assert_tiles(call, ops):
    """Workers make each element once, or all make all, where nothing combines what they make.

    Of sums a part may have no term: a window that skips elements gives these no gradient.
    """
    for number, shape in enumerate(call.outputs):
        results = [op.results[number] for op in ops]
        if results[0] is None or results[0].reducer is not None:
            continue
        made = [elements(result.box, shape) for result in results]
        assert len(set().union(*made)) == math.prod(shape)
        if made[0] != made[1]:
            assert sum(map(len, made)) == math.prod(shape)


def assert_boxes(axis_strategies, loop, op, box_row):
    for slot, dims in axis_strategies.dim_slices.inputs.items():
        region = op.regions.get(slot)
        none = [[0, 0]] * (dims.stop - dims.start)
        assert box_row[dims] == (none if region is None else [list(ends) for ends in region.box])
        assert region is None or region.content == axis_strategies.contents[loop][slot]
    for result, dims in zip(op.results, axis_strategies.dim_slices.outputs, strict=True):
        assert (result is None) == (dims is None)
        assert result is None or box_row[dims] == [list(ends) for ends in result.box]


def test_a_local_call_is_of_the_same_shape_class_until_a_size_is_one():
    forget()
    (number,) = (c.number for c in op_calls(mlp(4, 10, 7, 9)) if c.op.name == "h")
    halves = axis_strategies_of(number, 2).calls("i")
    quarters = axis_strategies_of(number, 4).calls("i")
    assert len({halves[0], halves[1]}) == len(set(quarters)) == 1
    assert classified(halves[0])[0] is classified(number)[0]
    assert classified(quarters[0])[0] is not classified(number)[0]
    assert interned_call(quarters[0]).outputs == ((1, 7),)


@pytest.mark.parametrize("shape", [(2,), (2, 2), (4, 1)])
def test_a_local_call_of_single_elements_is_of_a_class_of_its_own(shape):
    """Also where all dims that were longer become 1."""
    forget()
    g = Steps()
    g.source("x", shape, "input")
    g.call("y", "aten.relu.default", ["x"], shape)
    (call,) = op_calls(g.graph())
    strategies = axis_strategies_of(call.number, shape[0])
    for loop in strategies.places:
        for local in strategies.calls(loop):
            (sizes,) = interned_call(local).outputs
            assert sizes is not None
            is_same = [n == 1 for n in sizes] == [n == 1 for n in shape]
            assert (classified(local)[0] is classified(call.number)[0]) == is_same
            assert intern_call(interned_call(local)) == local
    assert_cuts({call.number}, shape[0])


def test_local_arguments_are_cached_where_they_follow_from_the_loop_alone():
    forget()
    graph = _padded()
    numbers = {call.op.name: call.number for call in op_calls(graph)}
    shape_class, dim_sizes = classified(numbers["y"])
    axis_strategies_of(numbers["y"], 2)
    nest = loop_nest_of(shape_class, dim_sizes)
    assert nest is not None
    assert nest.attributes["x0"] == ({"padding": [0]}, {"padding": [0]})
    assert nest.attributes["ci"] == ({}, {"bias": None})
    view, shape = classified(numbers["z"])
    axis_strategies_of(numbers["z"], 2)
    views = loop_nest_of(view, shape)
    assert views is not None
    assert set(views.attributes.values()) == {(None, None)}
