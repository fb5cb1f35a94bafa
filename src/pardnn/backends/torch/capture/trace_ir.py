"""The trace IR: calls, the values between them, and the storages behind the values.

A tensor is a `Value`: one geometry over one `Storage`, as of one version. A write in place gives
the storage a new version and makes a new value of the same geometry. A value that a write since its
version may have changed is stale: a call that reads its content takes the newest value instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype]

#: Kind of the calls of `.item()`.
ITEM = "aten._local_scalar_dense.default"


@dataclass(eq=False, slots=True, repr=False)
class Storage:
    """The memory behind one or more values.

    Attributes:
        held: torch's storage, kept alive so that its address identifies it.
        owner: The value that allocated it.
        newest: The value written last; at first the owner.
        writes: The calls that changed it in place, in order; their number is the version.
        written: The values that these calls produced, in order.
        values: The newest value of each geometry.
        source: Whether it exists before the step.
    """

    held: torch.UntypedStorage
    owner: Value
    newest: Value
    writes: list[Call] = field(default_factory=list)
    written: list[Value] = field(default_factory=list)
    values: dict[Geometry, Value] = field(default_factory=dict)
    source: bool = False


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """One output of a call: a tensor or a host scalar.

    Attributes:
        call: Its producer.
        geometry: Shape, strides, storage offset and dtype; None for a host scalar.
        storage: None for a host scalar.
        version: Version of the storage whose content it is.
        base: The input through which it shares its storage; None for the owner.
        kind: float, int or bool of a host scalar.
        device: Device type of a tensor.
        name: The name in the graph; given at the end.
        untouched: How many of its storage's written values are known not to overlap it.
    """

    call: Call
    geometry: Geometry | None = None
    storage: Storage | None = None
    version: int = 0
    base: Value | None = None
    kind: type | None = None
    device: str = "cpu"
    name: str = ""
    untouched: int = 0


@dataclass(eq=False, slots=True, repr=False)
class Call:
    """One op of the trace.

    Attributes:
        kind: As in the graph.
        args: Positional arguments, values of the trace inside.
        kwargs: Keyword arguments.
        inputs: The values among the arguments, each once.
        outputs: The values that it produces, new versions of changed inputs last.
        returns: The output behind each tensor that the call returns; None where it is none.
        mutated: Inputs that it changes in place.
        reads: Storages whose content it reads, with the version.
        random: Whether it draws random numbers.
        view: Whether it returns a view of its input.
        after: Predecessors without a data dependence.
        source: "file.py:line".
        module: Module path.
        backward_of: The forward call whose gradient it computes.
        replays: The predecessor whose random numbers it draws once more.
        arguments: The `arguments` of a source op, which has no call.
        kept: Whether its output outlives the step, for the caller.
        sums: Whether autograd adds to the gradient of a leaf by it.
        within: For a write, those of `AliasTracker.caches` whose functions are running.
        name: The name in the graph; given at the end, to sources at once.
    """

    kind: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    returns: list[Value | None] = field(default_factory=list)
    mutated: list[Value] = field(default_factory=list)
    reads: list[tuple[Storage, int]] = field(default_factory=list)
    random: bool = False
    view: bool = False
    after: list[Call] = field(default_factory=list)
    source: str | None = None
    module: str | None = None
    backward_of: Call | None = None
    replays: Call | None = None
    arguments: dict[str, Any] | None = None
    kept: bool = False
    sums: bool = False
    within: Sequence[Any] = ()
    name: str = ""


def storages_read(calls: Iterable[Call]) -> set[Storage | None]:
    """Return the storages whose content calls read."""
    return {storage for call in calls for storage, _ in call.reads}


class LazyGeometry(tuple[torch.Size, tuple[int, ...], int, torch.dtype]):
    """The geometry of a tensor that reads its memory as conjugate or negative.

    Attributes:
        flags: Whether as the conjugate, and whether as the negative.
    """

    flags: tuple[bool, bool]

    def __eq__(self, other: object) -> bool:
        """Whether another geometry is equal and lazy in the same way."""
        return flags_of(other) == self.flags and tuple.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)


def flags_of(geometry: object) -> tuple[bool, bool]:
    """Return whether a tensor of a geometry reads as the conjugate, and whether as the negative."""
    return geometry.flags if isinstance(geometry, LazyGeometry) else (False, False)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return shape, strides, storage offset (elements) and dtype of a tensor."""
    found = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
    return with_flags(found, (found[3].is_complex and tensor.is_conj(), tensor.is_neg()))


def with_flags(geometry: Geometry, flags: tuple[bool, bool]) -> Geometry:
    """Return the geometry of a tensor over the same elements with the flags of `flags_of`."""
    if not any(flags):
        return geometry if type(geometry) is tuple else tuple(geometry)
    found = LazyGeometry(geometry)
    found.flags = flags
    return found


class CallArguments:
    """What is collected from the arguments of one call, in order.

    Attributes:
        key: Cache key of the fake result; complete if `is_cacheable`.
        tensors: The fake tensors.
        values: The values of the trace.
        is_cacheable: Whether the fake result may be cached under `key`.
        is_view: Whether the call reads no content.
        is_sized: Whether its numbers decide a shape.
    """

    __slots__ = ("is_cacheable", "is_sized", "is_view", "key", "tensors", "values")

    def __init__(self, is_cacheable: bool, is_view: bool, is_sized: bool) -> None:
        self.is_cacheable, self.is_view, self.is_sized = is_cacheable, is_view, is_sized
        self.key: list[Any] = []
        self.tensors: list[Any] = []
        self.values: list[Value] = []
