"""Tensors that a step makes at its first use and keeps: masks, tables of positions, slopes.

Problem: `if self.mask is None: self.mask = build()`. All steps but the first find the tensor, but
ranks never run a first step.

Idea: if the tensor depends only on constants and no later step changes it, every step can make it:
its calls are recorded once more before the others. A walk over objects does not find what
`functools.cache` keeps, so such caches are cleared before each trace.

Complexity: O(calls of the first trace) if there is such a tensor; for caches
O(objects of the process) after a failed trace.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pardnn.backends.torch.capture.constant_folding import (
    depends_on_constants,
    producers_of,
    record_again,
)
from pardnn.backends.torch.capture.first_step.initial_state import initial_values
from pardnn.backends.torch.capture.refusals.changed_state import changed_state
from pardnn.backends.torch.capture.refusals.first_step import kept_of_numbers
from pardnn.backends.torch.capture.same_calls import comparable
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value, storages_read
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import Source, held_gradients, sources_of
from pardnn.errors import PardnnError
from pardnn.gc_pause import frozen_too
from pardnn.graph.ir import is_in_group

#: Counts and content hashes of caches that held no fake: most never change, and torch's own hold
#: ten thousand leaves.
_WITHOUT_FAKES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
#: Containers that are searched directly.
_PLAIN_NODES = frozenset({list, tuple, dict})
#: A value may hold itself.
_MAX_DEPTH = 10


@dataclass(frozen=True)
class KeptTensors:
    """What the first step made from constants and keeps.

    Attributes:
        calls: The trace of the first step.
        values: Its values of the tensors, by source name.
    """

    calls: Sequence[Call]
    values: Mapping[str, Value]

    def make(
        self, sources: Mapping[str, Source], tracer: Tracer, mode: FakeTensorMode
    ) -> list[tuple[Source, Storage | None, int]]:
        """Record the calls that make the tensors, and put the results where the step finds them.

        Args:
            sources: The sources by name, as of now.
            tracer: The tracer of the step that will run.
            mode: The mode of its fake tensors.

        Returns:
            For each tensor, its source, its storage and its number of writes: see
            `changed_tensors`.
        """
        if not self.values:
            return []
        with mode, tracer, torch.no_grad():
            tensors = record_again(list(self.values.values()), self.calls)
        made: list[tuple[Source, Storage | None, int]] = []
        for name, tensor in zip(self.values, tensors, strict=True):
            if name not in sources:  # each step makes its dictionary anew, and it as well
                continue
            storage = tracer.aliases.value(tensor).storage
            made.append((sources[name], storage, len(storage.writes) if storage else 0))
            sources[name].set(tensor)
        return made

    def origins(self, trace: StepTrace) -> dict[str, Any]:
        """Return the geometry of each tensor that a trace made, and a hash of how it was made."""
        made = {source.name: self.values[source.name] for source, *_ in trace.made_anew}
        return {name: (x.geometry, origin([x], self.calls)) for name, x in made.items()}

    def without(self, names: Collection[str]) -> KeptTensors:
        """Return the tensors with other names than these."""
        return replace(self, values={n: v for n, v in self.values.items() if n not in names})


def changed_tensors(trace: StepTrace) -> list[str]:
    """Return the names of kept tensors that a step has written or replaced by another."""
    found: list[str] = []
    for source, storage, num_writes in trace.made_anew:
        live = source.get()
        now = trace.tracer.aliases.value(live).storage if isinstance(live, torch.Tensor) else None
        if now is not storage or storage is None or len(storage.writes) != num_writes:
            found.append(source.name)
    return found


def without_first_value(
    first: StepTrace, trace: StepTrace, initial: Mapping[str, Any], irregular: Mapping[str, str]
) -> dict[str, str]:
    """Return why states do not start from a number; states replaced unread may start from any.

    Args:
        first: Trace of the first step.
        trace: The trace of the step that repeats.
        initial: First values of states by name.
        irregular: States that the first step does not fill with a number, and why.
    """
    replaced = _replaced_unread(trace, irregular)
    for name in replaced:
        trace.values[name].call.arguments = {"initial": 0.0}
    found = {name: why for name, why in irregular.items() if name not in replaced}
    for name, value in first.created.items():
        storage, now = value.storage, trace.values.get(name)
        is_number = isinstance(initial.get(name), int | float)
        if storage is None or now is None or now.storage is None or not is_number:
            continue
        # A tensor that is made empty is filled by a write of its own.
        is_empty = ".empty" in storage.owner.call.kind
        if len(storage.writes) - is_empty > len(now.storage.writes):
            found[name] = "is written once more by the first step, when it is created"
    return found


def _replaced_unread(trace: StepTrace, names: Iterable[str]) -> set[str]:
    """Return the optimizer states that a step replaces without ever reading them."""
    read = storages_read(trace.tracer.calls)
    found = set[str]()
    for name in names:
        source, value = trace.sources.get(name), trace.values.get(name)
        if source is None or value is None or value.storage is None or value.storage in read:
            continue
        live = source.get()
        if source.kind == "state" and source.parameter is None and isinstance(live, torch.Tensor):
            new = trace.tracer.aliases.fresh_value(live)
            is_alike = new.geometry and value.geometry and new.geometry[::3] == value.geometry[::3]
            if is_alike and new.storage is not value.storage and not value.storage.writes:
                found.add(name)
    return found


NOTHING_KEPT = KeptTensors((), {})


def check_lasting(
    kept: KeptTensors, trace: Callable[[], StepTrace], sources: Callable[[], Iterable[Source]]
) -> None:
    """Reject tensors made from changing numbers: another step would make other tensors.

    Args:
        kept: What the first step made and keeps. All steps make it again.
        trace: Traces a first step again, with symbols for the numbers that change.
        sources: Returns what the step reaches now.

    Raises:
        UnsupportedError: E804.
    """
    if not kept.values:
        return
    try:
        aliases = trace().tracer.aliases
    except PardnnError:  # no first step can be followed with such numbers
        return
    for source in sources():
        live = source.get() if source.name in kept.values else None
        is_known = isinstance(live, torch.Tensor) and aliases.knows(live)
        if is_known and not depends_on_constants(aliases.fresh_value(live)):
            raise kept_of_numbers(source.name)


CreatedTensors = tuple[dict[str, Any], dict[str, str], KeptTensors]
"""First values and why there is none, by name, as of `initial_values`; and `kept_tensors`."""


def created_tensors(
    first: StepTrace, objects: ObjectGraph, batch: Sequence[int], before: Iterable[Source]
) -> CreatedTensors:
    """Return the initial values of the tensors that the first step created.

    Args:
        first: Its trace.
        objects: The object graph after it.
        batch: Indices of the arguments that are the batch.
        before: The sources that existed before.

    Raises:
        UnsupportedError: E804, if it put tensors into containers in the groups of an optimizer.
    """
    existing, found = {source.name for source in before}, sources_of(objects, batch)
    created = [source for source in found if source.name not in existing]
    given = [s for s in created if s.kind == "input" and isinstance(s.get(), torch.Tensor)]
    groups = [s.name for s in given if is_in_group(s.name)]
    if lost := [name for name in groups if name not in first.assigned]:
        raise changed_state(lost)
    gradients = held_gradients(found)
    live = {source.name: source.get() for source in (*found, *gradients)}
    tensors = {name: each for name, each in live.items() if isinstance(each, torch.Tensor)}
    aliases, made = first.tracer.aliases, {source.name for source in created}
    first.created = {n: aliases.fresh_value(each) for n, each in tensors.items() if n in made}
    first.left = {n: aliases.fresh_value(x) for n, x in tensors.items() if aliases.knows(x)}
    numbers = {name: each.change.then for name, each in first.assigned.items()}
    numbers = {name: each for name, each in numbers.items() if type(each) in (int, float)}
    initial, irregular = initial_values(first.tracer, created, objects, numbers)
    first.numbers = sorted(numbers.keys() & initial.keys())
    for source in gradients:
        if source.name not in first.values:
            initial[source.name] = 0.0
    return initial, irregular, kept_tensors(first.tracer, created, irregular)


def kept_tensors(
    tracer: Tracer, created: Iterable[Source], irregular: Collection[str]
) -> KeptTensors:
    """Return the tensors of constants that the first step created.

    Args:
        tracer: The tracer of the first step.
        created: Sources that did not exist before it.
        irregular: Names of those that do not start from a number.
    """
    values: dict[str, Value] = {}
    for source in created:
        live = source.get()
        if not isinstance(live, torch.Tensor) or live.requires_grad:
            continue
        value = tracer.aliases.fresh_value(live)
        if source.kind == "buffer" or (source.kind == "state" and source.name in irregular):
            values[source.name] = value
    values = {n: v for n, v in values.items() if depends_on_constants(v)}
    return KeptTensors(tracer.calls, values) if values else NOTHING_KEPT


_CACHE: Any = functools._lru_cache_wrapper


def origin(values: Sequence[Value], calls: Iterable[Call]) -> str:
    """Return a hash of the calls that make values."""
    producers = producers_of(values) or ()
    positions: dict[Value, Any] = {}
    found = []
    for call in calls:
        if call in producers:
            found.append(comparable(call, positions, {}))
            positions |= {each: (len(found), i) for i, each in enumerate(call.outputs)}
    found.append([positions[each] for each in values])
    return hashlib.sha256(repr(found).encode()).hexdigest()


class _Caches:
    """The caches of `functools` but our own, searched only if there may be unknown ones.

    Each refers to its type, so the type's reference count shows new ones. Looking at all objects
    takes 20 ms where transformers is imported, and each capture would do so twice.
    """

    def __init__(self) -> None:
        self._known: WeakSet[Any] = WeakSet()
        self._others: int | None = None  # references other than from known caches
        before = sys.getrefcount(_CACHE)
        cache = functools.cache(len)
        self._are_counted = sys.getrefcount(_CACHE) == before + 1
        del cache

    def alive(self) -> list[Any]:
        """Return the caches that exist now."""
        known = list(self._known)
        if not self._are_counted or sys.getrefcount(_CACHE) - len(known) != self._others:
            # Half the time of `gc.get_objects`, and a forked process copies no pages of objects.
            with frozen_too():
                known = [each for each in gc.get_referrers(_CACHE) if type(each) is _CACHE]
            known = [each for each in known if not _is_ours(each)]
            self._known = WeakSet(known)
            self._others = sys.getrefcount(_CACHE) - len(known)
        return known


_CACHES = _Caches()


def _is_ours(cache: Any) -> bool:
    """Whether a cache is of this package: those hold no tensors, and most values of all."""
    return (getattr(cache, "__module__", None) or "").startswith("pardnn.")


def caches_with_fakes(mode: FakeTensorMode) -> list[tuple[Any, list[FakeTensor]]]:
    """Return the caches of `functools` with the fake tensors of a mode that they hold.

    These must be removed after a trace, or an eager step would find them.
    """
    found: list[tuple[Any, list[FakeTensor]]] = []
    for cache in _CACHES.alive():
        info = cache.cache_info()
        if not info.currsize:  # four of five
            continue
        # A bounded cache refers to its values itself, others have them in a dictionary.
        held = gc.get_referents(cache)
        held += [item for each in held if type(each) is dict for item in each.values()]
        seen = hash((info, *map(id, held)))
        if _WITHOUT_FAKES.get(cache) == seen:
            continue
        leaves = pytree.tree_leaves(held) if _may_hold_fakes(held) else ()
        fakes = [t for t in leaves if isinstance(t, FakeTensor)]
        if not fakes:
            _WITHOUT_FAKES[cache] = seen
        elif own := [fake for fake in fakes if fake.fake_mode is mode]:
            found.append((cache, own))
    return found


def _may_hold_fakes(held: list[Any]) -> bool:
    """Whether a fake tensor may be among values or inside them, judging by types alone.

    Each level takes a few calls in C, while a tree of ten thousand leaves takes 10 ms.
    """
    for _ in range(_MAX_DEPTH):
        kinds = set(map(type, held))
        if any(issubclass(kind, FakeTensor | tuple) and kind is not tuple for kind in kinds):
            return True
        if kinds & pytree.SUPPORTED_NODES.keys() - _PLAIN_NODES:
            return True
        inner = [x for x in held if type(x) in (list, tuple)]
        inner += [x.values() for x in held if type(x) is dict]
        if not inner:
            return False
        held = list(itertools.chain.from_iterable(inner))
    return True


def new_caches(mode: FakeTensorMode, known: list[Any]) -> list[tuple[Any, list[FakeTensor]]]:
    """Find further caches that hold fake tensors; they become known."""
    found = [each for each in caches_with_fakes(mode) if each[0] not in known]
    known += [cache for cache, _ in found]
    return found


def is_made_of_constants(tracer: Tracer, fakes: Iterable[FakeTensor]) -> bool:
    """Whether each tensor that a step has cached depends on constants alone.

    Args:
        tracer: The tracer of the step.
        fakes: The tensors.
    """
    return all(
        tracer.aliases.knows(fake)
        and not fake.requires_grad
        and depends_on_constants(tracer.aliases.fresh_value(fake))
        for fake in fakes
    )


def is_written_elsewhere(tracer: Tracer, cache: Any, fakes: Iterable[FakeTensor]) -> bool:
    """Whether code other than the function that caches a tensor writes it in place.

    Args:
        tracer: The tracer of the step; knows the cache.
        cache: A cache of `functools`.
        fakes: The tensors in it.
    """
    storages = (tracer.aliases.fresh_value(fake).storage for fake in fakes)
    return any(cache not in call.within for each in storages if each for call in each.writes)
