"""Checks of whole traces: that a step trains, is the same twice, and waits for no data."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.capture.numbers.effects import check_same_effects
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.called_from import with_users_line
from pardnn.backends.torch.capture.refusals.changed_state import counting_hook, unreached_write
from pardnn.backends.torch.capture.refusals.first_step import made_later
from pardnn.backends.torch.capture.refusals.tensor_questions import given_tensor
from pardnn.backends.torch.capture.result import structured
from pardnn.backends.torch.capture.same_calls import traces_differ
from pardnn.backends.torch.capture.step_trace import (
    StepTrace,
    changes_parameters,
    may_go_otherwise,
)
from pardnn.backends.torch.capture.trace_ir import Call, geometry_of
from pardnn.backends.torch.capture.traced_run import run_traced
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.capture.view_overlap import span
from pardnn.backends.torch.user_step.guards.parameter import held_node
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import Source, WholeOf
from pardnn.errors import PardnnError, UnsupportedError, UsageError

_SEARCHING = sys.modules[torch.optim.LBFGS.__module__].__file__


def check_objects(objects: ObjectGraph, batch: Collection[int], *, trains: bool) -> None:
    """Reject a step that reaches objects which no trace can follow.

    Args:
        objects: What it reaches.
        batch: Indices of the arguments that are the batch.
        trains: Whether it takes gradients; an evaluation takes none.

    Raises:
        UnsupportedError: E801; E804 for a hook that counts.
    """
    for entry in objects.stateful:
        if isinstance(entry.value, torch.jit.ScriptModule):
            raise unsupported.scripted(entry.name)
    held = held_node((entry.name, entry.value) for entry in objects.tensors)
    if held is not None:
        raise unsupported.held_node(held)
    for entry in objects.tensors:
        if any(map(_is_counting, (entry.value._backward_hooks or {}).values())):
            raise counting_hook(entry.name)
    for name, tensor, *_ in (entry for entry in objects.tensors if entry.argument in batch):
        _check_given(name, tensor, trains=trains)


def _check_given(name: str, tensor: torch.Tensor, *, trains: bool) -> None:
    """Reject a tensor of the batch that has more than its numbers."""
    kind = type(tensor)
    if not isinstance(tensor, FakeTensor) and kind not in (torch.Tensor, torch.nn.Parameter):
        raise given_tensor(
            name,
            f"is a {kind.__name__}, a class of its own: the graph would compute with a plain\n"
            "tensor, and code that asks for its class or calls its methods would be misled",
            f"{name}.as_subclass(torch.Tensor)",
        )
    if trains and not tensor.is_leaf:
        raise given_tensor(
            name,
            "was computed from tensors that require gradients: backward() would continue to\n"
            "them, but the graph begins with this one",
            f"{name}.detach(), or compute it in the step,",
        )
    if tensor.is_leaf and tensor.grad is not None:
        raise given_tensor(
            name,
            "has a gradient, to which the step would add: the graph does not get it",
            f"{name}.detach()",
        )


def _is_counting(hook: Any) -> bool:
    """Whether a hook is one of `register_multi_grad_hook`, which keeps count of its calls."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.graph.__file__


def as_refused(error: PardnnError) -> PardnnError:
    """Return the error of a trace as the user gets it."""
    return with_users_line(_of_search(error), run_traced.__code__)


def _of_search(error: PardnnError) -> PardnnError:
    """Return E802 if an optimizer that searches raised an error, and other errors unchanged.

    Args:
        error: The error of a trace; it is about what `LBFGS` itself reads, which no user can
            rewrite.
    """
    frames = traceback.walk_tb(error.__traceback__)
    if all(frame.f_code.co_filename != _SEARCHING for frame, _ in frames) or error.code != "E802":
        return error
    where = error.details.get("source")
    return UnsupportedError(
        f"torch.optim.LBFGS runs its closure{unsupported.at(where)} as often as its losses\n"
        "require, which is known only in a run: one graph must hold for every step.\n"
        "Take an optimizer that updates once a step, such as Adam or Muon.",
        code="E802",
        details=error.details,
    )


def check_trains(trace: StepTrace) -> None:
    """Reject a step that changes no parameter.

    Raises:
        UsageError: E201.
    """
    added = [n for n, s in trace.sources.items() if s.parameter is not None and s.get() is not None]
    storages = [trace.values[name].storage for name in added]
    # A call that only adds to gradients leaves them to one that takes another path.
    adds = any(each and each.writes for each in storages)
    if not (adds and may_go_otherwise(trace)) and not changes_parameters(trace):
        if adds:
            raise UsageError(
                "nothing to train: the first captured call only adds to gradients.\n"
                "It should call optimizer.step(). If a later call does, as the last one of an\n"
                "accumulation, set what decides this (a count, a flag) before `parallelize`:\n"
                "calls that only add are captured when they occur.",
            )
        raise UsageError(
            "nothing to train: the step changes no parameter of any model it reaches.\n"
            "It should call loss.backward() and optimizer.step() on parameters that require\n"
            "gradients. If a later call does, set what decides this (a count, a flag) before.",
        )


def shared_sources(live: Sequence[Source], whole_of: WholeOf) -> dict[str, list[str]]:
    """Return, for each source that shares elements with others, the names of all of them.

    Views that follow each other in it are apart: norms that an optimizer has stacked. What ranks
    keep shared its storage at first, and what came since may be a view of it.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    by_whole: dict[int, list[str]] = {}
    for source in live:
        tensor = source.get()
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            key = tensor.untyped_storage()._cdata
            by_storage.setdefault(key, []).append((source.name, tensor))
            if (whole := whole_of(tensor)) is not None:
                by_whole.setdefault(whole.storage, []).append(source.name)
    groups = [group for group in by_whole.values() if len(group) > 1]
    groups += [
        [name for name, _ in group]
        for group in by_storage.values()
        if len(group) > 1 and not _are_apart([each for _, each in group])
    ]
    found: dict[str, list[str]] = {}
    for group in groups:
        for name in group:
            found[name] = list(dict.fromkeys((*found.get(name, ()), *group)))
    return found


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    spans = sorted(span(geometry_of(each)) for each in tensors if each.numel())
    return all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


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


def check_constants(tracer: Tracer) -> None:
    """Reject a step that writes to a real tensor that is not a source and outlives the step.

    Raises:
        UnsupportedError: E804.
    """
    for tensor, value in tracer.constants():
        # Held by the tracer, the list, this loop and the call; what the step made is gone.
        is_lasting = sys.getrefcount(tensor) > 4
        if is_lasting and value.storage is not None and value.storage.writes:
            raise unreached_write(tuple(tensor.shape), value.storage.writes[0].source)


def check_same_twice(one: StepTrace, other: StepTrace) -> None:
    """Reject a step if two traces from the same state differ, because of a clock, for example.

    Raises:
        UnsupportedError: E804.
    """
    check_same(one, other)
    check_same_effects(one.effects, other.effects)
    for name, change in one.changed.items():
        now, again = change.now, other.changed.get(name, change).now
        is_plain = isinstance(now, int | float) and isinstance(again, int | float)
        if is_plain and now != again and now == now:
            raise unsupported.changing_step(f"it leaves another number in {name!r}", None)
    mine, its = (structured(x.result, None, lambda _: None, x.held) for x in (one, other))
    if repr(mine) != repr(its):
        raise unsupported.changing_step("it returns another number or text", None)


def is_not_twice(error: Exception) -> bool:
    """Whether an error says that two traces of a step differ."""
    return isinstance(error, PardnnError) and "differs" in error.details


def difference(one: StepTrace, other: StepTrace) -> tuple[Call | None, Call | None] | None:
    """Return the first calls in which two traces differ; None if they are the same."""
    hints = {**one.tracer.scalars.hints, **other.tracer.scalars.hints}
    return traces_differ(one.tracer.calls[: one.length], other.tracer.calls[: other.length], hints)


def check_same(one: StepTrace, other: StepTrace) -> None:
    """Reject a step whose two traces differ."""
    different = difference(one, other)
    if different is None:
        return
    here, there = different
    # Only the first of the two traces knows where its calls come from.
    located = here or one.tracer.calls[one.length - 1]
    if there is not None and there.name in other.sources.keys() - one.sources.keys():
        raise made_later(there.name)
    what = f"{(there or located).kind} has other arguments the second time"
    raise unsupported.changing_step(what, located.source)
