"""The ops of a cut graph while it is written, and their order in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pardnn.graph.ir import MemoryKind, Op, Tensor
from pardnn.plan.mesh import Box
from pardnn.plan.piece_order import piece_by_piece
from pardnn.shard.boxes import bytes_of, lengths, new_strides


@dataclass
class Sheet:
    """What has been written.

    Attributes:
        ops: In an order in which they can run.
        piece: Of each op that is a piece of an op of the graph.
    """

    ops: list[Op] = field(default_factory=list)
    piece: dict[str, int] = field(default_factory=dict)

    def helper(
        self,
        name: str,
        kind: str,
        args: list[Any],
        inputs: Sequence[str],
        output: Tensor,
        beside: Op,
        *,
        memory: MemoryKind = "normal",
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Append a helper op, with position and source line of an op of the graph beside it."""
        arguments: dict[str, Any] = {"args": args, **({"kwargs": kwargs} if kwargs else {})}
        self.ops.append(
            Op(
                name=name, kind=kind, inputs=tuple(dict.fromkeys(inputs)), outputs=(output,),
                memory=memory, source=beside.source, module=beside.module, step=beside.step,
                arguments=arguments, seconds=None if beside.seconds is None else
                dict.fromkeys(beside.seconds, 0.0),
            )
        )  # fmt: skip


def new_tensor(tensor: Tensor, name: str, box: Box | None = None) -> Tensor:
    """Return a dense tensor with its own storage, as large as another one or a box of it."""
    shape = tensor.shape if box is None else lengths(box)
    strides = None if shape is None else new_strides(tensor, shape)
    size = tensor.bytes if shape is None else bytes_of(tensor, shape)
    return Tensor(name=name, bytes=size, shape=shape, dtype=tensor.dtype, strides=strides)


def in_order(sheet: Sheet) -> tuple[Op, ...]:
    """Return all ops, one piece after the other: the order that needs least memory."""
    ops = sheet.ops
    maker = {tensor.name: i for i, op in enumerate(ops) for tensor in op.outputs}
    number = {op.name: i for i, op in enumerate(ops)}
    pairs = [
        (source, i)
        for i, op in enumerate(ops)
        for source in {*(maker[name] for name in op.inputs), *(number[name] for name in op.after)}
    ]
    piece = np.array([sheet.piece.get(op.name, -1) for op in ops], dtype=np.int64)
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return tuple(ops[i] for i in piece_by_piece(edges, piece, np.arange(len(ops))).tolist())
