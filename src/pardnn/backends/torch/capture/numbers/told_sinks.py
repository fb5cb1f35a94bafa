"""Calls on files, progress bars and writers, recorded while a step is traced: `bar.update(1)`.

Problem: capture would write a step's output to a file three times, with marks in place of numbers
that only a run knows, and later steps would write nothing.

Idea: as for lists that a step fills, each sink (`user_step.sinks`) has a stand-in while the step is
traced, which records calls whose results are dropped. Any other use ends the trace, and the step is
traced again with the object itself; for files, databases and queues no other use is allowed. A file
that the step opens for writing is refused: it would be emptied at capture.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import io
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from pardnn.backends.torch.capture.numbers.containers import OtherUse, is_told
from pardnn.backends.torch.capture.numbers.texts import marks_in
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.held_numbers import slots_of
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sinks import is_outside
from pardnn.errors import UnsupportedError

#: Called with the name of a sink, a method, and its arguments.
Tell = Callable[[str, str, tuple[Any, ...], dict[str, Any]], None]

#: Prefixes of the names of methods that take a tensor for its numbers.
_TELLING = ("add_", "log", "record", "set_", "update", "write")


class StandIn:
    """Replaces a sink while a step is traced.

    Args:
        name: The name of the sink.
        real: The sink.
        tell: Called with each call.
    """

    is_pardnn_recorder = True  # no walk enters it

    def __init__(self, name: str, real: Any, tell: Tell) -> None:
        self.__dict__.update(pardnn=(name, real, tell))

    @property
    def __class__(self) -> type:
        """The class of the sink, for `isinstance`."""
        return type(self.__dict__["pardnn"][1])

    def __getattr__(self, key: str) -> Any:
        """Return what notes a call of a method."""
        name, real, tell = self.__dict__["pardnn"]
        if key.startswith("_") or not callable(getattr(type(real), key, None)):
            raise other_use(name, real, key)

        def note(*args: Any, **kwargs: Any) -> None:
            args = tuple([*arg] if isinstance(arg, Iterator) else arg for arg in args)
            is_known = may_be_given(key, [*args, *kwargs.values()])
            if not is_known or not is_dropped(sys._getframe(1)):
                raise other_use(name, real, key)
            tell(name, key, args, kwargs)

        return note

    def __setattr__(self, key: str, value: Any) -> None:
        """Refuse it: setting an attribute is another use."""
        name, real, _ = self.__dict__["pardnn"]
        raise other_use(name, real, key)

    def __bool__(self) -> bool:
        """Whether the sink is true, as `if writer:` asks."""
        name, real, _ = self.__dict__["pardnn"]
        if hasattr(type(real), "__bool__") or hasattr(type(real), "__len__"):
            raise other_use(name, real, "its truth")
        return True


def other_use(name: str, real: Any, key: str) -> BaseException:
    """Return the exception that ends a trace that does more with a sink than write to it."""
    return _outside_is_used(name, real, key) if is_outside(real) else OtherUse(name)


def _refuse(key: str) -> Callable[..., Any]:
    """Return a special method for stand-ins that refuses to be called."""

    def used(stand_in: Any, *_: Any) -> Any:
        name, real, _ = stand_in.__dict__["pardnn"]
        raise other_use(name, real, key)

    return used


for _key in ("__iter__", "__next__", "__getitem__", "__setitem__", "__contains__", "__enter__",
             "__exit__"):  # fmt: skip
    setattr(StandIn, _key, _refuse(_key))


def sink_name(value: Any) -> str | None:
    """Return the name of the sink for which a value stands; None for any other value."""
    return value.__dict__["pardnn"][0] if type(value) is StandIn else None


@contextlib.contextmanager
def stand_ins_inserted(
    objects: ObjectGraph, sinks: Mapping[str, Any], tell: Tell
) -> Iterator[None]:
    """Put a stand-in in place of each sink while the context is open.

    Args:
        objects: The object graph of the step.
        sinks: The sinks by name.
        tell: Called with what the step calls.
    """
    slots = {name: slots_of(objects.contents, sink) for name, sink in sinks.items()}
    for name, sink in sinks.items():
        for slot in slots[name]:
            slot.set(StandIn(name, sink, tell))
    try:
        yield
    finally:
        for name, sink in sinks.items():
            for slot in slots[name]:
                if sink_name(slot.get()) == name:
                    slot.set(sink)


@contextlib.contextmanager
def texts_noted(locator: Locator, mark: Callable[[Any, str], str]) -> Iterator[None]:
    """Refuse files that the step opens, and make `json` write marks for changing numbers.

    Args:
        locator: Finds the user's line.
        mark: Returns the mark that stands for a number's text.
    """
    real, own = builtins.open, threading.get_ident()  # other threads are not concerned

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_torchs = caller.startswith("torch.") and not caller.startswith("torch.serialization")
        is_steps = threading.get_ident() == own and not is_torchs
        if is_steps and isinstance(mode, str) and set(mode) & set("wax+"):
            raise _opened(str(file), locator.line())
        return real(file, mode, *args, **kwargs)

    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        patch(builtins, "open", opening)
        patch(io, "open", opening)
        patch(json, "dumps", _marking(json.dumps, mark))
        patch(json, "dump", lambda obj, fp, **kwargs: _dumped(obj, fp, kwargs))
        yield


def _dumped(obj: Any, file: Any, kwargs: dict[str, Any]) -> None:
    file.write(json.dumps(obj, **kwargs))


def _marking(real: Callable[..., str], mark: Callable[[Any, str], str]) -> Callable[..., str]:
    def dumps(obj: Any, **kwargs: Any) -> str:
        numbers: list[Any] = []
        marks: list[str] = []

        def replaced(value: Any) -> Any:
            marks.extend(marks_in(value) if isinstance(value, str) else ())
            if node_of(value) is not None:
                numbers.append(value)
                return f"\ue002{len(numbers) - 1}\ue003"
            if isinstance(value, dict):
                return {key: replaced(item) for key, item in value.items()}
            return [replaced(item) for item in value] if isinstance(value, list | tuple) else value

        plain = replaced(obj)
        text = real(plain if numbers else obj, **kwargs)
        for i, number in enumerate(numbers):
            text = text.replace(real(f"\ue002{i}\ue003", **kwargs), mark(number, "json"))
        for each in marks:  # within texts, which are escaped
            text = text.replace(real(each, **kwargs)[1:-1], each)
        return text

    return dumps


def may_be_given(key: str, values: list[Any]) -> bool:
    """Whether a function of a name may get values after the step, rather than in it."""
    return all(map(_is_told, values)) and (key.startswith(_TELLING) or not _of_graph(values))


def _of_graph(values: list[Any]) -> bool:
    """Whether a value may lead to gradients: `accelerator.backward(loss)`."""
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)


def _is_told(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_told(value)


def _opcode_after(code: bytes, at: int) -> str:
    """Return the name of the instruction after a call, past its cache and jumps."""
    while at < len(code):
        name = dis.opname[code[at]]
        if name == "JUMP_FORWARD":
            at += 2 * code[at + 1]
        elif name != "CACHE":
            return name
        at += 2
    return ""


def is_dropped(frame: types.FrameType | None) -> bool:
    """Whether a frame drops the result of the call that it makes."""
    while frame is not None:
        following = _opcode_after(frame.f_code.co_code, frame.f_lasti + 2)
        if following != "RETURN_VALUE":
            return following == "POP_TOP"
        frame = frame.f_back
    return False


def _outside_is_used(name: str, real: Any, key: str) -> UnsupportedError:
    kind = "file" if isinstance(real, io.IOBase) else type(real).__name__
    return UnsupportedError(
        f"the step uses {key!r} of the {kind} {name!r}. A step may write to a file or put\n"
        "something in a queue, which each rank does after the step. What it reads there would be\n"
        "frozen in the graph: read it before the step, and pass it as an argument.",
        code="E802",
        details={"file": name},
    )


def _opened(file: str, where: str | None) -> UnsupportedError:
    return unsupported.error_at(
        where,
        f"the step opens {file!r:.200} for writing{unsupported.at(where)}: it would be "
        "done at capture,\nmore than once. Open the file before the step, and write to it in the "
        'step: log = open(path, "a").',
        "E802",
    )
