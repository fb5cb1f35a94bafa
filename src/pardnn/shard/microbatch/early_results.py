"""Results that need no values of any piece, so that pieces do not wait for each other.

Two kinds: an op that reads only the shape of its input (`ones_like` of the loss, where every
backward pass starts), and the number of rows that a mean loss divides by, which comes from the
targets alone and which every gradient needs. Also, the gradient of a mean over all elements becomes
that of their sum, applied to a gradient that is divided by their number once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.partitioned_graph import FETCH

#: Results that depend on the shape of their input alone, and what they are filled with; a number
#: is the position of the argument that says it.
FILLED: Mapping[str, float | str | None] = {
    "aten.empty_like": None, "aten.zeros_like": 0, "aten.ones_like": 1, "aten.full_like": "1",
    "aten.new_empty": None, "aten.new_zeros": 0, "aten.new_ones": 1, "aten.new_full": "2",
}  # fmt: skip
#: Mean losses whose second result is the number of rows that count: arguments 1, 2, 3 and 4 are
#: target, weight, reduction and the target that does not count.
COUNTING = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")

#: Gradients of means over all elements: where their calls say how to reduce.
MEANS: Mapping[str, int] = {
    "aten.mse_loss_backward": 3, "aten.smooth_l1_loss_backward": 3,
    "aten.huber_loss_backward": 3, "aten.soft_margin_loss_backward": 3,
    "aten.binary_cross_entropy_backward": 4,
}  # fmt: skip


def with_sums(graph: Graph) -> Graph:
    """Return a graph in which gradients of means are gradients of sums of a share.

    "h" then reads "h:share"; this is for ops that are cut, and ops that stay whole do not change.
    """
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    ops: list[Op] = []
    for op in graph.ops:
        ops += _summed(op, tensors)
    return graph if len(ops) == len(graph.ops) else build_graph(graph.name, ops)


def _summed(op: Op, tensors: Mapping[str, Tensor]) -> list[Op]:
    at, args = MEANS.get(op.kind.rpartition(".")[0], 0), list((op.arguments or {}).get("args", []))
    if not at or len(args) <= at or args[at] != 1:
        return [op]
    grad, number = tensors[args[0]["tensor"]], math.prod(tensors[args[1]["tensor"]].shape or ())
    if grad.shape != () or not number:
        return [op]
    name = f"{op.name}:share"
    share = Op(
        name=name, kind="aten.mul.Scalar", inputs=(grad.name,), source=op.source, module=op.module,
        outputs=(dataclasses.replace(grad, name=name, alias_of=None),),
        arguments={"args": [{"tensor": grad.name}, 1 / number]}, step=op.step,
        seconds=None if op.seconds is None else dict.fromkeys(op.seconds, 0.0),
    )  # fmt: skip
    args[0], args[at] = {"tensor": name}, 2
    inputs = tuple(dict.fromkeys((name, *(n for n in op.inputs if n != grad.name))))
    return [share, changed(op, inputs=inputs, arguments={**(op.arguments or {}), "args": args})]


def is_counting(op: Op) -> bool:
    """Whether the divisor of a mean loss depends on the targets alone."""
    arguments = (op.arguments or {}).get("args", [])
    is_known = (
        op.kind.rpartition(".")[0] in COUNTING and len(arguments) == 5 and op.memory != "residual"
    )
    return is_known and arguments[2] is None and arguments[3] == 1 and len(op.outputs) == 2


def filled(op: Op) -> Op | None:
    """Return an op with the same result that does not read its input; None if there is none."""
    kind = op.kind.rpartition(".")[0]
    if kind not in FILLED or len(op.outputs) != 1 or op.outputs[0].alias_of is not None:
        return None
    fill, args = FILLED[kind], (op.arguments or {}).get("args", [])
    if isinstance(fill, str):
        if len(args) <= int(fill) or not isinstance(args[int(fill)], int | float):
            return None
        fill = args[int(fill)]
    arguments = {"args": [list(op.outputs[0].shape or ()), fill, []]}
    return changed(op, kind=FETCH, inputs=(), arguments=arguments)


def changed(op: Op, **changes: Any) -> Op:
    """Return an op with some fields changed; the op itself if nothing differs."""
    is_same = all(getattr(op, name) == value for name, value in changes.items())
    return op if is_same else dataclasses.replace(op, **changes)
