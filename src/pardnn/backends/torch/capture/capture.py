"""Capture: one training step, exactly as the user wrote it, as a graph of ATen calls.

The step is traced three times over fake tensors, so nothing is computed and no tensor data is
allocated:

1. To let optimizers create their state and gradients come into being.
2. With new placeholders for every source and with symbols for every number that may change: this
   is the step that repeats, and its trace becomes the graph.
3. To compare: what differs between two traces would be frozen at one of its values.

Then everything is restored: tensors, gradients, optimizer state and its keys, settings, Python
attributes, the state of the random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.fake_cache import FakeCache
from pardnn.backends.torch.capture.first_use import (
    NOTHING_KEPT,
    KeptTensors,
    changed_tensors,
    kept_tensors,
)
from pardnn.backends.torch.capture.initial_state import initial_values
from pardnn.backends.torch.capture.placeholders import (
    fake_mode_of,
    insert_gradient_placeholders,
    insert_placeholders,
)
from pardnn.backends.torch.capture.restore import changes, restore
from pardnn.backends.torch.capture.result import (
    loss_of,
    named_result,
    recorded_result,
)
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.source_updates import (
    StepTrace,
    check_shared_storage,
    gradients_read,
    is_registered,
    shared_sources,
    source_updates,
)
from pardnn.backends.torch.capture.to_graph import (
    add_order_edges,
    graph_of,
    live_calls,
    name_calls,
    traces_differ,
)
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.capture.traced_run import generators_restored, run_traced
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.access import access_allowed
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
        A graph whose source ops have the names of `user_step.sources`. In `arguments`, state that
        does not exist yet has its first value as "initial" (a number, or {"copy_of": source}), and
        numbers that are read at every
        step have "value" and "guard" (None, "nonzero" or "exact": what must stay true of them).
        The loss op lists the plain values that the graph takes for granted as "settings".

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
    session = _Session(step, arguments, batch, mode, FakeCache(mode))
    with generators_restored(), collector_paused(), access_allowed():
        try:
            return session.graph(name or getattr(step, "__name__", "step"))
        finally:
            restore(original.contents)


def _is_overwritten_before_read(trace: StepTrace, name: str) -> bool:
    """Whether the step overwrites a number, such as `group["lr"]`, and never reads its old value.

    Such a change of Python state is harmless: no step sees what the last one left there.
    """
    value = trace.values.get(name)
    if value is None or value.kind is None or value in trace.tracer.guards:
        return False
    return not any(value in call.inputs for call in trace.tracer.calls)


@dataclass(repr=False)
class _Session:
    """One capture.

    Attributes:
        step: The user's step.
        args: Its arguments; the items are replaced while tracing.
        batch: Indices of the arguments that are the batch.
        mode: Of the fake tensors.
        fake_cache: Fake results that all traces share.
    """

    step: Callable[..., Any]
    args: list[Any]
    batch: tuple[int, ...]
    mode: fake_tensor.FakeTensorMode
    fake_cache: FakeCache

    def graph(self, name: str) -> Graph:
        """Trace the step three times and return the second trace as a graph."""
        live = sources_of(walk_objects(self.step, self.args), self.batch)
        existing, sharing = {source.name for source in live}, shared_sources(live)
        first = self._trace(symbolic_numbers=False, locate=False)
        initial, irregular, constants = self._created(first, existing)
        read_once = gradients_read(first)
        del first
        trace = self._trace(initial=initial, constants=constants)
        if changed := changed_tensors(trace):
            constants = constants.without(changed)
            trace = self._trace(initial=initial, constants=constants)
        left_over = [name for name in read_once if name not in trace.sources]
        if left_over:
            raise unsupported.left_over_gradient(left_over[0].removesuffix(".grad"))
        changed = [name for name in trace.changed if not _is_overwritten_before_read(trace, name)]
        if changed:
            raise unsupported.changed_state(changed)
        returned = loss_of(trace.result)
        loss = trace.tracer.aliases.fresh_value(returned)
        updated = source_updates(trace, irregular)
        result, copies = recorded_result(trace.tracer, trace.result, returned)
        calls = _ordered_live_calls(trace, loss, [*updated, *copies], irregular)
        check_shared_storage(trace, calls, sharing)
        _check_repeatable(trace, self._trace(initial=initial, constants=constants, locate=False))
        named = named_result(result)
        return graph_of(name, calls, loss, trace.settings, self._accelerator(trace), named)

    def _accelerator(self, trace: StepTrace) -> str:
        kinds = [trace.values[n].device for n, s in trace.sources.items() if s.kind == "parameter"]
        return kinds[0] if kinds else "cpu"

    def _trace(
        self,
        *,
        symbolic_numbers: bool = True,
        initial: dict[str, Any] | None = None,
        constants: KeptTensors = NOTHING_KEPT,
        locate: bool = True,
    ) -> StepTrace:
        """Run the step once over new placeholders and record it."""
        objects = walk_objects(self.step, self.args)
        made_anew = {
            s.name: s for s in sources_of(objects, self.batch) if s.name in constants.values
        }
        found = [s for s in sources_of(objects, self.batch) if s.name not in constants.values]
        gradients = _gradients(found)
        tensors = [source for source in found if isinstance(source.get(), torch.Tensor)]
        numbers = [s for s in found if symbolic_numbers and isinstance(s.get(), float)]
        settings = settings_of(objects, self.batch)
        kept = {source.name: source.get() for source in gradients}
        placeholders = insert_placeholders(objects, tensors, self.mode)
        gradients = [gradient_source(s) for s in tensors if f"{s.name}.grad" in kept]
        tracer = Tracer(self.mode, Locator(objects.modules, is_silent=not locate), self.fake_cache)
        trace = StepTrace(tracer, {}, {}, [], settings, None)
        for source in tensors:
            self._add(trace, source, placeholders[source.name], initial)
        placeholders |= insert_gradient_placeholders(gradients, kept, self.mode)
        for source in gradients:
            self._add(trace, source, placeholders[source.name], initial)
        trace.made_anew = constants.make(made_anew, tracer, self.mode)
        live = {source.name: source.get() for source in numbers}
        for source in numbers:
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
            for source in numbers:
                source.set(live[source.name])
        return trace

    def _created(
        self, first: StepTrace, existing: set[str]
    ) -> tuple[dict[str, Any], dict[str, str], KeptTensors]:
        """Return how the tensors begin that the first step created: see `initial_values`."""
        objects = walk_objects(self.step, self.args)
        found = sources_of(objects, self.batch)
        created = [source for source in found if source.name not in existing]
        initial, irregular = initial_values(first.tracer, created, objects)
        for source in _gradients(found):
            if source.name not in first.values:
                initial[source.name] = 0.0
        return initial, irregular, kept_tensors(first.tracer, created, irregular)

    def _add(
        self, trace: StepTrace, source: Source, fake: Any, initial: dict[str, Any] | None
    ) -> None:
        arguments = {"initial": initial[source.name]} if source.name in (initial or {}) else None
        value = trace.tracer.add_source(source.kind, fake, arguments)
        value.call.name = source.name
        trace.values[source.name], trace.sources[source.name] = value, source


def _gradients(found: Sequence[Source]) -> list[Source]:
    """Return the sources of the gradients that parameters hold now."""
    parameters = [source for source in found if source.kind == "parameter"]
    held = [gradient_source(source) for source in parameters]
    return [source for source in held if source.get() is not None]


def _ordered_live_calls(
    trace: StepTrace, loss: Value, updated: list[Call], irregular: dict[str, str]
) -> list[Call]:
    """Return the live calls, ordered and named, sources first."""
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
        if s.kind == "parameter" or (s.kind in ("buffer", "state") and n not in irregular
        and is_registered(s))
    ]  # fmt: skip
    calls = live_calls(trace.tracer.calls, [loss.call, *updated, *guarded, *always])
    for call in calls:
        if call.name in irregular:
            raise unsupported.irregular_initial_state(call.name, irregular[call.name])
    _check_item_reads(calls, trace.tracer.permitted_reads)
    sources_first = sorted(calls, key=lambda call: not call.name)
    add_order_edges(sources_first)
    name_calls(sources_first)
    return sources_first


def _check_item_reads(calls: list[Call], permitted: set[Call]) -> None:
    """Reject `.item()` of what depends on the batch or the parameters: every rank would wait.

    A number that no tensor is computed from, as one that is only returned, holds up nobody.
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
        if touched and is_read and not feeding.isdisjoint(call.outputs):
            kind = call.outputs[0].kind
            raise unsupported.data_dependent_branch(call.source, kind.__name__ if kind else "data")
        if touched:
            tainted.update(call.outputs)


def _check_repeatable(one: StepTrace, other: StepTrace) -> None:
    """Reject a step whose two traces differ."""
    index = traces_differ(one.tracer.calls[: one.length], other.tracer.calls)
    if index is None:
        return
    calls = other.tracer.calls if index < len(other.tracer.calls) else one.tracer.calls
    # Only the first of the two traces knows where its calls come from.
    located = one.tracer.calls[min(index, one.length - 1)]
    what = f"{calls[index].kind} has other arguments the second time"
    raise unsupported.changing_step(what, located.source)
