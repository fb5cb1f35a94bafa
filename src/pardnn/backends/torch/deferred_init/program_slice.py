"""Which events of a recording some tensors need, and an order in which few bytes are held.

Backwards, storage by storage: a call that overwrites a storage as a whole ends the need for what
was there, so that a weight which is initialised twice is made once. Storages that nothing has
filled yet are allocated when they are first used. Random calls keep their places; every other call
runs as soon as its last operand is there, so that `model.double()` converts each weight when it
has been drawn, and not all of them after the last.

O(events x their storages).
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
# Calls whose draws depend on geometry alone, never on values.
_GEOMETRIC = frozenset((
    "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_", "rand", "randn", "randint", "randperm", "rand_like", "randn_like",
    "randint_like", "native_dropout", "_no_grad_trunc_normal_",
))  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """What to execute.

    Attributes:
        needed: Calls that run in full.
        order: Of all events that do something.
        last_use: After which place of `order` each storage is last used; -1 if never.
        owned: Storages that are written or handed out, so that constants must be copied.
    """

    needed: frozenset[int]
    order: tuple[int, ...]
    last_use: dict[int, int]
    owned: frozenset[int]


def call_name(call: rec.Call) -> str:
    """Return the name of what a call calls, without overload."""
    packet = getattr(call.function, "overloadpacket", call.function)
    return str(getattr(packet, "__name__", packet))


def needs_values(call: rec.Call) -> bool:
    """Whether a call's draws depend on values of its arguments."""
    return call_name(call) not in _GEOMETRIC or (
        # bernoulli_ given probabilities as a tensor checks them.
        call_name(call) == "bernoulli_" and len(call.reads) > 1
    )


def slice_events(recording: rec.Recording, wanted: Iterable[int]) -> Slice:
    """Return what the storages `wanted` need of a recording."""
    wanted = set(wanted)
    needed, owned = _needed(recording, wanted)
    order = tuple(_ordered(recording, needed))
    last_use = dict.fromkeys(wanted, -1)
    for place, index in enumerate(order):
        call = recording.events[index]
        if index in needed:
            assert isinstance(call, rec.Call)
            last_use.update(dict.fromkeys(call.reads | call.writes, place))
    return Slice(needed, order, last_use, owned)


def _needed(recording: rec.Recording, wanted: set[int]) -> tuple[frozenset[int], frozenset[int]]:
    live, needed, owned = set(wanted), set(), set(wanted)
    for index in range(len(recording.events) - 1, -1, -1):
        call = recording.events[index]
        if not isinstance(call, rec.Call):
            continue
        draws_by_value = call.generator is not None and needs_values(call)
        if not (call.writes & live or draws_by_value):
            continue
        if call_name(call) in _ALLOCATIONS:
            live -= call.writes - call.reads
            continue
        needed.add(index)
        owned |= call.writes
        filled = _filled(recording, call)
        live -= filled
        live |= call.reads - filled
    return frozenset(needed), frozenset(owned)


def _filled(recording: rec.Recording, call: rec.Call) -> frozenset[int]:
    """Return the storage that a call overwrites as a whole without reading it, if there is one."""
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
    reach = 1
    for stride, size in sorted(zip(ref.stride, ref.size, strict=True)):
        if size != 1 and stride != reach:
            return frozenset()
        reach *= size
    covers = reach * ref.dtype.itemsize == int(recording.kept[ref.storage].nbytes())
    return frozenset({ref.storage}) if covers and ref.offset == 0 else frozenset()


def _ordered(recording: rec.Recording, needed: frozenset[int]) -> Iterator[int]:
    """Yield events so that what draws keeps its place, and the rest follows its operands."""
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for index, event in enumerate(recording.events):
        if not isinstance(event, rec.Call):
            places.append((index, index))
            continue
        if index not in needed and event.generator is None:
            continue
        place = index
        if event.generator is None:
            before = [written[s] for s in event.reads | event.writes if s in written]
            before += [read[s] for s in event.writes if s in read]
            place = max(before, default=index)
        places.append((place, index))
        if index in needed:
            read.update({s: max(place, read.get(s, place)) for s in event.reads})
            written.update({s: max(place, written.get(s, place)) for s in event.writes})
    yield from (index for _, index in sorted(places))
