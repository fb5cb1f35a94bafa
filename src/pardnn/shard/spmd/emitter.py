"""The emitter: collects the ops of the SPMD partitioner, by device, and the messages.

It keeps the order of each device and gives unique names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Graph, MemoryKind, Op, Tensor, addressed, storage_owners, writes
from pardnn.plan.mesh import Box, Layout, owned_boxes
from pardnn.plan.plan import Message
from pardnn.shard.boxes import bytes_of, lengths, local_strides, new_strides
from pardnn.shard.partition.regions import Region
from pardnn.shard.sharding import Sharding
from pardnn.time_limit import check_time

Shape = tuple[int, ...] | None


class ShardedTensor(NamedTuple):
    """A tensor as the devices hold it.

    Attributes:
        tensor: The whole one.
        names: By device, the name of its local tensor, None where there is none.
        boxes: By device, what that is of the whole; it may be out of bounds.
    """

    tensor: Tensor
    names: tuple[str | None, ...]
    boxes: tuple[Box | None, ...]


class Anchor(NamedTuple):
    """Where in the step ops are inserted, and until when sends are held.

    Attributes:
        op: The op of the graph beside which they are inserted.
        hold: By device, the op after which it waits for what it sent; None: the sent slice's own.
    """

    op: Op
    hold: tuple[str | None, ...]


@final
class Emitter:
    """The partitioned graph while it is written: ops by device, messages, names.

    Args:
        graph: The graph.
        sharding: The decision.
        in_turn: Receive the slices of a region one after the other.
        reuse: Number of ops of the graph for which a fetched region is kept for another consumer.
        relay_axes: How many of the first mesh axes slices cross once per group; 0 if `in_turn`.
        in_place: Receive slices into the buffers of fetches if they are one run of memory.

    Raises:
        InvalidPlanError: E410, if a layout is impossible.
    """

    def __init__(
        self,
        graph: Graph,
        sharding: Sharding,
        *,
        in_turn: bool = False,
        reuse: int = 0,
        relay_axes: int = 0,
        in_place: bool = True,
    ) -> None:
        self.in_turn = in_turn
        self.in_place = in_place
        # A relay that receives in turn may wait for a device that waits for it.
        self.relay_axes = 0 if in_turn else relay_axes
        self.reuse = reuse
        self.now = 0
        # What was fetched last of a tensor: when, and under which name by device.
        self.fetched: dict[tuple[str, tuple[Region | None, ...]], tuple[int, list[str | None]]] = {}
        self.graph = graph
        self.sharding = sharding
        self.mesh = sharding.mesh
        self.devices = range(self.mesh.size)
        self.tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
        self.owners = storage_owners(graph.ops)
        # Storages whose views must be local: one that is written, or addressed by an offset.
        self.written = {
            self.owners[name] for op in graph.ops for name in (*writes(op), *addressed(op))
        }
        self.boxes = {name: self._boxes(tensor) for name, tensor in self.tensors.items()}
        self._whole = (None,) * len(self.mesh.shape)
        self.ops: list[Op] = []
        # Of each of them, the position in the topological order of the op that it stands beside.
        self.beside: list[int] = []
        self.names: set[str] = set()
        self.rows: list[list[str]] = [[] for _ in self.devices]
        self.messages: list[Message] = []
        self.helpers: dict[tuple[str, int], list[str]] = {}
        # Local tensors that are strided, though they are dense in the graph.
        self.strided: set[str] = set()
        self._counts: dict[str, int] = {}
        self._owned: dict[str, ShardedTensor] = {}
        self._taken = {op.name for op in graph.ops} | self.tensors.keys()

    def _boxes(self, tensor: Tensor) -> tuple[Box, ...]:
        check_time()
        shape = tensor.shape or ()
        layout = self.sharding.layouts.get(tensor.name, ())
        layout = layout if shape and layout else (None,) * len(self.mesh.shape)
        found = owned_boxes(shape, layout, self.mesh)
        if found is None:
            raise InvalidPlanError(
                f"tensor {shown(tensor.name)} of shape {list(shape)} cannot have the layout "
                f"{layout} on a mesh {self.mesh.shape}: some device would hold nothing of it.\n"
                "Leave it whole (None) along that axis."
            )
        return found

    def layout(self, name: str) -> Layout:
        """Return the layout of a tensor; numbers are whole everywhere."""
        found = self.sharding.layouts.get(name) if self.tensors[name].shape else None
        return found or self._whole

    def fresh(self, base: str) -> str:
        """Return an unused name, without its device."""
        name = base
        while name in self._taken:
            self._counts[base] = self._counts.get(base, 1) + 1
            name = f"{base}.{self._counts[base]}"
        self._taken.add(name)
        return name

    def own(self, name: str) -> ShardedTensor:
        """Return a tensor of the graph as its owners hold it."""
        found = self._owned.get(name)
        if found is None or found.boxes is not self.boxes[name]:
            names = tuple([f"{name}@{device}" for device in self.devices])
            found = self._owned[name] = ShardedTensor(self.tensors[name], names, self.boxes[name])
        return found

    def may_leave(self, tensor: Tensor) -> bool:
        """Whether views of a tensor are made where it is, and read on other submeshes, too."""
        return not self.in_place and self.owners[tensor.name] in self.written

    def emit(self, device: int, op: Op) -> None:
        """Append an op to the list of its device."""
        self.ops.append(op)
        self.beside.append(self.now)
        self.names.add(op.name)
        self.rows[device].append(op.name)

    def helper(
        self,
        device: int,
        name: str,
        kind: str,
        args: list[Any],
        inputs: Sequence[str],
        output: Tensor,
        anchor: Anchor,
        *,
        memory: MemoryKind = "normal",
        workspace: int = 0,
        more: dict[str, Any] | None = None,
        after: tuple[str, ...] = (),
    ) -> str:
        """Append an op that moves a tensor of the graph.

        If the storage is written in place, the op comes after everything that its consumer comes
        after, and before the write (see `after`).

        Args:
            device: Where it runs.
            name: Of the op.
            kind: `pardnn.slice`, `pardnn.fetch` and the like.
            args: Encoded positional arguments.
            inputs: Names of the local tensors that it reads.
            output: The local tensor that it makes.
            anchor: Where it stands.
            memory: Of the op.
            workspace: Bytes.
            more: Further entries of the op's arguments.
            after: Further ops of the device that it comes after.

        Returns:
            The name of the output.
        """
        op = anchor.op
        if memory == "normal" and op.memory == "residual" and is_result(op, output, device):
            memory = "residual"  # of a tensor that outlives the step, this is the one that does
        self.emit(
            device,
            Op(
                name=name, kind=kind, inputs=tuple(dict.fromkeys(inputs)), outputs=(output,),
                after=(*self.after(op, device), *after), memory=memory, workspace=workspace,
                source=op.source, module=op.module, step=op.step,
                arguments={"args": args, **(more or {})},
            ),
        )  # fmt: skip
        self.helpers.setdefault((op.name, device), []).append(name)
        return output.name

    def after(self, op: Op, device: int) -> tuple[str, ...]:
        """Return the ops that must come before a device's local op although it does not read them.

        The control dependencies of the graph, kept on each device (Tofu, section 6 and Fig. 7).
        """
        if not op.after:
            return ()
        found: list[str] = []
        for name in op.after:
            found += self.helpers.get((name, device), [])
            if f"{name}@{device}" in self.names:
                found.append(f"{name}@{device}")
        return tuple(found)

    def send(
        self,
        tensor: str,
        source: int,
        target: int,
        before: str,
        hold: str,
        into: str | None = None,
    ) -> None:
        """Append a message.

        Args:
            tensor: The local tensor that is sent.
            source: Its device.
            target: The receiver.
            before: The receiver's op before which the receive is posted.
            hold: The sender's op after which it waits for the send.
            into: The receiver's buffer into which it is received in place; a new one if None.
        """
        self.messages.append(
            Message(
                tensor=tensor,
                source=source,
                target=target,
                post_before=before,
                hold_until=hold,
                into=into,
            )
        )


def is_result(op: Op, output: Tensor, device: int) -> bool:
    """Whether a local tensor is a result of an op, in its final layout."""
    return any(output.name == f"{tensor.name}@{device}" for tensor in op.outputs)


def local_tensor(tensor: Tensor, name: str, box: Box, alias: str | None = None) -> Tensor:
    """Return the local tensor of a device.

    Args:
        tensor: The whole one.
        name: Of the local one.
        box: What it is of the whole.
        alias: The local tensor that it is a view of; it is a new, dense one if None.
    """
    size, shape, strides = _local_form(
        tensor.bytes, tensor.shape, tensor.strides, lengths(box), alias is None
    )
    return Tensor(
        name=name, bytes=size, shape=shape, dtype=tensor.dtype, strides=strides, alias_of=alias
    )


@functools.lru_cache(maxsize=1 << 14)
def _local_form(
    size: int, whole: Shape, strides: Shape, shape: tuple[int, ...], is_new: bool
) -> tuple[int, Shape, Shape]:
    """Return bytes, shape and strides of a local tensor."""
    tensor = Tensor(name="", bytes=size, shape=whole, strides=strides)
    strides = (new_strides if is_new else local_strides)(tensor, shape)
    return (size, None, strides) if whole is None else (bytes_of(tensor, shape), shape, strides)


def box_list(box: Box) -> list[list[int]]:
    """Return a box as data."""
    return [list(ends) for ends in box]


def number(value: float | None) -> Any:
    """Return a number as data: JSON has no infinities."""
    if value is None or value - value == 0:
        return value
    return {"float": "nan" if value != value else "inf" if value > 0 else "-inf"}
