"""Executing a recording, or the slice of it that some tensors depend on.

Idea: run the calls of the `program_slice`. Random calls outside it only advance the generator:
`uniform_`, `normal_` and similar calls by counted draws, joined into one jump; others by running
the call on scratch tensors of the same geometry. Each storage is freed after its last use, so
memory is that of the wanted tensors plus the temporaries of one of them. A tensor of which shards
are wanted is made a block of rows at a time if its calls allow it (`blocks.py`); otherwise the
shards are copied as soon as it is complete, and the rest is freed.

Complexity: O(events) to slice; time of the calls executed; 50 ms per jump (`rng/mt19937.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.deferred_init import recording as rec
from pardnn.backends.torch.deferred_init.blocks import (
    Chain,
    Shard,
    chains_of,
    made_in_blocks,
    wanted_of,
)
from pardnn.backends.torch.deferred_init.counted_draws import counted_draws, num_elements
from pardnn.backends.torch.deferred_init.program_slice import ProgramSlice, slice_program
from pardnn.backends.torch.ops.partition_ops import box_copy
from pardnn.backends.torch.rng import generator as rng
from pardnn.errors import MismatchError


def tensor_refs(tree: Any) -> list[rec.TensorRef | rec.StorageRef]:
    """Return the references to tensors and storages in a tree of arguments."""
    kinds = (rec.TensorRef, rec.StorageRef)
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, kinds)]


def view(storage: torch.UntypedStorage, ref: rec.TensorRef) -> torch.Tensor:
    """Return a real tensor over a real storage, with the geometry of a recorded one."""
    with torch.no_grad():
        tensor = torch.empty(0, dtype=ref.dtype, device=storage.device)
        tensor = tensor.set_(storage, ref.offset, ref.size, ref.stride)
        tensor = tensor.conj() if ref.conjugate else tensor
        return torch._neg_view(tensor) if ref.negative else tensor


def cost_elements(recording: rec.Recording, refs: Sequence[rec.TensorRef]) -> int:
    """Return how many elements `execute` would compute or draw for these tensors."""
    sliced = slice_program(recording, {ref.storage for ref in refs})
    total = 0
    for index, call in enumerate(recording.events):
        if not isinstance(call, rec.Call):
            continue
        is_drawn = call.generator is not None and counted_draws(call) is None
        if index in sliced.needed or is_drawn:
            total += sum(num_elements(ref) for ref in call.outputs if ref is not None)
    return total


def made_whole(
    recording: rec.Recording, refs: Sequence[rec.TensorRef], shards: Sequence[Shard | None]
) -> list[int]:
    """Return the positions of the tensors that `execute` makes whole to cut shards from them."""
    sliced = slice_program(recording, {ref.storage for ref in refs})
    wanted = wanted_of(refs, shards)
    apart = {chain.whole.storage for chain in chains_of(recording, sliced, wanted)}
    return [
        i
        for storage, entries in wanted.items()
        for i, _, shard in entries
        if shard is not None and storage not in apart
    ]


@dataclass
class _Execution:
    """State of one execution.

    Attributes:
        recording: The recording.
        sliced: The slice of it that runs.
        live: Real storages by number.
        pending_draws: Per generator, draws of calls that do not run, still to be skipped.
        saved_states: Generator states that the user restores later, by generator and event.
        wanted: The tensors to return for each storage: position, reference and shard.
        results: The complete tensors to return, by position.
    """

    recording: rec.Recording
    sliced: ProgramSlice
    live: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    pending_draws: list[list[rng.Draws]] = field(default_factory=list)
    saved_states: dict[tuple[int, int], bytes] = field(default_factory=dict)
    wanted: dict[int, list[tuple[int, rec.TensorRef, Shard | None]]] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)


def execute(
    recording: rec.Recording,
    refs: Sequence[rec.TensorRef],
    shards: Sequence[Shard | None] | None = None,
    *,
    keep_generators: bool = False,
) -> list[torch.Tensor]:
    """Return real tensors for recorded ones, bit for bit as the factory would compute them.

    Args:
        recording: The recording of the factory.
        refs: The tensors wanted.
        shards: The shard wanted of each; None for all of it.
        keep_generators: Leave the generators as they are, instead of where the factory would.

    Raises:
        MismatchError: E517, a real result has another layout than the recorded one.
    """
    sliced = slice_program(recording, {ref.storage for ref in refs})
    run = _Execution(recording, sliced, pending_draws=[[] for _ in recording.generators])
    run.wanted = wanted_of(refs, shards or [None] * len(refs))
    before = [rng.read_state(generator) for generator in recording.generators]
    with _disable_current_modes(), torch.no_grad(), _default_dtype() as set_dtype:
        try:
            for generator, state in enumerate(recording.starts):
                rng.write_state(recording.generators[generator], state)
            _run_events(run, set_dtype)
            for generator in range(len(recording.generators)):
                _apply_skips(run, generator)
            return [run.results[i] for i in range(len(refs))]
        except BaseException:
            keep_generators = True
            raise
        finally:
            if keep_generators:
                for generator, state in zip(recording.generators, before, strict=True):
                    rng.write_state(generator, state)


def _deliver(run: _Execution, storage: int) -> None:
    """Take the wanted tensors from a storage after its last use, and free the rest."""
    for i, ref, shard in run.wanted.get(storage, ()):
        whole = view(_storage(run, ref), ref)
        run.results[i] = whole if shard is None else box_copy(whole, *shard)
    run.live.pop(storage, None)


@contextmanager
def _default_dtype() -> Iterator[Any]:
    saved = torch.get_default_dtype()

    def change(dtype: torch.dtype) -> None:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)

    try:
        yield change
    finally:
        change(saved)


def _run_events(run: _Execution, set_dtype: Any) -> None:
    events, sliced = run.recording.events, run.sliced
    ends: dict[int, list[int]] = {}
    for storage, position in sliced.last_use.items():
        ends.setdefault(position, []).append(storage)
    returns = {
        event.state
        for event in events
        if isinstance(event, rec.Reseed) and isinstance(event.state, tuple)
    }
    chains = chains_of(run.recording, sliced, run.wanted)
    for chain in chains:
        del run.wanted[chain.whole.storage]
    firsts = {chain.events[0]: chain for chain in chains}
    in_chains = {index for chain in chains for index in chain.events}
    for storage in ends.get(-1, ()):
        _deliver(run, storage)
    for position, index in enumerate(sliced.order):
        event = events[index]
        if isinstance(event, rec.Reseed):
            state = event.state
            state = state if isinstance(state, bytes) else run.saved_states[state]
            run.pending_draws[event.generator].clear()
            rng.write_state(run.recording.generators[event.generator], state)
            continue
        if index in firsts:
            set_dtype(event.default_dtype)
            _run_chain(run, firsts[index])
        elif index not in in_chains and (index in sliced.needed or event.generator is not None):
            set_dtype(event.default_dtype)
            _run_or_skip(run, event, is_needed=index in sliced.needed)
        for storage in ends.get(position, ()):
            _deliver(run, storage)
        if event.generator is not None and (event.generator, index) in returns:
            _apply_skips(run, event.generator)
            generator = run.recording.generators[event.generator]
            run.saved_states[event.generator, index] = rng.read_state(generator)


def _run_chain(run: _Execution, chain: Chain) -> None:
    def run_call(call: rec.Call, operand: torch.Tensor) -> torch.Tensor:
        if call.generator is not None:
            _apply_skips(run, call.generator)
        args, kwargs = _resolve_arguments(run, call, lambda _run, _ref: operand)
        return call.function(*args, **kwargs)

    def skip(generator: int, draws: rng.Draws) -> None:
        run.pending_draws[generator].append(draws)

    run.results.update(made_in_blocks(chain, run_call, skip))


def _apply_skips(run: _Execution, generator: int) -> None:
    rng.skip_calls(run.recording.generators[generator], run.pending_draws[generator])
    run.pending_draws[generator].clear()


def _run_or_skip(run: _Execution, call: rec.Call, *, is_needed: bool) -> None:
    if is_needed:
        if call.generator is not None:
            _apply_skips(run, call.generator)
        _run_call(run, call)
        return
    assert call.generator is not None
    draws = counted_draws(call)
    if draws is not None:
        run.pending_draws[call.generator].append(draws)
        return
    _apply_skips(run, call.generator)
    args, kwargs = _resolve_arguments(run, call, _scratch_tensor)
    call.function(*args, **kwargs)


def _storage(run: _Execution, ref: rec.TensorRef | rec.StorageRef) -> torch.UntypedStorage:
    number = ref.storage
    real = run.live.get(number)
    if real is None and number in run.recording.constants:
        constant = run.recording.constants[number]
        real = constant.clone() if number in run.sliced.owned else constant
    elif real is None:
        # No call has written it yet.
        size = int(run.recording.kept[number].nbytes())
        device = ref.device if isinstance(ref, rec.TensorRef) else "cpu"
        real = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    run.live[number] = real
    return real


def _scratch_tensor(run: _Execution, ref: rec.TensorRef) -> torch.Tensor:
    return torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=ref.device)


def _live_tensor(run: _Execution, ref: rec.TensorRef) -> torch.Tensor:
    return view(_storage(run, ref), ref)


def _resolve_arguments(run: _Execution, call: rec.Call, tensor: Any) -> tuple[Any, Any]:
    def resolve(leaf: Any) -> Any:
        if isinstance(leaf, rec.TensorRef):
            return tensor(run, leaf)
        if isinstance(leaf, rec.StorageRef):
            return _storage(run, leaf)
        if isinstance(leaf, rec.GeneratorRef):
            return run.recording.generators[leaf.generator]
        return leaf

    return pytree.tree_map(resolve, (call.args, call.kwargs))


def _run_call(run: _Execution, call: rec.Call) -> None:
    args, kwargs = _resolve_arguments(run, call, _live_tensor)
    leaves = pytree.tree_leaves(call.function(*args, **kwargs))
    for ref, real in zip(call.outputs, leaves, strict=True):
        if ref is None:
            continue
        geometry = (real.dtype, tuple(real.shape), real.stride(), real.storage_offset())
        if geometry != (ref.dtype, ref.size, ref.stride, ref.offset):
            raise MismatchError(
                f"{call.function} gives {geometry} on the device where tracing had "
                f"{(ref.dtype, ref.size, ref.stride, ref.offset)}.\nBuild the model on the host "
                "instead, and report this op.",
                code="E517",
            )
        if ref.storage in run.sliced.last_use:
            run.live.setdefault(ref.storage, real.untyped_storage())
