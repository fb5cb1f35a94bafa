"""The updates of a step's sources, as calls of the trace.

Parameters, buffers and states that the next step reads are updated in place: if the step replaced a
source by another tensor, the assignment becomes a copy into the source. Batch tensors that it
writes are marked, and ranks exchange them, since the caller of an eager step finds the new values
in its own tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.capture.assigned.differences import is_reshaped
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.first_step import (
    irregular_initial_state,
)
from pardnn.backends.torch.capture.result import kept_copy
from pardnn.backends.torch.capture.rewrites.undoing import record
from pardnn.backends.torch.capture.step_trace import (
    StepTrace,
    changes_parameters,
    may_go_otherwise,
)
from pardnn.backends.torch.capture.to_graph import (
    add_order_edges,
    live_calls,
    name_calls,
)
from pardnn.backends.torch.capture.trace_ir import Call, Storage, Value, storages_read
from pardnn.backends.torch.user_step.sources import Source, is_on_meta
from pardnn.graph.ir import Graph, is_in_group


def source_updates(
    trace: StepTrace, irregular: Mapping[str, str], *, is_opening: bool = False
) -> list[Call]:
    """Return the calls that update sources; record a copy into each source that was replaced.

    Args:
        trace: The trace of one step; copies are recorded in it.
        irregular: Why the first value of a state is no constant, by its name.
        is_opening: Whether the next step is another graph, which may read what this one does not.

    Raises:
        UnsupportedError: E807, if a source became another kind of tensor, or none; E806, if a
            state without a first value that no op reads would not be left.
    """
    calls = _written_inputs(trace)
    passed = _passed_on(trace)
    calls_back = reversed(trace.tracer.calls)
    first_readers = {storage: call for call in calls_back for storage, _ in call.reads}
    read = set[Storage | None](first_readers)
    hands_on = not changes_parameters(trace) and may_go_otherwise(trace)
    for name, source in trace.sources.items():
        value = trace.values[name]
        if value.storage is None or source.kind == "input":
            continue
        live = source.get()
        if _is_left(trace, name, live):
            continue
        # A source's final content matters only if the next step reads it.
        kept = is_registered(source) and name not in irregular
        matters = source.kind == "parameter" or kept or value.storage in read
        # If a call makes gradients but no update, another call will read them.
        matters |= is_opening if source.parameter is None else hands_on
        if source.parameter is not None:
            _mark_gradient(value, live, first_readers.get(value.storage))
        if isinstance(live, torch.Tensor) and not matters:
            if name in irregular and is_registered(source):
                raise irregular_initial_state(name, irregular[name])  # it would be lost
            continue
        if live is None and source.parameter is not None and value.storage not in read:
            continue  # the ranks make it None
        if source.parameter is None and isinstance(live, torch.Tensor):
            calls += _left_to_others(trace, source, value, live)
        copies = _copy_back(trace, source, value, passed.get(name, live))
        read |= storages_read(copies)
        calls += copies
        calls += value.storage.writes
    return calls


def tensor_notes(trace: StepTrace, first: StepTrace | None) -> dict[str, Any]:
    """Return notes of the graph on sources that are tensors.

    Of those that `source_updates` found replaced by others, or moved to other memory: whoever still
    holds an old tensor, or the old memory, finds the old content in it. And of those that were
    numbers before the first step.

    Args:
        trace: The trace of the step that repeats.
        first: That of the first step; None of a first step that is a graph of its own.
    """
    numbers = [name for name in (first.numbers if first else ()) if name in trace.sources]
    notes = {
        "replaced": trace.replaced, "moved": trace.moved, "written": trace.written,
        "numbers": numbers,
    }  # fmt: skip
    return {key: names for key, names in notes.items() if names}


def _mark_gradient(value: Value, live: Any, first: Call | None) -> None:
    """Mark a gradient that can be zeros instead of None, and one that the step leaves as None.

    The next call starts from zeros instead of None, which is the same if it adds to them first, or
    if the first step started from None: its graph is proven to do the same.
    """
    is_same = "initial" in (value.call.arguments or {}) or (first is not None and first.sums)
    marks = {"summed": is_same, "reset": live is None}
    found = {key: True for key, is_so in marks.items() if is_so}
    if found:
        value.call.arguments = (value.call.arguments or {}) | found


def _is_left(trace: StepTrace, name: str, live: Any) -> bool:
    """Whether ranks assign what a step leaves in a source's place, rather than copy it there."""
    each = trace.assigned.get(name)
    return each is not None and (not isinstance(live, torch.Tensor) or is_reshaped(each.change))


def _written_inputs(trace: StepTrace) -> list[Call]:
    """Return the calls of all written inputs, before others replace what these may hold now."""
    inputs = [(n, s) for n, s in trace.sources.items() if s.kind == "input"]
    values = [(source, trace.values[name]) for name, source in inputs]
    found = [_written_input(trace, s, value) for s, value in values if value.storage is not None]
    return [call for calls in found for call in calls]


def _written_input(trace: StepTrace, source: Source, value: Value) -> list[Call]:
    """Note an input that the step writes in place, or replaces in its container.

    The caller of an eager step finds the new values in its tensor, or the new tensor in its
    container: the writes, or a copy, are part of the graph even where no other op reads them.
    """
    assert value.storage is not None
    live = source.get()
    if _is_rebound(trace, source, value, live):
        call = kept_copy(trace.tracer, live)
        trace.effects.noted.append({"rebind": [source.name, {"kept": call.outputs[0]}]})
        return [call]
    if value.storage.writes:
        value.call.arguments = {"written": True}
        return value.storage.writes
    return []


def _is_rebound(trace: StepTrace, source: Source, value: Value, live: Any) -> bool:
    """Whether the step replaced an input by one of the same shape and dtype: a state.

    One of another shape or dtype (`batch["x"] = batch["x"].float()`) prepares the batch; the next
    call with it would be another step. What a group of an optimizer holds is always a state.
    """
    if not isinstance(live, torch.Tensor):
        return False
    new = trace.tracer.aliases.fresh_value(live)
    if new.storage is value.storage or new.geometry is None or value.geometry is None:
        return False
    if is_in_group(source.name):
        return True
    return (new.geometry[0], new.geometry[3]) == (value.geometry[0], value.geometry[3])


def is_registered(source: Source) -> bool:
    """Whether the next step finds the source: optimizer state, or a buffer in a dictionary."""
    return (source.kind == "state" and source.parameter is None) or any(
        getattr(slot.holder, "get", None) is not None and source.kind == "buffer"
        for slot in source.slots
    )


def _left_to_others(
    trace: StepTrace, source: Source, value: Value, live: torch.Tensor
) -> list[Call]:
    """Note a source that another tensor has replaced; keep what the step wrote into the old one.

    Others may hold the old tensor: `self.h.add_(1); self.h = self.h * 2`. Of a tensor that only
    got other memory, `p.data = p.data.clamp(-1, 1)`, others may hold the old memory; ranks refuse
    that if the step has written into it, since a copy of each parameter would be too much.
    """
    assert value.storage is not None
    old, new = trace.placeholders.get(source.name), trace.tracer.aliases.fresh_value(live)
    if new.storage is value.storage:
        return []
    if old is live:
        trace.moved.append(source.name)
        if value.storage.writes:
            trace.written[source.name] = new.call.source
        return []
    if not value.storage.writes:
        trace.replaced.append(source.name)
        return []
    if old is None:  # the step itself has made it
        return []
    trace.replaced.append(source.name)
    call = kept_copy(trace.tracer, old)
    trace.effects.noted.append({"left": [source.name, {"kept": call.outputs[0]}]})
    return [call]


def _copy_back(trace: StepTrace, source: Source, value: Value, live: Any) -> list[Call]:
    """Record `source.copy_(live)` where `live` is another tensor than the source."""
    if live is None and source.parameter is not None:
        # Dropped: the next call starts from zeros, to which it adds its own gradient.
        return [_zeroed(trace, source)]
    if not isinstance(live, torch.Tensor):
        raise unsupported.replaced_tensor(source.name, "by something that is not a tensor")
    new = trace.tracer.aliases.fresh_value(live)
    if new.storage is value.storage:
        return []
    assert new.geometry is not None
    assert value.geometry is not None
    if new.geometry[0] != value.geometry[0] or new.geometry[3] != value.geometry[3]:
        raise unsupported.replaced_tensor(source.name, "by a tensor of another shape or dtype")
    if new.storage is not None and new.storage.source:
        raise unsupported.replaced_tensor(source.name, f"by {new.storage.owner.call.name!r}")
    return [trace.tracer.aliases.copy_back(value, new)]


def _passed_on(trace: StepTrace) -> dict[str, torch.Tensor]:
    """Record a copy of what a source held, for another one that holds it now.

    An example is `self.last = self.h; self.h = h.detach()`. It needs a copy, as either has memory
    of its own. Where both would hold one tensor, or the step has written into the other, copies
    would differ from it at later steps.

    Returns:
        The copies, by the name of the source that holds them now.
    """
    aliases, holders = trace.tracer.aliases, dict[Storage, list[str]]()
    for name, source in trace.sources.items():
        is_copy = source.kind == "input" or name in trace.assigned
        live = None if is_copy else source.get()
        if trace.values[name].storage is not None and isinstance(live, torch.Tensor):
            storage = aliases.fresh_value(live).storage
            if storage is not None and storage.source:
                holders.setdefault(storage, []).append(name)
    found: dict[str, torch.Tensor] = {}
    for storage, names in holders.items():
        own = trace.values[names[0]].storage
        is_state = storage.owner.call.kind in ("buffer", "state")
        is_moved = own is not None and own is not storage and not own.writes
        if is_moved and is_state and len(names) == 1:
            found[names[0]] = record(trace.tracer, "clone", trace.sources[names[0]].get())
    return found


def _zeroed(trace: StepTrace, source: Source) -> Call:
    record(trace.tracer, "zero_", trace.gradients[source.name])
    return trace.tracer.calls[-1]


def gradients_read(first: StepTrace) -> list[str]:
    """Return the gradients from before the first step to which the step adds its own."""
    read = storages_read(first.tracer.calls)
    return [
        name
        for name, source in first.sources.items()
        if source.parameter is not None and first.values[name].storage in read
    ]


def uncarried(trace: StepTrace, first: StepTrace, graph: Graph) -> list[str]:
    """Return the names of the tensors that a step changes but its graph does not.

    No later call of this step reads what it leaves there; one that takes another path may.

    Args:
        trace: The trace of the second run, which becomes the graph.
        first: The trace of the first run.
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
        if _is_left(trace, name, live):
            continue
        is_same = isinstance(live, torch.Tensor) and (
            trace.tracer.aliases.fresh_value(live).storage is value.storage
        )
        if not is_same or value.storage.writes:
            found.append(name)
    return found


def _templates(trace: StepTrace) -> set[str]:
    """Return the sources on the meta device, if a trace reads none of them.

    They belong to no model that still has to be initialised: `functional_call` replaces them.
    """
    found = {name for name, source in trace.sources.items() if is_on_meta(source.get())}
    read = storages_read(trace.tracer.calls)
    return set() if any(trace.values[name].storage in read for name in found) else found


def left_over(first: StepTrace, trace: StepTrace) -> list[str]:
    """Return the gradients from before the first step that only the first step reads."""
    return [name for name in gradients_read(first) if name not in trace.sources]


def ordered_live_calls(
    trace: StepTrace, loss: Value | None, updated: list[Call], irregular: dict[str, str],
    held: Collection[str], sharing: Mapping[str, Sequence[str]], *, trains: bool,
) -> list[Call]:  # fmt: skip
    """Return the live calls, ordered and named, sources first.

    Args:
        trace: The trace of the step that repeats.
        loss: The value that is the loss; None of an evaluation.
        updated: Calls that outlive the step.
        irregular: Why states have no first value, by name.
        held: Names of numbers that objects hold.
        sharing: Sources that share a storage with others, by name.
        trains: Whether it is a training step; an evaluation leaves alone what it does not read,
            except for parameters and states of optimizers.

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
    made_way = {n for n, s in trace.sources.items() if _is_left(trace, n, s.get())}
    # What holds the batch, and is not read, is the user's: nothing is kept of it.
    inputs = {n for n, s in trace.sources.items() if s.kind == "input" and not is_in_group(n)}
    shared = (n for n, others in sharing.items() if not inputs.isdisjoint(others))
    of_batch = {n for n in shared if n in trace.sources and trace.sources[n].kind != "parameter"}
    left_out = _templates(trace) | made_way | of_batch
    kept = ("buffer", "state") if trains else ("state",)
    always = [
        trace.values[n].call
        for n, s in trace.sources.items()
        if n not in left_out
        if s.kind == "parameter" or (s.kind in kept and n not in irregular and is_registered(s))
    ]  # fmt: skip
    outputs = [*updated, *guarded, *always, *([] if loss is None else [loss.call])]
    calls = live_calls(trace.tracer.calls, outputs)
    for call in calls:
        if call.name in irregular:
            raise irregular_initial_state(call.name, irregular[call.name])
    sources_first = sorted(calls, key=lambda call: not call.name)
    add_order_edges(sources_first)
    name_calls(sources_first)
    return sources_first
