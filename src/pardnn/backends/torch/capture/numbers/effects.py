"""Effects of a step outside the graph: prints, log records, lists of losses, and checks that raise.

Problem: `print(f"{i}: {loss.item():.3f}")` and `if loss.isnan(): raise` need numbers that only a
    run knows; the graph does not depend on them.

Idea: while the step is traced, a number's text is a mark, and a call of `print` or of a logger is
recorded with its arguments; each rank makes it after each step, with the numbers. A branch on data
is tried both ways: if one way raises before any further call on tensors, the other way is the step,
and each rank raises after a step in which the condition came out the other way, including what that
way prints first.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from pardnn.backends.torch.capture.numbers.containers import OtherUse, is_told
from pardnn.backends.torch.capture.numbers.failing_way import FailingWay, of_a_check, values_before
from pardnn.backends.torch.capture.numbers.questions import Check
from pardnn.backends.torch.capture.numbers.texts import Texts, texts_marked
from pardnn.backends.torch.capture.numbers.told_sinks import sink_name, texts_noted
from pardnn.backends.torch.capture.numbers.user_code import given_attributes, message_and_args
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.result import recorded_result
from pardnn.backends.torch.capture.trace_ir import ITEM, Call, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import HostNode, node_of
from pardnn.backends.torch.ops.number_texts import format_number, text_format
from pardnn.backends.torch.user_step.code_names import is_library_file, is_library_frame
from pardnn.backends.torch.user_step.object_graph import ObjectGraph


class Effects:
    """The effects of a traced step, in order.

    Args:
        tracer: The tracer of the step.
        is_long: Whether marks of texts are long; see `texts`.

    Attributes:
        noted: The effects as data, with values of the trace for numbers.
        calls: Calls whose results outlive the step for them.
        texts: The texts that the step makes of numbers.
        lines: "file.py:line" of each effect, by its id.
    """

    def __init__(self, tracer: Tracer, *, is_long: bool = True) -> None:
        self.noted: list[dict[str, Any]] = []
        self.calls: list[Call] = []
        self.texts = Texts(tracer.locator, self._recorded, is_long=is_long)
        self.lines: dict[int, str | None] = {}
        self._tracer = tracer
        self._trial = 0, 0  # calls, and effects noted, before it

    @property
    def hints(self) -> Mapping[Any, Any]:
        """The numbers of the traced step, by value of the trace."""
        return self._tracer.scalars.hints

    def _note(self, kind: str, content: list[Any]) -> None:
        """Note an effect; after data-dependent code has ended, it no longer belongs to it."""
        if self._tracer.before_call is not None:
            self._tracer.before_call()
        self.noted.append({kind: content})
        self.lines[id(self.noted[-1])] = self._tracer.locator.line()

    def tell_unless(self, effect: dict[str, Any], skips: torch.Tensor) -> None:
        """Make an effect happen only if a boolean tensor is false."""
        if "unless" not in effect:
            effect["unless"] = self._recorded(skips)

    def filled(self, name: str, keys: tuple[Any, ...], method: str, args: tuple[Any, ...]) -> None:
        """Note what the step puts into a container, see `containers`; recorded by `finish`."""
        self._note("call", [name, keys, method, args])

    def finish(self, objects: ObjectGraph, *, is_first: bool) -> None:
        """Record what containers got, with its values after the step.

        Args:
            objects: The object graph before it.
            is_first: Whether it is the first step, which does not yet know what containers get.

        Raises:
            OtherUse: This cannot be recorded, or changes after the step.
            UnsupportedError: E802, the text of a number went anywhere but to `print`, a logger or a
                container.
        """
        for effect in self.noted:
            if "call" in effect and not of_a_check(effect):
                name, keys, method, args = effect["call"]
                if not all(self._is_own(each, objects) for each in (*keys, *args)):
                    raise OtherUse(name)
                told = [[self._content(each) for each in items] for items in (keys, args)]
                effect["call"] = [name, told[0], method, told[1]]
        if self.texts.untold is not None and not is_first:
            raise unsupported.text_of_a_number(*self.texts.untold)

    def _is_own(self, value: Any, objects: ObjectGraph) -> bool:
        """Whether a value can be output, and no later step changes it."""
        if isinstance(value, torch.Tensor):
            storage = self._tracer.aliases.fresh_value(value).storage
            return storage is None or not storage.source
        if not isinstance(value, list | tuple | dict):
            return is_told(value)
        items = [*value, *value.values()] if isinstance(value, dict) else value
        is_new = id(value) not in objects.seen and is_told(value)
        return is_new and all(self._is_own(item, objects) for item in items)

    def _content(self, value: Any) -> dict[str, Any]:
        """Return what a container gets, with texts split into parts."""
        if isinstance(value, str):
            return {"text": self._parts(value)}
        if isinstance(value, dict):
            return {"dict": [[self._content(k), self._content(x)] for k, x in value.items()]}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [self._content(item) for item in value]}
        return self._recorded(value)

    def printed(self, args: tuple[Any, ...], sep: str | None, end: str | None, file: str) -> None:
        """Note a call of `print`."""
        parts = [self._parts(arg) for arg in args]
        ends = [" " if sep is None else sep, "\n" if end is None else end, file]
        self._note("print", [parts, *ends])

    def logged(self, record: logging.LogRecord) -> None:
        """Note a log record."""
        message, args = message_and_args(record)
        place = [record.name, record.levelno, record.pathname, record.lineno, record.funcName]
        values = [self._logged_value(arg) for arg in args]
        more = given_attributes(record, self._tracer.locator.line()).items()
        given = [[[key, self._content(each)] for key, each in more]] if more else []
        self._note("log", [self._parts(message), values, *place, *given])

    def _logged_value(self, arg: Any) -> Any:
        """Return an argument of a logger: a number itself, for "%d", or the parts of a text."""
        if node_of(arg) is not None:
            return self._recorded(arg)
        return self._parts(arg) if isinstance(arg, str) else arg

    def begin_trial(self) -> None:
        """Note the beginning of a branch that may only raise."""
        self._trial = len(self._tracer.calls), len(self.noted)

    def way_to(self, error: BaseException) -> FailingWay:
        """Return the trial's effects up to the exception that ended it."""
        start, first = self._trial
        is_one = len(error.args) == 1 and not isinstance(error.args[0], str)
        message = self._parts(error.args[0] if is_one else str(error))
        for effect in self.noted[first:]:
            if "call" in effect:
                name, keys, method, args = effect["call"]
                told = [[self._content(each) for each in items] for items in (keys, args)]
                effect["call"] = [name, told[0], method, told[1]]
        return FailingWay(start, self._tracer.calls, self.hints, self.noted[first:], message)

    def checked(self, node: HostNode, check: Check) -> bool:
        """Note a check: a condition, its required outcome, and the effects if it fails.

        Returns:
            False, with nothing noted, if its effects belong to another trace.
        """
        way, scalars = check.way, self._tracer.scalars
        if not way.fits(self._tracer.calls):
            return False
        values = self._again(way)
        value = scalars.scalar_call("bool", [node.operand], bool)
        held = value if check.outcome or not way.effects else scalars.scalar_call(
            "not", [value], bool
        )  # fmt: skip
        for each in dict.fromkeys([value, held]):
            each.call.kept = True
            self.calls.append(each.call)
        told = [way.with_values(effect, values) for effect in way.effects]
        self.noted += [effect | {"unless": {"kept": held}} for effect in told]
        message = way.with_values(way.message, values)
        if all(isinstance(part, str) for part in message):
            message = "".join(message)
        self._note(check.effect, [{"kept": value}, check.outcome, check.kind, message, check.line])
        return True

    def _again(self, way: FailingWay) -> dict[Value, Value]:
        """Record the numbers in a trial's effects again; return their values by the trial's."""
        tracer, values = self._tracer, {}
        if way.has_numbers:
            values = values_before(tracer.calls, way.calls[: way.start])
        for call in way.replayable() if values else ():
            (old,) = call.outputs
            if not values.keys() >= {*call.inputs}:
                continue  # of a tensor that was copied for its text
            args = [values[arg] if isinstance(arg, Value) else arg for arg in call.args]
            if call.kind == ITEM:
                new = tracer.item_of(args[0])
            else:
                assert old.kind is not None
                new = tracer.scalars.scalar_call(call.kind.partition(".")[2], args, old.kind)
            if old in way.hints:
                tracer.scalars.hints[new] = way.hints[old]
            values[old] = new
            if call.kept:
                new.call.kept = True
                self.calls.append(new.call)
        return values

    def told(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a sink, see `told_sinks`, with its arguments as they are now."""
        self._note("tell", [name, method, *self._given(args, kwargs)])

    def stepped(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the arguments of a schedule's step."""
        self._note("schedule", [name, *self._given(args, kwargs)])

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        named = [[key, self._content(each)] for key, each in kwargs.items()]
        return [[self._content(each) for each in args], named]

    def written(self, name: str, args: tuple[Any, ...], sep: str, end: str) -> None:
        """Note a call of `print` with a sink as its file.

        Args:
            name: The name of the sink.
            args: What is printed.
            sep: Between two of them.
            end: After the last.
        """
        between = ([sep] if i else [] for i in range(len(args)))
        parts = [
            each for s, arg in zip(between, args, strict=True) for each in (*s, *self._parts(arg))
        ]
        self._note("tell", [name, "write", [{"text": [*parts, end]}], []])

    def changed(self, name: str, number: Any) -> None:
        """Note the new value of a number that an object holds."""
        self.noted.append({"set": [name, self._recorded(number)]})

    def recorded(self, value: Any) -> Any:
        """Return a tensor or number as data, for effects after the step."""
        return self._recorded(value)

    def _parts(self, arg: Any) -> list[Any]:
        """Return an argument as a list of texts and of [number, format]."""
        if node_of(arg) is not None:
            return [[self._recorded(arg), "str"]]
        if isinstance(arg, torch.Tensor):
            return [[self._recorded(arg), text_format(arg)]]
        pieces = self.texts.pieces(str(arg))
        return [p if isinstance(p, str) else [self._recorded(p[0]), p[1]] for p in pieces]

    def _recorded(self, value: Any) -> Any:
        if isinstance(value, dict) and "kept" in value:
            return value  # of a tensor, when its text was made
        _, structure, calls = recorded_result(self._tracer, [value], None, {})
        self.calls += calls
        return structure["list"][0]


def check_same_effects(one: Effects, other: Effects) -> None:
    """Reject a step whose effects differ in another trace, such as those of a clock.

    Raises:
        UnsupportedError: E804.
    """
    told = [
        [
            (_plain(each, effects.hints), effects.lines.get(id(each)))
            for each in effects.noted
            if not _COMPARED_ELSEWHERE & each.keys()
        ]
        for effects in (one, other)
    ]
    for (a, line), (b, _) in itertools.zip_longest(*told, fillvalue=(None, None)):
        if a != b:
            if any(map(_has_numbers, (a, b))):
                raise unsupported.text_of_a_number(line)
            kind = next(iter(a or b))
            raise unsupported.changing_step(f"{_TOLD[kind]} something else the second time", line)


def told_numbers(told: list[Any], number_of: Callable[[Value], Any]) -> Any:
    """Return a step's effects with a number for each value, to compare them.

    Args:
        told: The effects as they are noted.
        number_of: Returns a known number itself, and something else for one that only a run knows.
    """

    class Numbers(dict[Value, Any]):
        def get(self, key: Value, default: Any = None) -> Any:
            number = number_of(key)
            return number if isinstance(number, bool | int | float) else str(number)

    return _plain(told, Numbers())


#: Numbers by the calls that make their values.
_COMPARED_ELSEWHERE = {"set", "rebind", "left", "assign", "trainable", "order", "no_nan"}
#: What a step does, by the effect that it notes.
_TOLD = {"print": "it prints", "log": "it logs", "call": "it collects", "check": "it checks",
         "tell": "it writes", "schedule": "it schedules"}  # fmt: skip


def _plain(data: Any, hints: Mapping[Any, Any]) -> Any:
    """Return effects with the numbers of the trace, and texts as far as they are known."""
    if isinstance(data, dict) and "kept" in data:
        return hints.get(data["kept"], "?")
    if isinstance(data, dict) and "value" in data:
        return data["value"]
    if isinstance(data, dict):
        return {key: _plain(item, hints) for key, item in data.items()}
    if not isinstance(data, list):
        return data
    if len(data) == 2 and isinstance(data[0], dict) and isinstance(data[1], str):
        number = _plain(data[0], hints)  # a number in a text, with its format
        return [number, data[1]] if isinstance(number, str) else format_number(number, data[1])
    texts = itertools.groupby((_plain(item, hints) for item in data), lambda x: type(x) is str)
    return [x for is_text, items in texts for x in (["".join(items)] if is_text else items)]


def _has_numbers(data: Any) -> bool:
    """Whether effects contain a number that only a run knows."""
    if isinstance(data, dict):
        return any(map(_has_numbers, data.values()))
    return data == "?" or (isinstance(data, list) and any(map(_has_numbers, data)))


@contextlib.contextmanager
def effects_noted(tracer: Tracer, *, is_long: bool = True) -> Iterator[Effects]:
    """Note prints, log records and checks while the context is open.

    Args:
        tracer: The tracer of the step that runs in it.
        is_long: Whether marks of texts are long; see `texts`.
    """
    effects = Effects(tracer, is_long=is_long)
    questions = tracer.scalars.questions
    questions.on_check, questions.way_to = effects.checked, effects.way_to
    questions.on_trial = effects.begin_trial
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, new: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        stack.enter_context(texts_marked(effects.texts))
        stack.enter_context(contextlib.redirect_stdout(_Written(effects)))
        stack.enter_context(texts_noted(tracer.locator, effects.texts.mark))
        patch(builtins, "print", _noting_print(effects, builtins.print))
        patch(logging.Logger, "handle", _noting_log(effects, logging.Logger.handle))
        yield effects


class _Written(io.TextIOBase):
    """Standard output while a step is traced: what is written is noted as a print is."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def write(self, text: str) -> int:
        """Note a text; if a library printed it, it goes to standard error, only at capture."""
        if sys._getframe(1).f_globals.get("__name__") == __name__:
            return sys.stderr.write(text)
        self._effects.printed((text,), None, "", "stdout")
        return len(text)


def _noting_print(effects: Effects, real: Callable[..., None]) -> Callable[..., None]:
    def noting(
        *args: Any, sep: str | None = None, end: str | None = None, file: Any = None,
        flush: bool = False,
    ) -> None:  # fmt: skip
        sink = sink_name(file)
        if sink is not None:
            effects.written(sink, args, " " if sep is None else sep, "\n" if end is None else end)
            return
        library = is_library_frame(sys._getframe(1))
        if library or file not in (None, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            real(*args, sep=sep, end=end, file=file, flush=flush)
            return
        effects.printed(args, sep, end, "stdout" if file is None else "stderr")

    return noting


def _noting_log(effects: Effects, real: Callable[..., None]) -> Callable[..., None]:
    def noting(logger: logging.Logger, record: logging.LogRecord) -> None:
        if is_library_file(record.pathname):
            real(logger, record)
        else:
            effects.logged(record)

    return noting
