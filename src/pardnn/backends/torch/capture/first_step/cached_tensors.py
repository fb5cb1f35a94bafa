"""Tensors that the user's functions keep in caches of `functools`, from capture to capture.

Problem: a trace must not find what another one left, so it makes a cached tensor again. An eager
step keeps using the first one, although what its function read may have changed since.

Idea: for each entry of a cache, note how its tensor is made, as calls on constants. If a later
trace makes an entry by other calls, the step is refused, unless the user has cleared the cache in
between.

Complexity: O(calls of the trace) if there is such a cache.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.first_step.first_use import (
    is_made_of_constants,
    is_written_elsewhere,
    origin,
)
from pardnn.backends.torch.capture.refusals.first_step import (
    cache_counts,
    cached_and_written,
    cached_tensor,
)
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.code_names import codes_of, place_in
from pardnn.backends.torch.user_step.guards.content import Clearings

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
Made = dict[Any, dict[Any, str]]
"""What the tensors of caches are made of, by cache and key."""


class _Kept(NamedTuple):
    """What eager steps have in a cache.

    Attributes:
        clearings: How often the user has cleared it.
        count: How often the user had cleared it when it was filled.
        made: What its tensors are made of, by key.
    """

    clearings: Clearings
    count: int
    made: dict[Any, str]


_KEPT: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()


def check_cached(tracer: Tracer, caches: Iterable[Any], made: Made) -> None:
    """Refuse cached tensors that an eager step would not make as this trace did.

    Args:
        tracer: The tracer of the trace.
        caches: The caches in which traces leave fake tensors; cleared before this one.
        made: What the traces of this capture have made; this trace is added.

    Raises:
        UnsupportedError: E804.
    """
    for cache in caches:
        known = made.setdefault(cache, dict(_eager(cache)))
        for key, fakes in _entries(cache):
            if not is_made_of_constants(tracer, fakes):
                raise cached_tensor(cache.__wrapped__)
            if is_written_elsewhere(tracer, cache, fakes):
                raise cached_and_written(cache.__wrapped__)
            values = [tracer.aliases.fresh_value(fake) for fake in fakes]
            now = origin(values, tracer.calls)
            if known.setdefault(key, now) != now:
                raise cached_tensor(cache.__wrapped__)


def keep_cached(made: Made) -> None:
    """Note what the caches of a step hold when it runs.

    Args:
        made: The result of `check_cached`.
    """
    for cache, each in made.items():
        kept = _KEPT.get(cache)
        clearings = Clearings(cache) if kept is None else kept.clearings
        _KEPT[cache] = _Kept(clearings, clearings(), each)


def _eager(cache: Any) -> dict[Any, str]:
    kept = _KEPT.get(cache)
    return {} if kept is None or kept.clearings() != kept.count else kept.made


def _entries(cache: Any) -> Iterator[tuple[Any, list[FakeTensor]]]:
    """Yield the keys of a cache, as they are compared, and the fake tensors under each."""
    held = gc.get_referents(cache)
    pairs = itertools.pairwise(held)  # a bounded cache has each key right before its value
    if cache.cache_parameters()["maxsize"] is None:
        pairs = next(each for each in held if type(each) is dict).items()
    for key, value in pairs:
        fakes = [each for each in pytree.tree_leaves(value) if isinstance(each, FakeTensor)]
        if fakes:
            yield _comparable_key(key), fakes


def _comparable_key(key: Any) -> Any:
    """Return a key without its objects, which a cleared cache no longer holds."""
    if isinstance(key, tuple):
        return tuple(map(_comparable_key, key))
    return (type(key), key) if isinstance(key, _PLAIN) else id(key)


def check_counts(functions: Iterable[types.FunctionType], held: Collection[Any]) -> None:
    """Refuse `cached.cache_info()` in the step: traces call the function, but runs do not.

    Args:
        functions: The user's functions that may run.
        held: What the step reaches.

    Raises:
        UnsupportedError: E804.
    """
    asked = (at for each in functions for at in _asks(each.__code__))
    where = next(asked, None)
    if where and any(isinstance(each, functools._lru_cache_wrapper) for each in held):
        raise cache_counts(where)


def _asks(code: types.CodeType) -> Iterator[str]:
    """Yield the lines that ask for the counts of a cache."""
    for each in codes_of(code):
        for at in dis.get_instructions(each) if "cache_info" in each.co_names else ():
            if at.argval == "cache_info":
                yield place_in(each, at)
