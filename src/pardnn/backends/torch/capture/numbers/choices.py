"""Code that runs or not by data: `if torch.isfinite(loss): optimizer.step()`.

Problem: one graph must hold for every step, whichever way such a step takes.

Idea: the code always runs, and what it writes in place is undone where the condition says that it
does not: `undoing`, as for `GradScaler`. That is the eager step bit by bit if the code leaves
nothing else behind: no other tensor that is used, no Python value, no random number. All of it is
looked at, and the rest is refused by name.

Complexity: the time of the code in every step, and a copy of what it writes.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.numbers.branches import (
    Position,
    Region,
    position_of,
    region_of,
    tested_position,
)
from pardnn.backends.torch.capture.restore import first_change
from pardnn.backends.torch.capture.rewrites.undoing import Undoing, record
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import HostNode, symbol
from pardnn.backends.torch.user_step.object_graph import ObjectGraph

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
        told: How much the step had told.
        thread: That asked.
        start: Index of the first call of the condition that was not asked before.
        undoing: Keeps what the code writes, from its first call on.
    """

    frame: types.FrameType
    region: Region
    line: str | None
    skips: torch.Tensor
    objects: ObjectGraph
    gradients: list[torch.Tensor | None]
    told: int
    start: int
    thread: int = field(default_factory=threading.get_ident)
    undoing: Undoing | None = None

    def tests(self, position: Position) -> bool:
        """Whether the condition is still being evaluated, at a position within it."""
        begin, end = self.region.test
        return self.undoing is None and begin <= position < end


class Choices:
    """The choices of one trace; `with` it, the step runs.

    Args:
        tracer: Of the step.
        look: Walks the step's objects.
        told: Returns how much the step has told so far.
        is_first: Whether it is the first step, which creates states.
    """

    def __init__(
        self, tracer: Tracer, look: Callable[[], ObjectGraph], told: Callable[[], int],
        *, is_first: bool,
    ) -> None:  # fmt: skip
        self._tracer, self._look, self._told, self._is_first = tracer, look, told, is_first
        self._choice: _Choice | None = None
        # Calls of the code that was chosen, and those that select; the line of the condition.
        self._chosen: list[tuple[set[Call], set[Call], str | None]] = []

    def __enter__(self) -> Choices:
        """Answer questions from now on."""
        self._tracer.scalars.choices = self.outcome
        return self

    def __exit__(self, kind: Any, *_error: Any) -> None:
        """End the code that is still running."""
        self._tracer.scalars.choices = None
        if kind is None:
            self._end()
        self._forget()

    def outcome(self, node: HostNode) -> bool | None:
        """Return how a condition comes out where its code runs; None if it has no such code.

        Args:
            node: Of the condition.
        """
        frame = _asking_frame()
        at = None if frame is None else tested_position(frame)
        choice = self._choice
        if choice is None or frame is not choice.frame or at is None or not choice.tests(at):
            self._before_call()
            if self._choice is not None:
                return None  # a choice within a choice
        if frame is None or at is None:
            return None
        region = region_of(frame)
        part = region and max((begin for begin in region.outcomes if begin <= at), default=None)
        if region is None or part is None:
            return None
        self._enter(frame, region, node, region.outcomes[part])
        return region.outcomes[part]

    def _enter(self, frame: Any, region: Region, node: HostNode, outcome: bool) -> None:
        tracer = self._tracer
        skips = self._condition(node)
        if outcome:
            skips = record(tracer, "logical_not", skips)
        if self._choice is not None:
            skips = record(tracer, "logical_or", self._choice.skips, skips)
        objects = self._look()
        self._choice = _Choice(
            frame, region, tracer.locator.line(), skips, objects, _gradients(objects),
            self._told(), len(tracer.calls),
        )  # fmt: skip
        tracer.before_call = self._before_call

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

    def _before_call(self) -> None:
        """Begin to keep what is written where the code begins, and end where it ends."""
        choice = self._choice
        if choice is None:
            return
        # Where an `if` takes the truth of a tensor, that is a call, too.
        at = tested_position(choice.frame) or position_of(choice.frame)
        if at is not None and choice.tests(at):
            return
        if not _is_running(choice) or not choice.region.holds(at):
            self._end()
        elif choice.undoing is None:
            choice.start = len(self._tracer.calls)
            choice.undoing = Undoing(self._tracer, self._whole_of)

    def _whole_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor over the whole storage of one, if that is older than the code."""
        choice, tracer = self._choice, self._tracer
        assert choice is not None
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
        choice, tracer = self._choice, self._tracer
        if choice is None:
            return
        self._forget()
        undoing = choice.undoing
        if undoing is None or (not undoing.kept and not self._is_first):
            raise unsupported.choice(choice.line, "writes no tensor that was there before")
        end = len(tracer.calls)
        calls = {*tracer.calls[choice.start : end]}
        if any(call.random for call in calls):
            raise unsupported.choice(choice.line, "draws random numbers")
        self._check_objects(choice)
        undoing.undo(choice.skips)
        made = {*tracer.calls[choice.start :]} - calls
        self._chosen.append((calls, made, choice.line))

    def _check_objects(self, choice: _Choice) -> None:
        if self._told() != choice.told:
            raise unsupported.choice(choice.line, "prints, logs, collects or steps a schedule")
        changed = None if self._is_first else first_change(choice.objects.contents)
        if changed is not None:
            raise unsupported.choice(choice.line, f"changes {changed!r}")
        now = _gradients(choice.objects)
        for before, after in zip(choice.gradients, now, strict=True):
            if before is not None and before is not after:
                raise unsupported.choice(choice.line, "drops or replaces a gradient")

    def _forget(self) -> None:
        choice, self._choice = self._choice, None
        self._tracer.before_call = None
        if choice is not None and choice.undoing is not None:
            choice.undoing.end()

    def check(self, results: Iterable[Value | None]) -> None:
        """Reject a trace in which more is used of what the code has made than what is undone.

        Args:
            results: Values that outlive the step.

        Raises:
            UnsupportedError: E802.
        """
        for calls, made, line in self._chosen:
            used = {value for value in results if value is not None}
            for call in self._tracer.calls:
                if call not in calls and call not in made:
                    used.update(call.inputs)
            if any(value.call in calls for value in used):
                raise unsupported.choice(line, "makes a tensor that is used outside of it")


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
