"""Gradients that eager calls would leave for the next call, and ranks free after their last use.

Problem: `optimizer.zero_grad(); loss.backward(); optimizer.step()` leaves gradients that no other
call of it reads. Another path of the step, or another step on the model, may add to them.
Idea: all steps on one state share a table of the parameters whose gradients are so left. A graph
that uses such a gradient is refused. One that was captured while it was None does not hold, and is
captured again as if it was there: the new graph either uses it or does not need it. A graph that
only adds to it and leaves the sum, as a generator's step does in its critic, may run.

Complexity: O(gradients that a graph resets, leaves or has as sources) per call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.first_step.gradients import GradientNames
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.graph.ir import Graph

#: They leave nothing of what was in the tensor that they write.
_OVERWRITING = ("aten.zero_.default", "aten.copy_.default")

Named = Sequence[tuple[str, torch.Tensor]]
"""Parameters with the names of their gradients."""


class TakenGradients(NamedTuple):
    """What one graph does with gradients that earlier calls have left.

    Attributes:
        left: Parameters whose gradients it frees and eager calls leave.
        replaced: Those of `left` for which it does not matter what they are before it.
        reset: Parameters whose gradients are None after it, and no sources of it.
        unknown: Parameters whose gradients must be None before it.
        presumed: Parameters whose gradients an earlier call must have left before it.
        used: Parameters whose gradients are sources of it, and that it does not only add to.
    """

    left: Named = ()
    replaced: Named = ()
    reset: Named = ()
    unknown: Named = ()
    presumed: Named = ()
    used: Named = ()

    def drop(self) -> None:
        """Reset gradients that no graph needs any more, since it frees its own."""
        for _, parameter in (*self.reset, *self.left):
            if parameter.grad is not None:
                parameter.grad = None


def taken_gradients(
    names: GradientNames, presumed: Collection[str], binding: Binding, graph: Graph,
    parameters: Mapping[str, Any],
) -> TakenGradients:  # fmt: skip
    """Return what a graph does with gradients.

    Args:
        names: What capture has found.
        presumed: Names of parameters that were taken to have a gradient.
        binding: The binding of the graph.
        graph: The whole graph of the step.
        parameters: All parameters that the step reaches, by name.
    """

    def named(found: Collection[str]) -> Named:
        return [(f"{each}.grad", parameters[each]) for each in found if each in parameters]

    sources = {
        op.name: parameter
        for op in graph.ops
        if op.kind == "state" and (parameter := binding.sources[op.name].parameter) is not None
    }
    used = [(name, sources[name]) for name in used_tensors(graph, sources)]
    return TakenGradients(
        named(names.left), named(names.replaced), named(names.reset), named(names.unknown),
        named(presumed), used,
    )  # fmt: skip


def used_tensors(graph: Graph, sources: Collection[str]) -> list[str]:
    """Return those of some source ops whose content is used for more than what replaces it.

    A view counts as a use, so what is written in place is always the whole tensor.
    """
    if not sources:
        return []
    of = {op.outputs[0].name: op.name for op in graph.ops if op.name in sources}
    written, found = dict(graph.overwrites), set[str]()
    for i, op in enumerate(graph.ops):
        if op.kind in _OVERWRITING and (whole := of.get(op.inputs[0])) is not None:
            found |= {of[name] for name in op.inputs[1:] if name in of}
            of = {name: each for name, each in of.items() if each != whole}
        for each in {of[name] for name in op.inputs if name in of}:
            if {of.get(name) for name in written.get(i, ())} != {each}:
                found.add(each)
        of |= {x.name: of[x.alias_of] for x in op.outputs if x.alias_of in of}
    return sorted(found)


class LeftGradients:
    """The gradients that eager calls would have left, of all steps on one state."""

    def __init__(self) -> None:
        # With the gradient that is in place, if any: the user may set another one, or reset it.
        self._left: dict[int, tuple[torch.Tensor, Any]] = {}
        self._is_ours = False

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._left)

    def __contains__(self, parameter: Any) -> bool:
        """Whether a parameter's gradient is left."""
        return id(parameter) in self._left

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Forget those that the user has set or reset; while the context is open, none is."""
        if self._is_ours:
            yield
            return
        changed = [key for key, (p, gradient) in self._left.items() if p.grad is not gradient]
        for key in changed:
            del self._left[key]
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False
            self._record()

    def _record(self) -> None:
        for key, (parameter, gradient) in self._left.items():
            if parameter.grad is not gradient:
                self._left[key] = parameter, parameter.grad

    def note(self, taken: TakenGradients, reset: Sequence[torch.Tensor]) -> None:
        """Note what a call of a graph has left; what it frees or resets is None from now on.

        Args:
            taken: What the graph does with gradients.
            reset: Parameters whose gradients are sources of it, and None after it.
        """
        for parameter in (*(each for _, each in taken.reset), *reset):
            self._left.pop(id(parameter), None)
        taken.drop()
        for _, parameter in taken.left:
            self._left[id(parameter)] = parameter, None
        self._record()

    def changes(self, taken: TakenGradients) -> Iterator[Change]:
        """Yield the gradients on whose absence or presence a graph relies in vain."""
        for name, parameter in taken.unknown if self._left else ():
            if parameter in self:
                yield Change(name, None, "left by an earlier call")
        for name, parameter in taken.presumed:
            if parameter not in self:
                yield Change(name, "left by an earlier call", None)

    def used(self, taken: TakenGradients) -> list[str]:
        """Return the names of left gradients that a graph uses."""
        return [name for name, parameter in taken.used if parameter in self] if self._left else []
