"""A condition on data whose code runs or is about to, see `choices`."""

from __future__ import annotations

import sys
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from pardnn.backends.torch.capture.choices.branches import Position, Region
from pardnn.backends.torch.capture.rewrites.undoing import Undoing
from pardnn.backends.torch.user_step.object_graph import ObjectGraph


@dataclass(repr=False)
class OpenChoice:
    """A condition whose code runs or is about to.

    Attributes:
        frame: The frame that asked.
        region: The code.
        line: "file.py:line" of the condition.
        skips: A boolean tensor: true if the code is skipped, by the parts evaluated so far.
        objects: What the step's objects held before it.
        gradients: The gradients of the parameters among them.
        told: How many effects and stepped schedules the step had before it.
        traced: What traced the frame's lines before.
        start: Index of the first call of the condition that was not asked before.
        thread: The thread that asked.
        undoing: Keeps what the code overwrites, from its first call on.
        is_left: Whether an exception seems to leave the frame.
        locals: Values of the region's names before it, or after the other branch.
        is_other: Whether it is the `else` branch.
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
    locals: dict[str, Any] = field(default_factory=dict)
    is_other: bool = False

    def tests(self, position: Position) -> bool:
        """Whether the condition is still being evaluated, at a position within it."""
        begin, end = self.region.test
        return self.undoing is None and begin <= position < end

    def is_running(self) -> bool:
        """Whether the function that asked has not returned."""
        if threading.get_ident() != self.thread:
            return True  # it waits for the thread of a backward pass
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None
