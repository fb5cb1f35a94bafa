"""Gradients that a call has reset to None, and whose memory the graphs keep for later calls.

Problem: `if i % 2: optimizer.step(); optimizer.zero_grad()` makes gradients None, and the graph
fills the memory in which they add up with zeros instead. To a call that adds to a gradient first,
or replaces it, zeros and None are the same. To any other they are not: an optimizer skips a
parameter whose gradient is None, and moves one with zeros by its momentum and weight decay.
Idea: capture marks the gradients that may be zeros instead of None ("summed"), and those that a
step leaves as None ("reset"). Where the next call runs a graph that does not add to such a
gradient, it is None; where it runs one that does, it is the memory of that graph, full of zeros.

Complexity: O(gradients of the graph) after a call of a graph that keeps some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.slots import set_gradient


class GradientsOf(NamedTuple):
    """The gradients that one graph keeps.

    Attributes:
        summed: Parameters whose gradients may be zeros instead of None, with the memory for them.
        reset: Parameters whose gradients are None after it.
        read: Those of `reset` that are not in `summed`, with the names of the gradients.
        left: Parameters whose gradients are not None after it.
    """

    summed: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    reset: tuple[torch.Tensor, ...] = ()
    read: tuple[tuple[str, torch.Tensor], ...] = ()
    left: tuple[torch.Tensor, ...] = ()

    def changes(self) -> Iterator[Change]:
        """Yield the gradients that the graph reads and a call has reset."""
        for name, parameter in self.read:
            if parameter.grad is None:
                yield Change(name, "a tensor", None)


def gradients_of(program: Program, binding: Binding) -> GradientsOf:
    """Return the gradients that a program keeps, once the user's objects hold them."""
    summed, reset, read, left = list[tuple[torch.Tensor, torch.Tensor]](), [], [], []
    for name in program.state:
        source, marks = binding.sources[name], program.sources[name].arguments or {}
        parameter, gradient = source.parameter, source.get()
        if parameter is None or not isinstance(gradient, torch.Tensor):
            continue
        (reset if marks.get("reset") else left).append(parameter)
        if marks.get("summed"):
            summed.append((parameter, gradient))
        elif marks.get("reset"):
            read.append((name, parameter))
    return GradientsOf(tuple(summed), tuple(reset), tuple(read), tuple(left))


class ResetGradients:
    """The gradients that are None to the user's step, while their memory is in place."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Take all gradients for what they are: a checkpoint has filled them."""
        self._kept.clear()

    def note(self, of: GradientsOf) -> None:
        """Note what a call of a graph has left; what it does not add to is None at once."""
        for parameter in of.left:
            self._kept.pop(id(parameter), None)
        summed = {id(parameter) for parameter, _ in of.summed}
        for parameter in of.reset:
            gradient = parameter.grad
            if gradient is not None and id(parameter) in summed:
                self._kept[id(parameter)] = parameter, gradient
            else:
                self._kept.pop(id(parameter), None)
                parameter.grad = None

    def note_new(self, of: GradientsOf, before: GradientsOf) -> None:
        """Note gradients that a graph has made when it took the state over.

        Args:
            of: The gradients of the graph.
            before: Those that were there.
        """
        had = {id(parameter) for parameter, _ in before.summed}
        self._kept |= {id(p): (p, made) for p, made in of.summed if id(p) not in had}

    def arrange(
        self, of: GradientsOf, replaced: Sequence[tuple[str, torch.Tensor]] = ()
    ) -> Callable[[], None] | None:
        """Give parameters the gradients that a graph expects, where that is the same to the step.

        Args:
            of: The gradients of the graph.
            replaced: Parameters, with names, whose gradients it replaces, whatever they are.

        Returns:
            What undoes that; None if nothing was to be done.
        """
        before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        summed = {id(parameter) for parameter, _ in of.summed}
        for parameter, gradient in list(self._kept.values()):
            if parameter.grad is not gradient:  # the user has set another one
                del self._kept[id(parameter)]
            elif id(parameter) not in summed:
                before.append((parameter, gradient))
                parameter.grad = None
        for _, parameter in replaced:
            if parameter.grad is not None:
                before.append((parameter, parameter.grad))
                parameter.grad = None
        for parameter, gradient in of.summed:
            is_none = parameter.grad is None or id(parameter) in self._kept
            if is_none and parameter.grad is not gradient and parameter.requires_grad:
                before.append((parameter, parameter.grad))
                set_gradient(parameter, gradient)
                with torch.no_grad():
                    gradient.zero_()
        return (lambda: _set(before)) if before else None


def _set(gradients: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for parameter, gradient in reversed(gradients):
        set_gradient(parameter, gradient)
