"""The trace of one step: what its run has recorded, and questions about it as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pardnn.backends.torch.capture.restore import Changed
from pardnn.backends.torch.capture.trace_ir import Storage, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.codec import encode
from pardnn.backends.torch.user_step.sources import Source


@dataclass(repr=False)
class StepTrace:
    """The trace of one step.

    Attributes:
        tracer: Holds the calls.
        values: Values of the trace by source name.
        sources: Sources by name.
        changed: Plain values that the step changed, by name.
        settings: Plain values on which the graph relies.
        result: What the step returned.
        roots: What it called `backward` on.
        held: Names of the step's own objects by id.
        schedules: Names of the learning rate schedules that it stepped.
        effects: The effects of the step: `numbers.effects.Effects`.
        choices: Its code that runs depending on data: `choices.choices.Choices`.
        length: Number of calls of the step itself, before copies back were added.
        gradients: Placeholders of gradients that were held before the step, by name.
        created: For the first step: values of the tensors that it creates, by name.
        numbers: For the first step: names of those that it puts in the place of a number.
        left: For the first step: values of the sources after it, by name.
        filled: For the first step: what it puts into containers that it only fills, by name.
        unfilled: Names of such containers into which it puts nothing.
        orders: Keys of the dictionaries whose order it changes, by name.
        assigned: Plain values that it assigned, by name: `assigned.differences.Assigned`.
        trainable: Parameters of which it changed `requires_grad`, with the new value.
        tables: Lists and tuples that its counts index, or may: `rewrites.tables`.
        stood_for: The tensor that each placeholder replaces, by the placeholder's id.
        asked: Names of sources whose gradients its Python reads or sets.
        placeholders: Those of the sources that are tensors, and of their gradients, by name.
        replaced: Names of sources that got the content of a tensor which took their place.
        moved: Names of sources that are still the same tensors, whose memory it took.
        written: Those among them that the step wrote in place, too, and the user's line if known.
        made_anew: Sources made of constants, their storages and numbers of writes: `first_use`.
    """

    tracer: Tracer
    values: dict[str, Value]
    sources: dict[str, Source]
    changed: dict[str, Changed]
    settings: dict[str, Any]
    result: Any
    held: Mapping[int, str] = field(default_factory=dict)
    schedules: Sequence[str] = ()
    effects: Any = None
    choices: Any = None
    length: int = 0
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    created: Mapping[str, Value] = field(default_factory=dict)
    numbers: Sequence[str] = ()
    left: Mapping[str, Value] = field(default_factory=dict)
    filled: Mapping[str, Any] = field(default_factory=dict)
    unfilled: Sequence[str] = ()
    orders: Mapping[str, list[Any]] = field(default_factory=dict)
    assigned: Mapping[str, Any] = field(default_factory=dict)
    trainable: Mapping[str, bool] = field(default_factory=dict)
    tables: Sequence[Any] = ()
    stood_for: Mapping[int, torch.Tensor] = field(default_factory=dict)
    made_anew: Sequence[tuple[Source, Storage | None, int]] = ()
    roots: Sequence[torch.Tensor] = ()
    asked: Collection[str] = ()
    placeholders: dict[str, torch.Tensor] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    written: dict[str, str | None] = field(default_factory=dict)

    def add(self, source: Source, fake: Any, arguments: dict[str, Any] | None = None) -> None:
        """Make a placeholder the value of a source, with the arguments of its op."""
        value = self.tracer.add_source(source.kind, fake, arguments)
        value.call.name = source.name
        self.values[source.name], self.sources[source.name] = value, source


def accelerator_of(trace: StepTrace) -> str:
    """Return the device type of a step's parameters."""
    kinds = [trace.values[n].device for n, s in trace.sources.items() if s.kind == "parameter"]
    return kinds[0] if kinds else "cpu"


def gradients_of_batch(trace: StepTrace) -> tuple[str, ...]:
    """Return the names of the batch's tensors on which the step has left a gradient."""
    given = ((n, s.get()) for n, s in trace.sources.items() if s.kind == "input")
    tensors = ((n, x) for n, x in given if isinstance(x, torch.Tensor) and x.is_leaf)
    return tuple(name for name, tensor in tensors if tensor.grad is not None)


def changes_parameters(trace: StepTrace) -> bool:
    """Whether a step writes any parameter, or a plain tensor that requires a gradient."""
    storages = [trace.values[n].storage for n, s in trace.sources.items() if _is_trained(s)]
    return any(storage and storage.writes for storage in storages)


def _is_trained(source: Source) -> bool:
    """Whether training changes a source: `w = torch.randn(n, requires_grad=True)` is enough."""
    tensor = source.get() if source.kind in ("buffer", "input") else None
    return source.kind == "parameter" or (
        isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
    )


def may_go_otherwise(trace: StepTrace) -> bool:
    """Whether numbers or flags have decided the path of the step."""
    scalars = trace.tracer.scalars
    flags = [name for name in trace.settings if ".param_groups." not in f".{name}"]
    return bool(scalars.conditions or scalars.guards or flags)


@contextlib.contextmanager
def symbols_inserted(
    trace: StepTrace, numbers: Sequence[Source], frozen: Collection[str] = ()
) -> Iterator[None]:
    """Put a symbol in place of each number, a source of the trace, while the context is open.

    Args:
        trace: The trace of the step that will run.
        numbers: Sources of the numbers.
        frozen: Names of those that stay numbers; the graph holds only for their values.
    """
    live = [source.get() for source in numbers]
    for source, number in zip(numbers, live, strict=True):
        noted = {"value": encode(number, str), "guard": None}
        symbol = trace.tracer.scalars.add_number(number, noted)
        value = symbol.node.value
        value.call.name, trace.values[source.name] = source.name, value
        trace.sources[source.name] = source
        if source.name in frozen and isinstance(number, float):
            trace.tracer.scalars.guards[value] = "exact"
        else:
            source.set(symbol)
    try:
        yield
    finally:
        for source, number in zip(numbers, live, strict=True):
            with contextlib.suppress(IndexError):  # a list is shorter now
                source.set(number)
