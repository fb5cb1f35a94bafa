"""Strategies as arrays beside those built device by device, as objects."""

import itertools
from typing import Any

import numpy as np
import pytest

from pardnn.graph.ir import Op, Tensor
from pardnn.plan.mesh import make_mesh, owned_boxes
from pardnn.shard.partition.call import Call, call_of
from pardnn.shard.partition.interning import classified, intern_call
from pardnn.shard.partition.mesh_strategies import (
    extend,
    mesh_strategy_of,
    owned_array,
    uncut,
)
from pardnn.shard.partition.per_device import local_ops
from pardnn.shard.partition.shape_class import is_exact
from pardnn.shard.partition.strategy import strategies


def call(kind: str, *args: Any, outputs: tuple[Any, ...], **shapes: Any) -> Call:
    """A call; strings among the arguments name tensors, as do those in lists."""

    def data(arg: Any) -> Any:
        if isinstance(arg, list):
            return [data(each) for each in arg]
        return {"tensor": arg} if isinstance(arg, str) else arg

    return Call(kind, tuple(data(arg) for arg in args), {}, shapes, outputs)


WINDOW = ([2], [1], [1], False, [0], 1)
CALLS = {
    "product": call("aten.mm.default", "x", "w", outputs=((8, 6),), x=(8, 12), w=(12, 6)),
    "uneven": call("aten.mm.default", "x", "w", outputs=((5, 3),), x=(5, 7), w=(7, 3)),
    "halo": call("aten.convolution.default", "x", "w", None, *WINDOW, outputs=((4, 6, 8),),
                 x=(4, 5, 15), w=(6, 5, 3)),
    "no gradient of the input": call(
        "aten.convolution_backward.default", "g", "x", "w", None, *WINDOW, [False, True, False],
        outputs=(None, (6, 5, 3), None), g=(4, 6, 8), x=(4, 5, 15), w=(6, 5, 3)),
    "softmax": call("aten._softmax.default", "x", 1, False, outputs=((6, 8),), x=(6, 8)),
    "broadcast": call("aten.add.Tensor", "x", "y", outputs=((4, 6),), x=(4, 6), y=(6,)),
    "square": call("aten.mul.Tensor", "x", "x", outputs=((4, 6),), x=(4, 6)),
    "sum": call("aten.sum.dim_IntList", "x", [0], True, outputs=((1, 6),), x=(9, 6)),
    "cat": call("aten.cat.default", ["x", "y"], 1, outputs=((4, 9),), x=(4, 6), y=(4, 3)),
    "view": call("aten.view.default", "x", [4, 3, 2], outputs=((4, 3, 2),), x=(4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 2, 2)], ids=str)
def test_arrays_hold_what_each_device_needs_and_makes(name: str, shape: tuple[int, ...]) -> None:
    whole, mesh = CALLS[name], make_mesh(shape)
    loops = [*(strategy.loop for strategy in strategies(whole)), None]
    possible = 0
    # Every seventh of many: 7 divides no number of loops here, so that all of them meet.
    step = 7 if len(loops) ** len(shape) > 60 else 1
    for axes in itertools.islice(itertools.product(loops, repeat=len(shape)), 0, None, step):
        found, expected = mesh_strategy_of(whole, axes, mesh), local_ops(whole, axes, mesh)
        assert (found is None) == (expected is None), axes
        if found is None or expected is None:
            continue
        possible += 1
        slots = found.dim_slices.inputs
        assert set(slots) == set(expected[0].regions)
        for slot, dims in slots.items():
            boxes = [local.regions[slot].box for local in expected]
            assert found.unclipped[0][:, dims].tolist() == np.array(boxes).tolist(), (axes, slot)
            content = any(bool(local.regions[slot].content) for local in expected)
            assert found.read(slot) == [content], (axes, slot)
        for number, dims in enumerate(found.dim_slices.outputs):
            results = [local.results[number] for local in expected]
            assert (dims is None) == (results[0] is None)
            if dims is not None and results[0] is not None:
                made = [result.box for result in results if result is not None]
                assert found.unclipped[0][:, dims].tolist() == np.array(made).tolist(), axes
                flags = [each is not None for each in results[0].reducers]
                assert list(found.reduced[0][number]) == flags, axes
        inside = (found.unclipped >= 0).all() and (found.unclipped <= found.sizes[:, None]).all()
        assert found.out_of_bounds or inside
        inner = np.clip(found.unclipped, 0, found.sizes[:, None])
        assert (found.boxes == inner).all()
    assert possible > len(shape)


def test_all_strategies_at_once_are_those_one_by_one() -> None:
    """Devices whose local calls differ cut only what all of them can; None is all alike."""
    for whole in CALLS.values():
        loops = [*(strategy.loop for strategy in strategies(whole)), None]
        found = extend(extend(uncut(intern_call(whole)), loops, 2), loops, 3)
        mesh = make_mesh((2, 3))
        alone = {axes: mesh_strategy_of(whole, axes, mesh)
                 for axes in itertools.product(loops, repeat=2)}  # fmt: skip
        assert set(found.axes) == {axes for axes, one in alone.items() if one is not None}
        for number, axes in enumerate(found.axes):
            one = alone[tuple(axes)]
            assert one is not None
            assert found.calls[number] == one.calls[0]
            assert (found.unclipped[number] == one.unclipped[0]).all()
            some = found.subset([number])
            assert (some.axes, some.reduced, some.contents) == ([axes], one.reduced, one.contents)


@pytest.mark.parametrize(
    ("name", "is_same"), [("square", True), ("view", True), ("broadcast", False), ("cat", False)]
)
def test_a_call_is_exact_where_it_makes_as_much_as_it_needs_of_each(
    name: str, is_same: bool
) -> None:
    assert is_exact(*classified(intern_call(CALLS[name]))) == is_same


def test_a_host_scalar_has_no_dims() -> None:
    """A tensor without a shape, as one of an op that was not captured."""
    tensors = {"x": Tensor(name="x", bytes=8), "y": Tensor(name="y", bytes=24, shape=(6,))}
    op = Op(name="y", kind="aten.full_like.default", inputs=("x",), outputs=(tensors["y"],))
    assert call_of(op, tensors).shapes == {"x": ()}
    assert call_of(op, tensors).outputs == ((6,),)


@pytest.mark.parametrize("shape", [(8,), (7, 5), (3, 1, 4)])
def test_what_devices_own_is_the_same_as_an_array(shape: tuple[int, ...]) -> None:
    for sizes in ((2,), (2, 3), (2, 2, 2)):
        for layout in itertools.product([*range(len(shape)), None], repeat=len(sizes)):
            expected, found = owned_boxes(shape, layout, make_mesh(sizes)), owned_array(
                shape, layout, sizes
            )  # fmt: skip
            assert (found is None) == (expected is None)
            assert found is None or found.tolist() == np.array(expected).tolist()
