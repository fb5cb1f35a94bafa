"""The graph: one training step as a list of ops on tensors.

A graph is data. An op names the call it makes (`kind`) and holds the call's whole argument
structure (`arguments`), so a rank rebuilds every call from the file and needs no traced module.
Values are tensors and host scalars (`dtype` "host.int", "host.float" or "host.bool", 8 bytes).

A storage has one owner, the tensor with `alias_of` null that allocated it. Views and in-place
results alias it, own nothing, and extend its life.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pardnn.graph.csr import GraphArrays

MemoryKind = Literal["normal", "residual", "reference", "host"]
Seconds = Mapping[str, float]

#: Kinds that are no calls: their values exist before the step runs.
SOURCE_KINDS = frozenset({"input", "parameter", "buffer", "state", "constant"})

#: Kind of the op that marks the tensor whose value the step returns. It has no outputs.
LOSS_KIND = "pardnn.loss"

#: Kinds of the copies between a device and its host, and the only ops that read what is there.
FROM_HOST, TO_HOST = "pardnn.from_host", "pardnn.to_host"

#: Every value class below refuses unknown fields and wrong types when it is read from a file.
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

#: Bytes. Storages begin at multiples of it, and no vectorised kernel asks for more.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One output of an op.

    Attributes:
        name: Unique in the graph; any text.
        bytes: Of its elements; what a copy without gaps takes (see `span_bytes`).
        shape: Sizes of the dims; None where unknown.
        dtype: Such as "float32"; "host.int", "host.float", "host.bool" for host scalars.
        strides: In elements; None means contiguous.
        alias_of: The tensor whose storage this one shares; None if it owns its storage.
        misaligned_bytes: From the last multiple of `ALIGNMENT` in its storage to its first element.
    """

    __pydantic_config__ = STRICT

    name: str
    bytes: int
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    strides: tuple[int, ...] | None = None
    alias_of: str | None = None
    misaligned_bytes: int = 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor in elements, as torch states them."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * max(size, 1))
    return tuple(reversed(steps)) if shape else ()


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last, and what misaligns the first.

    That is what its own storage takes and what a message of it carries, because strides and
    alignment change the bits of sums and vectorised functions: a slice is sent with its gaps, an
    expanded tensor without repetitions. Of a dense tensor that owns its storage it is `bytes`.
    """
    if tensor.shape is not None and 0 in tensor.shape:
        return tensor.bytes
    if tensor.strides is None or not tensor.shape:
        return tensor.bytes + tensor.misaligned_bytes
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    span = tensor.bytes * (1 + sum(steps)) // math.prod(tensor.shape)
    return span + tensor.misaligned_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        name: Unique in the graph; any text.
        kind: A member of `SOURCE_KINDS`, or the call: "aten.mm.default", "mylib::op.default",
            "scalar.pow".
        inputs: Names of the tensors it reads.
        after: Names of ops that must have finished before it starts, without a data dependence.
        outputs: What it produces.
        memory: "residual" outlives the step, "reference" owns nothing (view, in-place result),
            "host" outlives the step in memory that is not the device's (`plan.rewritten.offload`).
        seconds: Duration per device type at speed 1. A type that is absent cannot run the op;
            None leaves the duration to a cost model.
        workspace: Bytes held only while the op runs.
        group: Ops of one group share a device.
        source: The user's "file.py:line".
        module: Path of the module it belongs to, such as "blocks.0.mlp".
        arguments: The call's argument structure, see `backends/torch/ops/codec.py`.
        backward_of: The forward op whose gradient this op computes.
        step: Index of the unrolled time step.
        position: Of a file alone: where the op stands in `Graph.ops`, wherever the file lists it.
    """

    __pydantic_config__ = STRICT

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    memory: MemoryKind = "normal"
    seconds: Seconds | None = None
    workspace: int = 0
    group: str | None = None
    source: str | None = None
    module: str | None = None
    arguments: dict[str, Any] | None = None
    backward_of: str | None = None
    step: int | None = None
    position: int | None = field(default=None, compare=False, repr=False)

    @property
    def is_source(self) -> bool:
        """Whether the op stands for a value that exists before the step runs."""
        return self.kind in SOURCE_KINDS


@dataclass(frozen=True)
class Graph:
    """A checked graph; make one with `build_graph`.

    Attributes:
        name: Any text.
        ops: In the order of the step where one is known; it need not be topological. Planners
            settle ties by it.
        arrays: The same graph as flat arrays, indices in the order of `ops`.
        is_captured: Whether it was captured in this process, so that its calls are those of the
            user's own step. A file cannot say so of itself.
    """

    name: str
    ops: tuple[Op, ...]
    arrays: GraphArrays = field(repr=False, compare=False)
    is_captured: bool = field(default=False, repr=False, compare=False)

    def __hash__(self) -> int:
        """Hash by name and size: hashing the ops would cost as much as reading them."""
        return hash((self.name, len(self.ops)))

    @property
    def loss_op(self) -> Op | None:
        """What marks the loss; None in a graph that no step was captured for. O(ops)."""
        return next((op for op in self.ops if op.kind == LOSS_KIND), None)

    @functools.cached_property
    def overwrites(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The ops that write in place, by number, each with what `writes` tells of it. O(ops)."""
        found = ((i, writes(op)) for i, op in enumerate(self.ops))
        return tuple((i, names) for i, names in found if names)

    @functools.cached_property
    def op_numbers(self) -> Mapping[str, int]:
        """The number of each op by its name. O(ops)."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @functools.cached_property
    def tensor_numbers(self) -> Mapping[str, int]:
        """The number of each tensor by its name, in the order of the ops' outputs. O(tensors)."""
        return {t.name: i for i, t in enumerate(t for op in self.ops for t in op.outputs)}

    @property
    def step_notes(self) -> dict[str, Any]:
        """What capture noted of the whole step, such as "settings" and "effects", on its mark."""
        loss = self.loss_op
        return (loss.arguments or {}) if loss else {}


def alias_of(op: Op, tensor: Tensor) -> str | None:
    """Name of the tensor whose storage an output of `op` shares; None if it owns its storage.

    An output of a reference op that names none shares the storage of the op's first input.
    """
    if tensor.alias_of is None and op.memory == "reference" and op.inputs:
        return op.inputs[0]
    return tensor.alias_of


def storage_owners(ops: Iterable[Op]) -> dict[str, str | None]:
    """Return the owner of each tensor's storage, by name; None where aliases go in a circle.

    O(tensors): each chain of aliases is walked once.
    """
    parent = {tensor.name: alias_of(op, tensor) for op in ops for tensor in op.outputs}
    owners: dict[str, str | None] = {}
    for start, of in parent.items():
        if of is None or of in owners:  # as in a file whose ops are in the order of a step
            owners[start] = start if of is None else owners[of]
            continue
        path: list[str] = []
        name = start
        while name not in owners:
            owners[name] = None  # and so it stays if the walk comes back here
            path.append(name)
            above = parent.get(name)
            if above is None:
                owners[name] = name
            else:
                name = above
        for passed in path:
            owners[passed] = owners[name]
    return {name: owners[name] for name in parent}


@functools.lru_cache(maxsize=4096)
def _is_in_place(kind: str) -> bool:
    call = kind.rsplit("::", 1)[-1].split(".")
    name = call[1] if len(call) > 1 and "::" not in kind else call[0]
    return name.endswith("_") and not name.endswith("__")


def writes(op: Op) -> tuple[str, ...]:
    """Names of the input tensors whose storage `op` changes in place.

    In-place calls end in an underscore (`aten.add_.Tensor`) and alias what they change; calls
    that change an argument which their schema does not mark list it in `arguments["mutates"]`.
    """
    if op.arguments is not None and op.arguments.get("mutates"):
        return tuple(op.arguments["mutates"])
    if not _is_in_place(op.kind):
        return ()
    return tuple(tensor.alias_of for tensor in op.outputs if tensor.alias_of is not None)


def addresses_storage(kind: str) -> bool:
    """Whether a call finds elements of its first input by an offset in the storage."""
    return kind.startswith("aten.as_strided")


def addressed(op: Op) -> tuple[str, ...]:
    """Names of the input tensors of which `op` finds elements by an offset in their storage.

    In a copy of one of its views, such an offset means other elements.
    """
    return op.inputs[:1] if addresses_storage(op.kind) else ()


def is_in_group(name: str) -> bool:
    """Return whether a tensor or number of a step is in a group of an optimizer, by its name.

    An example is `optimizer.param_groups.0.lr`.
    """
    return ".param_groups." in f".{name}"
