"""A first step with a separate graph, because the later ones do something else.

Problem: `if not state: state["mean"] = grad.clone()`; `continue` in the first step of ADOPT. What
such a step leaves is known only when it runs, so the states have no initial number.

Idea: its trace, from the original content of the objects, is the graph of the first call. Each
tensor that it creates is a state that the step writes and does not read; each number is one that it
sets. After that call all of them exist, and the step that repeats is captured.

Complexity: one more trace, and one copy of each state that the first step fills.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from pardnn.backends.torch.capture.assigned.assignments import note_assigned
from pardnn.backends.torch.capture.assigned.differences import is_reshaped
from pardnn.backends.torch.capture.first_step.initial_state import initial_value, is_of_a_module
from pardnn.backends.torch.capture.numbers.first_numbers import containers_in_states
from pardnn.backends.torch.capture.numbers.selection import OPENING, Selection
from pardnn.backends.torch.capture.restore import Changed, is_arithmetic, is_filled
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import Call
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.held_numbers import (
    is_plain_value,
    named_places,
    texts_of_states,
    values_by_name,
    with_tensor_names,
)
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import (
    Source,
    held_gradients,
    registration,
    tensor_names,
)
from pardnn.graph.ir import Graph


class NotFollowed(Exception):
    """The first step creates something that no rank can create."""


def created_states(
    trace: StepTrace, found: tuple[Source, ...], objects: ObjectGraph, before: set[str]
) -> list[Call]:
    """Record copies into the tensors that a first step creates; return the calls that fill them.

    Args:
        trace: The trace of the first step.
        found: Sources after it.
        objects: The object graph after it.
        before: Names of the sources before it.

    Raises:
        NotFollowed: A tensor is in an object that the step makes, or is a view.
    """
    calls: list[Call] = []
    owners = [source.get() for source in held_gradients(found)]
    taken = {_storage(trace, tensor) for tensor in owners}
    for source in found:
        live = source.get()
        if source.name in before or not isinstance(live, torch.Tensor):
            continue
        value = trace.tracer.aliases.fresh_value(live)
        storage = value.storage
        if (
            storage is None
            or storage.source
            or storage in taken
            or not _is_reached(source, objects)
        ):
            raise NotFollowed
        taken.add(storage)
        number, is_empty = initial_value(value), ".empty" in storage.owner.call.kind
        is_filled_once = number is not None and len(storage.writes) == int(is_empty)
        with trace.tracer.fake_mode:
            fake: Any = torch.empty_like(live, requires_grad=False)
        first = {"initial": number if is_filled_once else 0.0} | registration(source, objects)
        state = trace.tracer.add_source(source.kind, fake, first)
        state.call.name = source.name
        trace.values[source.name], trace.sources[source.name] = state, source
        calls.append(state.call)
        if not is_filled_once:
            calls.append(trace.tracer.aliases.copy_back(state, value))
    return calls


def _storage(trace: StepTrace, tensor: torch.Tensor) -> Any:
    return trace.tracer.aliases.fresh_value(tensor).storage


def _is_reached(source: Source, objects: ObjectGraph) -> bool:
    """Whether ranks can find the place: a parameter's state in an optimizer, or a module's own."""
    if source.kind == "buffer":
        return is_of_a_module(source, objects)
    optimizers = [e.value for e in objects.stateful if isinstance(e.value, torch.optim.Optimizer)]
    states = {id(state) for each in optimizers for state in _states(each).values()}
    places = (slot.holder for slot in source.slots if not slot.path)
    is_one = source.kind == "state" and len(source.slots) == 1
    return is_one and any(id(holder) in states for holder in places)


def _states(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    return {key: x for key, x in optimizer.state.items() if isinstance(key, torch.Tensor)}


def created_numbers(
    trace: StepTrace, found: tuple[Source, ...], objects: ObjectGraph, before: ObjectGraph,
    live: tuple[Source, ...],
) -> Selection:  # fmt: skip
    """Note the plain values that a first step leaves; return the selection that includes new ones.

    Args:
        trace: The trace of the first step.
        found: Sources after it.
        objects: The object graph after it.
        before: The object graph before it.
        live: The sources before it.

    Raises:
        NotFollowed: It leaves other values in new places.
    """
    _check_changes(trace, {source.name for source in found})
    _check_values(objects)
    names, old = tensor_names(found), tensor_names(live)
    then = values_by_name(before.contents, old) | texts_of_states(before, old)
    now = values_by_name(objects.contents, names) | texts_of_states(objects, names)
    numbers = _with_symbols(objects, names) | now
    known = then.keys() | trace.sources.keys() | trace.changed.keys()
    # What an assigned container holds is made with it.
    made = tuple(f"{name}." for name in trace.assigned)
    created = sorted(name for name in numbers.keys() - known if not name.startswith(made))
    inner = containers_in_states(objects)
    within = values_by_name([x for x in objects.contents if id(x[1]) in inner], names)
    if not within.keys().isdisjoint(created):
        raise NotFollowed
    for name in created:
        if "<" in name or "unnamed" in name:
            raise NotFollowed
        trace.effects.changed(name, numbers[name])
    return replace(OPENING, created=frozenset(created), start=dict.fromkeys(created, 0))


def _with_symbols(objects: ObjectGraph, names: Mapping[int, str]) -> dict[str, Any]:
    places = ((name, value) for name, slot, value in named_places(objects) if slot.key is not None)
    return {with_tensor_names(n, names): v for n, v in places if node_of(v) is not None}


def _check_changes(trace: StepTrace, tensors: Collection[str]) -> None:
    """Keep the changes of numbers among those of plain values; the rest must be assignments.

    Args:
        trace: The trace of the first step.
        tensors: Names of the tensors that exist after it: states.
    """
    changed = {n: c for n, c in trace.changed.items() if is_arithmetic(c) or is_filled(c)}
    rest = trace.changed.keys() - changed.keys() - trace.assigned.keys()
    assigned = {
        name: each
        for name, each in trace.assigned.items()
        if name not in tensors or is_reshaped(each.change)
    }
    if any(each.content is None for each in assigned.values()):
        raise NotFollowed
    if not all(_is_made(trace.changed[name], name in tensors) for name in rest):
        raise NotFollowed
    trace.changed = {n: c for n, c in changed.items() if not c.is_new}
    note_assigned(trace, assigned, assigned)


def _is_made(change: Changed, is_tensor: bool) -> bool:
    """Whether a place is new, or held None for a tensor: `register_buffer(n, None)`.

    Args:
        change: The change at the place.
        is_tensor: Whether it now holds a tensor.
    """
    return change.is_new or (is_tensor and change.then is None and change.slot is not None)


def _check_values(objects: ObjectGraph) -> None:
    """Reject states of parameters that hold more than tensors and plain values."""
    for entry in objects.stateful:
        if isinstance(entry.value, torch.optim.Optimizer):
            for state in _states(entry.value).values():
                items = state.values() if isinstance(state, dict) else [state]
                for item in items:
                    is_known = isinstance(
                        item, torch.Tensor | bool | int | float
                    ) or is_plain_value(item)
                    if not is_known and node_of(item) is None:
                        raise NotFollowed


def left_gradients(found: tuple[Source, ...], graph: Graph) -> list[str]:
    """Return the names of the gradients that a first step leaves and its graph does not."""
    carried = {op.name for op in graph.ops}
    return [source.name for source in held_gradients(found) if source.name not in carried]
