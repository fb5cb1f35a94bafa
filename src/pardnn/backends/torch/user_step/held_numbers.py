"""Numbers held by objects of a step that the step itself changes: counters, rates, sums.

`trainer.calls += 1`, `state["step"] += 1`, `self.tau *= 0.99`: the number is read at each call, and
its new value is written back after the step. It is found by its name, the path to it, which is the
same on every rank; the name of optimizer state contains the parameter's name. Such names also find
optimizer states and gradients that no call has made yet.

The user's classes and modules hold numbers, too (`Model.tau`, `settings.weight`). The walk of a
step's objects does not enter them; changes between two calls are found here, under separate names.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from pardnn.backends.torch.user_step.class_numbers import space_name
from pardnn.backends.torch.user_step.object_graph import ARGUMENTS, ObjectGraph
from pardnn.backends.torch.user_step.slots import (
    Attributes,
    Entry,
    GlobalName,
    Slot,
    dotted,
    items_of,
    slot_of,
)

#: Types of an arithmetic state; bool is an int.
NUMBERS = (int, float)
#: Types without items or attributes for a walk to enter.
_WHOLE = (
    bytes, complex, set, frozenset, type, types.FunctionType, types.BuiltinFunctionType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def with_tensor_names(name: str, names: Mapping[int, str]) -> str:
    """Return a path with names of parameters in place of their ids.

    Args:
        name: As `object_graph` makes it: "optimizer.state.<139734>.step".
        names: The names of tensors by id.
    """
    if "<" not in name:  # a list of a million numbers has as many names
        return name
    return re.sub(r"<(\d+)>", lambda m: names.get(int(m[1]), "unnamed"), name)


def numbers_by_name(
    contents: Iterable[tuple[str, Any, Any]], names: Mapping[int, str]
) -> dict[str, tuple[Slot, Any]]:
    """Return place and value of every number in objects, by name; ambiguous names are left out.

    Args:
        contents: `ObjectGraph.contents`.
        names: The names of tensors by id.
    """
    found: dict[str, tuple[Slot, Any]] = {}
    ambiguous: set[str] = set()
    rates: dict[int, LRScheduler] = {}
    for path, holder, content in contents:
        if isinstance(holder, LRScheduler):
            rates[id(content.get("_last_lr"))] = holder
        for raw, slot, value in _places(path, holder, content):
            if not isinstance(value, NUMBERS):
                continue
            name = with_tensor_names(raw, names)
            if id(holder) in rates:  # a schedule makes this list anew at each step
                slot = Slot(rates[id(holder)], "_last_lr", (slot.key,))
            if name in found and place(found[name][0]) != place(slot):
                ambiguous.add(name)
            found[name] = slot, value
    return {name: each for name, each in found.items() if name not in ambiguous}


def values_by_name(
    contents: Iterable[tuple[str, Any, Any]], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return the value of every number of `numbers_by_name`."""
    return {name: value for name, (_, value) in numbers_by_name(contents, names).items()}


def texts_of_states(objects: ObjectGraph, names: Mapping[int, str]) -> dict[str, Any]:
    """Return what optimizer states hold besides tensors, numbers and containers, by name.

    Tuples of plain values do not count as containers, nor do sets, which no walk enters.

    Args:
        objects: The object graph of a step.
        names: The names of tensors by id.
    """
    optimizers = [e.value for e in objects.stateful if isinstance(e.value, torch.optim.Optimizer)]
    states = {id(state) for each in optimizers for state in getattr(each, "state", {}).values()}
    found = {
        with_tensor_names(name, names): value
        for path, holder, content in objects.contents
        if id(holder) in states
        for name, _, value in _places(path, holder, content)
        if not isinstance(value, NUMBERS) and (is_plain_value(value) or isinstance(value, _WHOLE))
    }
    return {name: value for name, value in found.items() if "unnamed" not in name}


def is_plain_value(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a tuple of such values."""
    if type(value) in (tuple, torch.Size):
        return all(map(is_plain_value, value))
    return value is None or type(value) in (str, bool, *NUMBERS)


def all_numbers(objects: ObjectGraph, names: Mapping[int, str]) -> dict[str, tuple[Slot, Any]]:
    """Return place and value of `numbers_by_name`, and of numbers in classes and modules.

    Args:
        objects: The object graph of the step.
        names: The names of tensors by id.
    """
    shared = {name: (slot, slot.get()) for name, slot in _shared(objects)}
    return shared | numbers_by_name(objects.contents, names)


def _shared(objects: ObjectGraph) -> Iterator[tuple[str, Slot]]:
    """Yield name and place of each number in a class or module."""
    for space in objects.spaces:
        name, holder = space_name(space), space if isinstance(space, type) else vars(space)
        for key, value in items_of(holder).items():
            # Not an enum member, which is more than a number.
            if type(value) in NUMBERS and not key.startswith("__"):
                yield f"{name}.{key}", Slot(holder, key)


def _places(path: str, holder: Any, content: Any) -> Iterator[tuple[str, Slot, Any]]:
    """Yield name, place and value of what one entry of `ObjectGraph.contents` holds."""
    if isinstance(holder, types.CellType | GlobalName):
        yield path, slot_of(holder, None), content
    elif path != ARGUMENTS:
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            if not isinstance(key, torch.Tensor):
                yield dotted(path, key), slot_of(holder, key), value


def named_places(objects: ObjectGraph) -> Iterator[tuple[str, Slot, Any]]:
    """Yield name, place and value of all that the arguments and objects of a step hold."""
    args = next((holder for name, holder, _ in objects.contents if name == ARGUMENTS), [])
    for name, index in objects.arguments:
        yield name, Slot(args, index), args[index]
    for path, holder, content in objects.contents:
        yield from _places(path, holder, content)


def slot_of_name(objects: ObjectGraph, name: str) -> Slot | None:
    """Return the place that a name stands for; None if there is none."""
    return next((slot for path, slot, _ in named_places(objects) if path == name), None)


def objects_by_name(contents: Iterable[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Return the objects and containers that a step holds; of two with one name, the first.

    Args:
        contents: `ObjectGraph.contents`.
    """
    found: dict[str, Any] = {}
    for name, holder, _ in contents:
        if name not in ("", ARGUMENTS) and not isinstance(holder, types.CellType | GlobalName):
            found.setdefault(name, holder)
    return found


def place(slot: Slot) -> tuple[int, Any]:
    """Return what identifies a place, even if two slots lead to it."""
    held = slot.holder if slot.key is None else items_of(slot.holder)
    return id(held.held_by(slot.key) if isinstance(held, Attributes) else held), slot.key


def containers(contents: Iterable[tuple[str, Any, Any]]) -> dict[int, tuple[Slot, Any]]:
    """Return where each list and dictionary is held that an object holds, by its id.

    Args:
        contents: `ObjectGraph.contents`.
    """
    found: dict[int, tuple[Slot, Any]] = {}
    for path, holder, content in contents:
        for _, slot, value in _places(path, holder, content):
            if isinstance(value, dict | list):
                found.setdefault(id(value), (slot, value))
    return found


def slots_of(contents: Iterable[tuple[str, Any, Any]], value: Any) -> list[Slot]:
    """Return every place that holds an object, including in tuples and arguments.

    Args:
        contents: `ObjectGraph.contents`.
        value: The object.
    """
    found: list[Slot] = []
    for path, holder, content in contents:
        within = _places(path, holder, content)
        if path == ARGUMENTS:
            within = (("", Slot(holder, i), item) for i, item in enumerate(content))
        for _, slot, item in within:
            found += _within_tuples(slot, item, value)
    return found


def _within_tuples(slot: Slot, item: Any, value: Any) -> Iterator[Slot]:
    if item is value:
        yield slot
    elif isinstance(item, tuple):
        for i, each in enumerate(item):
            yield from _within_tuples(Slot(slot.holder, slot.key, (*slot.path, i)), each, value)


class StateOwner(NamedTuple):
    """What a state belongs to.

    Attributes:
        name: The name of its parameter.
        parameter: The parameter itself.
        optimizer: The optimizer whose state it is; None for a gradient.
        key: The key in the optimizer's state of that parameter.
    """

    name: str
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer | None
    key: str

    def slots(self) -> tuple[Slot, ...]:
        """Return where it is held, and make room there; no slots for a gradient."""
        if self.optimizer is None:
            return ()
        return (Slot(self.optimizer.state[self.parameter], self.key),)

    def state(self) -> dict[Any, Any]:
        """Return what the optimizer now holds for the parameter."""
        return {} if self.optimizer is None else self.optimizer.state.get(self.parameter, {})


def state_owners(
    names: Collection[str], parameters: Mapping[str, torch.Tensor], stateful: Iterable[Entry]
) -> dict[str, StateOwner]:
    """Return what states belong to, by their names; names of anything else are left out.

    Args:
        names: Names such as "optimizer.state.net.weight.step" or "net.weight.grad".
        parameters: The parameters of the step, by name.
        stateful: Objects of the step, optimizers among them.
    """
    gradients = {f"{n}.grad": StateOwner(n, p, None, "grad") for n, p in parameters.items()}
    found = {name: gradients[name] for name in names if name in gradients}
    by_id = {id(parameter): name for name, parameter in parameters.items()}
    for entry in stateful:
        if not isinstance(entry.value, torch.optim.Optimizer):
            continue
        path = with_tensor_names(entry.name, by_id)
        prefixes = {f"{path}.state.{name}.": name for name in parameters}
        for name in names:
            prefix = max((p for p in prefixes if name.startswith(p)), key=len, default="")
            if prefix:
                own, key = prefixes[prefix], name.removeprefix(prefix)
                found.setdefault(name, StateOwner(own, parameters[own], entry.value, key))
    return found


def missing_slots(
    names: Collection[str], objects: ObjectGraph, parameters: Mapping[str, Any]
) -> dict[str, Slot]:
    """Return the places of numbers that the first step would create, leaving out other names.

    Args:
        names: Names such as "optimizer.state.net.weight.step" or "optimizer.param_groups.0.step".
        objects: The object graph of the step.
        parameters: Parameters by name.
    """
    holders: dict[str, Any] = {}
    for path, holder, content in objects.contents:
        if isinstance(content, dict) and not isinstance(holder, types.CellType | GlobalName):
            holders.setdefault(path, holder)  # a module comes before its tables
    owners = state_owners(names, parameters, objects.stateful)
    found = {name: slot for name, owner in owners.items() for slot in owner.slots()}
    for name in (name for name in names if name not in owners):
        for parent, key in _splits(name):
            if parent in holders:
                found[name] = Slot(holders[parent], key)
                break
    return found


def slots_of_numbers(
    names: Iterable[str],
    objects: ObjectGraph,
    tensors: Mapping[str, torch.Tensor],
    created: Container[str],
) -> dict[str, Slot]:
    """Return the places of numbers that objects hold or the step would create.

    Args:
        names: The names of numbers; those that have no place are left out.
        objects: The object graph of the step.
        tensors: Tensors of the step by name.
        created: Names of those that need not be there.
    """
    held = all_numbers(objects, {id(value): name for name, value in tensors.items()})
    found = {name: held[name][0] for name in names if name in held}
    lacking = [name for name in names if name in created and name not in found]
    return found | missing_slots(lacking, objects, tensors)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to split a name into path and key, as keys such as parameters' have dots."""
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        yield ".".join(parts[:i]), ".".join(parts[i:])
