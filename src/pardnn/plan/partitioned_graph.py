"""The partitioned graph of a sharded plan: the ops of every device, as a graph of its own.

Idea: op "h" of the graph becomes the local ops "h@0" to "h@3", one per device, with localised
arguments and shapes; what a device needs of others is sliced (`pardnn.slice`), travels as a
message, and is assembled (`pardnn.fetch`) or reduced (`pardnn.reduce`). So a sharded plan is a
placement of this graph, and the checker, the simulator, the memory proof and the runtime know
nothing of sharding.

| kind | arguments `args` | result |
| --- | --- | --- |
| `pardnn.slice` | tensor, box | a view: the box, in indices of the local tensor |
| `pardnn.fetch` | shape, fill or None, [[tensor, box], ...] | new, each tensor copied to its box |
| `pardnn.reduce` | name, [tensors], weights or None | new, combined in this order |
| `pardnn.update` | tensor, box, source | the box of the tensor is overwritten in place |
| `pardnn.join` | tensor, [[tensor, box], ...] | the first tensor, the others in their boxes |
| `pardnn.draw` | kind, args, kwargs, boxes | of the random op on the whole, cut |

- Shape, dtype and strides of a new tensor are those of the op's output. Fill is a number, or
  `{"float": "-inf"}`; elements that no tensor covers have it, or with None no meaning.
- A join completes what a fetch began: the fetch makes the buffer and fills in what is here, the
  rest is received in place, by messages `into` the buffer, before the join. So remote regions need
  no memory but the buffer. Only joins and updates read such a buffer. A box that is received in
  place is one run of the buffer's memory; tensors of other boxes are received on their own, and put
  in by a fetch or an update.
- Reducers are "sum", "max", "min", "prod", "mean", which is the sum of `weights[i] * tensors[i]`,
  and "quotient", of two tensors.
- A draw calls `kind` with `args` and `kwargs`, in which `{"ones": [shape, dtype, strides or None]}`
  is a new tensor of ones (into which an in-place kind draws), and keeps of each result the box in
  `boxes`, None for a result that no device needs. Draws with the same `arguments["of"]`, one per
  device, are one draw of the generator. Its workspace is the whole.
- `arguments["collective"]` of a fetch or a reduce names the collective that it is part of:
  `{"collective": "all_gather", "axis": "m0", "dim": 1}`; also "reduce_scatter", "all_reduce",
  "all_to_all", "halo" and "slice"; axis and dim are None where it is not along one axis.

Sources ("w@2") carry `arguments["shard"] = {"of": "w", "box": [[0, 8], [16, 32]]}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pardnn.cluster import STRICT
from pardnn.errors import UnsupportedError, shown
from pardnn.graph.ir import Graph, Op, is_in_group
from pardnn.plan.mesh import Mesh

SLICE, FETCH, REDUCE, UPDATE, JOIN, DRAW = (
    f"pardnn.{name}" for name in ("slice", "fetch", "reduce", "update", "join", "draw")
)

#: A sum, and what its local ops are where they are made in the first term.
ADD, ADD_IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """What a sharded plan does with each tensor.

    Attributes:
        mesh: The devices as a grid; of a mixed plan those of one submesh.
        sharding: Tensor of the graph to its layout in DTensor's words, one per mesh axis;
            "Partial()" of a sum of pieces of which each device along an axis holds a term.
        ops: Of all devices; the plan's placement, order and messages are of these.
        loops: Op of the graph to the loop that is cut at each mesh axis, None where there is none;
            an op that is absent runs whole everywhere. The ops of all devices follow from these,
            the layouts and the next three. None in a plan that does not say.
        in_turn: Whether the slices of a region are received one after the other.
        reuse: Ops of the graph for which a fetched region is kept for another reader.
        relay_axes: Of the first mesh axes, how many slices cross once per group.
        sums_in_place: Whether local sums are `ADD_IN_PLACE` where nothing else reads their first
            terms.
        submeshes: How many meshes of this kind the devices make up, one after the other. Where
            there are several, the plan is mixed: the ops of one position are those of its device on
            any submesh, all local ops of an op on one, and nothing is received in place.
    """

    __pydantic_config__ = STRICT

    mesh: Mesh
    sharding: Mapping[str, tuple[str, ...]]
    ops: tuple[Op, ...]
    loops: Mapping[str, tuple[str | None, ...]] | None = None
    in_turn: bool = False
    reuse: int = 0
    relay_axes: int = 0
    sums_in_place: bool = False
    submeshes: int = 1

    def __hash__(self) -> int:
        """Hash by mesh and size: hashing the ops would cost as much as reading them."""
        return hash((self.mesh, len(self.ops)))


def is_partitioned(graph: Graph) -> bool:
    """Return whether a graph is partitioned: its sources then say which shards they are."""
    return any("shard" in (op.arguments or {}) for op in graph.ops if op.is_source)


def filled_later(ops: Iterable[Op]) -> frozenset[str]:
    """Return the tensors that joins and updates read: messages may go into buffers among them."""
    return frozenset(name for op in ops if op.kind in (JOIN, UPDATE) for name in op.inputs)


def written_inputs(graph: Graph) -> list[str]:
    """Return the batch tensors that a step writes in place, which its caller reads afterwards."""
    return [
        op.name for op in graph.ops if op.kind == "input" and (op.arguments or {}).get("written")
    ]


def check_batch_is_read_only(graph: Graph) -> None:
    """Check that the step does not write its batch: each device would hold a shard of the result.

    Raises:
        UnsupportedError: E823, naming the tensor.
    """
    written = written_inputs(graph)
    if written:
        what, instead = "the batch tensor", "let the step write a copy"
        if is_in_group(written[0]):  # read at each call, as a learning rate is
            what, instead = "the tensor of a group", 'keep it in optimizer.state["name"]'
        elif "." in written[0]:  # an average of weights is no batch, but holds no model either
            holder = shown(written[0].partition(".")[0])
            instead += f".\nIf {holder} is state, let the step find it as a global or in an "
            instead += "attribute of the model: what is passed counts as batch"
        raise UnsupportedError(
            f"the step writes {what} {shown(written[0])} in place, so its ops cannot be cut.\n"
            f"Place whole ops (--algorithm auto-whole), or {instead}.",
            code="E823",
            details={"inputs": written},
        )
