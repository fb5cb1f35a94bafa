"""Capture: one training step, exactly as the user wrote it, as a graph of ATen calls.

The step runs over fake tensors, so nothing is computed and no tensor data is allocated:

1. Once, so that optimizers create their state and gradients come to life.
2. Once more under the tracer, with new stand-ins for every source and with symbols for every
   number that may change: this is the step that is repeated, and it becomes the graph.
3. Once more, to compare: what differs between two steps would be frozen at one of its values.

Then everything is put back: tensors, gradients, optimizer state and its keys, settings, Python
attributes, the state of the random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor

from pardnn.backends.torch.capture import initial_state, unsupported
from pardnn.backends.torch.capture.fake_cache import FakeResults
from pardnn.backends.torch.capture.loss import loss_of as loss_of
from pardnn.backends.torch.capture.placeholders import fake_mode_of, put, stand_in
from pardnn.backends.torch.capture.restore import changes, restore
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.to_graph import (
    add_order_edges,
    graph_of,
    live_calls,
    name_calls,
    traces_differ,
)
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.capture.traced_run import generators_kept, run_traced
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.object_graph import walk_objects
from pardnn.backends.torch.user_step.sources import (
    Source,
    batch_indices,
    gradient_source,
    settings_of,
    sources_of,
)
from pardnn.errors import UsageError
from pardnn.gc_pause import collector_paused
from pardnn.graph.ir import Graph


def capture(step: Callable[..., Any], *args: Any, name: str | None = None) -> Graph:
    """Return the graph of one training step.

    Args:
        step: The user's step; `step(*args)` runs forward, backward and update, and returns the
            loss. It is run three times over fake tensors, never over real ones.
        *args: Models, optimizers and an example batch, real tensors or fake ones.
        name: Of the graph; the step's own name by default.

    Returns:
        A graph whose source ops are named as `roots.sources` names them; state that does not
        exist yet has its first value as `arguments["initial"]`, numbers that are read at every
        step have "value" and "guard" (None, "nonzero" or "exact": what must stay true of them),
        and the loss op lists the plain values that the graph takes for granted as "settings".

    Raises:
        UnsupportedError: E801 to E807, if the step cannot be captured; it names the line.
        UsageError: E201, if the step trains nothing.
        UserCodeError: E110, if the step itself raises.
    """
    arguments = list(args)
    original = walk_objects(step, arguments)
    scripted = [e.name for e in original.stateful if isinstance(e.value, torch.jit.ScriptModule)]
    if scripted:
        raise unsupported.scripted(scripted[0])
    batch = batch_indices(args)
    mode = fake_mode_of(entry.value for entry in original.tensors)
    session = _Session(step, arguments, batch, mode, FakeResults(mode))
    with generators_kept(), collector_paused():
        try:
            return session.graph(name or getattr(step, "__name__", "step"))
        finally:
            restore(original.contents)


def _is_replaced_unread(trace: _Trace, name: str) -> bool:
    """Whether a setting of an optimizer gets another number before the step reads it.

    So `group["lr"] = lr` is a step like any other: what the last step left there is never seen.
    """
    value = trace.values.get(name)
    if value is None or value.kind is None or value in trace.tracer.guards:
        return False
    return not any(value in call.inputs for call in trace.tracer.calls)


def _sharing(live: Sequence[Source]) -> dict[str, list[str]]:
    """Return, for each source that shares its storage with others, the names of all of them."""
    by_storage: dict[int, list[str]] = {}
    for source in live:
        tensor = source.get()
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(source.name)
    return {name: names for names in by_storage.values() for name in names if len(names) > 1}


def _check_sharing(trace: _Trace, calls: list[Call], sharing: dict[str, list[str]]) -> None:
    """Refuse a write to a source when another one that the graph reads shares its storage."""
    used = {value for call in calls for value in call.inputs}
    for name, others in sharing.items():
        value = trace.values.get(name)
        if value is None or value.storage is None or not value.storage.writes:
            continue
        read = [n for n in others if n != name and trace.values.get(n) in used]
        if read:
            raise unsupported.shared_storage([name, *read])


@dataclass(repr=False)
class _Trace:
    """What one traced step left behind."""

    tracer: Tracer
    values: dict[str, Value]
    sources: dict[str, Source]
    stand_ins: dict[str, torch.Tensor]
    changed: list[str]
    settings: dict[str, Any]
    result: Any
    length: int = 0


@dataclass(repr=False)
class _Session:
    """The step, its arguments (whose items are replaced while tracing), and the fake world."""

    step: Callable[..., Any]
    args: list[Any]
    batch: tuple[int, ...]
    mode: fake_tensor.FakeTensorMode
    fakes: FakeResults

    def graph(self, name: str) -> Graph:
        """Run the step three times and write the second run as a graph."""
        live = sources_of(walk_objects(self.step, self.args), self.batch)
        existing, sharing = {source.name for source in live}, _sharing(live)
        first = self._trace(live_numbers=False, locate=False)
        initial, odd = self._initial_values(first, existing)
        del first
        trace = self._trace(initial=initial)
        changed = [name for name in trace.changed if not _is_replaced_unread(trace, name)]
        if changed:
            raise unsupported.changed_state(changed)
        loss = trace.tracer.memory.value_of(loss_of(trace.result))
        updated = _follow_replaced(trace, odd)
        calls = _written_out(trace, loss, updated, odd)
        _check_sharing(trace, calls, sharing)
        _compare(trace, self._trace(initial=initial, locate=False))
        return graph_of(name, calls, loss, trace.settings, self._accelerator(trace))

    def _accelerator(self, trace: _Trace) -> str:
        kinds = [trace.values[n].device for n, s in trace.sources.items() if s.kind == "parameter"]
        return kinds[0] if kinds else "cpu"

    def _trace(
        self,
        *,
        live_numbers: bool = True,
        initial: dict[str, Any] | None = None,
        locate: bool = True,
    ) -> _Trace:
        """Run the step once over new stand-ins and record it."""
        objects = walk_objects(self.step, self.args)
        found = sources_of(objects, self.batch)
        gradients = _gradients(found)
        tensors = [source for source in found if isinstance(source.get(), torch.Tensor)]
        numbers = [source for source in found if isinstance(source.get(), float)]
        settings = settings_of(objects, self.batch)
        kept = {source.name: source.get() for source in gradients}
        stand_ins = put(objects, tensors, self.mode)
        gradients = [gradient_source(s) for s in tensors if f"{s.name}.grad" in kept]
        tracer = Tracer(self.mode, Locator(objects.modules, is_silent=not locate), self.fakes)
        trace = _Trace(tracer, {}, {}, stand_ins, [], settings, None)
        for source in tensors:
            self._add(trace, source, stand_ins[source.name], initial)
        stand_ins |= put_gradients(gradients, kept, self.mode)
        for source in gradients:
            self._add(trace, source, stand_ins[source.name], initial)
        live = {source.name: source.get() for source in numbers} if live_numbers else {}
        for source in numbers if live_numbers else ():
            number = live[source.name]
            symbol = tracer.add_number(number, {"value": number, "guard": None})
            value = symbol.node.value
            value.call.name, trace.values[source.name] = source.name, value
            trace.sources[source.name] = source
            source.set(symbol)
        before = walk_objects(self.step, self.args).contents
        try:
            trace.result = run_traced(self.step, self.args, tracer, self.mode)
            trace.changed = changes(before)
            trace.length = len(tracer.calls)
        finally:
            for source in numbers if live_numbers else ():
                source.set(live[source.name])
        return trace

    def _add(
        self, trace: _Trace, source: Source, fake: Any, initial: dict[str, Any] | None
    ) -> None:
        arguments = {"initial": initial[source.name]} if source.name in (initial or {}) else None
        value = trace.tracer.add_source(source.kind, fake, arguments)
        value.call.name = source.name
        trace.values[source.name], trace.sources[source.name] = value, source

    def _initial_values(
        self, first: _Trace, existing: set[str]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return what the state that the first step made starts from, and what is odd about it."""
        objects = walk_objects(self.step, self.args)
        initial: dict[str, float] = {}
        odd: dict[str, str] = {}
        optimizers = [
            e.value for e in objects.stateful if isinstance(e.value, torch.optim.Optimizer)
        ]
        found = sources_of(objects, self.batch)
        for source in found:
            live = source.get()
            if source.name in existing or not isinstance(live, torch.Tensor):
                continue
            value = first.tracer.memory.value_of(live)
            number = initial_state.initial_value(value)
            reason: str | None = "is not filled with one number when it is created"
            if number is None and initial_state.is_copied_gradient(value):
                number = initial_state.MOMENTUM_INITIAL
                reason = _momentum_reason(source, optimizers)
                number = None if reason else number
            if number is None:
                odd[source.name] = reason or ""
            else:
                initial[source.name] = number
        for source in _gradients(found):
            if source.name not in first.values:
                initial[source.name] = 0.0
        return initial, odd


def _momentum_reason(source: Source, optimizers: list[torch.optim.Optimizer]) -> str | None:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if any(slot.holder is state for slot in source.slots):
                return initial_state.momentum_reason(optimizer, parameter)
    return "is created as a copy of another tensor"


def _gradients(found: tuple[Source, ...]) -> list[Source]:
    """Sources of the gradients that parameters hold now."""
    parameters = [source for source in found if source.kind == "parameter"]
    held = [gradient_source(source) for source in parameters]
    return [source for source in held if source.get() is not None]


def put_gradients(
    gradients: list[Source], kept: dict[str, torch.Tensor], mode: fake_tensor.FakeTensorMode
) -> dict[str, torch.Tensor]:
    """Give each stand-in of a parameter the stand-in of its gradient."""
    made: dict[str, torch.Tensor] = {}
    for source in gradients:
        made[source.name] = stand_in(kept[source.name].detach(), mode)
        source.set(made[source.name])
    return made


def _follow_replaced(trace: _Trace, odd: Collection[str]) -> list[Call]:
    """Copy what the step put in a source's place into the source; return the calls of updates."""
    calls: list[Call] = []
    read = {storage for call in trace.tracer.calls for storage, _ in call.reads}
    for name, source in trace.sources.items():
        value = trace.values[name]
        if source.kind == "input" or value.storage is None:
            continue
        live = source.get()
        # What a source holds at the end matters to the next step only if that reads it.
        kept = _is_registered(source) and name not in odd
        matters = source.kind == "parameter" or kept or value.storage in read
        if isinstance(live, torch.Tensor) and not matters:
            continue
        copies = _copied_back(trace, source, value, live)
        read.update(storage for call in copies for storage, _ in call.reads)
        calls += copies
        calls += value.storage.writes
    return calls


def _is_registered(source: Source) -> bool:
    return (source.kind == "state" and source.parameter is None) or any(
        getattr(slot.holder, "get", None) is not None and source.kind == "buffer"
        for slot in source.slots
    )


def _copied_back(trace: _Trace, source: Source, value: Value, live: Any) -> list[Call]:
    """Record `source.copy_(live)` where `live` is another tensor than the source."""
    if live is None and source.parameter is not None:
        return []
    if not isinstance(live, torch.Tensor):
        raise unsupported.replaced(source.name, "which is no tensor")
    new = trace.tracer.memory.value_of(live)
    if new.storage is value.storage:
        return []
    assert new.geometry is not None
    assert value.geometry is not None
    if new.geometry[0] != value.geometry[0] or new.geometry[3] != value.geometry[3]:
        raise unsupported.replaced(source.name, "of another shape or dtype")
    if new.storage is not None and new.storage.source:
        raise unsupported.replaced(source.name, f"namely {new.storage.owner.call.name!r}")
    return [trace.tracer.memory.copy_back(value, new)]


def _written_out(
    trace: _Trace, loss: Value, updated: list[Call], odd: dict[str, str]
) -> list[Call]:
    """Return the live calls, ordered and named."""
    parameters = [trace.values[n] for n, s in trace.sources.items() if s.kind == "parameter"]
    if not any(value.storage and value.storage.writes for value in parameters):
        raise UsageError(
            "nothing to train: the step changes no parameter of any model it reaches.\n"
            "It should call loss.backward() and optimizer.step() on parameters that require\n"
            "gradients.",
            details={"parameters": len(parameters)},
        )
    guarded = [value.call for value in trace.tracer.guards]
    for value, guard in trace.tracer.guards.items():
        if value.call.arguments is not None:
            value.call.arguments["guard"] = guard
    always = [
        trace.values[n].call
        for n, s in trace.sources.items()
        if s.kind == "parameter" or (s.kind in ("buffer", "state") and n not in odd
        and _is_registered(s))
    ]  # fmt: skip
    calls = live_calls(trace.tracer.calls, [loss.call, *updated, *guarded, *always])
    for call in calls:
        if call.name in odd:
            raise unsupported.odd_initial_state(call.name, odd[call.name])
    _refuse_numbers_of_activations(calls, trace.tracer.free_numbers)
    sources_first = sorted(calls, key=lambda call: not call.name)
    add_order_edges(sources_first)
    name_calls(sources_first)
    return sources_first


def _refuse_numbers_of_activations(calls: list[Call], free: set[Call]) -> None:
    """Refuse `.item()` of what depends on the batch or the parameters: every rank would wait."""
    tainted: set[Value] = set()
    for call in calls:
        touched = call.random or any(value in tainted for value in call.inputs)
        if call.kind in ("parameter", "input") and call.outputs[0].geometry is not None:
            touched = True
        if touched and call.kind == "aten._local_scalar_dense.default" and call not in free:
            raise unsupported.decision_by_value(call.source)
        if touched:
            tainted.update(call.outputs)


def _compare(one: _Trace, other: _Trace) -> None:
    index = traces_differ(one.tracer.calls[: one.length], other.tracer.calls)
    if index is None:
        return
    calls = other.tracer.calls if index < len(other.tracer.calls) else one.tracer.calls
    # Only the first of the two traces knows where its calls come from.
    twin = one.tracer.calls[min(index, one.length - 1)]
    what = f"{calls[index].kind} has other arguments the second time"
    raise unsupported.changing_constant(what, twin.source)
