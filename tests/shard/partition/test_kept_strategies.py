"""How calls are cut, loop by loop and worker by worker, is what is kept as text."""

import pytest

from pardnn.shard.partition.axis_strategies import axis_strategies_of
from pardnn.shard.partition.call import Call
from pardnn.shard.partition.interning import intern_call, interned_call
from pardnn.shard.partition.strategy import strategies
from pardnn.shard.partition.worker_ops import partition
from pardnn.shard.search.alignment import alignment_of
from tests.kept import assert_kept, check_sum
from tests.shard.partition.test_mesh_strategies import CALLS, WINDOW, call

#: One line each: what is special is the kind.
MORE = {
    "bmm": call("aten.bmm.default", "x", "w", outputs=((4, 6, 5),), x=(4, 6, 3), w=(4, 3, 5)),
    "addmm": call("aten.addmm.default", "b", "x", "w", outputs=((6, 8),), b=(8,), x=(6, 4),
                  w=(4, 8)),
    "strided": call("aten.slice.Tensor", "x", 0, 1, 9, 2, outputs=((4, 5),), x=(10, 5)),
    "transposed": call("aten.convolution.default", "x", "w", "b", [2, 1], [1, 0], [1, 1], True,
                       [1, 0], 1, outputs=((4, 6, 12, 8),), x=(4, 3, 6, 6), w=(3, 6, 3, 3), b=(6,)),
    "in groups": call("aten.convolution.default", "x", "w", None, [1], [0], [2], False, [0], 2,
                      outputs=((4, 6, 8),), x=(4, 4, 12), w=(6, 2, 3)),
    "gradients": call("aten.convolution_backward.default", "g", "x", "w", [6], *WINDOW,
                      [True, True, True], outputs=((4, 5, 15), (6, 5, 3), (6,)), g=(4, 6, 8),
                      x=(4, 5, 15), w=(6, 5, 3)),
    "pool": call("aten.max_pool2d_with_indices.default", "x", [3, 2], [2, 2], [1, 1],
                 outputs=((4, 5, 5), (4, 5, 5)), x=(4, 9, 8)),
    "layer norm": call("aten.native_layer_norm.default", "x", [6], "w", "b", 1e-5,
                       outputs=((4, 5, 6), (4, 5, 1), (4, 5, 1)), x=(4, 5, 6), w=(6,), b=(6,)),
    "mean": call("aten.mean.dim", "x", [1], False, outputs=((6, 4),), x=(6, 8, 4)),
    "greatest": call("aten.amax.default", "x", [0], True, outputs=((1, 6),), x=(8, 6)),
    "sums up to": call("aten.cumsum.default", "x", 1, outputs=((6, 8),), x=(6, 8)),
    "topk": call("aten.topk.default", "x", 3, 0, outputs=((3, 6), (3, 6)), x=(8, 6)),
    "rows": call("aten.embedding.default", "w", "i", outputs=((4, 7, 6),), w=(9, 6), i=(4, 7)),
    "gradient of rows": call("aten.embedding_dense_backward.default", "g", "i", 9, -1, False,
                             outputs=((9, 6),), g=(4, 7, 6), i=(4, 7)),
    "pad": call("aten.constant_pad_nd.default", "x", [1, 2], 0.0, outputs=((4, 9),), x=(4, 6)),
    "split": call("aten.split.Tensor", "x", 3, 1, outputs=((4, 3), (4, 3), (4, 2)), x=(4, 8)),
    "joined": call("aten.view.default", "x", [24], outputs=((24,),), x=(4, 6)),
    "expand": call("aten.expand.default", "x", [5, 4, 6], outputs=((5, 4, 6),), x=(4, 1)),
    "permute": call("aten.permute.default", "x", [2, 0, 1], outputs=((6, 4, 5),), x=(4, 5, 6)),
    "roll": call("aten.roll.default", "x", [2], [0], outputs=((8, 3),), x=(8, 3)),
    "flip": call("aten.flip.default", "x", [0], outputs=((8, 3),), x=(8, 3)),
    "repeat": call("aten.repeat.default", "x", [2, 3], outputs=((8, 18),), x=(4, 6)),
    "triangle": call("aten.tril.default", "x", 1, outputs=((6, 8),), x=(6, 8)),
    "gather": call("aten.gather.default", "x", 0, "i", outputs=((4, 6),), x=(8, 6), i=(4, 6)),
    "where": call("aten.where.self", "c", "x", "y", outputs=((6, 5),), c=(6, 5), x=(5,), y=(6, 1)),
    "zeros": call("aten.zeros_like.default", "x", outputs=((6, 5),), x=(6, 5)),
    "normal": call("aten.normal_functional.default", "x", outputs=((6, 5),), x=(6, 5)),
    "stack": call("aten.stack.default", ["x", "y"], 1, outputs=((4, 2, 6),), x=(4, 6), y=(4, 6)),
    "mean of all": call("aten.mean.default", "x", outputs=((),), x=(6, 8)),
    "undescribed": call("mylib::op", "x", outputs=((6, 8),), x=(6, 8)),
}  # fmt: skip
pytestmark = pytest.mark.jit  # no kernels: once is enough
ALL = CALLS | MORE


def lines_of(made: Call) -> list[str]:
    found: list[str] = []
    number = intern_call(made)
    shapes = {name: f"float32{list(shape)}" for name, shape in made.shapes.items()}
    found.append(f"{made.kind} of {shapes}: {alignment_of(number)}")
    for each in strategies(made):
        parts = ", ".join(f"{slot} {layout}" for slot, layout in each.inputs.items())
        found.append(f"{each.loop} of {each.extent}: {parts} -> {each.outputs}")
        for workers in (2, 3):
            ops = partition(made, each.loop, workers)
            found.append(f"  by {workers}: {'not' if ops is None else check_sum(*ops)}")
    for workers in (2, 3):
        cut = axis_strategies_of(number, workers)
        calls = [[interned_call(n) for n in cut.calls(loop)] for loop in cut.places]
        found.append(
            f"{workers} workers: {[*cut.places]}, {cut.out_of_bounds}, {cut.flags}, "
            f"{cut.contents}, {check_sum(cut.boxes)} {check_sum(*calls)}"
        )
    return found


@pytest.mark.parametrize("name", ALL)
def test_strategies_are_those_that_are_kept(name: str) -> None:
    assert_kept("strategies.txt", [name, *lines_of(ALL[name])])
