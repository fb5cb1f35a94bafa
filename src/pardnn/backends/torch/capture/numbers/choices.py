"""Code that runs or not by data: `if torch.isfinite(loss): optimizer.step()`.

Problem: one graph must hold for every step, whichever way such a step takes.

Idea: the code always runs, and what it writes in place is undone where the condition says that it
does not: `undoing`, as for `GradScaler`. What it prints, logs and collects is told only where it
says yes, and a number that it counts is chosen between its two values. That is the eager step bit
by bit if the code leaves nothing else behind: no other tensor that is used, no other Python value,
no random number. All of it is looked at, and the rest is refused by name. Such code may hold
conditions of its own.

Where the code ends is seen by Python's tracing of lines, in the frame that asked and only
meanwhile: what follows it may count and print, too.

Complexity: the time of the code in every step, and a copy of what it writes.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.numbers.branches import (
    Position,
    Region,
    position_of,
    region_of,
    tested_position,
)
from pardnn.backends.torch.capture.numbers.effects import Effects
from pardnn.backends.torch.capture.restore import Changed, changes, first_change, is_arithmetic
from pardnn.backends.torch.capture.rewrites.undoing import Undoing, record
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import HostNode, choose, symbol
from pardnn.backends.torch.user_step.object_graph import PLAIN, ObjectGraph

_ITEM = "aten._local_scalar_dense.default"


@dataclass(repr=False)
class _Choice:
    """A condition whose code is about to run, or runs.

    Attributes:
        frame: That asked.
        region: The code.
        line: "file.py:line" of the condition.
        skips: A boolean tensor: whether the code does not run, as far as was asked.
        objects: What the step's objects held before it.
        gradients: Of the parameters among them.
        told: How much the step had told: effects, and schedules that it stepped.
        traced: By what the frame's lines were traced before.
        start: Index of the first call of the condition that was not asked before.
        thread: That asked.
        undoing: Keeps what the code writes, from its first call on.
        is_left: Whether the frame is left by an exception, as far as is known.
    """

    frame: types.FrameType
    region: Region
    line: str | None
    skips: torch.Tensor
    objects: ObjectGraph
    gradients: list[torch.Tensor | None]
    told: tuple[int, int]
    traced: Any
    start: int
    thread: int = field(default_factory=threading.get_ident)
    undoing: Undoing | None = None
    is_left: bool = False

    def tests(self, position: Position) -> bool:
        """Whether the condition is still being evaluated, at a position within it."""
        begin, end = self.region.test
        return self.undoing is None and begin <= position < end


class _Chosen(NamedTuple):
    """Code that was chosen, and has ended.

    Attributes:
        calls: Of the code.
        made: Those that select.
        undone: The storages that it writes.
        told: What it tells.
        line: "file.py:line" of the condition.
    """

    calls: set[Call]
    made: set[Call]
    undone: set[Storage | None]
    told: list[dict[str, Any]]
    line: str | None


class Choices:
    """The choices of one trace; `with` it, the step runs.

    Args:
        tracer: Of the step.
        look: Walks the step's objects.
        effects: What the step tells.
        schedules: Names of the schedules that it has stepped so far.
        is_first: Whether it is the first step, which creates states.
    """

    def __init__(
        self, tracer: Tracer, look: Callable[[], ObjectGraph], effects: Effects,
        schedules: Sequence[str], *, is_first: bool,
    ) -> None:  # fmt: skip
        self._tracer, self._look, self._is_first = tracer, look, is_first
        self._effects, self._schedules = effects, schedules
        # Those whose code is running, the innermost last.
        self._open: list[_Choice] = []
        self._chosen: list[_Chosen] = []
        self._saved: set[Call] = set()  # copies of what is written, of code around it, too
        self._traced: Any = None

    def __enter__(self) -> Choices:
        """Answer questions from now on."""
        self._tracer.scalars.choices = self.outcome
        return self

    def __exit__(self, kind: Any, *_error: Any) -> None:
        """End the code that is still running."""
        self._tracer.scalars.choices = None
        while self._open:
            if kind is None:
                self._end()
            else:
                self._forget()

    def outcome(self, node: HostNode) -> bool | None:
        """Return how a condition comes out where its code runs; None if it has no such code.

        Args:
            node: Of the condition.
        """
        frame = _asking_frame()
        at = None if frame is None else tested_position(frame)
        last = self._open[-1] if self._open else None
        is_part = last is not None and frame is last.frame and at is not None and last.tests(at)
        if not is_part:
            self._settle()
            if self._open and self._open[-1].undoing is None:
                return None  # a question within a condition
        if frame is None or at is None:
            return None
        region = region_of(frame)
        part = region and max((begin for begin in region.outcomes if begin <= at), default=None)
        if region is None or part is None:
            return None
        self._enter(frame, region, node, region.outcomes[part], is_part)
        return region.outcomes[part]

    def _enter(
        self, frame: Any, region: Region, node: HostNode, outcome: bool, is_part: bool
    ) -> None:
        """Open a choice, or that of which the condition's first part was asked before."""
        tracer = self._tracer
        skips = self._condition(node)
        if outcome:
            skips = record(tracer, "logical_not", skips)
        if self._open:
            skips = record(tracer, "logical_or", self._open[-1].skips, skips)
        if is_part:
            self._forget()
        objects = self._look()
        told = len(self._effects.noted), len(self._schedules)
        if not self._open:
            self._traced = sys.gettrace()
        self._open.append(_Choice(
            frame, region, tracer.locator.line(), skips, objects, _gradients(objects),
            told, frame.f_trace, len(tracer.calls),
        ))  # fmt: skip
        tracer.before_call = self._settle
        frame.f_trace = self._trace_line
        sys.settrace(_trace_no_call)

    def _trace_line(self, frame: Any, event: str, _given: Any) -> Any:
        """Look at each line of a frame that asked whether the code has ended."""
        mine = [choice for choice in self._open if choice.frame is frame]
        for choice in mine:
            choice.is_left = event == "exception"
        if event == "line" and mine:
            self._settle()
        elif event == "return" and mine and not mine[0].is_left:
            while any(choice in self._open for choice in mine):
                self._end()
        return self._trace_line

    def _condition(self, node: HostNode) -> torch.Tensor:
        """Return a condition as a boolean tensor of no dimensions and of its own."""
        tracer = self._tracer
        if node.tensor is not None:
            found = record(tracer, "ne.Scalar", node.tensor, 0)
            return record(tracer, "view", found, []) if found.dim() else found
        tracer.permitted_reads.update(_reads(node))
        truth = node if node.kind is bool else None
        if truth is None:
            value = tracer.scalars.scalar_call("bool", [node.operand], bool)
            truth = HostNode(tracer.scalars, value, bool)
        return record(tracer, "scalar_tensor", symbol(truth), dtype=torch.bool)

    def _settle(self) -> None:
        """Begin to keep what is written where code begins, and end where it ends."""
        while self._open:
            choice = self._open[-1]
            # Where an `if` takes the truth of a tensor, that is a call, too.
            at = tested_position(choice.frame) or position_of(choice.frame)
            if at is not None and choice.tests(at):
                return
            if _is_running(choice) and choice.region.holds(at):
                self._begin(choice)
                return
            self._end()

    def _begin(self, choice: _Choice) -> None:
        if choice.undoing is None:
            choice.start = len(self._tracer.calls)
            keep = functools.partial(self._whole_of, choice)
            choice.undoing = Undoing(self._tracer, keep)

    def _whole_of(self, choice: _Choice, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor over the whole storage of one, if that is older than the code."""
        tracer = self._tracer
        value = tracer.aliases.value(tensor)
        assert value.storage is not None
        owner = value.storage.owner
        if owner.call in tracer.calls[choice.start :]:
            return None
        if value.geometry == owner.geometry:
            return tensor.detach()
        shape, strides, offset, dtype = owner.geometry or (None, None, None, None)
        if dtype != tensor.dtype or shape is None or strides is None:
            raise unsupported.choice(choice.line, "writes into part of a tensor")
        return record(tracer, "as_strided", tensor, list(shape), list(strides), offset)

    def _end(self) -> None:
        """Undo, under the condition, what the code has written; check that it did nothing else."""
        tracer, effects = self._tracer, self._effects
        choice = self._forget()
        end = len(tracer.calls)
        calls = {*tracer.calls[choice.start : end]}
        if any(call.random for call in calls):
            raise unsupported.choice(choice.line, "draws random numbers")
        if len(self._schedules) > choice.told[1]:
            raise unsupported.choice(choice.line, "steps a schedule")
        told = effects.noted[choice.told[0] :]
        changed = _changed_numbers(choice.objects.contents)
        is_kept = choice.undoing is not None and (choice.undoing.kept or self._is_first)
        if not (is_kept or told or changed):
            raise unsupported.choice(choice.line, "writes no tensor that was there before")
        for effect in told:
            effects.tell_unless(effect, choice.skips)
        self._choose_numbers(choice, changed)
        self._check_objects(choice)
        kept = choice.undoing.kept.values() if choice.undoing is not None else ()
        if choice.undoing is not None:
            choice.undoing.undo(choice.skips)
        undone = {tracer.aliases.value(tensor).storage for tensor, _ in kept}
        self._saved |= {tracer.aliases.value(old).call for _, old in kept}
        made = {*tracer.calls[choice.start :]} - calls
        self._chosen.append(_Chosen(calls, made, undone, told, choice.line))

    def _choose_numbers(self, choice: _Choice, changed: Iterable[Changed]) -> None:
        """Let numbers that the code has changed be chosen between what they were and are."""
        skips = None
        for change in changed:
            if skips is None:
                skips = self._tracer.number_of(choice.skips)
            assert change.slot is not None
            change.slot.set(choose(skips, change.then, change.now))

    def _check_objects(self, choice: _Choice) -> None:
        contents = choice.objects.contents
        if self._is_first:
            changed = _first_set(choice.objects)
        else:
            changed = first_change(contents, {id(each.now) for each in _changed_numbers(contents)})
        if changed is not None:
            raise unsupported.choice(choice.line, f"changes {changed!r}")
        now = _gradients(choice.objects)
        for before, after in zip(choice.gradients, now, strict=True):
            if before is not None and before is not after:
                raise unsupported.choice(choice.line, "drops or replaces a gradient")

    def _forget(self) -> _Choice:
        """Close the innermost choice and return it."""
        choice = self._open.pop()
        choice.frame.f_trace = choice.traced
        if not self._open:
            self._tracer.before_call = None
            sys.settrace(self._traced)
        if choice.undoing is not None:
            choice.undoing.end()
        return choice

    def check(self, results: Iterable[Value | None]) -> None:
        """Reject a trace in which more is used of what the code has made than what is undone.

        Args:
            results: Values that outlive the step.

        Raises:
            UnsupportedError: E802.
        """
        for chosen in self._chosen:
            used = {value for value in results if value is not None}
            apart = chosen.calls | chosen.made | {value.call for value in _values_in(chosen.told)}
            for call in self._tracer.calls:
                if call not in apart:
                    used.update(call.inputs)
            made = {value for value in used if value.call in chosen.calls - self._saved}
            if any(value.storage not in chosen.undone for value in made):
                what = "makes a tensor that is used outside of it"
                raise unsupported.choice(chosen.line, what)


def _trace_no_call(_frame: Any, _event: str, _given: Any) -> None:
    """Trace the lines of no further frame."""


def _changed_numbers(contents: Sequence[tuple[str, Any, Any]]) -> list[Changed]:
    """Return the changes of numbers that stay numbers."""
    return [each for each in changes(contents).values() if is_arithmetic(each)]


def _first_set(objects: ObjectGraph) -> str | None:
    """Return the name of a plain value that is no number and has changed; of no optimizer's."""
    bound = [e.name for e in objects.stateful if not isinstance(e.value, torch.nn.Module)]
    prefixes = tuple(f"{name}." for name in bound)
    for name, change in changes(objects.contents).items():
        is_plain = isinstance(change.now, PLAIN) and change.slot is not None
        if is_plain and not is_arithmetic(change) and not name.startswith(prefixes):
            return name
    return None


def _values_in(data: Any) -> set[Value]:
    """Return the values of the trace in what a step tells."""
    if isinstance(data, dict):
        data = [*data.values()]
    if isinstance(data, list):
        return {value for item in data for value in _values_in(item)}
    return {data} if isinstance(data, Value) else set()


def _gradients(objects: ObjectGraph) -> list[torch.Tensor | None]:
    leaves = (entry.value for entry in objects.tensors if entry.value.requires_grad)
    return [tensor.grad if tensor.is_leaf else None for tensor in leaves]


def _reads(node: HostNode) -> set[Call]:
    """Return the calls of `.item()` behind a number."""
    found: set[Call] = set()
    stack = [node]
    while stack:
        at = stack.pop()
        stack += at.parents
        if isinstance(at.value, Value) and at.value.call.kind == _ITEM:
            found.add(at.value.call)
    return found


def _is_running(choice: _Choice) -> bool:
    """Whether the function that asked has not returned."""
    if threading.get_ident() != choice.thread:
        return True  # it waits for the thread of a backward pass
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame is not choice.frame:
        frame = frame.f_back
    return frame is not None


def _asking_frame() -> types.FrameType | None:
    """Return the innermost frame of code that is neither this package's nor behind a symbol."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "torch" and module.partition(".")[0] != "pardnn":
            return frame
        frame = frame.f_back
    return None
