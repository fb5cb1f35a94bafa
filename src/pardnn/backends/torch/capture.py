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

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses import fake_tensor

from pardnn.backends.torch import refuse, states
from pardnn.backends.torch.assemble import (
    add_order_edges,
    graph_of,
    live_calls,
    name_calls,
    traces_differ,
)
from pardnn.backends.torch.locate import Locator
from pardnn.backends.torch.reach import changes, reach, restore
from pardnn.backends.torch.roots import (
    Source,
    batch_arguments,
    gradient_source,
    settings_of,
    sources_of,
)
from pardnn.backends.torch.standins import fake_mode_of, put, stand_in
from pardnn.backends.torch.trace import Tracer
from pardnn.backends.torch.values import Call, Value
from pardnn.errors import PardnnError, UnsupportedError, UsageError, UserCodeError
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
    original = reach(step, arguments)
    batch = batch_arguments(step, args)
    mode = fake_mode_of(entry.value for entry in original.tensors)
    session = _Session(step, arguments, batch, mode)
    with _generators_kept():
        try:
            return session.graph(name or getattr(step, "__name__", "step"))
        finally:
            restore(original.contents)


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

    def graph(self, name: str) -> Graph:
        """Run the step three times and write the second run as a graph."""
        existing = {s.name for s in sources_of(reach(self.step, self.args), self.batch)}
        first = self._trace(live_numbers=False)
        initial, odd = self._initial_values(first, existing)
        del first
        trace = self._trace(initial=initial)
        if trace.changed:
            raise refuse.changed_state(trace.changed)
        loss = trace.tracer.value_of(loss_of(trace.result))
        updated = _follow_replaced(trace)
        calls = _written_out(trace, loss, updated, odd)
        again = self._trace(initial=initial)
        _compare(trace, again)
        return graph_of(name, calls, loss, trace.settings, self._accelerator(trace))

    def _accelerator(self, trace: _Trace) -> str:
        kinds = [trace.values[n].device for n, s in trace.sources.items() if s.kind == "parameter"]
        return kinds[0] if kinds else "cpu"

    def _trace(self, *, live_numbers: bool = True, initial: dict[str, Any] | None = None) -> _Trace:
        """Run the step once over new stand-ins and record it."""
        met = reach(self.step, self.args)
        found = sources_of(met, self.batch)
        gradients = _gradients(found)
        tensors = [source for source in found if isinstance(source.get(), torch.Tensor)]
        numbers = [source for source in found if isinstance(source.get(), float)]
        settings = settings_of(met, self.batch)
        kept = {source.name: source.get() for source in gradients}
        stand_ins = put(met, tensors, self.mode)
        gradients = [gradient_source(s) for s in tensors if f"{s.name}.grad" in kept]
        tracer = Tracer(self.mode, Locator(met.modules))
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
        before = reach(self.step, self.args).contents
        try:
            trace.result = _run(self.step, self.args, tracer, self.mode)
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
        met = reach(self.step, self.args)
        initial: dict[str, float] = {}
        odd: dict[str, str] = {}
        optimizers = [r.value for r in met.roots if isinstance(r.value, torch.optim.Optimizer)]
        found = sources_of(met, self.batch)
        for source in found:
            live = source.get()
            if source.name in existing or not isinstance(live, torch.Tensor):
                continue
            value = first.tracer.value_of(live)
            number = states.initial_value(value)
            reason: str | None = "is not filled with one number when it is created"
            if number is None and states.is_copied_gradient(value):
                number = states.MOMENTUM_INITIAL
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
                return states.momentum_reason(optimizer, parameter)
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


def _run(
    step: Callable[..., Any], args: list[Any], tracer: Tracer, mode: fake_tensor.FakeTensorMode
) -> Any:
    """Call the step under the tracer; say whose fault it is if it raises."""
    states_before = random.getstate(), np.random.get_state()
    try:
        with mode, tracer, tracer.locator.watching(), _noting_seeds(tracer), torch.enable_grad():
            result = step(*args)
    except PardnnError:
        raise
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    ) as error:
        raise _refused(error, tracer.locator.line_of(error)) from error
    except Exception as error:
        where = tracer.locator.line_of(error)
        refusal = _refused_by_text(str(error), where)
        if refusal is not None:
            raise refusal from error
        raise UserCodeError(
            f"while running your step for capture{f' ({where})' if where else ''}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if random.getstate() != states_before[0]:
        raise refuse.host_randomness("Python's random module")
    numpy_state = np.random.get_state()
    if any(
        not np.array_equal(a, b) for a, b in zip(states_before[1], numpy_state, strict=True)
    ):
        raise refuse.host_randomness("numpy.random")
    return result


def _refused(error: Exception, where: str | None) -> UnsupportedError:
    op = str(getattr(error, "func", None) or error.args[0])
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return refuse.decision_by_value(where)
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return refuse.dynamic_shape(op, where)
    return refuse.untraceable(op, where)


def _refused_by_text(text: str, where: str | None) -> UnsupportedError | None:
    """Recognise what torch says where a fake tensor or a symbol cannot stand for a real one."""
    if "tensor subclasses" in text:
        return refuse.decision_by_value(where)
    if "SymInt" in text or "SymFloat" in text or "SymBool" in text:
        return refuse.decides_shape(where)
    missing = re.search(r"no fake impl registered for <CustomOpDef\((.+?)\)>", text)
    return refuse.untraceable(missing[1], where) if missing else None


@contextlib.contextmanager
def _noting_seeds(tracer: Tracer) -> Iterator[None]:
    """Tell the tracer when the step sets the generator's state."""
    with contextlib.ExitStack() as stack:
        for module, name in (
            (torch, "set_rng_state"), (torch.random, "set_rng_state"),
            (torch, "manual_seed"), (torch.random, "manual_seed"),
        ):  # fmt: skip
            real = getattr(module, name)

            def noting(*args: Any, _real: Any = real, **kwargs: Any) -> Any:
                tracer.note_seed()
                return _real(*args, **kwargs)

            stack.enter_context(mock.patch.object(module, name, noting))
        yield


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Put back the state of every random generator that the step may have moved."""
    host, numbers = random.getstate(), np.random.get_state()
    state = torch.get_rng_state()
    devices = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state_all() if devices else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(host)
        np.random.set_state(numbers)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def loss_of(result: Any) -> torch.Tensor:
    """Return the first scalar floating-point tensor in what a step returned, `loss` first.

    Raises:
        UnsupportedError: E805, if there is none.
    """
    found = next(_scalars(result, 0), None)
    if found is None:
        raise refuse.no_loss(_described(result))
    return found


def _scalars(result: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        if result.numel() == 1 and result.dtype.is_floating_point:
            yield result
        return
    if depth > 4 or isinstance(result, str | bytes | int | float | type(None)):
        return
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if named is not None:
        yield from _scalars(named, depth + 1)
    for item in _items(result):
        yield from _scalars(item, depth + 1)


def _items(result: Any) -> list[Any]:
    if isinstance(result, dict):
        return list(result.values())
    if isinstance(result, list | tuple):
        return list(result)
    if is_dataclass(result):
        return [getattr(result, field.name) for field in fields(result)]
    return list(getattr(result, "__dict__", {}).values())


def _described(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a {str(result.dtype).removeprefix('torch.')} tensor of shape {list(result.shape)}"
    if isinstance(result, list | tuple):
        return f"a {type(result).__name__} of " + (
            ", ".join(_described(item) for item in result[:4]) or "nothing"
        )
    return "nothing" if result is None else f"a {type(result).__name__}"


def _follow_replaced(trace: _Trace) -> list[Call]:
    """Copy what the step put in a source's place into the source; return the calls of updates."""
    calls: list[Call] = []
    for name, source in trace.sources.items():
        value = trace.values[name]
        if source.kind == "input" or value.storage is None:
            continue
        live = source.get()
        if isinstance(live, torch.Tensor) and not _is_read_first(trace, source, value):
            continue
        calls += _copied_back(trace, source, value, live)
        calls += value.storage.writes
    return calls


def _is_read_first(trace: _Trace, source: Source, value: Value) -> bool:
    """Whether what a source holds at the end of the step matters to the next one."""
    if source.kind == "parameter" or _is_registered(source):
        return True
    return any(value.storage is s for call in trace.tracer.calls for s, _ in call.reads)


def _is_registered(source: Source) -> bool:
    return source.kind == "state" and source.parameter is None or any(
        getattr(slot.holder, "get", None) is not None and source.kind == "buffer"
        for slot in source.slots
    )


def _copied_back(trace: _Trace, source: Source, value: Value, live: Any) -> list[Call]:
    """Record `source.copy_(live)` where `live` is another tensor than the source."""
    if live is None and source.parameter is not None:
        return []
    if not isinstance(live, torch.Tensor):
        raise refuse.replaced(source.name, "which is no tensor")
    new = trace.tracer.value_of(live)
    if new.storage is value.storage:
        return []
    assert new.geometry is not None
    assert value.geometry is not None
    if new.geometry[0] != value.geometry[0] or new.geometry[3] != value.geometry[3]:
        raise refuse.replaced(source.name, "of another shape or dtype")
    if new.storage is not None and new.storage.source:
        raise refuse.replaced(source.name, f"namely {new.storage.owner.call.name!r}")
    return [trace.tracer.copy_back(value, new)]


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
            raise refuse.odd_initial_state(call.name, odd[call.name])
    _refuse_numbers_of_activations(calls)
    sources_first = sorted(calls, key=lambda call: not call.name)
    add_order_edges(sources_first)
    name_calls(sources_first)
    return sources_first


def _refuse_numbers_of_activations(calls: list[Call]) -> None:
    """Refuse `.item()` of what depends on the batch or the parameters: every rank would wait."""
    tainted: set[Value] = set()
    for call in calls:
        touched = call.random or any(value in tainted for value in call.inputs)
        if call.kind in ("parameter", "input") and call.outputs[0].geometry is not None:
            touched = True
        if touched and call.kind == "aten._local_scalar_dense.default":
            raise refuse.decision_by_value(call.source)
        if touched:
            tainted.update(call.outputs)


def _compare(one: _Trace, other: _Trace) -> None:
    call = traces_differ(one.tracer.calls[: one.length], other.tracer.calls)
    if call is not None:
        what = f"{call.kind} has other arguments the second time"
        raise refuse.changing_constant(what, call.source)

