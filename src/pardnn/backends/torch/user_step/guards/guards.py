"""Guards: the Python values on which a captured step relies, compared at every call.

Problem: a traced step is one path through the user's code, and plain Python values decide which
one: flags and counts among the arguments, attributes of modules such as `training` or `p`,
configurations, closure cells, globals, class attributes, `requires_grad`.

Idea: guards as in TorchDynamo. It guards what its compiled frames read; here no frame is compiled,
    so every value is guarded that the step can reach *and* that code which may run names
    (`used_names`). A guard holds a container and its items at capture. A check compares identities
first, in one pass, and values only if an identity differs.

Complexity: O(values guarded); `python -m bench guards` measures a call for a GPT-2 of 12 layers
(164 modules, 1,300 containers).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pardnn.backends.torch.user_step.guards.batch import BatchGuards
from pardnn.backends.torch.user_step.guards.content import (
    MODE_GLOBALS,
    ModeGuards,
    environment,
    reads_environment,
    shared_values,
)
from pardnn.backends.torch.user_step.guards.item import Change, ItemGuard, Snapshot, any_key
from pardnn.backends.torch.user_step.guards.library import (
    library_containers,
    library_guards,
    library_modules,
    process_settings,
)
from pardnn.backends.torch.user_step.guards.parameter import ParameterGuards
from pardnn.backends.torch.user_step.guards.walk import GuardWalk
from pardnn.backends.torch.user_step.object_graph import GLOBAL_HOOKS, walk_objects
from pardnn.backends.torch.user_step.references import registrations
from pardnn.backends.torch.user_step.root_names import argument_names
from pardnn.backends.torch.user_step.slots import dotted
from pardnn.backends.torch.user_step.used_names import used_names

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Guards:
    """All guards of a captured step.

    Args:
        step: The user's step.
        args: Its arguments, with the example batch.
        batch: Indices of the arguments that are the batch.
        written: Places of numbers that the step itself changes, `held_numbers.place`.
        left: What the step itself leaves in places, and also holds for, by place.
        live: Names of numbers that are read at every call.
        filled: Containers that the step only fills, by name.
        read: Names of the large contents that the step reads.

    Attributes:
        of_batch: The guards on what the batch holds.
        of_parameters: The guards on properties of parameters.
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
        read: Collection[str] = (),
    ) -> None:
        arguments = list(args)
        objects = walk_objects(step, arguments)
        used = used_names(step, objects.seen.values())
        walk = GuardWalk(used, written, left, {id(each): each for each in filled.values()})
        self._guards, self._contents, self._classes = walk.guards, walk.contents, walk.classes
        self._attributes, self._pointed = walk.attributes, walk.pointed
        self._modes = ModeGuards()
        if reads_environment(used.of_users):  # it may compute the names
            known = environment()
            self._guards.append(ItemGuard("os.environ", known, list(known), any_key))
        else:
            for name, get in shared_values(used.names):
                self._attributes.add(name, get)
        for name, get in (*process_settings(used.of_users), *registrations(used.of_users)):
            self._attributes.add(name, get)
        names = argument_names(step, len(arguments))
        for i, name in enumerate(names):
            if i not in batch:
                walk.walk(name, arguments[i])
        walk.walk("", step)
        for function in used.functions:
            walk.walk("", function)
        self._guards += [ItemGuard(name, *held) for name, held in MODE_GLOBALS.items()]
        for name, hooks in GLOBAL_HOOKS.items():
            self._guards.append(ItemGuard(name, hooks, list(hooks), any_key))
            for i, hook in enumerate(hooks.values()):
                walk.walk(dotted(name, i), hook)
        while walk.weak:  # last, so that what is also held strongly comes first
            walk.walk(*walk.weak.pop(0), is_weak=True)
        reached = list(walk.seen.values())
        modules = library_modules(used, reached)
        for name, container in library_containers(used, modules):
            walk.walk(name, container)
        self._guards += library_guards(used, reached, modules)
        walk.contents.hold(read)
        walk.seen.clear()  # guards hold the walk, but must not keep objects alive
        self._snapshot = Snapshot(self._guards, self._pointers())
        self.of_parameters = ParameterGuards([*walk.parameters, *walk.leaves])
        self.of_batch = BatchGuards(step, names, used, written, live, filled)
        self.of_batch.hold({i: arguments[i] for i in batch})

    def changes(self, batch: dict[int, Any], *, is_told: bool = False) -> list[Change]:
        """Return what differs from the capture, in the order of the walk.

        Args:
            batch: This call's batch by index of the argument.
            is_told: As for `ParameterGuards.changes`.
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
        found += self.of_parameters.changes(is_told=is_told)
        found += self.of_batch.changes(batch)
        return found

    def release(self) -> None:
        """Hold each guarded object as often as at any other call, whatever was compared."""
        self._snapshot.release()

    def accept(self, exchanged: Sequence[tuple[Any, Any]]) -> None:
        """Expect other objects where they are in the places of some, whose content they have.

        Args:
            exchanged: Pairs of an old object and the new one.
        """
        now = {id(old): new for old, new in exchanged}
        for guard in self._guards:
            guard.accept(now)
        for guards in (self._attributes, self._pointed):
            guards.accept(now)
        self._snapshot = Snapshot(self._guards, self._pointers())

    def large_contents(self) -> list[tuple[str, Any]]:
        """Return names and values of what is compared only if the step reads it."""
        return self._contents.large

    def _pointers(self) -> list[tuple[int, int]]:
        return [*self._classes.pointers(), *self._pointed.pointers()]
