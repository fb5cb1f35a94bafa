"""The updates of a step's sources, as calls of the trace, and checks of whole traces.

Parameters, buffers and states that the next step reads are updated in place: where the step
replaced a source by another tensor, the assignment becomes a copy into the source. Batch tensors
that it writes are marked, and ranks exchange them, since the caller of an eager step finds the new
values in its own tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.first_step import refusals
from pardnn.backends.torch.capture.restore import Changed
from pardnn.backends.torch.capture.result import kept_copy
from pardnn.backends.torch.capture.rewrites.undoing import record
from pardnn.backends.torch.capture.to_graph import (
    add_order_edges,
    live_calls,
    name_calls,
    traces_differ,
)
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.codec import encode
from pardnn.backends.torch.user_step.sources import Source, WholeOf
from pardnn.errors import UsageError
from pardnn.graph.ir import Graph


@dataclass(repr=False)
class StepTrace:
    """The trace of one step.

    Attributes:
        tracer: Holds the calls.
        values: Values of the trace by source name.
        sources: Sources by name.
        changed: Plain values that the step changed, by name.
        settings: Plain values that the graph takes for granted.
        result: What the step returned.
        schedules: Names of the learning rate schedules that it stepped.
        effects: What the step tells: `numbers.effects.Effects`.
        choices: Code of it that runs by data: `numbers.choices.Choices`.
        length: Number of calls of the step itself, before copies back were added.
        gradients: Placeholders of gradients that were held before the step, by name.
        created: Of the first step: values of the tensors that it creates, by name.
        assigned: Plain values that it assigned, by name: `assigned.differences.Assigned`.
        trainable: Parameters of which it changed `requires_grad`, with the new value.
        made_anew: Sources made of constants, their storages and numbers of writes: `first_use`.
    """

    tracer: Tracer
    values: dict[str, Value]
    sources: dict[str, Source]
    changed: dict[str, Changed]
    settings: dict[str, Any]
    result: Any
    schedules: Sequence[str] = ()
    effects: Any = None
    choices: Any = None
    length: int = 0
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    created: Mapping[str, Value] = field(default_factory=dict)
    assigned: Mapping[str, Any] = field(default_factory=dict)
    trainable: Mapping[str, bool] = field(default_factory=dict)
    made_anew: Sequence[tuple[Source, Storage | None, int]] = ()

    def add(self, source: Source, fake: Any, initial: dict[str, Any] | None) -> None:
        """Make a placeholder the value of a source, with the first value that it may have."""
        arguments = {"initial": initial[source.name]} if source.name in (initial or {}) else None
        value = self.tracer.add_source(source.kind, fake, arguments)
        value.call.name = source.name
        self.values[source.name], self.sources[source.name] = value, source


class Captured(NamedTuple):
    """A captured step.

    Attributes:
        graph: Of the step.
        uncarried: Names of the tensors that the step changes, but its graph does not.
    """

    graph: Graph
    uncarried: tuple[str, ...]


def accelerator_of(trace: StepTrace) -> str:
    """Return the device type of a step's parameters."""
    kinds = [trace.values[n].device for n, s in trace.sources.items() if s.kind == "parameter"]
    return kinds[0] if kinds else "cpu"


def check_trains(trace: StepTrace) -> None:
    """Reject a step that changes no parameter.

    Raises:
        UsageError: E201.
    """
    added = [n for n, s in trace.sources.items() if s.parameter is not None and s.get() is not None]
    storages = [trace.values[name].storage for name in added]
    # A call that only adds to gradients leaves them to one that takes another path.
    is_part = _may_go_otherwise(trace) and any(each and each.writes for each in storages)
    if not is_part and not _changes_parameters(trace):
        raise UsageError(
            "nothing to train: the step changes no parameter of any model it reaches.\n"
            "It should call loss.backward() and optimizer.step() on parameters that require\n"
            "gradients.",
        )


def _changes_parameters(trace: StepTrace) -> bool:
    named = trace.sources.items()
    storages = [trace.values[n].storage for n, s in named if s.kind == "parameter"]
    return any(storage and storage.writes for storage in storages)


def _may_go_otherwise(trace: StepTrace) -> bool:
    """Whether numbers or flags have decided which path the step takes."""
    scalars = trace.tracer.scalars
    flags = [name for name in trace.settings if ".param_groups." not in f".{name}"]
    return bool(scalars.conditions or scalars.guards or flags)


def source_updates(trace: StepTrace, irregular: Collection[str]) -> list[Call]:
    """Return the calls that update sources; record a copy into each source that was replaced.

    Args:
        trace: Of one step; copies are recorded in it.
        irregular: Names of states whose first value is no constant.

    Raises:
        UnsupportedError: E807, if a source became another kind of tensor, or none.
    """
    calls: list[Call] = []
    read = {storage for call in trace.tracer.calls for storage, _ in call.reads}
    hands_on = not _changes_parameters(trace) and _may_go_otherwise(trace)
    for name, source in trace.sources.items():
        value = trace.values[name]
        if source.kind == "input":
            calls += [] if value.storage is None else _written_input(trace, source, value)
        if value.storage is None or source.kind == "input":
            continue
        live = source.get()
        if name in trace.assigned and not isinstance(live, torch.Tensor):
            continue
        # What a source holds at the end matters only if the next step reads it.
        kept = is_registered(source) and name not in irregular
        matters = source.kind == "parameter" or kept or value.storage in read
        # Where a call makes gradients and no update, another one is to read them.
        matters |= hands_on and source.parameter is not None
        if isinstance(live, torch.Tensor) and not matters:
            continue
        copies = _copy_back(trace, source, value, live)
        read.update(storage for call in copies for storage, _ in call.reads)
        calls += copies
        calls += value.storage.writes
    return calls


def _written_input(trace: StepTrace, source: Source, value: Value) -> list[Call]:
    """Note an input that the step writes in place, or replaces in its container.

    The caller of an eager step finds the new values in its tensor, or the new tensor in its
    container: the writes, or a copy, are part of the graph even where no other op reads them.
    """
    assert value.storage is not None
    live = source.get()
    if _is_rebound(trace, value, live):
        call = kept_copy(trace.tracer, live)
        trace.effects.noted.append({"rebind": [source.name, {"kept": call.outputs[0]}]})
        return [call]
    if value.storage.writes:
        value.call.arguments = {"written": True}
        return value.storage.writes
    return []


def _is_rebound(trace: StepTrace, value: Value, live: Any) -> bool:
    """Whether the step replaced an input in its container by one of its shape and dtype: a state.

    One of another shape or dtype (`batch["x"] = batch["x"].float()`) prepares the batch; a next
    call with it would be another step.
    """
    if not isinstance(live, torch.Tensor):
        return False
    new = trace.tracer.aliases.fresh_value(live)
    if new.storage is value.storage or new.geometry is None or value.geometry is None:
        return False
    return (new.geometry[0], new.geometry[3]) == (value.geometry[0], value.geometry[3])


def is_registered(source: Source) -> bool:
    """Whether the next step finds the source: optimizer state, or a buffer in a dictionary."""
    return (source.kind == "state" and source.parameter is None) or any(
        getattr(slot.holder, "get", None) is not None and source.kind == "buffer"
        for slot in source.slots
    )


def _copy_back(trace: StepTrace, source: Source, value: Value, live: Any) -> list[Call]:
    """Record `source.copy_(live)` where `live` is another tensor than the source."""
    if live is None and source.parameter is not None:
        # Dropped: the next call begins with zeros, which its own gradient is added to.
        return [_zeroed(trace, source)]
    if not isinstance(live, torch.Tensor):
        raise unsupported.replaced_tensor(source.name, "which is no tensor")
    new = trace.tracer.aliases.fresh_value(live)
    if new.storage is value.storage:
        return []
    assert new.geometry is not None
    assert value.geometry is not None
    if new.geometry[0] != value.geometry[0] or new.geometry[3] != value.geometry[3]:
        raise unsupported.replaced_tensor(source.name, "of another shape or dtype")
    if new.storage is not None and new.storage.source:
        raise unsupported.replaced_tensor(source.name, f"namely {new.storage.owner.call.name!r}")
    return [trace.tracer.aliases.copy_back(value, new)]


def _zeroed(trace: StepTrace, source: Source) -> Call:
    record(trace.tracer, "zero_", trace.gradients[source.name])
    return trace.tracer.calls[-1]


def gradients_read(first: StepTrace) -> list[str]:
    """Return the gradients from before the first step that it reads, to add its own to them."""
    read = {storage for call in first.tracer.calls for storage, _ in call.reads}
    return [
        name
        for name, source in first.sources.items()
        if source.parameter is not None and first.values[name].storage in read
    ]


def uncarried(trace: StepTrace, first: StepTrace, graph: Graph) -> list[str]:
    """Return the names of the tensors that a step changes, but its graph does not.

    No later call of this step reads what it leaves there; one that takes another path may.

    Args:
        trace: Of the second run, which becomes the graph.
        first: Of the first run.
        graph: Made of the trace.
    """
    carried = {op.name for op in graph.ops}
    gradients = [name for name, source in first.sources.items() if source.parameter is not None]
    found = [name for name in gradients if name not in trace.sources]
    for name, source in trace.sources.items():
        value = trace.values[name]
        if value.storage is None or source.kind == "input" or name in carried:
            continue
        live = source.get()
        is_same = isinstance(live, torch.Tensor) and (
            trace.tracer.aliases.fresh_value(live).storage is value.storage
        )
        if not is_same or value.storage.writes:
            found.append(name)
    return found


def shared_sources(live: Sequence[Source], whole_of: WholeOf) -> dict[str, list[str]]:
    """Return, for each source that shares its storage with others, the names of all of them."""
    by_storage: dict[int, list[str]] = {}
    for source in live:
        tensor = source.get()
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            whole = whole_of(tensor)
            key = tensor.untyped_storage()._cdata if whole is None else whole.storage
            by_storage.setdefault(key, []).append(source.name)
    return {name: names for names in by_storage.values() for name in names if len(names) > 1}


def check_shared_storage(
    trace: StepTrace, calls: list[Call], sharing: dict[str, list[str]]
) -> None:
    """Reject a write to a source when another one that the graph reads shares its storage."""
    used = {value for call in calls for value in call.inputs}
    for name, others in sharing.items():
        value = trace.values.get(name)
        if value is None or value.storage is None or not value.storage.writes:
            continue
        read = [n for n in others if n != name and trace.values.get(n) in used]
        if read:
            raise unsupported.shared_storage([name, *read])


def check_item_reads(calls: Sequence[Call], permitted: Collection[Call]) -> None:
    """Reject `.item()` of what depends on the batch or the parameters: every rank would wait.

    A number that no tensor is computed from, as one that is only returned, holds up nobody. A
    count that an optimizer keeps in a tensor is as late as the optimizer itself.
    """
    feeding: set[Value] = set()
    for call in reversed(calls):
        is_host = call.kind.startswith("scalar.")
        if not is_host or not feeding.isdisjoint(call.outputs):
            feeding.update(call.inputs)
    tainted: set[Value] = set()
    for call in calls:
        touched = call.random or any(value in tainted for value in call.inputs)
        if call.kind in ("parameter", "input") and call.outputs[0].geometry is not None:
            touched = True
        is_read = call.kind == "aten._local_scalar_dense.default" and call not in permitted
        storage = call.inputs[0].storage if is_read else None
        is_read = is_read and (storage is None or storage.owner.call.kind != "state")
        if touched and is_read and not feeding.isdisjoint(call.outputs):
            kind = call.outputs[0].kind
            raise unsupported.data_dependent_branch(call.source, kind.__name__ if kind else "data")
        if touched:
            tainted.update(call.outputs)


def left_over(first: StepTrace, trace: StepTrace) -> list[str]:
    """Return the gradients from before the first step that it reads, and no later step finds."""
    return [name for name in gradients_read(first) if name not in trace.sources]


def check_same(one: StepTrace, other: StepTrace) -> None:
    """Reject a step whose two traces differ."""
    hints = {**one.tracer.scalars.hints, **other.tracer.scalars.hints}
    different = traces_differ(one.tracer.calls[: one.length], other.tracer.calls, hints)
    if different is None:
        return
    here, there = different
    # Only the first of the two traces knows where its calls come from.
    located = here or one.tracer.calls[one.length - 1]
    what = f"{(there or located).kind} has other arguments the second time"
    raise unsupported.changing_step(what, located.source)


def ordered_live_calls(
    trace: StepTrace, loss: Value | None, updated: list[Call], irregular: dict[str, str],
    held: Collection[str],
) -> list[Call]:  # fmt: skip
    """Return the live calls, ordered and named, sources first.

    Args:
        trace: Of the step that repeats.
        loss: The value that is the loss; None of an evaluation.
        updated: Calls that outlive the step.
        irregular: Why states have no first value, by name.
        held: Names of numbers that objects hold.

    Raises:
        UnsupportedError: E806, if the graph reads a state without a first value.
    """
    guarded = []
    for value, guard in trace.tracer.scalars.guards.items():
        # A guard on any other number is a condition of the host program, or a setting.
        if value.kind is float and value.call.name not in held:
            assert value.call.arguments is not None
            value.call.arguments["guard"] = guard
            guarded.append(value.call)
    always = [
        trace.values[n].call
        for n, s in trace.sources.items()
        if s.kind == "parameter" or (s.kind in ("buffer", "state") and n not in irregular
        and is_registered(s))
    ]  # fmt: skip
    outputs = [*updated, *guarded, *always, *([] if loss is None else [loss.call])]
    calls = live_calls(trace.tracer.calls, outputs)
    for call in calls:
        if call.name in irregular:
            raise refusals.irregular_initial_state(call.name, irregular[call.name])
    check_item_reads(calls, trace.tracer.permitted_reads)
    sources_first = sorted(calls, key=lambda call: not call.name)
    add_order_edges(sources_first)
    name_calls(sources_first)
    return sources_first


@contextlib.contextmanager
def symbols_inserted(trace: StepTrace, numbers: Sequence[Source]) -> Iterator[None]:
    """Put a symbol in the place of each number, a source of the trace, while the context is open.

    Args:
        trace: Of the step that will run.
        numbers: Sources of the numbers.
    """
    live = [source.get() for source in numbers]
    for source, number in zip(numbers, live, strict=True):
        noted = {"value": encode(number, str), "guard": None}
        symbol = trace.tracer.scalars.add_number(number, noted)
        value = symbol.node.value
        value.call.name, trace.values[source.name] = source.name, value
        trace.sources[source.name] = source
        source.set(symbol)
    try:
        yield
    finally:
        for source, number in zip(numbers, live, strict=True):
            with contextlib.suppress(IndexError):  # a list is shorter now
                source.set(number)
