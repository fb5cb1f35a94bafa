"""Making shards of a tensor, a block of rows at a time, so that no rank ever holds all of it.

Idea: most tensors are filled by one call whose numbers follow the order of the elements, and
afterwards changed element by element, if at all: an embedding is drawn and its padding row set to
0, `model.half()` converts. Such a chain of calls gives the same bits on one block of rows after the
other. The shard's part of a block is copied; for blocks that no shard needs, nothing is drawn and
the generator moves past them.

Complexity: time of the calls; memory of two blocks of `BLOCK_BYTES`, or 16 rows, beside the shards.
Deviation: a tensor made in another way (`orthogonal_`, a sum of two tensors) is made whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from pardnn.backends.torch.deferred_init import recording as rec
from pardnn.backends.torch.deferred_init.counted_draws import (
    GROUP,
    draws_of_fill,
    is_dense,
    is_fill_in_parts,
    num_elements,
)
from pardnn.backends.torch.deferred_init.program_slice import ProgramSlice, call_name, overwritten
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.rng import generator as rng
from pardnn.checkpoint.manifest import intersection, within
from pardnn.graph.ir import contiguous_strides
from pardnn.plan.mesh import Box

#: Size of a block, unless 16 rows are larger.
BLOCK_BYTES = 8 << 20
Shard = tuple[Box, Sequence[int] | None]
"""Box of a tensor, and the strides of its copy; contiguous if None."""
Wanted = Mapping[int, Sequence[tuple[int, rec.TensorRef, Shard | None]]]
"""For each storage, the tensors to return: position, reference and shard."""

_CONSTANT_FILLS = frozenset({"fill_", "zero_"})
#: Calls that change each element of their first argument independently, given only numbers.
_ELEMENTWISE = frozenset({"add_", "clamp_", "div_", "mul_", "neg_", "sub_"})
_CONVERSION = "_to_copy"


@dataclass(frozen=True)
class Chain:
    """The calls that make one tensor, and may run on some of its rows.

    Attributes:
        events: Their indices in the recording, in order.
        calls: The calls themselves; the first one fills.
        whole: The tensor that the last call leaves.
        shards: Its shards: position in the results, box, strides.
    """

    events: tuple[int, ...]
    calls: tuple[rec.Call, ...]
    whole: rec.TensorRef
    shards: tuple[tuple[int, Box, Sequence[int] | None], ...]


def chains_of(recording: rec.Recording, sliced: ProgramSlice, wanted: Wanted) -> list[Chain]:
    """Return the chains of tensors that can be made in blocks, and are larger than one block."""
    calls: dict[int, list[int]] = {}
    for index in sorted(sliced.needed):
        call = recording.events[index]
        assert isinstance(call, rec.Call)
        for storage in call.reads | call.writes:
            calls.setdefault(storage, []).append(index)
    found = []
    for storage, entries in wanted.items():
        shards = tuple((i, *shard) for i, _, shard in entries if shard is not None)
        (ref, *others) = {ref for _, ref, _ in entries}
        is_large = num_elements(ref) * ref.dtype.itemsize > BLOCK_BYTES
        if others or len(shards) < len(entries) or not is_large:
            continue
        events = _events(recording, calls, storage, wanted)
        chain = [recording.events[index] for index in events]
        if chain and _result(recording, chain) == ref:  # pyright: ignore[reportArgumentType]
            found.append(Chain(tuple(events), tuple(chain), ref, shards))  # pyright: ignore[reportArgumentType]
    return found


def wanted_of(
    refs: Sequence[rec.TensorRef], shards: Sequence[Shard | None]
) -> dict[int, list[tuple[int, rec.TensorRef, Shard | None]]]:
    """Return the wanted parts by storage."""
    found: dict[int, list[tuple[int, rec.TensorRef, Shard | None]]] = {}
    for i, (ref, shard) in enumerate(zip(refs, shards, strict=True)):
        found.setdefault(ref.storage, []).append((i, ref, shard))
    return found


def _events(
    recording: rec.Recording, calls: Mapping[int, list[int]], storage: int, wanted: Wanted
) -> list[int]:
    """Return the calls on a storage and on what it was converted from; none if shared.

    Args:
        recording: The recording of the factory.
        calls: The calls of the slice, by storage.
        storage: The wanted storage.
        wanted: Storages that are wanted themselves, and not given up after a conversion.
    """
    storages = [storage]
    while True:
        own = calls.get(storages[0], [])
        first = recording.events[own[0]] if own else None
        if not isinstance(first, rec.Call) or call_name(first) != _CONVERSION:
            break
        source = first.args[0].storage
        if source in wanted or source in storages or calls[source][-1] != own[0]:
            return []
        storages.insert(0, source)
    return [*calls.get(storages[0], []), *(i for s in storages[1:] for i in calls[s][1:])]


def _result(recording: rec.Recording, chain: Sequence[rec.Call]) -> rec.TensorRef | None:
    """Return the tensor that a chain leaves; None if it may not run on just some rows."""
    whole = None
    for number, call in enumerate(chain):
        (operand, *others) = _operands(call) or [None]
        if others or not isinstance(operand, rec.TensorRef) or not _is_plain(operand):
            return None
        if number == 0:
            is_constant = call.generator is None and call_name(call) in _CONSTANT_FILLS
            covers = operand.storage in overwritten(recording, call)
            whole = operand if covers and (is_constant or is_fill_in_parts(call)) else None
        elif call_name(call) == _CONVERSION:
            made = call.outputs[0]
            is_same = made is not None and _is_plain(made) and made.size == operand.size
            whole = made if is_same and operand == whole and made.offset == 0 else None
        elif call.generator is not None or not _keeps_rows_apart(call, operand, whole):
            return None
        if whole is None:
            return None
    return whole


def _operands(call: rec.Call) -> list[Any]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, rec.TensorRef | rec.StorageRef)]


def _is_plain(ref: rec.TensorRef) -> bool:
    """Whether a tensor's elements lie side by side in C order, on the host."""
    return is_dense(ref) and ref.device.type == "cpu" and not ref.conjugate and not ref.negative


def _keeps_rows_apart(call: rec.Call, operand: rec.TensorRef, whole: rec.TensorRef | None) -> bool:
    """Whether an in-place call changes each element independently; a fill may cover just some."""
    if whole is None or (operand.storage, operand.dtype) != (whole.storage, whole.dtype):
        return False
    if call_name(call) in _CONSTANT_FILLS:
        return True
    return operand == whole and call_name(call) in _ELEMENTWISE


def made_in_blocks(
    chain: Chain,
    run_call: Callable[[rec.Call, torch.Tensor], torch.Tensor],
    skip: Callable[[int, rng.Draws], None],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the shards of a chain, with their positions in the results.

    Args:
        chain: The chain to run.
        run_call: Runs a call on a given tensor instead of its own, and returns its result.
        skip: Moves a generator, of this number, past draws.
    """
    made: dict[int, torch.Tensor] = {}
    for i, box, strides in chain.shards:
        shape = [high - low for low, high in box]
        strides = contiguous_strides(shape) if strides is None else strides
        made[i] = torch.empty_strided(shape, strides, dtype=chain.whole.dtype)
    first, start = chain.calls[0], 0
    filled = first.args[0]
    for block in _blocks(filled):
        shape = tuple(high - low for low, high in block)
        part = dataclasses.replace(filled, size=shape, stride=contiguous_strides(shape))
        parts = [(i, box, intersection(box, block)) for i, box, _ in chain.shards]
        if any(common is not None for _, _, common in parts):
            value = torch.empty(shape, dtype=filled.dtype)
            for call in chain.calls:
                value = _run_on_block(call, value, start, run_call)
            for i, box, common in parts:
                if common is not None:
                    source = box_view(value, within(common, block))
                    box_view(made[i], within(common, box)).copy_(source)
        elif first.generator is not None:
            draws = draws_of_fill(first, part)
            assert draws is not None
            skip(first.generator, draws)
        start += num_elements(part)
    yield from made.items()


def _blocks(ref: rec.TensorRef) -> Iterator[Box]:
    """Yield boxes of a tensor that follow one another in memory, each from a multiple of `GROUP`.

    They are cut along the first dim that is longer than 1; none has less than `GROUP` elements.
    """
    dim = next(d for d, size in enumerate(ref.size) if size > 1)
    extent = ref.size[dim]
    row = num_elements(ref) // extent
    unit = GROUP // math.gcd(GROUP, row)
    step = max(unit, BLOCK_BYTES // (row * ref.dtype.itemsize) // unit * unit)
    low = 0
    while low < extent:
        high = min(extent, low + step)
        if (extent - high) * row < GROUP:
            high = extent
        yield (*((0, size) for size in ref.size[:dim]), (low, high),
               *((0, size) for size in ref.size[dim + 1 :]))  # fmt: skip
        low = high


def _run_on_block(
    call: rec.Call,
    value: torch.Tensor,
    start: int,
    run_call: Callable[[rec.Call, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run a call of a chain on a block and return the block after it.

    Args:
        call: The call to run.
        value: The block.
        start: Its first element in the whole tensor.
        run_call: As for `made_in_blocks`.
    """
    if call_name(call) == _CONVERSION:
        return run_call(call, value)
    # A fill may cover just some elements, such as one row.
    operand = call.args[0]
    low, high = operand.offset - start, operand.offset - start + num_elements(operand)
    low, high = max(0, low), min(value.numel(), high)
    if low < high:
        run_call(call, value.view(-1)[low:high])
    return value
