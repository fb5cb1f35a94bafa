"""The walk that guards values reached by a step and named in code that may run.

See `guards.guards`, which compares what is gathered here at every call.
"""

from __future__ import annotations

import abc
import collections
import contextvars
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.user_step.code_names import (
    globals_named,
    is_library_function,
    is_users_code,
    object_question,
)
from pardnn.backends.torch.user_step.dict_versions import attribute_address
from pardnn.backends.torch.user_step.guards.attribute import AttributeGuards
from pardnn.backends.torch.user_step.guards.batch import HOLDERS, is_settable, is_users_object
from pardnn.backends.torch.user_step.guards.content import (
    ClassGuards,
    asked_of,
)
from pardnn.backends.torch.user_step.guards.held_content import (
    ContentGuards,
    has_content,
    has_order,
)
from pardnn.backends.torch.user_step.guards.item import (
    VALUES,
    ItemGuard,
    any_key,
    items_by_key,
    may_hold,
)
from pardnn.backends.torch.user_step.guards.library import Registered
from pardnn.backends.torch.user_step.guards.parameter import (
    hook_tables,
    own_step,
    states_of_parameters,
    tensors_held,
    tensors_of_groups,
)
from pardnn.backends.torch.user_step.object_graph import PLAIN, attributes_of
from pardnn.backends.torch.user_step.references import (
    Existence,
    behind_proxy,
    cells,
    is_reference,
    referred,
)
from pardnn.backends.torch.user_step.slots import (
    HOOK_TABLES,
    VIEWS,
    behind_view,
    dotted,
    slots_of_class,
)
from pardnn.backends.torch.user_step.used_names import RUN_UNNAMED, UsedNames, imported_modules

#: Not guarded, since their contents are sources of the graph, or compared as settings.
_BOUND = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
)
#: Code that names one of these may ask a tensor for a missing attribute.
_ASKING = frozenset({"hasattr", "getattr", "vars", "dir", "__dict__", "AttributeError"})
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class GuardWalk:
    """Gathers guards, value by value.

    Args:
        used: Names in code that may run.
        written: Places of numbers that the step itself changes, `held_numbers.place`.
        left: What the step itself leaves in places, and holds for as well, by place.
        seen: Objects that are not entered, by id.

    Attributes:
        guards: The guards of the items of containers.
        attributes: Guards on attributes that have to be read through a getter.
        pointed: Guards on attributes whose address is known.
        contents: Guards on contents without keys, and on orders.
        classes: Guards on the objects' classes.
        parameters: Parameters of modules, by name.
        leaves: Tensors that are trained, by name, wherever they are.
        weak: Objects reached only by weak references, by name; no walk has entered them yet.
        seen: All objects that were entered, by id.
    """

    def __init__(
        self,
        used: UsedNames,
        written: Collection[tuple[int, Any]],
        left: Mapping[tuple[int, Any], Any],
        seen: dict[int, Any],
    ) -> None:
        self._used, self._written, self._left, self.seen = used, written, left, seen
        self._asks = not _ASKING.isdisjoint(used.of_users)
        self._changing = {holder for holder, _ in (*written, *left)}
        self._tells_apart = any(object_question(each.__code__) for each in used.functions)
        self.guards: list[ItemGuard] = []
        self.attributes, self.pointed = AttributeGuards(), AttributeGuards()
        self.contents, self.classes = ContentGuards(), ClassGuards()
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.leaves: list[tuple[str, torch.Tensor]] = []
        self.weak: list[tuple[str, Any]] = []

    def _attribute(
        self, name: str, value: Any, key: str, place: tuple[int, Any] | None = None
    ) -> None:
        """Guard the identity of an attribute's object, by the word that points to it if known."""
        address = attribute_address(value, key)
        guards = self.attributes if address is None else self.pointed
        get = functools.partial(getattr, value, key, None)
        guards.add(name, get, is_same=self._is_one(get()), place=place, address=address or 0)

    def _is_one(self, value: Any) -> bool:
        """Whether an equal object is another one: code may tell, or the step writes into it.

        What it writes may have two names, and the user may give one of them a copy.
        """
        is_told = isinstance(value, list | dict | tuple) and self._tells_apart
        return is_told or (isinstance(value, list | dict) and id(value) in self._changing)

    def walk(self, name: str, start: Any, *, is_weak: bool = False) -> None:
        """Guard everything that a value leads to; targets of weak references are noted in `weak`.

        Args:
            name: The name of the value.
            start: The value.
            is_weak: Whether a weak reference led to it.
        """
        stack = [(name, start)]
        while stack:
            path, value = stack.pop()
            if is_reference(value):
                if not is_weak:
                    self.weak.append((path, value))
                    continue
                self.attributes.add(f"whether what {path} refers to exists", Existence(value))
            value = behind_proxy(value)
            if isinstance(value, frozenset):
                stack += [(dotted(path, key), each) for key, each in referred(value)]
            elif isinstance(value, torch.Tensor):
                stack += self._of_tensor(path, value)
            elif isinstance(value, tuple):
                stack += [(dotted(path, i), item) for i, item in enumerate(value)]
            elif may_hold(value) and id(value) not in self.seen:
                self.seen[id(value)] = value
                if not is_weak:
                    self.classes.add(path, value)
                stack += [(dotted(path, key), each) for key, each in referred(value)]
                stack += reversed(list(self._children(path, value)))

    def _of_tensor(self, path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        """Guard what users have set on a tensor, and new attributes if their code asks for them."""
        if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
            self.leaves.append((path, tensor))
        if ((own := attributes_of(tensor)) or self._asks) and id(own) not in self.seen:
            self.seen[id(own)] = own
            yield from self._container(path, own, self._used.__contains__)

    def _children(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Guard what an object itself holds, and yield what it leads to."""
        if isinstance(value, torch.optim.Optimizer):
            yield from self._optimizer(path, value)
            yield from (*tensors_held(path, value, self._used.of_users), *_classes_of(value))
        elif isinstance(value, torch.amp.GradScaler):
            yield from self._scaler(path, value)
        elif isinstance(value, _BOUND):
            return
        elif isinstance(value, torch.nn.Module):
            yield from self._module(path, value)
        elif isinstance(value, dict | list | collections.deque):
            yield from self._of_container(path, value)
        elif has_content(value):
            self.contents.add(path, value)
        elif (asked := asked_of(path, value, self._used)) is not None:
            self.attributes.add(*asked)
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, type | types.ModuleType):
            if is_users_code(value):
                yield from self._container(path, vars(value), self._is_run_or_used)
                yield type(value).__name__, type(value)
            if isinstance(value, abc.ABCMeta) and self._is_named(value):
                self.attributes.add(f"the classes registered with {path}", Registered(value))
        elif isinstance(value, HOLDERS):
            yield from self._container(path, vars(value), any_key)
        elif (parts := _parts(path, value)) is not None:
            yield from parts
        elif isinstance(value, contextvars.ContextVar):
            self.attributes.add(f"{path}.get()", functools.partial(value.get, None))
            yield f"{path}.get()", value.get(None)
        elif is_users_object(value):
            yield from self._of_object(path, value)
        elif is_settable(value):
            yield from self._of_torch(path, value)

    def _of_container(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        yield from self._container(path, value, any_key)
        if is_users_object(value):
            yield from self._of_object(path, value)
        elif isinstance(value, collections.defaultdict):
            self._attribute(dotted(path, "default_factory"), value, "default_factory")
        if has_order(value):
            self.contents.add(path, value)

    def _of_object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(value, "__dict__"):
            yield from self._container(path, value.__dict__, self._used.__contains__)
        yield from self._slotted(path, value)
        yield from _classes_of(value)

    def _of_torch(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Guard the attributes of an object of torch that it runs by, or that users' code names."""
        own, used = value.__dict__, self._used.of_users
        is_run = callable(value) or isinstance(value, torch.distributions.Distribution)
        kinds = (*VALUES, torch.Tensor, types.FunctionType) if is_run else ()
        keys = [key for key, item in own.items() if key in used or isinstance(item, kinds)]
        keys = [key for key in keys if (id(own), key) not in self._written]
        self.guards.append(ItemGuard(path, own, keys))
        yield from ((dotted(path, key), own[key]) for key in keys)

    def _is_named(self, kind: type) -> bool:
        return is_users_code(kind) or kind.__name__ in self._used.of_users

    def _is_run_or_used(self, key: Any) -> bool:
        return key in RUN_UNNAMED or key in self._used

    def _slotted(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        for key in slots_of_class(type(value)):
            if key in self._used and (id(value), key) not in self._written:
                get = functools.partial(getattr, value, key, None)
                is_one, place = self._is_one(get()), (id(value), key)
                self.attributes.add(dotted(path, key), get, is_same=is_one, place=place)
                yield dotted(path, key), get()

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
        """Guard numbers of groups and parameters; settings are sources, or compared elsewhere."""
        own = optimizer.__dict__
        same = [key for key in ("param_groups", "state")
                if key in own and not hasattr(type(optimizer), key)]  # fmt: skip
        for key in (key for key in ("param_groups", "state") if key not in same):
            get = functools.partial(getattr, optimizer, key)
            self.attributes.add(dotted(path, key), get, is_same=True)
        if "step" in own:
            self.attributes.add(dotted(path, "step"), functools.partial(own_step, optimizer))
        keys = [k for k, v in own.items() if isinstance(v, VALUES) and k in self._used]
        keys = [key for key in keys if (id(own), key) not in self._written]

        def is_new(key: Any) -> bool:
            return key == "step" and own_step(optimizer) is not None

        self.guards.append(ItemGuard(path, own, [*keys, *same], is_new, same=same))
        yield from self._hooks(path, own)
        used, written = self._used.of_users, self._written
        self.guards += states_of_parameters(path, optimizer, used, written)
        groups = optimizer.param_groups
        which = range(len(groups))
        self.guards.append(ItemGuard(f"{path}.param_groups", groups, which, any_key, same=which))
        for i, group in enumerate(groups):
            name, held = f"{path}.param_groups.{i}.params", group["params"]
            self.guards.append(ItemGuard(name, held, range(len(held)), any_key))
            self.leaves += ((dotted(name, j), tensor) for j, tensor in enumerate(held))
            others = {key for key, x in group.items() if key != "params" and not _is_setting(x)}
            read = {key for key in others if key in own.get("defaults", ()) or key in self._used}
            yield from self._container(f"{path}.param_groups.{i}", group, read.__contains__)
        defaults = own.get("defaults")
        if isinstance(defaults, dict) and "defaults" in self._used.of_users:
            plain = [key for key, value in defaults.items() if isinstance(value, (*VALUES, tuple))]
            self.guards.append(ItemGuard(f"{path}.defaults", defaults, plain))
        guards, kinds = tensors_of_groups(path, optimizer, used, written)
        self.guards += guards
        for name, get in kinds:
            self.attributes.add(name, get)

    def _scaler(self, path: str, scaler: torch.amp.GradScaler) -> Iterator[tuple[str, Any]]:
        """Guard the settings of a `GradScaler`; its tensors are sources."""
        own = scaler.__dict__
        plain = [key for key, item in own.items() if isinstance(item, VALUES)]
        self.guards.append(ItemGuard(path, own, plain))
        return _classes_of(scaler)

    def _container(
        self, path: str, holder: Any, is_used: Callable[[Any], bool], same: Collection[Any] = ()
    ) -> Iterator[tuple[str, Any]]:
        at = id(behind_view(holder))

        def is_guarded(key: Any) -> bool:
            return is_used(key) and (at, key) not in self._written

        items = {key: item for key, item in items_by_key(holder).items() if is_guarded(key)}
        left = {key: x for (place, key), x in self._left.items() if place == id(holder)}
        ones = [key for key, x in items.items() if self._is_one(x) and key not in left]
        # Of a dictionary with numbers that are read at every call, the order counts all the same.
        is_ordered = isinstance(holder, dict) and is_used is any_key and len(items) < len(holder)
        self.guards.append(
            ItemGuard(
                path, holder, list(items), is_guarded, left, (*same, *ones), is_ordered=is_ordered
            )
        )
        rest = ((key, x) for key, x in items.items() if type(x) not in PLAIN and key not in same)
        yield from ((dotted(path, key), x) for key, x in rest)

    def _hooks(self, path: str, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Guard the hooks of an object, and yield them."""
        for key, table in attributes.items():
            if key in HOOK_TABLES and isinstance(table, dict):
                yield from ((dotted(path, f"{key}.{i}"), x) for i, x in enumerate(table.values()))
                self.guards.append(ItemGuard(dotted(path, key), table, list(table), any_key))
                if isinstance(table, collections.OrderedDict) and len(table) > 1:
                    self.contents.add(dotted(path, key), table)  # as for other containers

    def _module(self, path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        attributes = module.__dict__

        def is_used(key: Any) -> bool:
            is_known = key in ("training", "forward", *HOOK_TABLES) or key in self._used
            return is_known and key not in _MODULE_TABLES

        for key, parameter in attributes["_parameters"].items():
            if parameter is not None:
                self.parameters.append((dotted(path, key), parameter))
                yield from self._hooks(dotted(path, key), hook_tables(parameter))
        yield from self._hooks(path, attributes)
        yield from self._container(path, attributes, is_used, HOOK_TABLES)
        yield from self._slotted(path, module)
        for table in _MODULE_TABLES:
            yield from self._container(path, attributes[table], any_key)
        yield from _classes_of(module)

    def _function(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for key, cell in cells(function):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if (id(cell), None) not in self._written:
                self._attribute(key, cell, "cell_contents", (id(cell), None))
                yield key, value
        if is_library_function(function):
            return
        name = function.__name__
        # An editor that reloads a module puts new code into its functions.
        for key in ("__code__", "__defaults__", "__kwdefaults__"):
            self._attribute(dotted(name, key), function, key)
        defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
        yield from ((f"{name}.default", item) for item in defaults)
        yield from self._container(name, function.__dict__, self._used.__contains__)
        namespace = function.__globals__
        used = globals_named(function)
        kept = sorted(key for key in used if (id(namespace), key) not in self._written)
        ones = [key for key in kept if self._is_one(namespace[key])]
        self.guards.append(ItemGuard("", namespace, kept, same=ones))
        yield from ((key, namespace[key]) for key in kept)
        yield from imported_modules(function)


def _is_setting(value: Any) -> bool:
    """Whether a value of a group is an input of the graph, or compared as one."""
    if type(value) is tuple:
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (int, float, torch.Tensor))


def _parts(path: str, value: Any) -> Sequence[tuple[str, Any]] | None:
    """Return the parts of a view, method or partial; None for other values."""
    if isinstance(value, VIEWS):
        return [(path, behind_view(value))]
    if isinstance(value, types.MethodType):
        return [(path, value.__self__), (path, value.__func__)]
    if isinstance(value, functools.partial | functools.partialmethod):
        return [(path, value.func), (path, value.args), (path, value.keywords)]
    return None


def _classes_of(value: Any) -> Iterator[tuple[str, Any]]:
    return ((kind.__name__, kind) for kind in type(value).__mro__)
