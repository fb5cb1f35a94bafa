"""A recording: the construction of a model as data, a list of calls and reseeds.

`recorder.py` writes it while the user's factory runs under fake tensors, and `replay.py` executes
it, whole or in part. A tensor is described by its storage and its geometry, so that views,
in-place writes and `.data` need no calls of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pardnn.errors import UnsupportedError


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the recording: a geometry over a storage.

    Attributes:
        storage: Number of the storage.
        dtype: Element type.
        size: Shape, elements.
        stride: Strides, elements.
        offset: First element in the storage, elements.
        device: Where it lives.
        conjugate: Whether reading conjugates (lazy `conj()`).
        negative: Whether reading negates (lazy `imag` of a conjugate).
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    conjugate: bool = False
    negative: bool = False


@dataclass(frozen=True)
class StorageRef:
    """A storage that is itself an argument of a call."""

    storage: int


@dataclass(frozen=True)
class GeneratorRef:
    """A random number generator that is an argument of a call."""

    generator: int


@dataclass(frozen=True)
class Call:
    """One call that creates or writes storages, or draws random numbers.

    Attributes:
        function: An ATen overload, or a Python function that runs as one call.
        args: Positional arguments, with references in place of tensors and generators.
        kwargs: Keyword arguments, in the same form.
        reads: Storages of the arguments.
        writes: Storages that the call writes or creates.
        outputs: Per flattened tensor result, its reference; None for other results.
        generator: Number of the generator that the call draws from, None if it draws nothing.
        default_dtype: What `torch.get_default_dtype()` was.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[TensorRef | None, ...]
    generator: int | None
    default_dtype: torch.dtype


@dataclass(frozen=True)
class Reseed:
    """The user set a generator's state.

    Attributes:
        generator: Number of the generator.
        state: The state itself; or, if an old state is restored, the number of a generator and of
            the event after whose draws it had that state.
    """

    generator: int
    state: bytes | tuple[int, int]


Event: TypeAlias = Call | Reseed


@dataclass(eq=False)
class Recording:
    """The calls that compute the tensors of a factory's result.

    Attributes:
        fake_mode: The mode that its fake tensors belong to; capture traces in it.
        events: Calls and reseeds in the order in which they happened.
        generators: The generators that calls draw from; replay leaves each in its final state.
        starts: State of each generator when it was first used.
        constants: Storages that hold real data, by number; never written.
        storages: Number of each known storage, by its address; `kept` keeps addresses valid.
        kept: The storages themselves, fake and real.
        fallback: Why the factory was built on the host instead of recorded; empty if recorded.
        fallback_bytes: Bytes that building on the host took at its peak.
        on_meta: Name of each tensor of a model on the meta device, how to replace it, and the
            tensor itself.
    """

    fake_mode: FakeTensorMode
    events: list[Event] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    starts: list[bytes] = field(default_factory=list)
    constants: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    kept: list[torch.UntypedStorage] = field(default_factory=list)
    fallback: str = ""
    fallback_bytes: int = 0
    on_meta: list[tuple[str, Callable[[torch.Tensor], None], torch.Tensor]] = field(
        default_factory=list
    )


def add_storage(recording: Recording, storage: torch.UntypedStorage, number: int = -1) -> int:
    """Give a storage a number and return it.

    Args:
        recording: Gets the storage.
        storage: Fake or real.
        number: The number of an equivalent storage; -1 for the next free number.
    """
    number = len(recording.kept) if number < 0 else number
    recording.storages[storage._cdata] = number
    recording.kept.append(storage)
    return number


def add_constant(recording: Recording, real: torch.UntypedStorage) -> int:
    """Number a storage with real data, which replay copies; a known one keeps its number."""
    number = recording.storages.get(real._cdata)
    if number is None:
        number = add_storage(recording, real)
        recording.constants[number] = real
    return number


def tensor_ref(recording: Recording, tensor: torch.Tensor) -> TensorRef:
    """Return the reference to a tensor whose storage is known.

    Raises:
        UnsupportedError: E817, the tensor was created by no call that was recorded, or its
            layout is not strided.
    """
    number = None
    if tensor.layout == torch.strided:
        number = recording.storages.get(tensor.untyped_storage()._cdata)
    if number is None:
        raise UnsupportedError(
            f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.layout}, was made "
            "without a call that can be recorded (torch.load does this, sparse layouts too).\n"
            "Build it with ordinary tensor operations, or from a file through safetensors.",
            code="E817",
        )
    return TensorRef(
        number,
        tensor.dtype,
        tuple(int(size) for size in tensor.shape),
        tuple(int(stride) for stride in tensor.stride()),
        int(tensor.storage_offset()),
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )
