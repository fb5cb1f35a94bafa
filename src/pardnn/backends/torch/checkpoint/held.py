"""Numbers of the user's objects in a checkpoint: what the step counts, and what it only reads.

Problem: each graph reads its own numbers, and if different calls alternate, the running graph may
    not be the one that counts.
Idea: save the numbers of all graphs so far. Loaded numbers go to their places in the objects, by
    name, whether a graph already reads them or one captured later will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pardnn.backends.torch.checkpoint.left import makes
from pardnn.backends.torch.checkpoint.python_values import decode, encode
from pardnn.backends.torch.ops.host_program import host_program
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.user_step.held_numbers import slots_of_numbers
from pardnn.backends.torch.user_step.sources import Source
from pardnn.errors import MismatchError, shown
from pardnn.graph.ir import Graph


class HeldNumbers:
    """The numbers that the graphs of a step read of the user's objects.

    Args:
        graphs: Returns all graphs of the step, each with its binding.
    """

    def __init__(self, graphs: Callable[[], Iterable[tuple[Graph, Binding]]]) -> None:
        self._graphs = graphs
        # For numbers set by a load: their original value, and the value that was set.
        self._before: dict[str, tuple[Any, Any]] = {}

    def values(self, binding: Binding) -> dict[str, Any]:
        """Return them as JSON types, by name, and those that a load has set for later graphs.

        Args:
            binding: The binding of the user's objects.
        """
        now = {name: source.get() for name, source in self._places(self._before, binding).items()}
        return {name: encode(value, name) for name, value in now.items() if value is not None}

    def set(self, values: Mapping[str, Any], binding: Binding) -> None:
        """Give the user's objects the numbers of a checkpoint.

        A number that an earlier load has set, and that this checkpoint does not have, was not yet
        changed by any call when it was saved: it gets its original value back, unless something has
        changed it since.

        Args:
            values: The result of `values`, checked.
            binding: The binding of the user's objects.
        """
        places = self._places({**self._before, **values}, binding)
        for name, value in values.items():
            new, place = decode(value), places[name]
            self._before[name] = self._before.get(name, (place.get(),))[0], new
            place.set(new)
        for name in self._before.keys() - values.keys():
            before, loaded = self._before.pop(name)
            if name in places and places[name].get() == loaded:
                places[name].set(before)

    def check(self, values: Mapping[str, Any], objects: Mapping[str, Any], binding: Binding,
              what: str, left: Iterable[str]) -> None:  # fmt: skip
        """Check that a checkpoint has all counted numbers, and that others have places.

        Args:
            values: The values of the checkpoint.
            objects: Its values of optimizers and schedulers, which hold numbers, too.
            binding: The binding of the user's objects.
            what: Names the checkpoint.
            left: Places of other values that the checkpoint puts into the objects, see `left`.

        Raises:
            MismatchError: E520, naming the first number.
        """
        places = self._places(values, binding)
        if lacking := [n for n in values if n not in places and not makes(left, n)]:
            raise MismatchError(
                f"{what} holds the number {shown(lacking[0])} ({len(lacking)} such), but the "
                "objects of the step have no place for it.\nBuild them as they were when it was "
                "saved. If a call of the step creates that place, make one call before `load`, "
                "which undoes what the call changes.",
                code="E520",
                details={"unexpected": lacking[:20]},
            )
        own = tuple(f"{name}." for name in objects)
        if lost := [n for n in self._counted() if n not in values and not n.startswith(own)]:
            raise MismatchError(
                f"{what} was saved before the first call that changes {shown(lost[0])} "
                f"({len(lost)} such), but calls have changed it since.\nLoad it in a new run, "
                "before any call.",
                code="E520",
                details={"missing": lost[:20]},
            )

    def _known(self) -> dict[str, Source]:
        return {n: s for _, each in self._graphs() for n, s in each.held_numbers().items()}

    def _counted(self) -> set[str]:
        """Return the names of the numbers that some graph so far writes."""
        return {name for graph, _ in self._graphs() for name, _ in host_program(graph).writes}

    def _places(self, names: Iterable[str], binding: Binding) -> dict[str, Source]:
        """Return the places of numbers, whether a graph reads them so far or not."""
        if not (names := list(names)):
            return self._known()
        live = {name: source.get() for name, source in binding.sources.items()}
        tensors = {name: value for name, value in live.items() if isinstance(value, torch.Tensor)}
        slots = slots_of_numbers(names, binding.objects(), tensors, names)
        found = {name: Source(name, "input", (slot,)) for name, slot in slots.items()}
        # A key with a dot may be a path through a container that does not exist yet.
        there = {
            n: s for n, s in found.items() if "." not in str(slots[n].key) or s.get() is not None
        }
        return there | self._known()
