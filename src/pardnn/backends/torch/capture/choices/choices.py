"""Data-dependent code: `if torch.isfinite(loss): optimizer.step()`.

Problem: one graph must serve every step, whichever branch it takes.

Idea: the code always runs, and if the condition is false, its in-place writes are undone:
`undoing`, as for `GradScaler`. Prints, logs and appended values take effect only if the condition
is true, and a number that the code counts is selected from its two values. This equals the eager
step bit by bit if the code leaves nothing else behind: no other tensor that is used, no other
Python value, no random number. All of this is checked, and anything else is refused by name;
rebound tensors are selected, too (`chosen_tensors`). Such code may contain further conditions.

Python's line tracing, only in the frame that asked and only until the code ends, shows where that
is: the code after it may count and print, too. If there is an `else` that does something, the frame
jumps there next, as under a debugger, and the same happens under the negated condition. Local
variables get the value of the branch that is taken.

Complexity: the time of the code in every step, and a copy of what it writes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.capture.choices.branches import (
    Position,
    Region,
    asking_frame,
    position_of,
    region_of,
    tested_position,
)
from pardnn.backends.torch.capture.choices.chosen_locals import chosen_locals
from pardnn.backends.torch.capture.choices.chosen_tensors import ChosenTensors, rebound_tensors
from pardnn.backends.torch.capture.choices.normal_forms import NormalForms
from pardnn.backends.torch.capture.choices.open_choice import OpenChoice
from pardnn.backends.torch.capture.numbers.effects import Effects
from pardnn.backends.torch.capture.numbers.left_behind import (
    Chosen,
    changed_numbers,
    first_set,
    gradients,
    is_number,
    values_in,
)
from pardnn.backends.torch.capture.refusals import advice, unsupported
from pardnn.backends.torch.capture.restore import Changed, first_change
from pardnn.backends.torch.capture.rewrites.undoing import Undoing, record
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import HostNode, choose, symbol
from pardnn.backends.torch.user_step.object_graph import ObjectGraph


class Choices:
    """The choices of one trace; a context manager around the step.

    Args:
        tracer: The tracer of the step.
        look: Walks the step's objects.
        effects: The effects of the step.
        schedules: Names of the schedules that it has stepped so far.
        forms: Functions that run in normal form; notes those that would have to.
        is_first: Whether it is the first step, which creates states.
    """

    def __init__(
        self, tracer: Tracer, look: Callable[[], ObjectGraph], effects: Effects,
        schedules: Sequence[str], forms: NormalForms, *, is_first: bool,
    ) -> None:  # fmt: skip
        self._tracer, self._look, self._is_first = tracer, look, is_first
        self._effects, self._schedules, self._forms = effects, schedules, forms
        # Open choices, the innermost last.
        self._open: list[OpenChoice] = []
        self._chosen: list[Chosen] = []
        self._saved: set[Call] = set()  # copies of what is written, by enclosing code, too
        self._traced: Any = None
        self._selecting: set[Call] = set()  # local variables
        self._tensors = ChosenTensors(tracer)
        self._values: dict[str, Any] = {}  # of local variables, for the line about to run

    def __enter__(self) -> Choices:
        """Begin to answer questions."""
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
        """Return the outcome of a condition for which its code runs; None if it has no such code.

        Args:
            node: The node of the condition.
        """
        frame = asking_frame()
        at = None if frame is None else tested_position(frame)
        last = self._open[-1] if self._open else None
        is_part = last is not None and frame is last.frame and at is not None and last.tests(at)
        if not is_part:
            self._settle()
            if self._open and self._open[-1].undoing is None:
                return None  # a question within a condition
        if frame is None or at is None:
            return None
        region = region_of(frame, self._forms.function_of(frame.f_code))
        part = region and max((begin for begin in region.outcomes if begin <= at), default=None)
        if region is None or part is None:
            self._forms.note(frame)
            return None
        self._enter(frame, region, node, region.outcomes[part], is_part)
        return region.outcomes[part]

    def _enter(
        self, frame: Any, region: Region, node: HostNode, outcome: bool, is_part: bool
    ) -> None:
        """Open a choice, or continue one whose condition is partly evaluated."""
        tracer = self._tracer
        self._forms.forget()
        skips = self._condition(node)
        if outcome:
            skips = record(tracer, "logical_not", skips)
        if self._open:
            skips = record(tracer, "logical_or", self._open[-1].skips, skips)
        if is_part:
            self._forget()
        if not self._open:
            self._traced = sys.gettrace()
        self._add(frame, region, tracer.locator.line(), skips)

    def _add(self, frame: Any, region: Region, line: str | None, skips: torch.Tensor) -> OpenChoice:
        """Open a choice whose code is about to run."""
        tracer, objects = self._tracer, self._look()
        told = len(self._effects.noted), len(self._schedules)
        choice = OpenChoice(
            frame, region, line, skips, objects, gradients(objects), told, frame.f_trace,
            len(tracer.calls), locals=self._locals(frame, region),
        )  # fmt: skip
        self._open.append(choice)
        tracer.before_call = self._settle
        frame.f_trace = self._trace_line
        sys.settrace(_trace_no_call)
        return choice

    def _locals(self, frame: Any, region: Region) -> dict[str, Any]:
        """Return the values of the local variables that a region binds."""
        held = frame.f_locals | self._values if region.names else {}
        return {name: held[name] for name in sorted(region.names) if name in held}

    def _trace_line(self, frame: Any, event: str, _given: Any) -> Any:
        """Check at each line of the asking frame whether the code has ended."""
        mine = [choice for choice in self._open if choice.frame is frame]
        for choice in mine if event != "return" else ():  # an exception that leaves returns, too
            choice.is_left = event == "exception"
        if event == "line" and mine:
            self._settle(frame)
            if self._values:  # reading the frame's variables again would undo that
                frame.f_locals.update(self._values)
                self._values = {}
        elif event == "return" and mine and not mine[0].is_left:
            while any(choice in self._open for choice in mine):
                self._end()
        return self._trace_line

    def _condition(self, node: HostNode) -> torch.Tensor:
        """Return a condition as a new boolean tensor without dimensions."""
        tracer = self._tracer
        if node.tensor is not None:
            found = record(tracer, "ne.Scalar", node.tensor, 0)
            return record(tracer, "view", found, []) if found.dim() else found
        truth = node if node.kind is bool else None
        if truth is None:
            value = tracer.scalars.scalar_call("bool", [node.operand], bool)
            truth = HostNode(tracer.scalars, value, bool)
        return record(tracer, "scalar_tensor", symbol(truth), dtype=torch.bool)

    def _settle(self, frame: types.FrameType | None = None) -> None:
        """Start to keep overwritten content when code begins, and stop when it ends.

        Args:
            frame: The frame that is about to run another line; None at any other time.
        """
        while self._open:
            choice = self._open[-1]
            # An `if` that takes the truth of a tensor makes a call, too.
            at = tested_position(choice.frame) or position_of(choice.frame)
            if at is not None and choice.tests(at):
                return
            if choice.is_running() and choice.region.holds(at):
                self._begin(choice)
                return
            is_entered = choice.undoing is not None or choice.is_other
            if not is_entered and self._forms.has(choice.frame.f_code):
                raise unsupported.choice(choice.line, "is not where it seems")
            self._end(frame)
            if self._open and self._open[-1].is_other and self._open[-1].undoing is None:
                return

    def _begin(self, choice: OpenChoice) -> None:
        if choice.undoing is None:
            choice.start = len(self._tracer.calls)
            keep = functools.partial(self._whole_of, choice)
            choice.undoing = Undoing(self._tracer, keep)

    def _whole_of(self, choice: OpenChoice, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor over the whole storage of another, if it is older than the code."""
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

    def _end(self, frame: types.FrameType | None = None) -> None:
        """Undo, under the condition, what the innermost code has written; see `_close`."""
        region = self._open[-1].region
        if (region.other or region.names) and frame is not self._open[-1].frame:
            self._forms.note_end(self._open[-1].frame)
            raise unsupported.choice(
                self._open[-1].line, "ends its function: a `return` behind it lets it be followed"
            )
        # The undoing itself is not part of enclosing code; an error ends all of it.
        self._tracer.before_call = None
        self._close(self._forget())
        self._tracer.before_call = self._settle if self._open else None

    def _close(self, choice: OpenChoice) -> None:
        """Undo, under the condition, what code has written; check that it did nothing else."""
        tracer, effects, region = self._tracer, self._effects, choice.region
        end = len(tracer.calls)
        calls = {*tracer.calls[choice.start : end]}
        if any(call.random for call in calls):
            raise unsupported.choice(choice.line, "draws random numbers", advice.DRAWN)
        if len(self._schedules) > choice.told[1]:
            raise unsupported.choice(choice.line, "steps a schedule")
        told = self._told(choice)
        changed = changed_numbers(choice.objects.contents)
        rebound = rebound_tensors(choice.objects.contents)
        is_kept = choice.undoing is not None and (choice.undoing.kept or self._is_first)
        is_alone = not (region.other or region.names or choice.is_other)
        if is_alone and not (is_kept or told or changed or rebound):
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
        self._choose_tensors(choice, rebound)
        made = {*tracer.calls[choice.start :]} - calls
        self._chosen.append(Chosen(calls, made, undone, told, choice.line))
        now = self._locals(choice.frame, region)
        if region.other is not None:
            self._turn(choice, region.other, now)
        elif region.names:
            before = len(tracer.calls)
            self._values |= chosen_locals(choice.locals, now, self._either(choice), choice.line)
            self._selecting |= {*tracer.calls[before:]}

    def _told(self, choice: OpenChoice) -> list[dict[str, Any]]:
        """Return the effects of a choice's code; what a step clears, it may read, too."""
        noted = self._effects.noted
        filled = [each["call"] for each in noted if "call" in each]
        cleared = {name for name, _, method, _ in filled if method == "clear"}
        told = noted[choice.told[0] :]
        if any("call" in each and each["call"][0] in cleared for each in told):
            raise unsupported.choice(choice.line, "fills a container that the step clears")
        return told

    def _turn(
        self, choice: OpenChoice, other: tuple[Position, Position], now: dict[str, Any]
    ) -> None:
        """Run the other branch of a condition whose first branch has run.

        Args:
            choice: The first branch.
            other: Begin and end of the other.
            now: Local variables after the first.
        """
        skips = record(self._tracer, "logical_not", choice.skips)
        if self._open:
            skips = record(self._tracer, "logical_or", self._open[-1].skips, skips)
        region = Region(((0, 0), (0, 0)), *other, {}, None, choice.region.names)
        turned = self._add(choice.frame, region, choice.line, skips)
        turned.locals, turned.is_other = now, True
        self._values |= choice.locals
        try:
            turned.frame.f_lineno = other[0][0]
        except ValueError as error:
            raise unsupported.choice(choice.line, "cannot be left for its other way") from error

    def _choose_numbers(self, choice: OpenChoice, changed: Iterable[Changed]) -> None:
        """Select between the old and the new value of each number that the code has changed."""
        skips = None
        for change in changed:
            if skips is None:
                skips = self._tracer.number_of(choice.skips)
            assert change.slot is not None
            change.slot.set(choose(skips, change.then, change.now))

    def _choose_tensors(self, choice: OpenChoice, rebound: Mapping[str, Changed]) -> None:
        """Select between the old and the new tensor of each name that the code has rebound."""
        for name, change in rebound.items():
            found = self._tensors.select(choice.skips, change.then, change.now, choice.line)
            if found is None:
                what = "a tensor that is not like the one before, or needs a gradient"
                state, of, key = name.partition(".<")  # a parameter's, which has no name here
                name = f"{state}.{key.partition('.')[2]}" if of else name
                rewrite = advice.FIRST if of else advice.UNDONE
                raise unsupported.choice(choice.line, f"gives {name!r} {what}", rewrite)
            assert change.slot is not None
            change.slot.set(found)

    def _either(self, choice: OpenChoice) -> Callable[[Any, Any], Any]:
        """Return what selects between a value before a choice's code and one after it."""
        number = functools.cache(functools.partial(self._tracer.number_of, choice.skips))

        def either(old: Any, new: Any) -> Any:
            if is_number(old) and is_number(new):
                return choose(number(), old, new)
            return self._tensors.select(choice.skips, old, new, choice.line)

        return either

    def _check_objects(self, choice: OpenChoice) -> None:
        contents = choice.objects.contents
        if self._is_first:
            changed = first_set(choice.objects)
        else:
            changed = first_change(contents, {id(each.now) for each in changed_numbers(contents)})
        if changed is not None:
            raise unsupported.choice(choice.line, f"changes {changed!r}")
        now = gradients(choice.objects)
        for before, after in zip(choice.gradients, now, strict=True):
            if before is not None and before is not after:
                raise unsupported.choice(choice.line, "drops or replaces a gradient")

    def _forget(self) -> OpenChoice:
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
        """Reject a trace that uses results of the code which cannot be undone.

        Args:
            results: Values that outlive the step.

        Raises:
            UnsupportedError: E802.
        """
        results = [*results]
        self._tensors.check(results)
        for chosen in self._chosen:
            used = {value for value in results if value is not None}
            apart = chosen.calls | chosen.made | {value.call for value in values_in(chosen.told)}
            apart |= self._selecting
            for call in self._tracer.calls:
                if call not in apart:
                    used.update(call.inputs)
            made = {value for value in used if value.call in chosen.calls - self._saved}
            if any(value.storage not in chosen.undone for value in made):
                what = "makes a tensor that is used outside of it"
                raise unsupported.choice(chosen.line, what)


def _trace_no_call(_frame: Any, _event: str, _given: Any) -> None:
    """Do not trace the lines of any further frame."""
