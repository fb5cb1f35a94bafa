"""The sources of a step: every value that exists before it runs, by name.

A name is the path from the step's own parameters, so it is the same on every rank and in every
process: "model.h.0.weight", "optimizer.state.model.h.0.weight.exp_avg",
"optimizer.param_groups.0.lr", "batch.tokens". Capture makes a source op for each, and ranks bind
the ops to live values; both name them by this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from pardnn.backends.torch.user_step.held_numbers import (
    StateOwner,
    named_places,
    state_owners,
    with_tensor_names,
)
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, holds_state, walk_objects
from pardnn.backends.torch.user_step.shards import mark_if_shard
from pardnn.backends.torch.user_step.slots import Entry, Slot, set_gradient
from pardnn.errors import UnsupportedError
from pardnn.graph.ir import Graph, Op, is_in_group

SourceKind = Literal["parameter", "buffer", "state", "input"]
_ORDER = {"parameter": 0, "buffer": 1, "state": 2, "input": 3}


@dataclass(frozen=True, slots=True)
class Source:
    """A value that exists before the step, and where it is held.

    Attributes:
        name: The name of its source op.
        kind: "parameter", "buffer", "state" (optimizer state and gradients kept across steps), or
            "input" (batch and hyperparameters, read at every step).
        slots: Every place that holds it; a tied parameter has several. Empty for a gradient.
        parameter: For a gradient, its parameter; otherwise None.
    """

    name: str
    kind: SourceKind
    slots: tuple[Slot, ...]
    parameter: torch.Tensor | None = None

    def get(self) -> Any:
        """Return the live tensor or number; None if it does not exist yet or any more."""
        if self.parameter is not None:
            return self.parameter.grad
        try:
            return self.slots[0].get()
        except (LookupError, AttributeError, TypeError):  # None has taken the place of a tuple
            return None

    def set(self, value: Any) -> None:
        """Make `value` the live value in every slot; a parameter stays a `Parameter`.

        A real tensor keeps its identity and takes over the storage and shape of `value`. A fake,
        meta or missing one is replaced, including as a key of optimizer state.
        """
        old = self.get()
        if _adopts(old, value):
            old.data = value
            mark_if_shard(old)
            return
        if self.parameter is not None:
            set_gradient(self.parameter, value)
            return
        if isinstance(old, torch.nn.Parameter) and not isinstance(value, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=old.requires_grad)
        for slot in self.slots:
            slot.set(value)


def mark_on_meta(tensor: Any) -> None:
    """Mark a tensor as standing in for one on the meta device, for `is_on_meta`."""
    tensor._pardnn_on_meta = True


def is_on_meta(tensor: Any) -> bool:
    """Whether a tensor is on the meta device, without data or a record of it."""
    return isinstance(tensor, torch.Tensor) and getattr(tensor, "_pardnn_on_meta", tensor.is_meta)


def _adopts(old: Any, value: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if (present := getattr(type(old), "present_class", None)) is not None:
        old.__class__ = present  # it gets data, see `absent` and `shards`
    plain = type(old) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and old.dtype == value.dtype and old.device == value.device


class WholeTensor(NamedTuple):
    """A user's tensor as it would be on one device, of which a rank holds a shard or nothing.

    Attributes:
        shape: The shape of the whole tensor.
        strides: The strides of the whole tensor, in elements.
        storage: A negative id, equal for tensors that shared their storage at first.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int


WholeOf = Callable[[torch.Tensor], WholeTensor | None]
"""Returns the whole tensor that a live one stands for; None if it is the whole itself."""


def is_whole(_tensor: torch.Tensor) -> None:
    """Return None for every tensor, as before any rank has taken its shards."""


def sources(
    step: Callable[..., Any], args: Sequence[Any], graph: Graph | None = None
) -> tuple[Source, ...]:
    """Find the sources of `step(*args)`: parameters first, then buffers, state and inputs.

    Args:
        step: The user's step.
        args: Its arguments, with the example batch.
        graph: If given, optimizer state, gradients and attributes of modules that the graph names
            and that do not exist yet are sources too; their `get` returns None until they are set.

    Returns:
        The sources, in an order that depends only on the step's code and arguments.

    Raises:
        UnsupportedError: E801, if an argument cannot be followed from step to step.
    """
    found = sources_of(walk_objects(step, list(args)), batch_indices(args))
    return (*found, *_missing(found, step, args, graph)) if graph is not None else found


def names_by_id(
    sources: Mapping[str, Source], passed: Collection[str], *, is_asked: bool
) -> Callable[[], dict[int, str]]:
    """Return a function that finds by id the names of tensors that a step's objects hold now.

    Args:
        sources: The sources of the step, by name.
        passed: Names of those that the batch holds.
        is_asked: Whether the step may ask which object a tensor is; otherwise only parameters
            count, which a graph reads differently from tensors of a batch.
    """
    own = [x for x in sources.values() if is_asked or x.kind == "parameter"]
    own = [source for source in own if source.name not in passed]

    def find() -> dict[int, str]:
        return {id(x): s.name for s in own if isinstance(x := s.get(), torch.Tensor)}

    return find


def batch_indices(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of the arguments that hold no model and no optimizer: the batch."""
    return tuple(i for i, arg in enumerate(args) if not holds_state(arg))


def sources_of(objects: ObjectGraph, batch: Sequence[int]) -> tuple[Source, ...]:
    """Return the sources in an object graph, in the order of `sources`.

    Args:
        objects: The object graph of the step.
        batch: Indices of the arguments that are the batch.

    Raises:
        UnsupportedError: E801, if an argument cannot be followed from step to step.
    """
    for entry in objects.arrays:
        if entry.argument in batch:
            is_array = isinstance(entry.value, np.ndarray)
            kind, instead = (
                ("array", "torch.from_numpy(array)") if is_array else ("number", "number.item()")
            )
            raise UnsupportedError(
                f"argument {entry.name!r} is a NumPy {kind}: converted inside the step it would\n"
                f"be frozen in the graph. Pass {instead} instead.",
                details={"argument": entry.name},
            )
    names: dict[int, str] = {}
    made = [_tensor_source(group, batch, names) for group in _groups(objects, batch)]
    made += [
        Source(entry.name, "input", (entry.slot,))
        for entry in objects.numbers
        if is_live_number(entry, batch)
    ]
    made = [_named(source, names) for source in made]
    return tuple(_unique(sorted(made, key=lambda source: _ORDER[source.kind])))


def _groups(objects: ObjectGraph, batch: Sequence[int]) -> Iterator[list[Entry]]:
    """Group entries by tensor; those of the batch are kept apart from all others."""
    groups: dict[int, list[Entry]] = {}
    for entry in objects.tensors:
        groups.setdefault(id(entry.value), []).append(entry)
    for group in groups.values():
        passed = [entry for entry in group if entry.argument in batch]
        if passed and _kind(group, batch) != "parameter":
            yield from _given_as_one(passed)
            group = [entry for entry in group if entry.argument not in batch]
        if group:
            yield group


def _given_as_one(passed: list[Entry]) -> Iterator[list[Entry]]:
    """Yield the places of one batch tensor; those that a traced step filled come separately."""
    given = getattr(passed[0].value, "_pardnn_places", None)
    if given is None:
        yield passed
        return
    if own := [entry for entry in passed if _place(entry.slot) in given]:
        yield own
    yield from ([entry] for entry in passed if _place(entry.slot) not in given)


def mark_places(placeholder: Any, slots: Iterable[Slot]) -> None:
    """Record in a placeholder into which places it was put."""
    placeholder._pardnn_places = frozenset(map(_place, slots))


def _place(slot: Slot | None) -> tuple[Any, ...] | None:
    return None if slot is None else (id(slot.holder), slot.key, slot.path)


def setting_entries(objects: ObjectGraph, batch: Sequence[int]) -> dict[str, Entry]:
    """Return where plain values are held on which a graph may rely: flags, counts and texts.

    Args:
        objects: The object graph of the step.
        batch: Indices of the arguments that are the batch.
    """
    names: dict[int, str] = {}
    if any("<" in entry.name for entry in objects.numbers):
        for group in _groups(objects, batch):
            _tensor_source(group, batch, names)
    return {
        with_tensor_names(entry.name, names): entry
        for entry in objects.numbers
        if not (isinstance(entry.value, float) and is_live_number(entry, batch))
        and (entry.argument in batch or is_in_group(entry.name))
    }


def is_live_number(entry: Entry, batch: Sequence[int]) -> bool:
    """Whether a number may be read at every step: one of the batch or of an optimizer's groups.

    Ints are read if no call needs the number itself; otherwise they are settings.
    """
    # An enum's int is more than a number.
    if entry.slot is None or not (isinstance(entry.value, float) or type(entry.value) is int):
        return False
    return isinstance(entry.owner, torch.optim.Optimizer) or entry.argument in batch


def _tensor_source(group: list[Entry], batch: Sequence[int], names: dict[int, str]) -> Source:
    # What an optimizer updates is found in it, whatever the batch holds at later calls.
    group = sorted(group, key=lambda entry: entry.argument in batch)
    named = next((e for e in group if isinstance(e.owner, torch.nn.Module)), group[0])
    tensor = named.value
    if type(tensor).__name__ == "DTensor" or isinstance(tensor, torch.nn.UninitializedParameter):
        raise UnsupportedError(
            f"{named.name!r} is a {type(tensor).__name__}; capture takes plain tensors.\n"
            "Initialise lazy modules, and pass the model as it is on one device.",
            details={"tensor": named.name},
        )
    name = re.sub(r"param_groups\.(\d+)\.params\.", r"params.\1.", named.name)
    names[id(tensor)] = name
    slots = tuple(entry.slot for entry in group if entry.slot is not None)
    return Source(name, _kind(group, batch), slots)


def _kind(group: list[Entry], batch: Sequence[int]) -> SourceKind:
    optimized = [e for e in group if isinstance(e.owner, torch.optim.Optimizer)]
    if any(re.search(r"param_groups\.\d+\.params\.", e.name) for e in optimized):
        return "parameter"
    is_given = all(entry.argument in batch for entry in group)
    if any(isinstance(entry.value, torch.nn.Parameter) for entry in group) and not is_given:
        return "parameter"
    if any(isinstance(entry.owner, torch.nn.Module) for entry in group):
        return "buffer"
    if optimized:
        return "input" if "param_groups." in optimized[0].name else "state"
    return "input" if any(entry.argument in batch for entry in group) else "buffer"


def _named(source: Source, names: dict[int, str]) -> Source:
    return Source(with_tensor_names(source.name, names), source.kind, source.slots)


def _unique(made: list[Source]) -> Iterator[Source]:
    """Give each source a unique name; what an argument holds is found by the argument's name."""
    counts: dict[str, int] = {}
    names: dict[int, str] = {}
    for i, source in sorted(enumerate(made), key=lambda each: each[1].kind != "input"):
        count = counts[source.name] = counts.get(source.name, 0) + 1
        names[i] = source.name if count == 1 else f"{source.name} ({count})"
    for i, source in enumerate(made):
        yield Source(names[i], source.kind, source.slots)


def outside(containers: Collection[str], found: Iterable[Source]) -> list[Source]:
    """Return the sources that are in none of some containers, by name."""
    prefixes = tuple(f"{name}." for name in containers)
    return [source for source in found if not source.name.startswith(prefixes)]


def state_source(name: str, owner: StateOwner) -> Source:
    """Return the source of a state that may not exist yet, and make room for it."""
    parameter = owner.parameter if owner.optimizer is None else None
    return Source(name, "state", owner.slots(), parameter)


def gradient_source(parameter: Source) -> Source:
    """Return the source of a gradient that is kept from step to step."""
    return Source(f"{parameter.name}.grad", "state", (), parameter.get())


def registration(source: Source, objects: ObjectGraph) -> dict[str, bool]:
    """Return how a buffer is registered, as an argument of its source op; nothing if it is not.

    Args:
        source: A buffer that the first step created.
        objects: The object graph after it.
    """
    for entry in objects.stateful:
        if isinstance(entry.value, torch.nn.Module):
            for slot in source.slots:
                if slot.holder is entry.value._buffers:
                    return {"persistent": slot.key not in entry.value._non_persistent_buffers_set}
    return {}


def _buffer_holder(module: torch.nn.Module, key: str, op: Op) -> Any:
    """Return what will hold a buffer that the first step creates, as after an eager step."""
    persistent = (op.arguments or {}).get("persistent")
    if persistent is False:
        module._non_persistent_buffers_set.add(key)
    is_registered = persistent is not None or key in module._buffers
    return module._buffers if is_registered else module


def _missing(
    found: Sequence[Source], step: Callable[..., Any], args: Sequence[Any], graph: Graph
) -> list[Source]:
    """Return the sources of state that the graph names and the first step would create."""
    existing = {source.name for source in found}
    ops = {op.name: op for op in graph.ops if op.kind in ("buffer", "state")}
    # In the graph's order, in which the first step creates them.
    wanted = [name for name in ops if name not in existing]
    parameters = {source.name: source for source in found if source.kind == "parameter"}
    made: dict[str, Source] = {}
    objects = walk_objects(step, list(args))
    stateful = objects.stateful
    for entry in stateful:
        if isinstance(entry.value, torch.nn.Module):
            for name in wanted:
                prefix, _, key = name.rpartition(".")
                if prefix == entry.name:
                    holder = _buffer_holder(entry.value, key, ops[name])
                    made[name] = Source(name, "buffer", (Slot(holder, key),))
    tensors = {name: source.get() for name, source in parameters.items()}
    for name, owner in state_owners(wanted, tensors, stateful).items():
        made.setdefault(name, state_source(name, owner))
    for entry in stateful:
        if isinstance(entry.value, torch.optim.Optimizer):
            # State of all parameters together, such as MADGRAD's count: `self.state["k"]`.
            of_all = {n: n.removeprefix(f"{entry.name}.state.") for n in wanted if n not in made}
            shared = {n: key for n, key in of_all.items() if key != n and "." not in key}
            slots = {n: Slot(entry.value.state, key) for n, key in shared.items()}
            made |= {n: Source(n, "state", (slot,)) for n, slot in slots.items()}
    for name, slot, value in named_places(objects):
        is_number = name in ops and name not in made and type(value) in (int, float)
        if is_number and (ops[name].arguments or {}).get("initial") == value:
            made[name] = Source(name, "buffer", (slot,))
    return [made[op.name] for op in graph.ops if op.name in made]


def tensor_names(found: Iterable[Source]) -> dict[int, str]:
    """Return the names of tensors by id."""
    live = ((source.get(), source.name) for source in found)
    return {id(value): name for value, name in live if isinstance(value, torch.Tensor)}


def held_gradients(found: Sequence[Source]) -> list[Source]:
    """Return the sources of the gradients that parameters hold now."""
    parameters = [source for source in found if source.kind == "parameter"]
    held = [gradient_source(source) for source in parameters]
    return [source for source in held if source.get() is not None]
