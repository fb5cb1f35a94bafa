"""Stencils: the boxes and local calls that they give are those of the pieces."""

import numpy as np
import pytest

from pardnn.shard.coarsen import op_calls
from pardnn.shard.cutting import _find_pieces, _stacked
from pardnn.shard.interned import KEPT, analysed, forget, loops_of
from pardnn.shard.partition import pieces_of
from tests.shard.hand import Steps, conv1d, mlp

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
def test_pieces_by_stencil_are_the_pieces(graph, parts):
    forget()
    todo = [(number, 0) for number in {call.number for call in op_calls(graph)}]
    count = 0
    while todo:
        number, depth = todo.pop()
        loops = loops_of(number)
        KEPT.halves.pop(number, None)  # which would be taken instead
        for axis in loops:
            known = analysed(number)
            pieces = pieces_of(*known, axis, parts)
            found = _find_pieces(number, axis, parts)
            assert (found is None) == (pieces is None)
            if found is None:
                continue
            wanted = _stacked(number, *known, pieces)
            assert np.array_equal(found.boxes, wanted.boxes)
            assert (found.calls, found.form) == (wanted.calls, wanted.form)
            assert (found.contents, found.reduced) == (wanted.contents, wanted.reduced)
            count += 1
            todo += [(local, depth + 1) for local in set(found.calls) if depth < 1]
    assert count > 4
