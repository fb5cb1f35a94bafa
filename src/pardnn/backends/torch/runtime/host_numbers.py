"""Python numbers of a step at run time: read at each call, written back after it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pardnn.backends.torch.ops.codec import Reference
from pardnn.backends.torch.ops.host_program import host_program
from pardnn.backends.torch.runtime.effects import value_of
from pardnn.backends.torch.runtime.filled_containers import (
    CONTAINERS,
    assign,
    assigned_places,
    fill,
    filled_names,
    held_in,
    holds,
    put_in_order,
)
from pardnn.backends.torch.runtime.results import held_names
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.held_numbers import (
    containers,
    objects_by_name,
    place,
    slot_of_name,
    slots_of,
    slots_of_numbers,
    state_owners,
)
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, walk_objects
from pardnn.backends.torch.user_step.root_names import argument_names
from pardnn.backends.torch.user_step.shared_containers import shared_containers
from pardnn.backends.torch.user_step.sinks import is_telling, may_be_told, told_functions
from pardnn.backends.torch.user_step.slots import Slot, ordered_keys
from pardnn.backends.torch.user_step.sources import Source, batch_indices
from pardnn.backends.torch.user_step.used_names import users_code
from pardnn.errors import FileError, MismatchError, shown
from pardnn.graph.ir import Graph

_CALLED = (types.FunctionType, types.MethodType)

#: Longest text of a condition in a message.
_SHORT = 60


class HostNumbers:
    """The numbers of a graph's host program, bound to the objects of its step.

    Args:
        step: The user's step.
        args: Its arguments, with the example batch.
        graph: The graph of that step.
        sources: Its sources by name; those of numbers that objects hold are added.

    Attributes:
        program: The arithmetic on them.
        places: Where numbers and containers are held that the step changes: `held_numbers.place`.
        filled: The lists and dictionaries that it fills, by name.
        left: Values that it leaves in places and for which it also holds, by place.

    Raises:
        MismatchError: E505, if the step's objects do not hold a number of the graph.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: Sequence[Any],
        graph: Graph,
        sources: dict[str, Source],
    ) -> None:
        self.program = host_program(graph)
        self._sources = sources
        # Lists and dictionaries that hold numbers: name of one number, place, container.
        self._containers: dict[int, tuple[str, Slot, Any]] = {}
        told = [each["set"][0] for each in graph.step_notes.get("effects", []) if "set" in each]
        written = dict.fromkeys([*dict(self.program.writes), *told])
        self.filled: dict[str, Any] = {}
        self._filled: dict[str, Slot] = {}
        self._empty: dict[str, Slot] = {}
        self._add_filled(step, args, filled_names(graph))
        unread = graph.step_notes.get("unread", [])
        names = {*self.program.inputs, *written, *_numbers_of(graph), *unread}
        read = self._add_held(step, args, names)
        self._unread = [(n, read[n], type(read[n].get())) for n in unread if n in read]
        slots = [sources[name].slots[0] for name in written]
        self._assigned = assigned_places(step, args, graph)
        effects = graph.step_notes.get("effects", [])
        orders = dict(each["order"] for each in effects if "order" in each)
        self._states, ordered = _orders_of_states(orders, sources.values(), step, args)
        held = held_names(graph.step_notes.get("result"))
        own = _held_slots(step, args, [*held, *ordered])
        self._held, self._ordered = ({x: own[x] for x in names} for names in (held, ordered))
        self._absent, self.left = self._assigned.absent(), self._assigned.left_values()
        places = [*slots, *read.values(), *self._filled.values(), *self._assigned.unread_slots()]
        self.places = frozenset(place(slot) for slot in places)
        self._slots: Mapping[str, Slot] = dict(zip(written, slots, strict=True))
        self._new: dict[str, Any] = {}
        self._sinks = _sink_slots(step, args, graph)
        self._given: dict[str, Slot] = {}  # sinks in the last batch
        self._schedules = _schedules(step, args, graph)

    @property
    def writes(self) -> bool:
        """Whether `write` does or returns anything after a step without effects."""
        return bool(self._new or self._schedules or self._given or self._held)

    def puts(self, effects: Sequence[Mapping[str, Any]]) -> bool:
        """Whether `write` needs what the batch's arguments hold."""
        return bool(effects or self._held)

    @property
    def is_empty(self) -> bool:
        """Whether `read` never compares anything."""
        program = self.program
        places = (
            self._containers, self._filled, self._empty, self._absent, self._sinks, self._unread,
        )  # fmt: skip
        return not any((*places, program.rows, program.conditions, program.writes))

    def dictionary(self, name: str) -> dict[Any, Any] | None:
        """Return the dictionary that a number is read from; None if it is no item of one."""
        slots = self._sources[name].slots
        return slots[0].holder if slots and isinstance(slots[0].holder, dict) else None

    def _add_held(
        self, step: Callable[..., Any], args: Sequence[Any], names: set[str]
    ) -> dict[str, Slot]:
        """Add the sources of numbers that objects hold, or that the first step creates."""
        wanted = sorted(names - self._sources.keys())
        if not wanted:
            return {}
        objects = walk_objects(step, list(args))
        live = {name: source.get() for name, source in self._sources.items()}
        tensors = {n: value for n, value in live.items() if isinstance(value, torch.Tensor)}
        slots = slots_of_numbers(wanted, objects, tensors, self.program.initial)
        for name in (name for name in wanted if name not in slots):
            slot = slot_of_name(objects, name)
            if slot is not None and slot.get() is None:  # the step puts a number there
                slots[name] = self._empty[name] = slot
        _check_known([name for name in wanted if name not in slots], "number")
        self._sources.update((name, Source(name, "input", (slots[name],))) for name in wanted)
        found = {name: slots[name] for name in wanted}
        self._watch_holders(found, objects)
        return found

    def _add_filled(
        self, step: Callable[..., Any], args: Sequence[Any], names: Sequence[str]
    ) -> None:
        """Find the containers that the step fills; those of the batch come with each call."""
        if not names:
            return
        objects = _with_shared(walk_objects(step, list(args)))
        held = {n: x for n, x, _ in objects.contents if isinstance(x, CONTAINERS)}
        _check_known([name for name in names if name not in held], "container")
        given = [argument_names(step, len(args))[i] for i in batch_indices(args)]
        prefixes = tuple(f"{name}." for name in given)
        self.filled = {name: held[name] for name in names}
        self._filled = {
            name: slots_of(objects.contents, held[name])[0]
            for name in names
            if not f"{name}.".startswith(prefixes)
        }
        self._watch_holders(self._filled, objects)

    def _watch_holders(self, slots: Mapping[str, Slot], objects: ObjectGraph) -> None:
        """Watch whether lists and dictionaries with places are replaced."""
        found = containers(objects.contents)
        for name in slots:
            holder = slots[name].holder
            while id(holder) in found and id(holder) not in self._containers:
                slot = found[id(holder)][0]
                self._containers[id(holder)] = name, slot, holder
                holder = slot.holder

    def sinks(self) -> dict[str, Any]:
        """Return the current files and writers to which the step writes, by name."""
        return {name: slot.get() for name, slot in (self._sinks | self._given).items()}

    def value(self, name: str) -> Any:
        """Return a number as it is now; its first value if it does not exist yet."""
        value = self._sources[name].get()
        return self.program.initial.get(name) if value is None else value

    def read(self, numbers: Mapping[str, Any]) -> list[Change]:
        """Evaluate the program for one step.

        Args:
            numbers: The batch's numbers by name; all others are read where they are held.

        Returns:
            The conditions whose outcome differs from that at capture.
        """
        other = next(self._others_held(), None)
        if other is not None:
            return [other]
        program = self.program
        if not program.rows and not program.conditions and not program.writes:
            return []
        names = program.inputs
        values = program.run({n: numbers[n] if n in numbers else self.value(n) for n in names})
        self._new = program.written(values)
        return [
            Change(_text(program.text(Reference(each.row)), each.source), each.expected, value)
            for each, value in program.broken(values)
        ]

    def _others_held(self) -> Iterator[Change]:
        """Yield numbers of the user's objects whose kind differs from that at capture."""
        for name, slot, holder in self._containers.values():
            if held_in(slot) is not holder:
                yield Change(f"what holds {name}", holder, held_in(slot))
        for name, slot in self._filled.items():
            if type(held_in(slot)) is not type(self.filled[name]):
                yield Change(name, self.filled[name], held_in(slot))
        for name, slot in self._empty.items():
            if slot.get() is not None:
                yield Change(name, None, slot.get())
        for name, slot, kind in self._unread:
            if type(slot.get()) is not kind:
                yield Change(f"the type of {name}", kind, type(slot.get()))
        for name, slot in self._absent:
            if holds(slot):
                yield Change(name, None, slot.get())
        for name, now in self.sinks().items():
            if now is not None and not isinstance(now, _CALLED) and not may_be_told(now):
                yield Change(name, "a file or writer", now)

    def order_states(self) -> None:
        """Put keys of optimizer states in the order of eager steps, before and in the first call.

        It is done before the call, too, since a loaded checkpoint adds numbers after the tensors,
        and guards would then hold that order.
        """
        for state, keys in self._states:
            put_in_order(state(), keys)

    def write(
        self, effects: Sequence[Mapping[str, Any]], batch: Sequence[ObjectGraph] = ()
    ) -> dict[str, Any]:
        """Write the results of the last step into the user's objects; step its schedules.

        Args:
            effects: The step's effects, including numbers that it computes from data.
            batch: What the batch's arguments hold.

        Returns:
            The objects that the step returns and that existed before it, by name.
        """
        held = {name: slot.get() for name, slot in self._held.items()}
        sets = (effect["set"] for effect in effects if "set" in effect)
        told = {name: value_of(value) for name, value in sets}
        for name, value in {**self._new, **told}.items():
            if isinstance(value, Exception):
                raise value
            self._slots[name].set(value)
        self._new = {}
        assign(effects, self._assigned, self._sources, batch)
        given = {name: holder for each in batch for name, holder, _ in each.contents}
        held |= {name: given[name] for name in held if name in given}
        self.order_states()
        self._states = []
        ordered = {name: slot.get() for name, slot in self._ordered.items()} | given
        if self.filled:
            fill(effects, given | {name: slot.get() for name, slot in self._filled.items()})
        for name, keys in (each["order"] for each in effects if "order" in each):
            if name in ordered:
                put_in_order(ordered_keys(ordered[name]) or {}, keys)
        found = {name: slot_of_name(each, name) for each in batch for name in self._sinks}
        self._given = {name: slot for name, slot in found.items() if slot is not None}
        stepped = [effect["schedule"] for effect in effects if "schedule" in effect]
        for name, schedule in self._schedules:
            given = next((each for each in stepped if each[0] == name), None)
            if given is None:
                schedule.step()
                continue
            stepped.remove(given)
            _, values, named = given
            schedule.step(*map(value_of, values), **{key: value_of(x) for key, x in named})
        return held


def _orders_of_states(
    orders: Mapping[str, list[Any]], sources: Iterable[Source], step: Callable[..., Any],
    args: Sequence[Any],
) -> tuple[list[tuple[Callable[[], dict[Any, Any]], list[Any]]], list[str]]:  # fmt: skip
    """Return parameter states with the order of their keys, and the names of all others.

    Args:
        orders: Keys by name.
        sources: The sources of the graph.
        step: The user's step.
        args: Its arguments.
    """
    if not any(".state." in f".{name}" for name in orders):
        return [], [*orders]
    parameters = {each.name: each.get() for each in sources if each.kind == "parameter"}
    stateful = walk_objects(step, list(args)).stateful
    owners = state_owners([f"{name}." for name in orders], parameters, stateful)
    found = {name: owners[f"{name}."] for name in orders if f"{name}." in owners}
    return [(found[name].state, orders[name]) for name in found], [
        name for name in orders if name not in found
    ]


def _held_slots(
    step: Callable[..., Any], args: Sequence[Any], names: Sequence[str]
) -> dict[str, Slot]:
    """Return the places of objects that the step returns, by name."""
    if not names:
        return {}
    objects = _with_shared(walk_objects(step, list(args)))
    held = objects_by_name(objects.contents)
    _check_known([name for name in names if name not in held], "object")
    contents = objects.contents
    # An object that no place holds, such as a hook's, stays as it is.
    return {n: next(iter(slots_of(contents, held[n])), Slot([held[n]], 0)) for n in names}


def _with_shared(objects: ObjectGraph) -> ObjectGraph:
    """Return an object graph with the containers of classes and modules among its contents."""
    objects.contents += shared_containers(objects)
    return objects


def _check_known(missing: Sequence[str], what: str) -> None:
    if missing:
        raise MismatchError(
            f"the graph was captured from another step: the {what} {shown(missing[0])} is not in "
            "this step's objects.\nCapture and plan this step again.",
            code="E505",
            details={"missing": list(missing[:20])},
        )


def _sink_slots(step: Callable[..., Any], args: Sequence[Any], graph: Graph) -> dict[str, Slot]:
    """Return where the sinks are to which a graph's step writes; a rank may have None there.

    Raises:
        FileError: E402, if the graph makes a call that no step may make.
    """
    effects = graph.step_notes.get("effects", [])
    told = dict.fromkeys((each["tell"][0], each["tell"][1]) for each in effects if "tell" in each)
    if not told:
        return {}
    objects = walk_objects(step, list(args))
    known = told_functions(users_code(step, objects.seen.values()).functions, objects)
    of_functions = {
        name: Slot(*known[name]) for name, method in told if not method and name in known
    }
    slots = {name: of_functions.get(name) or slot_of_name(objects, name) for name, _ in told}
    _check_known([name for name, slot in slots.items() if slot is None], "file or writer")
    for name, method in told:
        slot = slots[name]
        value = None if slot is None else slot.get()
        is_called = name in of_functions and not method and is_telling(name.rpartition(".")[2])
        is_other = method.startswith("_") or not method or not may_be_told(value)
        if value is not None and is_other and not is_called:
            raise FileError(f"a step does not call {method!r:.80} of {shown(name)}")
    return {name: slot for name, slot in slots.items() if slot is not None}


def _schedules(
    step: Callable[..., Any], args: Sequence[Any], graph: Graph
) -> list[tuple[str, LRScheduler]]:
    """Return the schedules, with names, that each rank steps after the step."""
    names = graph.step_notes.get("schedules", [])
    if not names:
        return []
    stateful = {entry.name: entry.value for entry in walk_objects(step, list(args)).stateful}
    found = [(name, stateful.get(name)) for name in names]
    missing = [name for name, each in found if not isinstance(each, LRScheduler)]
    if missing:
        raise MismatchError(
            f"the graph was captured from another step: {shown(missing[0])} is not a schedule of "
            "this one.\nCapture and plan this step again.",
            code="E505",
        )
    return [(name, each) for name, each in found if isinstance(each, LRScheduler)]


def _text(condition: str, source: str | None) -> str:
    """Return what a condition compares, if that is short, and the user's line."""
    told = condition if len(condition) <= _SHORT else "what is compared"
    return f"{told} ({source})" if source else told


def _numbers_of(graph: Graph) -> set[str]:
    return {
        op.name
        for op in graph.ops
        if op.kind == "input" and (op.outputs[0].dtype or "").startswith("host.")
    }
