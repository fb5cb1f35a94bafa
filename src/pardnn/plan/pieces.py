"""The batch of a step in pieces: microbatches, as a graph of its own.

The ops of the graph that are cut along the batch stand there once per piece, "h@0", "h@1" and so
on, with localised arguments and shapes; all others stand there as they are, and every name of the
graph is the name of the same whole value. So a plan with microbatches is a placement of this graph,
as a sharded plan is one of its partitioned graph (`plan.partitioned_graph`).

| op | kind | makes |
| --- | --- | --- |
| `t:slice@i` | `pardnn.slice` | piece i of what is whole, a view |
| `t:copy@i` | `pardnn.fetch` | piece i, copied where the view would have gaps |
| `t:join` | `pardnn.fetch` | the whole of its pieces |
| `h@i` | `aten.addmm_.default` | what a product `h` adds to the sum of the pieces before it |
| `t:add@i` | `aten.add_.Tensor` | the same for other partial results, in the storage of the first |
| `t:gather@i` | `aten.add_.Tensor` | the sum of accumulators up to the one that ends with piece i |
| `t:total` | `pardnn.reduce` | a copy of the sum of all pieces, whose storage is another's |
| `t:reduce` | `pardnn.reduce` | the whole of partial results that are no sum, or are returned |
| `t:divide` | `aten.div.Tensor` | a mean of sums |
| `t:rows`, `t:count` | `aten.ne.Scalar`, `aten.sum.default` | what a mean divides by |
| `h:share` | `aten.mul.Scalar` | the gradient by a mean of n elements, divided by n |
| `h:slot:blank@i` | `pardnn.fetch` | anything: only the shape is read |

An op whose result depends on the shape of its input alone may stand there as a `pardnn.fetch` of no
slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pardnn.cluster import STRICT
from pardnn.graph.ir import Op

#: What adds a partial result to another one in place.
ADD = "aten.add_.Tensor"
#: What makes a partial result and adds it to another one in place.
INTO: Mapping[str, str] = {
    "aten.mm.default": "aten.addmm_.default", "aten.bmm.default": "aten.baddbmm_.default",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """A step with its batch in pieces.

    Attributes:
        points: First sample of each piece, and the number of samples.
        batch: Of each tensor of the graph that is in pieces: the dim that runs over the samples,
            its elements per sample in a row, and how often the batch is there in a row: 16 tokens
            of 8 texts have it 16 times in a dim of 128. Such pieces are neither sliced nor joined.
        ops: Of the cut graph; the plan's placement, order and messages are of these.
    """

    __pydantic_config__ = STRICT

    points: tuple[int, ...]
    batch: Mapping[str, tuple[int, int, int]]
    ops: tuple[Op, ...]

    def __hash__(self) -> int:
        """Hash by pieces and size: hashing the ops would cost as much as reading them."""
        return hash((self.points, len(self.ops)))


def piece_of(name: str, piece: int) -> str:
    """Return the name of a piece of an op or a tensor."""
    return f"{name}@{piece}"


def piece_number(name: str) -> int:
    """Return the number of the piece that a name ends with; -1 if it ends with none."""
    _, at, piece = name.rpartition("@")
    return int(piece) if at and piece.isdecimal() and len(piece) < 6 else -1


def whole_name(name: str) -> str:
    """Return the name of what a name is a piece of; the name itself if it is of no piece."""
    return name if piece_number(name) < 0 else name.rpartition("@")[0]


def first_piece(name: str) -> str:
    """Return the name of the first piece of what a name is a piece of; the name itself if none."""
    return name if piece_number(name) < 0 else piece_of(whole_name(name), 0)
