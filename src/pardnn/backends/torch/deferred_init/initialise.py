"""Deferred initialisation: a rank builds a model and ends up with real tensors only for its shards.

`record` runs the user's factory under fake tensors: nothing is allocated, and every call that
creates or writes a storage or draws random numbers becomes data. `replay` executes the slice of it
that the wanted tensors depend on, and advances the generators past the rest. Together they give the
same bits as running the factory. A factory that cannot be recorded is built on the host by `build`,
behind the same interface.
"""

from __future__ import annotations

import random as python_random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pardnn.backends.torch.deferred_init import recording as rec
from pardnn.backends.torch.deferred_init.recorder import Recorder
from pardnn.backends.torch.deferred_init.recording import Recording
from pardnn.backends.torch.deferred_init.replay import Shard, execute, made_whole
from pardnn.backends.torch.ops.partition_ops import box_copy
from pardnn.backends.torch.rng import generator as rng
from pardnn.errors import PardnnError, UnsupportedError, UserCodeError, told

__all__ = ["Built", "Recording", "build", "initialise", "record", "replay"]

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])


def _new_recording() -> Recording:
    return Recording(FakeTensorMode())


@contextmanager
def _host_randomness_restored_on_error() -> Iterator[None]:
    python_state = python_random.getstate()
    # The factory may use NumPy's global generator, so that one is restored.
    numpy_state = np.random.get_state()  # noqa: NPY002
    try:
        yield
    except BaseException:
        # After a failed recording, the factory runs again as a whole.
        python_random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        raise


@contextmanager
def _copies_share_the_mode() -> Iterator[None]:
    """Let `copy.deepcopy` of a fake tensor, which copies attributes, keep the same fake mode.

    `constant`, the known value of a fake tensor, is not copied either: it is a real tensor, which
    cannot be copied here.
    """

    def copied(tensor: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        constant, tensor.constant = tensor.constant, None
        try:
            return torch.Tensor.__deepcopy__(tensor, memo)
        finally:
            tensor.constant = constant

    FakeTensorMode.__deepcopy__ = lambda mode, _memo: mode
    FakeTensor.__deepcopy__ = copied
    try:
        yield
    finally:
        del FakeTensorMode.__deepcopy__, FakeTensor.__deepcopy__


def _user_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor of this back end."""
    frames = traceback.extract_tb(error.__traceback__)
    paths = [Path(frame.filename) for frame in frames]
    own = [
        frame
        for frame, path in zip(frames, paths, strict=True)
        if not any(path.is_relative_to(library) for library in _LIBRARIES)
        and "<frozen" not in frame.filename
    ]
    outside = [frame for frame in own if "site-packages" not in Path(frame.filename).parts]
    chosen = (outside or own or list(frames))[-1]
    return f"{chosen.filename}:{chosen.lineno}"


def record(factory: Callable[..., Any], **kwargs: Any) -> tuple[Any, Recording]:
    """Run a factory without allocating tensors, and record how its tensors are computed.

    Args:
        factory: Returns anything that holds models, optimizers and tensors.
        kwargs: Passed to it.

    Returns:
        The factory's result, with fake tensors that belong to `recording.fake_mode` (tensors that
        no call has touched stay real), and the recording. The generators are as before.

    Raises:
        UnsupportedError: E820, something in the factory cannot be recorded; the message names the
            user's line. `build` is the way out.
    """
    recording = _new_recording()
    with recorded(recording):
        result = factory(**kwargs)
    return result, recording


@contextmanager
def recorded(recording: Recording, otherwise: str = "") -> Iterator[None]:
    """Record the building in a block into an empty recording; the generators end as before.

    Args:
        recording: An empty one.
        otherwise: What else can be done; added to the error.

    Raises:
        UnsupportedError: E820, something in the block cannot be recorded.
    """
    recorder = Recorder(recording)
    with _host_randomness_restored_on_error():
        try:
            with (
                recording.fake_mode,
                recorder,
                recorder.patched(),
                _copies_share_the_mode(),
                warnings.catch_warnings(),
            ):
                # copy.deepcopy takes a fake tensor's data pointer and does not use it.
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                yield
            recorder.close()
        except Exception as error:
            reason = error.message if isinstance(error, PardnnError) else _first_line(error)
            raise UnsupportedError(
                f"the model's construction cannot be recorded at {_user_line(error)}: {reason}"
                f"{otherwise}",
                code="E820",
                details={"where": _user_line(error)},
            ) from error
        finally:
            recorder.restore()


def _first_line(error: BaseException) -> str:
    return told(error).partition("\n")[0]


def replay(
    recording: Recording,
    tensors: Sequence[torch.Tensor],
    shards: Sequence[Shard | None] | None = None,
) -> list[torch.Tensor]:
    """Return real tensors, or shards of them, for those of a recorded factory's result.

    Executes what they depend on, frees every temporary after its last use, and leaves the
    generators as the factory would. Tensors that share a storage share it again. Peak memory: the
    wanted storages, plus what computing the largest of them takes.

    Args:
        recording: The result of `record` or `build`. One from `build` is used up: tensors that are
            not wanted lose their storage.
        tensors: Tensors of the factory's result.
        shards: Box and strides of the shard wanted of each, None for all of it. A shard has its own
            storage, and the whole tensor is freed once it is complete.

    Returns:
        Plain tensors in the same order, with `requires_grad` as the given ones have it.

    Raises:
        UnsupportedError: E817, a tensor is not of this recording.
        MismatchError: E517, an op returns another geometry than under tracing.
    """
    if isinstance(recording, Built):
        return _take(recording, tensors, shards or [None] * len(tensors))
    refs = [_reference(recording, tensor) for tensor in tensors]
    reals = execute(recording, refs, shards)
    return [
        real.requires_grad_(tensor.requires_grad)
        for real, tensor in zip(reals, tensors, strict=True)
    ]


def largest_made_whole(
    recording: Recording, tensors: Sequence[torch.Tensor], shards: Sequence[Shard | None]
) -> int | None:
    """Return the position of the largest tensor that `replay` makes whole to cut a shard.

    Args:
        recording: As for `replay`, like the other arguments.
        tensors: The wanted tensors.
        shards: The shards of each.
    """
    if isinstance(recording, Built):
        return None
    refs = [_reference(recording, tensor) for tensor in tensors]
    whole = made_whole(recording, refs, shards)
    return max(whole, key=lambda i: tensors[i].nbytes, default=None)


def _reference(recording: Recording, tensor: torch.Tensor) -> rec.TensorRef:
    storage = tensor.untyped_storage()
    if not isinstance(tensor, FakeTensor) and storage._cdata not in recording.storages:
        # A real tensor that no call has written.
        rec.add_constant(recording, storage)
    return rec.tensor_ref(recording, tensor)


class _CreatedStorages(TorchDispatchMode):
    """Tracks, by weak references, the storages that calls create on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = {
            leaf.untyped_storage()._cdata
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        }
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                if storage._cdata not in before:
                    self.created[storage._cdata] = StorageWeakRef(storage)
        return result

    def alive(self) -> Iterator[torch.UntypedStorage]:
        for reference in self.created.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                yield storage


@dataclass(eq=False)
class Built(Recording):
    """A factory's result that was built on the host, behind the interface of a recording.

    Attributes:
        storages_built: The storages that the factory created and that are still alive.
        ends: State of each default generator after the factory ran.
    """

    storages_built: _CreatedStorages = field(default_factory=_CreatedStorages)
    ends: list[bytes] = field(default_factory=list)


def build(factory: Callable[..., Any], reason: str = "", **kwargs: Any) -> tuple[Any, Built]:
    """Run a factory on the host: the fallback where `record` raises.

    Every rank holds the whole model for a while: `fallback_bytes`.

    Args:
        factory: As in `record`.
        reason: Why it was not recorded, kept as `fallback`.
        kwargs: Passed to the factory.

    Returns:
        The factory's result with real tensors, and what `replay` takes. Fake tensors for capture
        come from `recording.fake_mode.from_tensor`.

    Raises:
        UserCodeError: E110, the factory itself raises.
    """
    built = Built(FakeTensorMode(), fallback=reason or "built on the host by request")
    built.generators = _default_generators()
    built.starts = [rng.read_state(generator) for generator in built.generators]
    try:
        with built.storages_built:
            result = factory(**kwargs)
        built.ends = [rng.read_state(generator) for generator in built.generators]
    except PardnnError:
        raise  # it already says what is wrong
    except Exception as error:
        raise UserCodeError(
            f"the function that builds the model raised at {_user_line(error)}: "
            f"{_first_line(error)}",
            details={"where": _user_line(error)},
        ) from error
    finally:
        _write_states(built.generators, built.starts)
    built.fallback_bytes = sum(storage.nbytes() for storage in built.storages_built.alive())
    return result, built


def _default_generators() -> list[torch.Generator]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_initialized():
        devices.append(torch.device("cuda"))
    return [rng.default_generator(device) for device in devices]


def _write_states(generators: list[torch.Generator], states: list[bytes]) -> None:
    for generator, state in zip(generators, states, strict=True):
        rng.write_state(generator, state)


def _take(
    built: Built, tensors: Sequence[torch.Tensor], shards: Sequence[Shard | None]
) -> list[torch.Tensor]:
    _write_states(built.generators, built.ends)
    taken = [
        tensor.detach() if shard is None else box_copy(tensor, *shard)
        for tensor, shard in zip(tensors, shards, strict=True)
    ]
    kept = {tensor.untyped_storage()._cdata for tensor in taken}
    for storage in built.storages_built.alive():
        if storage._cdata not in kept and storage.resizable():
            # Any object may hold models and optimizers, so their memory is freed here.
            storage.resize_(0)
    return [
        real.requires_grad_(tensor.requires_grad)
        for real, tensor in zip(taken, tensors, strict=True)
    ]


def initialise(factory: Callable[..., Any], **kwargs: Any) -> tuple[Any, Recording]:
    """Record a factory, or build it on the host if that raises (`fallback` then says why)."""
    try:
        return record(factory, **kwargs)
    except UnsupportedError as error:
        reason = error.message
    # Outside the handler, so that no error of ours is chained to what the user's code raises.
    return build(factory, reason, **kwargs)
