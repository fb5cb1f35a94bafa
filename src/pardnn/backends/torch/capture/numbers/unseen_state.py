"""State that a step changes unseen by its trace: sets, arrays, iterators, attributes of tensors.

Problem: `next(schedule)`, `rng.random()` and `seen.add(key)` change objects that have no items by
key. Their results would be frozen in the graph, and two traces may agree by chance.

Idea: note their state before the step is traced, and refuse the step if it differs afterwards.
"""

from __future__ import annotations

import contextvars
import decimal
import functools
import logging
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._tensor_str import PRINT_OPTS

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.changed_state import changed_state, context_variable
from pardnn.backends.torch.user_step.guards.content import generator_state
from pardnn.backends.torch.user_step.guards.held_content import content_of, has_content
from pardnn.backends.torch.user_step.object_graph import PLAIN, UNSEEN, ObjectGraph
from pardnn.backends.torch.user_step.slots import Entry

#: What is set for the whole process, apart from torch's modes.
_SETTINGS: dict[str, Callable[[], Any]] = {
    "sys.path": lambda: tuple(sys.path),
    "warnings.filters": lambda: tuple(warnings.filters),
    "logging.disable": lambda: logging.root.manager.disable,
    "torch.set_printoptions": lambda: repr(PRINT_OPTS),
    "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.set_num_threads": torch.get_num_threads,
    "sys.setrecursionlimit": sys.getrecursionlimit,
    "sys.excepthook": lambda: id(sys.excepthook),
}
#: Larger arrays, alone or together, are data sets, which no step writes; in bytes.
_MAX_BYTES, _MAX_ARRAYS = 1 << 20, 256
_MAX_DEPTH = 4


def unseen_states(objects: ObjectGraph) -> list[tuple[Entry, Any]]:
    """Return the objects whose state is in no slot, and that state.

    Args:
        objects: The object graph of the step.
    """
    arrays: list[Entry] = [each for each in objects.arrays if _is_small(each.value)][:_MAX_ARRAYS]
    found = (*objects.unseen, *arrays, *objects.tensors)
    return [(entry, state_of(entry.value)) for entry in found]


def check_unseen(states: list[tuple[Entry, Any]]) -> None:
    """Reject a step that has changed such an object.

    Args:
        states: The result of `unseen_states` before the step.

    Raises:
        UnsupportedError: E804.
    """
    for entry, then in states:
        if isinstance(entry.value, torch.Tensor):
            attributes = dict(state_of(entry.value) ^ then)
            if attributes:
                raise changed_state([f"{entry.name}.{each}" for each in attributes])
        elif state_of(entry.value) != then:
            if has_content(entry.value):
                raise changed_state([entry.name])
            raise unsupported.drawn_from(entry.name, type(entry.value).__name__)


def kept_aside(objects: ObjectGraph) -> dict[str, Any]:
    """Return settings of the process and the content of `threading.local` objects, by name.

    Args:
        objects: The object graph of the step.
    """
    found: dict[str, Any] = {f"os.environ[{key!r}]": each for key, each in os.environ.items()}
    found |= {name: get() for name, get in _SETTINGS.items()} | dict(_of_loggers())
    for value in objects.seen.values():
        if isinstance(value, threading.local):
            for key, each in value.__dict__.items():
                held = each if isinstance(each, PLAIN) else id(each)
                found[f"{key} of a threading.local"] = held
    return found


def _of_loggers() -> Iterator[tuple[str, Any]]:
    """Yield the levels and handlers of loggers that have their own."""
    for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and (logger.level or logger.handlers):
            yield f"logging.getLogger({name!r})", (logger.level, *map(id, logger.handlers))


def check_context(context: contextvars.Context, before: contextvars.Context) -> None:
    """Reject a step that leaves another value in a context variable.

    Args:
        context: The context in which the step has run.
        before: A copy of it from before the step.

    Raises:
        UnsupportedError: E804.
    """
    for variable, now in context.items():
        try:
            then: Any = before.run(variable.get)
        except LookupError:
            then = context
        is_same = type(now) is type(then) and isinstance(now, PLAIN) and now == then
        # Python sets its own when it is first asked for.
        if now is not then and not is_same and not isinstance(now, decimal.Context):
            raise context_variable(variable.name)


def _is_small(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES


@functools.cache
def _own_attributes() -> frozenset[str]:
    """Return the names that are a placeholder's own."""
    with FakeTensorMode():
        return frozenset(vars(torch.nn.Parameter(torch.empty(0))))


def has_state(value: Any) -> bool:
    """Whether a value has state that `state_of` returns, and no items or attributes for it."""
    is_array = isinstance(value, np.ndarray)
    return _is_small(value) if is_array else isinstance(value, UNSEEN) or has_content(value)


def state_of(value: Any) -> Any:
    """Return the state of a value that is in no slot, to be compared."""
    if isinstance(value, torch.Tensor):
        held = vars(value)
        given = (key for key in held.keys() - _own_attributes() if key[:7] != "_pardnn")
        return {(key, id(held[key])) for key in given}
    if has_content(value):
        return content_of(value)
    if isinstance(value, random.SystemRandom):
        return None  # it has none, see `outside_reads`
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return generator_state(value)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return _position(value, 0)


def _position(iterator: Any, depth: int) -> Any:
    """Return how far an iterator is, if Python tells."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        held = {k: v for k, v in frame.f_locals.items() if isinstance(v, PLAIN)}
        inner = [v for v in frame.f_locals.values() if hasattr(v, "__next__")]
        return frame.f_lasti, repr(held), _positions(inner, depth)
    counted = getattr(iterator, "_num_yielded", None)  # of a DataLoader
    if counted is not None:
        return counted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, in Python 3.12
            _, *parts = iterator.__reduce__()
    except (TypeError, AttributeError, ValueError):
        return None
    return _positions(parts, depth)


def _positions(parts: Any, depth: int) -> list[Any]:
    """Return the numbers among parts, and the positions of iterators."""
    if depth > _MAX_DEPTH:
        return []
    found: list[Any] = []
    for part in parts:
        if isinstance(part, int | float):
            found.append(part)
        elif hasattr(part, "__next__"):
            found.append(_position(part, depth + 1))
        elif isinstance(part, tuple):
            found.append(_positions(part, depth + 1))
    return found
