"""Large arrays, sets and byte arrays: whether a step reads them.

Problem: what a step reads out of a NumPy array is a constant of its graph, so the array must be
compared at every call; but a data set that a trainer holds is too large for that, and not read.

Idea: trace the step once more with stand-ins in their places. A use of one is noted and gets the
real value, also in other threads, which are not noted. C code that looks into memory finds none and
fails, so the trace ends. What is read is compared as a whole, up to a limit; beyond it the step is
refused. What a stand-in cannot replace everywhere counts as read.

Complexity: one more trace for a step that reaches such contents; two for each that C code reads,
times the logarithm of their number.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pardnn.backends.torch.capture.assigned.stand_ins import OWN
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.restore import restore
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_checks import check_same_twice
from pardnn.backends.torch.capture.traced_run import run_traced
from pardnn.backends.torch.user_step.code_names import is_library_frame
from pardnn.backends.torch.user_step.guards.guards import Guards
from pardnn.backends.torch.user_step.guards.held_content import size_of
from pardnn.backends.torch.user_step.held_numbers import slots_of
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.errors import UnsupportedError, shown
from pardnn.units import bytes_text

#: Limit for all that is read; comparing it takes 3 ms of each call.
_MAX_BYTES = 16 << 20
#: What shows no content of an array; guards compare these in any case.
_EXTENT = frozenset({"shape", "ndim", "size", "nbytes", "itemsize", "dtype", "__len__"})
#: What looks at objects of a step, also while it runs.
_WALKS = ("pardnn.backends.torch.user_step.", restore.__module__)
_Held = tuple[str, Any]
#: Of names and lines: where a content was read.
_Read = dict[str, str]


def large_contents_read(
    step: Callable[..., Any],
    args: list[Any],
    batch: Sequence[int],
    trace: Callable[[], StepTrace],
    known: StepTrace,
    start: ObjectGraph,
) -> list[str]:
    """Return the names of the large contents that a step reads, which guards have to compare.

    Args:
        step: The user's step.
        args: Its arguments.
        batch: Indices of the arguments that are the batch.
        trace: Traces the step.
        known: Such a trace.
        start: What its objects held before it.

    Raises:
        UnsupportedError: E801, if they are too large to be compared.
    """
    restore(start.contents)
    found = Guards(step, args, batch).large_contents()
    if not found:
        return []
    read = _Search(step, args, batch, trace, known, start).read(found)
    contents = {name: value for name, value in found if name in read}
    if sum(map(size_of, contents.values())) > _MAX_BYTES:
        largest = max(contents, key=lambda name: size_of(contents[name]))
        raise _too_large(largest, contents, read[largest])
    return sorted(read)


class _Search:
    """Traces with stand-ins; arguments as for `large_contents_read`."""

    def __init__(
        self, step: Callable[..., Any], args: list[Any], batch: Sequence[int],
        trace: Callable[[], StepTrace], known: StepTrace, start: ObjectGraph,
    ) -> None:  # fmt: skip
        self._step, self._args, self._batch = step, args, batch
        self._start, self._trace, self._known = start, trace, known

    def read(self, suspects: Sequence[_Held]) -> _Read:
        """Return which of some contents the step reads."""
        if not suspects:
            return {}
        read, is_same = self._trial(suspects)
        rest = [each for each in suspects if each[0] not in read]
        if is_same:
            return read
        if len(rest) < len(suspects):
            return read | self.read(rest)
        if len(rest) == 1:
            return {rest[0][0]: ""}
        half = len(rest) // 2
        return self.read(rest[:half]) | self.read(rest[half:])

    def _trial(self, suspects: Sequence[_Held]) -> tuple[_Read, bool]:
        """Trace the step with stand-ins; return what is read, and whether the trace is the same."""
        read: _Read = {}
        objects = walk_objects(self._step, self._args)
        with _inserted(objects, suspects, read):
            left = Guards(self._step, self._args, self._batch).large_contents()
            others = {id(value) for _, value in left}
            read |= {name: "" for name, value in suspects if id(value) in others}
            try:
                trace = self._trace()
                check_same_twice(self._known, trace)
                is_same = True
            except Exception:  # C code that meets a stand-in may raise anything
                is_same = False
        restore(self._start.contents)
        return read, is_same


@contextlib.contextmanager
def _inserted(objects: ObjectGraph, suspects: Sequence[_Held], read: _Read) -> Iterator[None]:
    """Put stand-ins in place of contents, which note their uses, while the context is open."""
    places = [(value, slots_of(objects.contents, value)) for _, value in suspects]
    made = [_stand_in(value, functools.partial(_note, name, read)) for name, value in suspects]
    behind = {id(each): value for each, (value, _) in zip(made, places, strict=True)}
    for each, (_, slots) in zip(made, places, strict=True):
        for slot in slots:
            slot.set(each)
    try:
        yield
    finally:
        for slot in (slot for _, slots in places for slot in slots):
            with contextlib.suppress(LookupError, AttributeError, ValueError):
                if id(now := slot.get()) in behind:  # not always the object that was put there
                    slot.set(behind[id(now)])


def _note(name: str, read: _Read) -> None:
    """Note that the step reads a content, unless another thread or a walk of this package does."""
    if name in read:
        return
    frame, place = sys._getframe(2), ""
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is None or (frame.f_globals.get("__name__") or "").startswith(_WALKS):
        return
    while frame is not None and frame.f_code is not run_traced.__code__:
        if not place and not is_library_frame(frame):
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    if frame is not None:
        read[name] = place


def _stand_in(real: Any, note: Callable[[], None]) -> Any:
    """Return a stand-in that passes each use on to a content, and notes it."""

    def get(self: Any, key: str) -> Any:
        if key in OWN:
            return object.__getattribute__(self, key)
        if key == "__wrapped__":  # it says that it is what it is not, see `followed`
            return real
        if key not in _EXTENT or not isinstance(real, np.ndarray):
            note()
        return getattr(real, key)

    def use(key: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: get(self, key)(*args, **kwargs)

    kind = type(real)
    methods = [key for key in dir(kind) if key not in OWN and callable(getattr(kind, key, None))]
    members = {key: use(key) for key in methods} | {"__getattribute__": get}
    members |= {"__class__": property(lambda _: kind), "is_pardnn_recorder": True}
    return type("StandIn", (), members)()


def _too_large(name: str, contents: Mapping[str, Any], where: str) -> UnsupportedError:
    value, others = contents[name], len(contents) - 1
    size = f"{type(value).__name__}, {bytes_text(size_of(value))}"
    if others:
        size += f", and {others} more, {bytes_text(sum(map(size_of, contents.values())))} in all"
    return unsupported.error_at(
        where or None,
        f"the step reads {shown(name)}{unsupported.at(where or None)}: {size}.\n"
        "What it finds there is a constant of the graph, so the content would have to be compared\n"
        f"at every call, which is done up to {_MAX_BYTES >> 20} MiB in all.\n"
        "Read the number before the step, and keep it in an attribute or pass it as an argument.\n"
        "Or make it a torch tensor, whose content each step reads: torch.from_numpy(array). An\n"
        "array of its own memory that never changes needs no comparison once it is read-only:\n"
        "array.flags.writeable = False.",
    )
