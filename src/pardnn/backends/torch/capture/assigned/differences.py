"""What a step leaves in its objects: the places that hold something else afterwards.

Problem: effects of an eager step such as `self.metrics = {"loss": loss.item()}`, `self.hidden = h`
or `del self.cache` last; those of a trace are undone with it.

Idea: the object graph before the step is compared with what its places hold afterwards, by
identity. Sources of the graph, numbers that it counts, and containers that it only fills are
followed elsewhere. The rest is recorded as data.

Complexity: O(objects of the step).
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.assigned.contents import (
    Content,
    Leaf,
    Places,
    content_of,
    holds,
    leaves_of,
)
from pardnn.backends.torch.capture.assigned.stores import Stores
from pardnn.backends.torch.capture.numbers.left_behind import of_optimizers
from pardnn.backends.torch.capture.refusals.changed_state import changed_state
from pardnn.backends.torch.capture.restore import Changed, changes, differ, is_filled, is_flag
from pardnn.backends.torch.capture.result import storages_read_or_returned
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import Storage
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.guards.item import VALUES
from pardnn.backends.torch.user_step.object_graph import PLAIN, ObjectGraph
from pardnn.backends.torch.user_step.places import Reference

GONE: Content = {"gone": True}
#: Tensors in them are sources of the graph.
_TABLES = ("_parameters", "_buffers")
_HOOKS = tuple(name for name in vars(torch.nn.Module()) if "_hooks" in name)
_PLAIN = (
    *PLAIN,
    torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.BuiltinFunctionType,
    enum.Enum,
)  # fmt: skip


class Assigned(NamedTuple):
    """What a step has left in a place.

    Attributes:
        change: The place, and its values before and after.
        content: The new value as data, see `contents`; None if no rank could make it.
        place: The reference by which ranks find the place.
        line: "file.py:line" of the user's code that may have done it; None if unknown.
        is_users: Whether it seems to be the user's own code.
    """

    change: Changed
    content: Content | Leaf | None
    place: Reference | None = None
    line: str | None = None
    is_users: bool = True

    @property
    def is_fresh(self) -> bool:
        """Whether each step may leave a new object rather than a plain value."""
        now = self.change.now
        if isinstance(now, _PLAIN) or self.content == GONE:
            return False
        is_place = isinstance(self.content, dict) and "place" in self.content
        return isinstance(now, torch.Tensor) or not is_place

    @property
    def is_traced(self) -> bool:
        """Whether it holds numbers or tensors that only a run knows."""
        return self.content is None or next(leaves_of(self.content), None) is not None


def assigned_values(
    objects: ObjectGraph, trace: StepTrace, stores: Callable[[], Stores], *, is_first: bool
) -> dict[str, Assigned]:
    """Return what a step has left, by the names of the places.

    Args:
        objects: The object graph before the step.
        trace: The trace of the step.
        stores: Returns what the user's code writes.
        is_first: Whether it is the first step: numbers in new places may be counters.
    """
    is_bound, tables = of_optimizers(objects), _module_tables(objects)
    optimizers = [x.value for x in objects.stateful if isinstance(x.value, torch.optim.Optimizer)]
    groups = {id(group) for each in optimizers for group in each.param_groups}
    # Numbers are followed by name; an argument of the same name would be taken for an attribute.
    arguments = {name for name, _ in objects.arguments}
    found = {
        name: change
        for name, change in changes(objects.contents, _differ).items()
        if change.slot is not None and "<" not in name
        and (not is_bound(name) or _is_tensor_beside(name, change, groups))
        and (id(change.slot.holder) not in tables or is_reshaped(change))
        and not (_is_number_of_the_step(change, is_first) and name not in arguments)
    }  # fmt: skip
    if found:
        found = _without_installed_hooks(objects, found, stores)
    if not found:
        return {}
    tracer = trace.tracer
    places, written = Places(objects, tracer), stores()
    read = storages_read_or_returned(tracer, trace.result)
    found = {n: each for n, each in found.items() if not _is_source(each, tracer, read)}
    return {
        name: each
        for name, change in found.items()
        if (each := _assigned(name, change, places, written)) is not None
    }


def _assigned(name: str, change: Changed, places: Places, written: Stores) -> Assigned | None:
    """Return what was left in a place; None for internal state of a library."""
    assert change.slot is not None
    content = GONE if is_gone(change) else content_of(change.now, places)
    reference = places.index.reference(change.slot)
    if reference is None or (change.is_new and not isinstance(change.slot.key, str)):
        content = None
    holder, is_tensor = change.slot.holder, isinstance(change.now, torch.Tensor)
    is_of_torch = type(holder).__module__.partition(".")[0] == "torch"
    # Code that assigns a whole layer, `self.rnn = nn.GRU(...)`, writes none of its attributes.
    is_users = written.has(str(change.slot.key) if is_of_torch else name)
    each = Assigned(change, content, reference, written.line(name), is_users)
    if is_users or (isinstance(change.now, _PLAIN) and isinstance(change.then, _PLAIN)):
        return each
    if isinstance(holder, torch.nn.Module) and is_tensor and isinstance(change.then, torch.Tensor):
        return each  # as hooks of `weight_norm` set a weight at each call
    return None if content is None or (is_of_torch and each.is_fresh) else each


def _module_tables(objects: ObjectGraph, tables: Collection[str] = _TABLES) -> set[int]:
    modules = [e.value for e in objects.stateful if isinstance(e.value, torch.nn.Module)]
    return {id(module.__dict__[key]) for module in modules for key in tables}


def _without_installed_hooks(
    objects: ObjectGraph, found: dict[str, Changed], stores: Callable[[], Stores]
) -> dict[str, Changed]:
    """Return changes without the hooks that a library installs at its first call, and their flags.

    An example is transformers, which records in an attribute that its hooks are installed. Both
    stay for the next traces, as for eager calls; if only the flag were restored, the hooks would be
    installed again.
    """
    tables = _module_tables(objects, _HOOKS)
    hooks = {name for name, each in found.items() if each.slot and id(each.slot.holder) in tables}
    if not hooks:
        return found
    written = stores()
    flags = {name for name, each in found.items() if each.now is True and not written.has(name)}
    return {name: each for name, each in found.items() if name not in hooks | flags}


def _is_tensor_beside(name: str, change: Changed, groups: Collection[int]) -> bool:
    """Whether an optimizer got a tensor where it is no state: in a new attribute, or in a group.

    Raises:
        UnsupportedError: E804, if it was put under a new key of a group, or in a number's place.
    """
    assert change.slot is not None
    is_made = change.is_new and isinstance(change.now, torch.Tensor)
    if id(change.slot.holder) in groups:
        are_tensors = isinstance(change.then, torch.Tensor), isinstance(change.now, torch.Tensor)
        if are_tensors == (False, True) and (is_made or change.then is not None):
            raise changed_state([name])
        return any(are_tensors) and not all(are_tensors)
    return is_made and isinstance(change.slot.holder, torch.optim.Optimizer)


def _is_number_of_the_step(change: Changed, is_first: bool) -> bool:
    """Whether a number is new or changes by arithmetic; see `numbers.selection`."""
    if is_flag(change):
        return False
    is_made = is_first and change.is_new and type(change.now) in (int, float)
    return is_filled(change) or is_made or (_is_number(change.then) and _is_number(change.now))


def _is_source(change: Changed, tracer: Tracer, read: Collection[Storage | None]) -> bool:
    """Whether a new tensor becomes the content of the old one; see `source_updates`."""
    if isinstance(change.then, tuple) and isinstance(change.now, tuple):
        parts = zip(change.then, change.now, strict=False)
        changed = [change._replace(then=a, now=b) for a, b in parts if a is not b]
        return bool(changed) and all(_is_source(each, tracer, read) for each in changed)
    if not (isinstance(change.then, torch.Tensor) and isinstance(change.now, torch.Tensor)):
        return False
    assert change.slot is not None
    storage = tracer.aliases.value(change.then).storage
    is_kept = storage is None or (isinstance(change.slot.holder, dict) and not is_reshaped(change))
    return is_kept or storage in read or storage.owner.call.kind != "buffer"


def is_reshaped(change: Changed) -> bool:
    """Whether a tensor made way for one of another shape or dtype, which cannot be copied into it.

    An example is a table of positions for the length of the batch: `self.table = build(n)`.
    """
    then, now = change.then, change.now
    are_tensors = isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor)
    return are_tensors and (then.shape, then.dtype) != (now.shape, now.dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or node_of(value) is not None


def _differ(now: Any, then: Any) -> bool:
    if now is then:
        return False
    if type(now) is tuple and type(then) is tuple:
        return len(now) != len(then) or any(map(_differ, now, then))
    if isinstance(now, PLAIN) and isinstance(then, PLAIN):
        return differ(now, then)
    return not (isinstance(now, VALUES) and type(now) is type(then) and now == then)


def is_gone(change: Changed) -> bool:
    """Whether a place that held something holds nothing any more."""
    return change.now is None and not change.is_new and not is_there(change)


def is_there(change: Changed) -> bool:
    """Whether a place still holds the new value."""
    assert change.slot is not None
    return holds(change.slot, change.now)
