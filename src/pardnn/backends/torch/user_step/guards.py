"""Guards: the Python values that a captured step took for granted, compared at every call.

Problem: a traced step is one path through the user's code, and plain Python values decide which:
flags and counts among the arguments, attributes of modules such as `training` or `p`,
configurations, closure cells, globals, class attributes, `requires_grad`.

Idea: guards as in TorchDynamo. It guards on what the frames it compiles read; here no frame is
compiled, so every value is guarded that the step can reach *and* that code which may run mentions
by name (`used_names`). A guard holds a container and its items at capture. A check compares
identities first, in one pass, and values only where an identity differs.

Complexity: O(values guarded); `python -m bench guards` measures a call for a GPT-2 of 12 layers
(164 modules, 1,300 containers).
"""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.user_step.batch_guards import BatchGuards, is_users_object
from pardnn.backends.torch.user_step.code_names import globals_named, is_library_file, is_users_code
from pardnn.backends.torch.user_step.content_guards import (
    MODE_GLOBALS,
    ClassGuards,
    ContentGuards,
    ModeGuards,
    asked_of,
    environment,
    has_content,
    has_order,
    reads_environment,
    shared_values,
)
from pardnn.backends.torch.user_step.dict_versions import attribute_address
from pardnn.backends.torch.user_step.item_guards import (
    VALUES,
    AttributeGuards,
    Change,
    ItemGuard,
    Snapshot,
    any_key,
    items_by_key,
    may_hold,
)
from pardnn.backends.torch.user_step.library_guards import library_guards, process_settings
from pardnn.backends.torch.user_step.object_graph import (
    GLOBAL_HOOKS,
    HOOK_TABLES,
    argument_names,
    attributes_of,
    walk_objects,
)
from pardnn.backends.torch.user_step.parameter_guards import (
    ParameterGuards,
    hook_tables,
    own_step,
    states_of_parameters,
    tensors_held,
    tensors_of_groups,
)
from pardnn.backends.torch.user_step.references import (
    Existence,
    behind_proxy,
    cells,
    is_reference,
    referred,
    registrations,
)
from pardnn.backends.torch.user_step.slots import behind_view, dotted, slots_of_class
from pardnn.backends.torch.user_step.used_names import RUN_UNNAMED, imported_modules, used_names

#: Not guarded: their contents are sources of the graph, or compared as settings.
_BOUND = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
)
#: Their items lie in what an attribute holds.
_HOLDERS = (collections.ChainMap, collections.UserDict, collections.UserList)
#: Code that names one of them may ask a tensor for an attribute that it has not.
_ASKING = frozenset({"hasattr", "getattr", "vars", "dir", "__dict__", "AttributeError"})
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Guards:
    """All guards of a captured step.

    Args:
        step: The user's step.
        args: Its arguments, with the example batch.
        batch: Indices of the arguments that are the batch.
        written: Places of numbers that the step itself changes, `held_numbers.place`.
        left: What the step itself leaves in places, and holds for as well, by place.
        live: Names of numbers that are read at every call.
        filled: Containers that the step only fills, by name.

    Attributes:
        of_batch: Those on what the batch holds.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        batch: Sequence[int],
        written: Collection[tuple[int, Any]] = (),
        left: Mapping[tuple[int, Any], Any] = types.MappingProxyType({}),
        live: Collection[str] = (),
        filled: Mapping[str, Any] = _NOTHING,
    ) -> None:
        self._written, self._left = written, left
        arguments = list(args)
        objects = walk_objects(step, arguments)
        self._used = used_names(step, objects.seen.values())
        self._asks = not _ASKING.isdisjoint(self._used.of_users)
        self._guards: list[ItemGuard] = []
        self._attributes, self._pointed = AttributeGuards(), AttributeGuards()
        if reads_environment(self._used.of_users):  # by names that it may compute
            known = environment()
            self._guards.append(ItemGuard("os.environ", known, list(known), any_key))
        else:
            for name, get in shared_values(self._used.names):
                self._attributes.add(name, get)
        mentioned = self._used.of_users
        for name, get in (*process_settings(mentioned), *registrations(mentioned)):
            self._attributes.add(name, get)
        self._contents, self._modes, self._classes = ContentGuards(), ModeGuards(), ClassGuards()
        self._seen: dict[int, Any] = {id(container): container for container in filled.values()}
        self._weak: list[tuple[str, Any]] = []
        self._parameters: list[tuple[str, torch.Tensor]] = []
        names = argument_names(step, len(arguments))
        for i, name in enumerate(names):
            if i not in batch:
                self._walk(name, arguments[i])
        self._walk("", step)
        for function in self._used.functions:
            self._walk("", function)
        self._guards += [ItemGuard(name, *held) for name, held in MODE_GLOBALS.items()]
        for name, hooks in GLOBAL_HOOKS.items():
            self._guards.append(ItemGuard(name, hooks, list(hooks), any_key))
            for i, hook in enumerate(hooks.values()):
                self._walk(dotted(name, i), hook)
        while self._weak:  # last, so that what is held otherwise comes first
            self._walk(*self._weak.pop(0), is_weak=True)
        self._guards += library_guards(self._used, self._seen.values())
        self._seen = {}  # what only a weak reference leads to may go
        self._snapshot = Snapshot(self._guards, self._pointers())
        self._of_parameters = ParameterGuards(self._parameters)
        self.of_batch = BatchGuards(step, names, self._used, written, live, filled)
        self.of_batch.hold({i: arguments[i] for i in batch})

    def changes(self, batch: dict[int, Any]) -> list[Change]:
        """Return what differs from the capture, in the order of the walk.

        Args:
            batch: This call's batch by index of the argument.
        """
        found: list[Change] = []
        if not self._snapshot.holds():
            found = [change for guard in self._guards for change in guard.changes()]
            self._snapshot = Snapshot(self._guards, self._pointers())
        if not self._snapshot.is_rest_same:
            rest = [*self._classes.changes(), *self._pointed.changes()]
            if not rest:
                self._snapshot.expect(self._pointers())
            found += rest
        found += self._modes.changes()
        found += self._attributes.changes()
        found += self._contents.changes()
        found += self._of_parameters.changes()
        found += self.of_batch.changes(batch)
        return found

    def _pointers(self) -> list[tuple[int, int]]:
        return [*self._classes.pointers(), *self._pointed.pointers()]

    def _attribute(
        self, name: str, value: Any, key: str, place: tuple[int, Any] | None = None
    ) -> None:
        """Guard which object an attribute holds, by the word that points to it where known."""
        address = attribute_address(value, key)
        guards = self._attributes if address is None else self._pointed
        get = functools.partial(getattr, value, key, None)
        guards.add(name, get, place=place, address=address or 0)

    def _walk(self, name: str, start: Any, *, is_weak: bool = False) -> None:
        """Guard what a value leads to, later what only weak references do: that is not held."""
        stack = [(name, start)]
        while stack:
            path, value = stack.pop()
            if is_reference(value):
                if not is_weak:
                    self._weak.append((path, value))
                    continue
                self._attributes.add(f"whether what {path} refers to exists", Existence(value))
            value = behind_proxy(value)
            if isinstance(value, frozenset):
                stack += [(dotted(path, key), each) for key, each in referred(value)]
            elif isinstance(value, torch.Tensor):
                stack += self._of_tensor(path, value)
            elif isinstance(value, tuple):
                stack += [(dotted(path, i), item) for i, item in enumerate(value)]
            elif may_hold(value) and id(value) not in self._seen:
                self._seen[id(value)] = value
                if not is_weak:
                    self._classes.add(path, value)
                stack += [(dotted(path, key), each) for key, each in referred(value)]
                stack += reversed(list(self._children(path, value)))

    def _of_tensor(self, path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        """Guard what users have set on a tensor: a new attribute where they ask for such."""
        if ((own := attributes_of(tensor)) or self._asks) and id(own) not in self._seen:
            self._seen[id(own)] = own
            yield from self._container(path, own, self._used.__contains__)

    def _children(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.optim.Optimizer):
            self._optimizer(path, value)
            yield from (*tensors_held(path, value, self._used.of_users), *self._classes_of(value))
        elif isinstance(value, torch.amp.GradScaler):
            yield from self._scaler(path, value)
        elif isinstance(value, _BOUND):
            return
        elif isinstance(value, torch.nn.Module):
            yield from self._module(path, value)
        elif isinstance(value, dict | list | collections.deque):
            yield from self._container(path, value, any_key)
            if is_users_object(value):
                yield from self._of_object(path, value)
            elif isinstance(value, collections.defaultdict):
                self._attribute(dotted(path, "default_factory"), value, "default_factory")
            if has_order(value):
                self._contents.add(path, value)
        elif has_content(value):
            self._contents.add(path, value)
        elif isinstance(value, types.MappingProxyType):
            yield path, gc.get_referents(value)[0]
        elif (asked := asked_of(path, value, self._used)) is not None:
            self._attributes.add(*asked)
        elif isinstance(value, contextvars.ContextVar):
            self._attributes.add(f"{path}.get()", functools.partial(value.get, None))
            yield f"{path}.get()", value.get(None)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.MethodType):
            yield from ((path, value.__self__), (path, value.__func__))
        elif isinstance(value, functools.partial | functools.partialmethod):
            yield from ((path, value.func), (path, value.args), (path, value.keywords))
        elif isinstance(value, type | types.ModuleType):
            if is_users_code(value):
                yield from self._container(path, vars(value), self._is_run_or_used)
                yield type(value).__name__, type(value)
        elif isinstance(value, _HOLDERS):
            yield from self._container(path, vars(value), any_key)
        elif is_users_object(value):
            yield from self._of_object(path, value)

    def _of_object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(value, "__dict__"):
            yield from self._container(path, value.__dict__, self._used.__contains__)
        yield from self._slotted(path, value)
        yield from self._classes_of(value)

    def _is_run_or_used(self, key: Any) -> bool:
        return key in RUN_UNNAMED or key in self._used

    def _classes_of(self, value: Any) -> Iterator[tuple[str, Any]]:
        yield from ((kind.__name__, kind) for kind in type(value).__mro__)

    def _slotted(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        for key in slots_of_class(type(value)):
            if key in self._used and (id(value), key) not in self._written:
                get = functools.partial(getattr, value, key, None)
                self._attributes.add(dotted(path, key), get, place=(id(value), key))
                yield dotted(path, key), get()

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        """Guard the numbers of groups and parameters; settings are sources, or compared there."""
        own = optimizer.__dict__
        same = [key for key in ("param_groups", "state")
                if key in own and not hasattr(type(optimizer), key)]  # fmt: skip
        for key in (key for key in ("param_groups", "state") if key not in same):
            get = functools.partial(getattr, optimizer, key)
            self._attributes.add(dotted(path, key), get, is_same=True)
        if "step" in own:
            self._attributes.add(dotted(path, "step"), functools.partial(own_step, optimizer))
        keys = [k for k, v in own.items() if isinstance(v, VALUES) and k in self._used]
        keys = [key for key in keys if (id(own), key) not in self._written]

        def is_new(key: Any) -> bool:
            return key == "step" and own_step(optimizer) is not None

        self._guards.append(ItemGuard(path, own, [*keys, *same], is_new, same=same))
        self._hooks(path, own)
        used, written = self._used.of_users, self._written
        self._guards += states_of_parameters(path, optimizer, used, written)
        groups = optimizer.param_groups
        which = range(len(groups))
        self._guards.append(ItemGuard(f"{path}.param_groups", groups, which, any_key, same=which))
        for i, group in enumerate(groups):
            name, held = f"{path}.param_groups.{i}.params", group["params"]
            self._guards.append(ItemGuard(name, held, range(len(held)), any_key))
        defaults = own.get("defaults")
        if isinstance(defaults, dict) and "defaults" in self._used.of_users:
            plain = [key for key, value in defaults.items() if isinstance(value, (*VALUES, tuple))]
            self._guards.append(ItemGuard(f"{path}.defaults", defaults, plain))
        guards, kinds = tensors_of_groups(path, optimizer, used, written)
        self._guards += guards
        for name, get in kinds:
            self._attributes.add(name, get)

    def _scaler(self, path: str, scaler: torch.amp.GradScaler) -> Iterator[tuple[str, Any]]:
        """Guard the settings of a `GradScaler`; its tensors are sources."""
        own = scaler.__dict__
        plain = [key for key, item in own.items() if isinstance(item, VALUES)]
        self._guards.append(ItemGuard(path, own, plain))
        return self._classes_of(scaler)

    def _container(
        self, path: str, holder: Any, is_used: Callable[[Any], bool], same: Collection[Any] = ()
    ) -> Iterator[tuple[str, Any]]:
        at = id(behind_view(holder))

        def is_guarded(key: Any) -> bool:
            return is_used(key) and (at, key) not in self._written

        items = {key: item for key, item in items_by_key(holder).items() if is_guarded(key)}
        left = {key: x for (place, key), x in self._left.items() if place == id(holder)}
        self._guards.append(ItemGuard(path, holder, list(items), is_guarded, left, same))
        yield from ((dotted(path, key), x) for key, x in items.items() if key not in same)

    def _hooks(self, path: str, attributes: Mapping[str, Any]) -> None:
        for key, table in attributes.items():
            if key in HOOK_TABLES and isinstance(table, dict):
                self._guards.append(ItemGuard(dotted(path, key), table, list(table), any_key))
                if isinstance(table, collections.OrderedDict) and len(table) > 1:
                    self._contents.add(dotted(path, key), table)  # as for other containers

    def _module(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        attributes = module.__dict__

        def is_used(key: Any) -> bool:
            is_known = key in ("training", "forward", *HOOK_TABLES) or key in self._used
            return is_known and key not in _MODULE_TABLES

        for key, parameter in attributes["_parameters"].items():
            if parameter is not None:
                self._parameters.append((dotted(path, key), parameter))
                self._hooks(dotted(path, key), hook_tables(parameter))
        self._hooks(path, attributes)
        yield from self._container(path, attributes, is_used, HOOK_TABLES)
        yield from self._slotted(path, module)
        for table in _MODULE_TABLES:
            yield from self._container(path, attributes[table], any_key)
        yield from self._classes_of(module)

    def _function(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for key, cell in cells(function):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if (id(cell), None) not in self._written:
                self._attribute(key, cell, "cell_contents", (id(cell), None))
                yield key, value
        if is_library_file(function.__code__.co_filename):
            return
        name = function.__name__
        # An editor that reloads a module puts other code into its functions.
        for key in ("__code__", "__defaults__", "__kwdefaults__"):
            self._attribute(dotted(name, key), function, key)
        defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
        yield from ((f"{name}.default", item) for item in defaults)
        yield from self._container(name, function.__dict__, self._used.__contains__)
        namespace = function.__globals__
        used = globals_named(function)
        kept = sorted(key for key in used if (id(namespace), key) not in self._written)
        self._guards.append(ItemGuard("", namespace, kept))
        yield from ((key, namespace[key]) for key in kept)
        yield from imported_modules(function)
