"""`pardnn.deferred`, and models on the meta device: built without data, initialised by shard.

Under `deferred` a script builds its model as usual; the computation is recorded instead, and
`parallelize` replays on each rank the part that its shards depend on. A model that was built on the
meta device has lost its initialisation, so `reset_parameters` of its modules is called, in the
order of `modules()`, as one device would do after `to_empty`. This is left out if the step reads
none of its tensors: `torch.func`'s ensembles keep a model on the meta device only to call it with
other tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pardnn.backends.torch.deferred_init import recording as rec
from pardnn.backends.torch.deferred_init.initialise import recorded, replay
from pardnn.backends.torch.deferred_init.recording import Recording
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.sources import (
    Source,
    batch_indices,
    mark_on_meta,
    sources_of,
)
from pardnn.errors import UnsupportedError, shown

_OTHERWISE = "\nBuild it without `pardnn.deferred()`: each rank then makes all of it first."


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Build models and optimizers inside without allocating them; `parallelize` initialises them.

    Each rank then holds only its own shards, with the numbers that one device would have drawn, and
    later draws of the script are the same as without it.

    Raises:
        UnsupportedError: E820, if something inside cannot be recorded; the message names the line.
    """
    recording = Recording(FakeTensorMode())
    with recorded(recording, _OTHERWISE):
        yield
    replay(recording, [])  # moves the generators past what was drawn
    recording.fake_mode.pardnn_recording = recording  # type: ignore[attr-defined]


def recording_of(step: Callable[..., Any], args: Sequence[Any]) -> Recording | None:
    """Return the recording of a step's deferred models; record those on the meta device now.

    Args:
        step: The user's step.
        args: Its arguments. Meta tensors of models are replaced by those of the recording.

    Returns:
        None if all tensors have data.

    Raises:
        UnsupportedError: E801, if models were built under several `deferred` blocks.
    """
    objects = walk_objects(step, list(args))
    found = [_recording(entry.value) for entry in objects.tensors]
    known = {id(each): each for each in found if each is not None}
    meta = [
        source
        for source in sources_of(objects, batch_indices(args))
        if source.kind != "input" and _is_meta(source.get())
    ]
    if len(known) > 1 or (known and meta):
        raise UnsupportedError(
            "the step's models were built under several `pardnn.deferred()` blocks, or partly on "
            "the meta device.\nBuild all of them in one block: their numbers follow one another."
        )
    if meta:
        return _recorded_meta(objects, meta)
    return next(iter(known.values()), None)


def _recording(value: Any) -> Recording | None:
    return getattr(value.fake_mode, "pardnn_recording", None) if _is_fake(value) else None


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and not _is_fake(value)


def _recorded_meta(objects: ObjectGraph, meta: Sequence[Source]) -> Recording:
    """Record how the modules of models on the meta device initialise themselves."""
    recording = Recording(FakeTensorMode())
    roots = [e.value for e in objects.stateful if isinstance(e.value, torch.nn.Module)]
    with recorded(recording, _OTHERWISE):
        for source in meta:
            old = source.get()
            recording.on_meta.append((source.name, source.set, old))
            source.set(torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu"))
            mark_on_meta(source.get())
        for module in dict.fromkeys(module for root in roots for module in root.modules()):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset) and any(_is_fake(tensor) for tensor in _own_tensors(module)):
                reset()
    recording.fake_mode.pardnn_recording = recording  # type: ignore[attr-defined]
    return recording


def recording_for(
    read: Collection[str],
    recording: Recording | None,
    step: Callable[..., Any],
    args: Sequence[Any],
) -> Recording | None:
    """Return the recording if a graph needs it; the user gets unread meta tensors back.

    Args:
        read: Names of the sources of the graph.
        recording: The result of `recording_of` for the same step and arguments.
        step: The user's step.
        args: Its arguments.

    Raises:
        UnsupportedError: E820, if a module on the meta device cannot initialise itself.
    """
    if recording is None or not recording.on_meta:
        return recording
    names = {name for name, *_ in recording.on_meta}
    if names.isdisjoint(read):
        for _, put, old in recording.on_meta:
            put(old)
        return None
    objects = walk_objects(step, list(args))
    sources = sources_of(objects, batch_indices(args))
    roots = [e.value for e in objects.stateful if isinstance(e.value, torch.nn.Module)]
    _check_initialised(recording, [source for source in sources if source.name in names], roots)
    replay(recording, [])  # moves the generators past what was drawn
    return recording


def _own_tensors(module: torch.nn.Module) -> Iterable[torch.Tensor | None]:
    return [*module._parameters.values(), *module._buffers.values()]


def _check_initialised(
    recording: Recording, meta: Sequence[Source], roots: Sequence[torch.nn.Module]
) -> None:
    writes: dict[int, int] = {}
    for event in recording.events:
        for storage in event.writes if isinstance(event, rec.Call) else ():
            writes[storage] = writes.get(storage, 0) + 1
    for source in meta:
        tensor = source.get()
        number = recording.storages.get(tensor.untyped_storage()._cdata)
        # The first write is its creation, by `empty`.
        if tensor.numel() and (number is None or writes.get(number, 0) < 2):
            modules = [module for root in roots for module in root.modules()]
            holding = (m for m in modules if any(each is tensor for each in _own_tensors(m)))
            owner = type(next(holding, None)).__name__
            raise UnsupportedError(
                f"{shown(source.name)} is on the meta device, and {owner} has no reset_parameters "
                "that gives it values.\nBuild the model under `with pardnn.deferred():` instead of "
                '`torch.device("meta")`: its own initialisation is recorded there, and each rank '
                "runs what its shards need.",
                code="E820",
                details={"tensor": source.name},
            )
