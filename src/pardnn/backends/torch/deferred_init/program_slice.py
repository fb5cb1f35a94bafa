"""A program slice: the events of a recording that some tensors depend on, in a low-memory order.

Idea: a backward analysis of live storages. A call that overwrites a whole storage ends the liveness
of its old content, so that a weight that is initialised twice is computed once; storages that no
call has written yet are allocated at first use. Random calls keep their positions; every other call
runs as soon as its last operand exists, so that `model.double()` converts each weight right after
it is drawn, and not all of them at the end.

Complexity: O(events x their storages).
Source: Weiser, Program Slicing, IEEE TSE 10(4), 1984; here for straight-line programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from pardnn.backends.torch.deferred_init import recording as rec

#: Calls that only allocate.
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
#: Calls that fill their first argument and do not read it.
_FILLS = frozenset({
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_", "zero_", "_no_grad_trunc_normal_",
})  # fmt: skip
# Calls whose draws depend only on geometry, never on values.
_DRAWS_BY_GEOMETRY = frozenset((
    "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_", "rand", "randn", "randint", "randperm", "rand_like", "randn_like",
    "randint_like", "native_dropout", "_no_grad_trunc_normal_",
))  # fmt: skip


@dataclass(frozen=True)
class ProgramSlice:
    """What to execute.

    Attributes:
        needed: Indices of the calls that run; other random calls only advance a generator.
        order: Indices of all events that do something, in the order of execution.
        last_use: Position in `order` of the last use of each storage; -1 if never used.
        owned: Storages that are written or returned, so that constants must be copied.
    """

    needed: frozenset[int]
    order: tuple[int, ...]
    last_use: dict[int, int]
    owned: frozenset[int]


def call_name(call: rec.Call) -> str:
    """Return the name of a call's function, without overload."""
    packet = getattr(call.function, "overloadpacket", call.function)
    return str(getattr(packet, "__name__", packet))


def draws_depend_on_values(call: rec.Call) -> bool:
    """Whether a call's draws depend on values of its arguments."""
    return call_name(call) not in _DRAWS_BY_GEOMETRY or (
        # bernoulli_ given probabilities as a tensor checks them.
        call_name(call) == "bernoulli_" and len(call.reads) > 1
    )


def slice_program(recording: rec.Recording, wanted: Iterable[int]) -> ProgramSlice:
    """Return the slice of a recording that the storages `wanted` depend on."""
    wanted = set(wanted)
    needed, owned = _needed(recording, wanted)
    order = tuple(_ordered(recording, needed))
    last_use = dict.fromkeys(wanted, -1)
    for position, index in enumerate(order):
        call = recording.events[index]
        if index in needed:
            assert isinstance(call, rec.Call)
            last_use.update(dict.fromkeys(call.reads | call.writes, position))
    return ProgramSlice(needed, order, last_use, owned)


def _needed(recording: rec.Recording, wanted: set[int]) -> tuple[frozenset[int], frozenset[int]]:
    live, needed, owned = set(wanted), set(), set(wanted)
    for index in range(len(recording.events) - 1, -1, -1):
        call = recording.events[index]
        if not isinstance(call, rec.Call):
            continue
        is_value_dependent = call.generator is not None and draws_depend_on_values(call)
        if not (call.writes & live or is_value_dependent):
            continue
        if call_name(call) in _ALLOCATIONS:
            live -= call.writes - call.reads
            continue
        needed.add(index)
        owned |= call.writes
        whole = overwritten(recording, call)
        live -= whole
        live |= call.reads - whole
    return frozenset(needed), frozenset(owned)


def overwritten(recording: rec.Recording, call: rec.Call) -> frozenset[int]:
    """Return the storage that a call completely overwrites without reading it; else None."""
    if (
        call_name(call) not in _FILLS
        or not call.args
        or not isinstance(call.args[0], rec.TensorRef)
    ):
        return frozenset()
    ref = call.args[0]
    others = torch.utils._pytree.tree_leaves((call.args[1:], call.kwargs))
    kinds = (rec.TensorRef, rec.StorageRef)
    if any(isinstance(leaf, kinds) and leaf.storage == ref.storage for leaf in others):
        return frozenset()
    extent = 1
    for stride, size in sorted(zip(ref.stride, ref.size, strict=True)):
        if size != 1 and stride != extent:
            return frozenset()
        extent *= size
    covers = extent * ref.dtype.itemsize == int(recording.kept[ref.storage].nbytes())
    return frozenset({ref.storage}) if covers and ref.offset == 0 else frozenset()


def _ordered(recording: rec.Recording, needed: frozenset[int]) -> Iterator[int]:
    """Yield events: random calls and reseeds in their order, others right after their operands."""
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    positions: list[tuple[int, int]] = []
    for index, event in enumerate(recording.events):
        if not isinstance(event, rec.Call):
            positions.append((index, index))
            continue
        if index not in needed and event.generator is None:
            continue
        position = index
        if event.generator is None:
            before = [written[s] for s in event.reads | event.writes if s in written]
            before += [read[s] for s in event.writes if s in read]
            position = max(before, default=index)
        positions.append((position, index))
        if index in needed:
            read.update({s: max(position, read.get(s, position)) for s in event.reads})
            written.update({s: max(position, written.get(s, position)) for s in event.writes})
    yield from (index for _, index in sorted(positions))
