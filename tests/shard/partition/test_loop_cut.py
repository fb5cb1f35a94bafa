"""Stencils: the boxes and local calls that they give are those of the pieces."""

import pytest

from pardnn.shard.aten.lookup import description_of
from pardnn.shard.partition.analysis import analyse
from pardnn.shard.partition.axis_strategies import splits_of
from pardnn.shard.partition.interning import KEPT, forget, intern_call, interned, loops_of
from pardnn.shard.partition.pieces import pieces_of
from pardnn.shard.partition.shape_class import loops_in
from pardnn.shard.search.coarsening import op_calls
from testbed.hand_graphs import Steps, conv1d, mlp

pytestmark = pytest.mark.jit


def _padded():
    """Ops whose pieces call with other padding, other sizes, or without the bias."""
    g = Steps()
    x, w = g.source("x", (6, 4, 11), "input"), g.source("w", (8, 4, 4))
    b = g.source("b", (8,))
    args = [x, w, b, [2], [1], [1], False, [0], 1]
    y = g.call("y", "aten.convolution.default", args, (6, 8, 5))
    g.call("z", "aten.view.default", [y, [6, 40]], (6, 40))
    return g.graph()


@pytest.mark.parametrize("graph", [conv1d(8, 6, 10, 32, 3), mlp(6, 10, 7, 9), _padded()])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_splits_by_stencil_are_the_pieces(graph, parts):
    forget()
    todo = [(number, 0) for number in {call.number for call in op_calls(graph)}]
    count = 0
    while todo:
        number, depth = todo.pop()
        call, split = interned(number), splits_of(number, parts)
        description = description_of(call.kind)
        assert description is not None
        known = description, *analyse(description, call)
        assert list(split.loops)[-1] is None
        for axis in loops_of(number):
            pieces = pieces_of(*known, axis, parts)
            assert (axis in split.loops) == (pieces is not None)
            if pieces is None:
                continue
            rows = split.boxes[split.loops[axis]].tolist()
            for piece, row, local in zip(pieces, rows, split.calls(axis), strict=True):
                assert intern_call(piece.call) == local
                assert_boxes(split, axis, piece, row)
                count += 1
                todo += [(local, depth + 1)] if depth < 1 else []
            reducers = [share and share.reducer for share in pieces[0].shares]
            assert split.flags[axis] == tuple(r is not None for r in reducers)
    assert count > 4


def assert_boxes(split, axis, piece, row):
    for slot, dims in split.form.slots.items():
        region = piece.regions.get(slot)
        none = [[0, 0]] * (dims.stop - dims.start)
        assert row[dims] == (none if region is None else [list(ends) for ends in region.box])
        assert region is None or region.content == split.contents[axis][slot]
    for share, dims in zip(piece.shares, split.form.outputs, strict=True):
        assert (share is None) == (dims is None)
        assert share is None or row[dims] == [list(ends) for ends in share.box]


def test_a_piece_is_a_row_of_the_family_until_a_size_is_one():
    forget()
    (number,) = (c.number for c in op_calls(mlp(4, 10, 7, 9)) if c.op.name == "h")
    halves = splits_of(number, 2).calls("i")
    quarters = splits_of(number, 4).calls("i")
    assert len({halves[0], halves[1]}) == len(set(quarters)) == 1
    assert KEPT.calls[halves[0]][0] is KEPT.calls[number][0]
    assert KEPT.calls[quarters[0]][0] is not KEPT.calls[number][0]
    assert interned(quarters[0]).outputs == ((1, 7),)


def test_arguments_of_pieces_are_kept_where_they_follow_from_the_loop_alone():
    forget()
    graph = _padded()
    numbers = {call.op.name: call.number for call in op_calls(graph)}
    family, row = KEPT.calls[numbers["y"]]
    splits_of(numbers["y"], 2)
    loops = loops_in(family, row)
    assert loops is not None
    assert loops.attributes["x0"] == ({"padding": [0]}, {"padding": [0]})
    assert loops.attributes["ci"] == ({}, {"bias": None})
    view, shape = KEPT.calls[numbers["z"]]
    splits_of(numbers["z"], 2)
    views = loops_in(view, shape)
    assert views is not None
    assert set(views.attributes.values()) == {(None, None)}
