"""The object graph of a step: everything its arguments, closure, `self` and globals refer to.

A depth-first walk in a fixed order over containers, modules, optimizers and the user's objects. It
finds where each tensor and number is held (a `Slot`), so that capture can put a placeholder there
and a rank its shard, and copies what every container held, for `capture.restore`.

Functions of libraries are entered only for their closures, functions of the user also for the
globals that they name. O(objects reached).
"""

from __future__ import annotations

import functools
import io
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.user_step.class_numbers import class_numbers, users_spaces
from pardnn.backends.torch.user_step.code_names import globals_named, is_library_function
from pardnn.backends.torch.user_step.references import BYTES, cells, followed, referred
from pardnn.backends.torch.user_step.root_names import argument_names, outer_name, root_name
from pardnn.backends.torch.user_step.slots import (
    HOOK_TABLES,
    VIEWS,
    Entry,
    GlobalName,
    Slot,
    behind_view,
    has_attributes,
    items_of,
    tuple_items,
)
from pardnn.backends.torch.user_step.used_names import UsedNames, users_code

#: The only classes of torch's that hold what a step changes or computes with.
_TORCH_CLASSES = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
)
OPAQUE_PACKAGES = frozenset({
    "builtins", "concurrent", "datetime", "io", "logging", "multiprocessing", "numpy", "pathlib",
    "random", "re", "socket", "ssl", "tempfile", "threading", "_thread", "tokenizers", "torch",
    "typing", "weakref", "pardnn",
})  # fmt: skip
#: Hooks that torch runs for every module and optimizer, by the name of what holds them.
GLOBAL_HOOKS: dict[str, dict[Any, Any]] = {
    f"{space.__name__}.{key}": getattr(space, key)
    for space, keys in {
        torch.nn.modules.module: (
            "_global_forward_hooks", "_global_forward_pre_hooks",
            "_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs",
            "_global_backward_hooks", "_global_backward_pre_hooks",
        ),
        sys.modules[torch.optim.Optimizer.__module__]: (
            "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
        ),
    }.items()
    for key in keys
}  # fmt: skip
#: Values that are compared by value.
PLAIN = (bool, int, float, str, type(None))
#: Most objects that a walk meets are of exactly these classes, and cannot claim another.
_PLAIN_TYPES, _DICT_TYPES = frozenset(PLAIN), frozenset({dict, OrderedDict})
_CONTAINERS = dict | list | deque
_WITHOUT_ATTRIBUTES = (type, types.ModuleType, types.BuiltinFunctionType, types.GenericAlias)
#: Attributes that hold what a module registers.
_TABLES = ("_parameters", "_buffers", "_modules")
#: This set names buffers, and grows if a first step registers one.
_OF_MODULES = frozenset({*_TABLES, "_non_persistent_buffers_set"})
#: Types that change in place and have no items by key.
UNSEEN = (
    set, random.Random, np.random.Generator, np.random.RandomState, torch.Generator, Iterator,
)  # fmt: skip
_MAX_OBJECTS = 2_000_000
#: The list of the arguments among `ObjectGraph.contents`: variables may be called `args`.
ARGUMENTS = "()"


@dataclass(repr=False)
class ObjectGraph:
    """What a walk has found, in its order.

    Attributes:
        tensors: Every place that holds a tensor; a tied tensor has several.
        numbers: Every int, float, bool, str or None in arguments and optimizer settings.
        arrays: NumPy arrays among the arguments.
        unseen: Sets, iterators and random generators, whose content is in no slot.
        modules: Names of modules by id; the first name counts.
        stateful: Modules, optimizers, schedulers and gradient scalers.
        contents: What each container and object held: (name, holder, copy).
        seen: Objects by id, kept alive so that no id is reused.
        arguments: Name and index of each argument.
        is_weak: Whether weak references are followed.
        spaces: The user's classes and modules that objects are of or code reaches, in an order that
            is the same on every rank; none of them is entered.
    """

    tensors: list[Entry] = field(default_factory=list)
    numbers: list[Entry] = field(default_factory=list)
    arrays: list[Entry] = field(default_factory=list)
    unseen: list[Entry] = field(default_factory=list)
    modules: dict[int, str] = field(default_factory=dict)
    stateful: list[Entry] = field(default_factory=list)
    contents: list[tuple[str, Any, Any]] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)
    arguments: list[tuple[str, int]] = field(default_factory=list)
    is_weak: bool = True
    spaces: list[type | types.ModuleType] = field(default_factory=list)


def walk_objects(step: Callable[..., Any], args: list[Any], *, is_weak: bool = True) -> ObjectGraph:
    """Return the object graph of `step(*args)`, arguments first.

    Args:
        step: A function, method, partial or callable object.
        args: The arguments as a list that the caller owns, so that its items can be set.
        is_weak: Whether weak references are followed.
    """
    objects = ObjectGraph(is_weak=is_weak)
    objects.contents.append((ARGUMENTS, args, list(args)))
    objects.arguments += [(name, i) for i, name in enumerate(argument_names(step, len(args)))]
    for name, i in objects.arguments:
        _visit(objects, Entry(name, args[i], Slot(args, i), argument=i, numeric=True))
    _visit(objects, Entry(root_name(objects.arguments), step))
    _visit_hooks(objects)
    found = _visit_methods(objects, step)
    objects.spaces = users_spaces(found.spaces)
    objects.contents += class_numbers(objects.spaces, found.functions)
    return objects


def _visit_methods(objects: ObjectGraph, step: Callable[..., Any]) -> UsedNames:
    """Visit what methods that may run refer to, since no object holds them; return what code is."""
    found, num_seen = UsedNames(), -1
    while num_seen != (num_seen := len(objects.seen)):
        found = users_code(step, list(objects.seen.values()))
        for function in found.functions:
            _visit(objects, Entry(function.__name__, function))
    return found


def _visit_hooks(objects: ObjectGraph) -> None:
    """Visit what hooks on all modules and on tensors refer to, such as one optimizer per parameter.

    This comes last, so that what arguments and step hold is named after them.
    """
    for name, hooks in GLOBAL_HOOKS.items():
        for i, hook in enumerate(hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith("pardnn."):
                _visit(objects, Entry(f"{name}.{i}", hook))
    for entry in objects.tensors:  # grows meanwhile
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for i, hook in enumerate((getattr(entry.value, kind, None) or {}).values()):
                _visit(objects, Entry(f"{entry.name}.{kind}.{i}", hook))


def walk_value(value: Any, name: str = "") -> ObjectGraph:
    """Return the object graph of one value, as if it were the argument `name` of a step."""
    objects, holder = ObjectGraph(), [value]
    objects.contents.append((ARGUMENTS, holder, [value]))
    objects.arguments.append((name, 0))
    _visit(objects, Entry(name, value, Slot(holder, 0), argument=0, numeric=True))
    return objects


def holds_state(value: Any) -> bool:
    """Whether a value is or leads to a module, an optimizer, a scheduler or a gradient scaler."""
    objects = ObjectGraph()
    _visit(objects, Entry("", value), until=objects.stateful)
    return bool(objects.stateful)


def _visit(objects: ObjectGraph, start: Entry, until: Collection[Any] = ()) -> None:
    """Visit one value and all that it refers to, depth first, without recursion.

    Args:
        objects: Gets what is found.
        start: The value.
        until: A collection; the walk ends once something is in it.
    """
    stack = [start]
    while stack and not until:
        entry = stack.pop()
        if _note_simple(objects, entry):
            continue
        value = followed(entry.value, entry.name)
        if not objects.is_weak and (value is not entry.value or isinstance(value, weakref.ref)):
            continue
        entry = entry if value is entry.value else entry._replace(value=value, slot=None)
        if isinstance(value, torch.Tensor):
            objects.tensors.append(entry)
            if isinstance(value, FakeTensor):
                given, own = attributes_of(value).items(), value.__dict__
                stack.extend(entry.child(k, item, own, numeric=False) for k, item in given)
            elif own := attributes_of(value):
                stack.append(entry._replace(value=own, slot=None, numeric=False))
        elif isinstance(value, PLAIN):
            if entry.numeric:
                objects.numbers.append(entry)
        elif isinstance(value, tuple):
            stack.extend(_beside_items(entry))
            stack.extend(reversed(list(tuple_items(entry))))
        elif id(value) not in objects.seen and len(objects.seen) < _MAX_OBJECTS:
            objects.seen[id(value)] = value
            others = [entry.child(key, each, numeric=False) for key, each in referred(value)]
            stack.extend(each for each in others if not isinstance(each.value, torch.Tensor))
            stack.extend(_beside_items(entry))
            stack.extend(reversed(list(_children(objects, entry))))


def _note_simple(objects: ObjectGraph, entry: Entry) -> bool:
    """Note a plain value or an empty dictionary, such as of hooks; return whether it is one."""
    value, kind = entry.value, type(entry.value)
    if kind in _PLAIN_TYPES:
        if entry.numeric:
            objects.numbers.append(entry)
        return True
    if kind not in _DICT_TYPES or value:
        return False
    if id(value) not in objects.seen and len(objects.seen) < _MAX_OBJECTS:
        objects.seen[id(value)] = value
        objects.contents.append((entry.name, value, {}))
    return True


def _is_skipped(value: Any, numeric: bool) -> bool:
    """Whether nothing about a value would be noted."""
    return not numeric and type(value) in _PLAIN_TYPES


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the dictionary of what users have set on a tensor.

    A placeholder has a copy of the dictionary of the tensor that it replaces.
    """
    own = tensor.__dict__
    if not isinstance(tensor, FakeTensor):
        return own
    return {key: own[key] for key in own.get("_pardnn_given", ()) if key in own}


def _beside_items(entry: Entry) -> Iterator[Entry]:
    """Yield the dictionary of attributes that a container of a user's class may have."""
    value = entry.value
    package = type(value).__module__.partition(".")[0]
    is_own = package not in ("builtins", "collections", "pardnn")  # recording lists are pardnn's
    if is_own and isinstance(value, dict | tuple | list | deque) and hasattr(value, "__dict__"):
        yield entry.child("__dict__", value.__dict__, numeric=False)


def _children(objects: ObjectGraph, entry: Entry) -> Iterator[Entry]:
    """Yield what one object holds, and record its content."""
    value = entry.value
    if getattr(type(value), "is_pardnn_recorder", False):
        return  # it stands for a container while a step is traced
    if isinstance(value, _CONTAINERS):
        yield from _items(objects, entry)
    elif isinstance(value, torch.nn.Module):
        yield from _module_children(objects, entry)
    elif isinstance(value, functools.partial):
        for i, item in enumerate(value.args):
            yield entry.child(i, item)
        yield entry._replace(value=value.keywords, slot=None)
        yield entry._replace(value=value.func, slot=None)
    elif isinstance(value, VIEWS):
        yield entry._replace(value=behind_view(value), slot=None)
    elif isinstance(value, types.MethodType):
        yield entry._replace(value=value.__self__, slot=None)
        yield entry._replace(value=value.__func__, slot=None)
    elif isinstance(value, types.FunctionType):
        yield from _function_children(objects, entry)
    elif isinstance(value, np.ndarray | np.generic):
        objects.arrays.append(entry)
    elif isinstance(value, BYTES):
        objects.unseen.append(entry)
    elif _is_walked(value):
        yield from _object_children(objects, entry)
    elif isinstance(value, UNSEEN) and not isinstance(value, io.IOBase):
        objects.unseen.append(entry)


def _items(objects: ObjectGraph, entry: Entry) -> Iterator[Entry]:
    value = entry.value
    is_dict, is_hooks = isinstance(value, dict), entry.name.rpartition(".")[2] in HOOK_TABLES
    held: Any = dict(value) if is_dict else list(value)
    objects.contents.append((entry.name, value, held))
    if not entry.numeric and _PLAIN_TYPES.issuperset(map(type, held.values() if is_dict else held)):
        return  # without a loop in Python: a log of losses may hold a million
    for i, (key, item) in enumerate(held.items() if is_dict else enumerate(held)):
        if _is_skipped(item, entry.numeric):
            continue
        # Optimizer state is keyed by parameter, whose name is only known at the end. As text, it
        # would show all its numbers, which fails under some modes. Hooks are keyed by how many the
        # process has registered before.
        at = f"<{id(key)}>" if isinstance(key, torch.Tensor) else i if is_hooks else key
        child = entry.child(at, item, value)
        yield child if at is key else child._replace(slot=Slot(value, key))


def _module_children(objects: ObjectGraph, entry: Entry) -> Iterator[Entry]:
    module, attributes = entry.value, items_of(entry.value)
    objects.modules.setdefault(id(module), entry.name)
    objects.stateful.append(entry)
    objects.contents.append((entry.name, module, dict(attributes)))
    entry = entry._replace(owner=module, numeric=False)
    for kind in _TABLES:
        entries = attributes.get(kind, {})
        objects.contents.append((entry.name, entries, dict(entries)))
        objects.seen[id(entries)] = entries
        for key, item in list(entries.items()):
            yield entry.child(key, item, entries)
    for key, item in list(attributes.items()):
        if key not in _OF_MODULES and not _is_skipped(item, numeric=False):
            yield entry.child(key, item, module)


def _object_children(objects: ObjectGraph, entry: Entry) -> Iterator[Entry]:
    value = entry.value
    if isinstance(value, torch.amp.GradScaler):
        _create_scaler_tensors(value)
    attributes = dict(items_of(value))
    objects.contents.append((entry.name, value, attributes))
    if isinstance(value, _TORCH_CLASSES):
        objects.stateful.append(entry)
        owner = value if isinstance(value, torch.optim.Optimizer) else entry.owner
        entry = entry._replace(owner=owner, numeric=False)
    else:
        # What an optimizer only leads to, such as a trainer by a hook, is no state of its own.
        owner = None if isinstance(entry.owner, torch.optim.Optimizer) else entry.owner
        entry = entry._replace(owner=owner, numeric=entry.numeric and is_dataclass(value))
    for key, item in attributes.items():
        settings = key == "param_groups" and entry.owner is value
        numeric = entry.numeric or settings
        if not _is_skipped(item, numeric):
            yield entry.child(key, item, value, numeric=numeric)
    call = type(value).__dict__.get("__call__")
    if isinstance(call, types.FunctionType):
        yield entry._replace(value=call, slot=None)


def _create_scaler_tensors(scaler: torch.amp.GradScaler) -> None:
    """Create a scaler's tensors before its first step, for ranks to set their values."""
    if scaler.is_enabled() and scaler._scale is None:
        with _disable_current_modes():
            scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))


def _function_children(objects: ObjectGraph, entry: Entry) -> Iterator[Entry]:
    function = entry.value
    entry, arguments = entry._replace(numeric=False), objects.arguments
    for key, cell in cells(function):
        try:
            item = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        objects.seen[id(cell)] = cell
        # The variable's own name, not the path to the function that uses it.
        name = outer_name(key, arguments)
        objects.contents.append((name, cell, item))
        yield entry._replace(name=name, value=item, slot=Slot(cell, None))
    defaults = {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
    for key, item in defaults.items():
        yield entry.child(f"default.{key}", item)
    if is_library_function(function):
        return
    named = entry._replace(name=outer_name(function.__name__, arguments))
    objects.contents.append((named.name, function, dict(function.__dict__)))
    for key, item in list(function.__dict__.items()):
        yield named.child(key, item, function)
    for key in globals_named(function):
        item, name = function.__globals__[key], outer_name(key, arguments)
        objects.contents.append((name, GlobalName(function.__globals__, key), item))
        slot = Slot(function.__globals__, key)
        yield entry._replace(name=name, value=item, slot=slot)


def _is_walked(value: Any) -> bool:
    """Whether the walk enters an object's attributes."""
    if isinstance(value, _TORCH_CLASSES):
        return True
    if isinstance(value, _WITHOUT_ATTRIBUTES):
        return False
    package = type(value).__module__.split(".")[0]
    return package not in OPAQUE_PACKAGES and has_attributes(value)
