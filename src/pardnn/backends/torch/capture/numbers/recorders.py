"""Objects that a step only fills or writes to, as far as its traces have shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from pardnn.backends.torch.capture.numbers.containers import (
    Filled,
    OtherUse,
    alike,
    filled_containers,
)
from pardnn.backends.torch.capture.refusals.changed_state import changed_state
from pardnn.backends.torch.capture.restore import restore
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.shared_containers import shared_containers
from pardnn.backends.torch.user_step.sinks import is_outside, sinks_of
from pardnn.backends.torch.user_step.slots import GlobalName
from pardnn.errors import PardnnError, UnsupportedError


class Recorders:
    """The containers and sinks that recorders replace while a step is traced.

    Args:
        objects: The object graph before the first trace.
        known: Names of containers that other paths of the step only fill.

    Attributes:
        filled: Containers that the step only fills, by name.
        sinks: Files, progress bars and writers that it only writes to, by name.
        of_classes: Numbers of classes that were there before the first trace.
        shared: The containers of classes and modules then, see `shared_containers`.
    """

    def __init__(self, objects: ObjectGraph, known: Collection[str] = ()) -> None:
        self._objects, self._known = objects, known
        spaces = [(x.namespace, x.name) for _, x, _ in objects.contents if type(x) is GlobalName]
        self.of_classes = {(each, key) for each, key in spaces if isinstance(each, type)}
        self.shared = shared_containers(objects)
        self._others: set[str] = set()  # names of objects with other uses
        self._refused: PardnnError | None = None
        self.filled: dict[str, Filled] = {}
        self.sinks: dict[str, Any] = {}

    def begin(self) -> None:
        """Find the sinks; the filled containers are known only after the first step.

        Containers of classes and modules get back what they held: no walk notes that.
        """
        restore(self.shared)
        sinks = sinks_of(self._objects)
        self.sinks = {n: x for n, x in sinks.items() if n not in self._others or is_outside(x)}
        self.filled = {}

    def find_filled(self, stood_for: Mapping[int, torch.Tensor]) -> dict[str, Filled]:
        """Return the containers that the first step has filled; see `filled_containers`."""
        others = self._others
        return filled_containers(self._objects, others, self._known, stood_for, self.shared)

    def take_filled(self, stood_for: Mapping[int, torch.Tensor]) -> dict[str, Any]:
        """Take the containers that the first step has filled, and restore their content.

        Args:
            stood_for: See `filled_containers`.

        Returns:
            What it has put into each; see `Filled.added`.
        """
        self.filled = self.find_filled(stood_for)
        restore([(name, each.holder, each.content) for name, each in self.filled.items()])
        return {name: each.added for name, each in self.filled.items()}

    def learn(self, error: OtherUse | PardnnError) -> None:
        """Learn from what ended a trace.

        Raises:
            PardnnError: Recorders did not cause it.
        """
        if isinstance(error, OtherUse):
            found = alike(error.name, [*self.filled, *self.sinks])
            if found <= self._others:  # every later trace would end in the same way
                raise changed_state(sorted(found)) from error
            self._others |= found
            return
        # A recorder may be in the way of the user's code.
        recorders = {*self.filled} | {n for n, x in self.sinks.items() if not is_outside(x)}
        if self._refused is not None or not recorders:
            raise self._refused or error from error.__cause__
        self._refused = error if isinstance(error, UnsupportedError) else None
        self._others |= recorders
