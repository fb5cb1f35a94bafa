"""What a step does with gradients that an earlier call has left, and what it leaves itself.

Problem: a step that resets gradients at its start leaves them, and one that resets them at its end
adds to what it finds. A graph of either has no gradients among its sources, if they were None at
capture, but the second holds only where they are None.
Idea: note whose gradients the step's Python reads or sets. Where these are None before and after
it, what it would do with others is unknown.

Complexity: O(parameters), and one Python call for each gradient that the step reads or sets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch

from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import storages_read
from pardnn.graph.ir import Graph


class GradientNames(NamedTuple):
    """Parameters by what a step does with their gradients, where its graph has no such gradient.

    Attributes:
        left: Their gradients are tensors after the step.
        replaced: Those of `left` for which it is the same what their gradients were.
        reset: Their gradients are None after the step.
        unknown: Those whose gradients were None at capture, and for which no others will do.
    """

    left: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@contextlib.contextmanager
def gradients_noted(names: Mapping[int, str]) -> Iterator[set[str]]:
    """Note the names of tensors whose `grad` Python reads or sets while the context is open.

    Args:
        names: Names of tensors by id; other tensors are not noted.
    """
    found, real = set[str](), torch.Tensor.grad

    def note(tensor: torch.Tensor) -> None:
        if (name := names.get(id(tensor))) is not None:
            found.add(name)

    def get(tensor: torch.Tensor) -> Any:
        note(tensor)
        return real.__get__(tensor)

    def put(tensor: torch.Tensor, value: Any) -> None:
        note(tensor)
        real.__set__(tensor, value)

    def delete(tensor: torch.Tensor) -> None:
        note(tensor)
        real.__delete__(tensor)

    # torch asks once for the getters whose results keep their type, and must not get this one.
    torch.overrides.get_default_nowrap_functions()
    with mock.patch.object(torch.Tensor, "grad", property(get, put, delete)):
        yield found


def gradient_names(
    trace: StepTrace, first: StepTrace | None, graph: Graph, uncarried: Collection[str]
) -> GradientNames:
    """Return what a step does with the gradients that its graph does not have.

    Args:
        trace: The trace that becomes the graph; the objects of the step are as it left them.
        first: The trace of the first step; None of a first step that is a graph of its own.
        graph: Made of the trace.
        uncarried: Names of the tensors that the step changes but its graph does not.
    """
    ops, before = {op.name for op in graph.ops}, (first or trace).sources
    read = storages_read(trace.tracer.calls)
    left, replaced, reset, unknown = list[str](), list[str](), list[str](), list[str]()
    for name, source in trace.sources.items():
        gradient = f"{name}.grad"
        if source.kind != "parameter" or gradient in ops:
            continue
        was_there, is_tensor = gradient in before, source.get().grad is not None
        if is_tensor and gradient in uncarried:
            left.append(name)
            if not was_there or trace.values[gradient].storage not in read:
                (replaced if first else unknown).append(name)
        elif not is_tensor and (name in trace.asked or was_there):
            reset.append(name)
            unknown += [name] * (not was_there)
    return GradientNames(tuple(left), tuple(replaced), tuple(reset), tuple(unknown))
