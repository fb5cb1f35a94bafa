"""What strategies fetch of an operand, and where it is found in place."""

import numpy as np

from pardnn.shard.partition.call import Call
from pardnn.shard.partition.interning import intern_call
from pardnn.shard.partition.mesh_strategies import MeshStrategies, extend, uncut
from pardnn.shard.partition.strategy import strategies
from pardnn.shard.search.objective import TableRequest, fetches, not_local
from pardnn.shard.search.problem import Operand

X = {"tensor": "x"}
#: The product of a matrix with itself, and a tensor that is made after the sizes of another.
SQUARE = Call("aten.mm.default", (X, X), {}, {"x": (6, 6)}, ((6, 6),))
LIKE = Call("aten.zeros_like.default", (X,), {}, {"x": (6, 6)}, ((6, 6),))


def cut(call: Call) -> MeshStrategies:
    loops = [strategy.loop for strategy in strategies(call)]
    return extend(uncut(intern_call(call)), [*loops, None], 2)


def operand(*slots: str, outputs: tuple[int, ...] = (), shape: tuple[int, ...] = (6, 6)) -> Operand:
    return Operand(1, 0, tuple(range(len(shape))), shape, 4, slots, outputs, False)


def test_a_region_that_two_slots_need_is_fetched_once() -> None:
    found = cut(SQUARE)
    assert [axes for (axes,) in found.axes] == ["i", "j", "k", None]
    (one, all_of_it), (other, new) = fetches(found, operand("self", "mat2"))
    assert all_of_it is None
    assert new is not None
    # Rows of one and all of the other; all and columns; columns and rows; all and all.
    assert new.tolist() == [True, True, True, False]
    assert one[0].tolist() == [[[0, 3], [0, 6]], [[3, 6], [0, 6]]]
    assert other[1].tolist() == [[[0, 6], [0, 3]], [[0, 6], [3, 6]]]
    ((region, all_of_it),) = fetches(found, operand("mat2"))
    assert all_of_it is None
    assert (region == other).all()


def test_what_has_no_dims_or_is_not_read_is_not_fetched() -> None:
    assert list(fetches(cut(SQUARE), operand("self", shape=()))) == []
    found = cut(LIKE)
    assert (None,) in found.axes
    assert list(fetches(found, operand(*found.dim_slices.inputs))) == []


def test_an_operand_is_in_place_where_every_device_reads_and_makes_what_it_owns() -> None:
    """By rows: mat2 is needed whole; by columns: self is. Sums over k are of no one device."""
    found = cut(SQUARE)
    rows = [[[0, 3], [0, 6]], [[3, 6], [0, 6]]]
    columns = [[[0, 6], [0, 3]], [[0, 6], [3, 6]]]
    owned = np.array([rows, columns, [[[0, 6], [0, 6]]] * 2])
    for each, expected in (
        (operand("self"), [[0, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 0]]),
        (operand("mat2"), [[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0]]),
        (operand("self", outputs=(0,)), [[0, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]),
        (operand(outputs=(0,)), [[0, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0]]),
    ):
        request = TableRequest(each, found, owned, (2,))
        assert not_local(request).astype(int).tolist() == expected
