"""What the steps of a capture assign: restored after the first trace, and applied after each step.

Problem: the second trace, which becomes the graph, would already find what the first one assigns.
The assignment would never reach the user's object, and later steps would take the old path.

Idea: the old values are restored after the first trace, so that the next one makes the assignments
again. Ranks make them after each step. A graph holds for what a place held at capture, and the
guards of the next call see the new value, unless the step never reads the place. Another trace
shows this: it begins with what a step has left there, and must be the same. It may also be the same
although the step reads a plain value there, as in `if self.kind is None: self.kind = "a"`; then the
graph holds for both values.

Complexity: two more traces if a step leaves plain values, fresh objects or tensors, and one more
for each of the latter that is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from pardnn.backends.torch.capture.assigned.contents import Leaf, agree, recorded
from pardnn.backends.torch.capture.assigned.differences import GONE, Assigned, is_there
from pardnn.backends.torch.capture.assigned.key_orders import note_orders
from pardnn.backends.torch.capture.assigned.stand_ins import stand_in
from pardnn.backends.torch.capture.numbers.left_behind import of_optimizers
from pardnn.backends.torch.capture.refusals.changed_state import changed_state, read_again
from pardnn.backends.torch.capture.restore import Changed, restore
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.ops.codec import encode
from pardnn.backends.torch.ops.host_scalars import node_of
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.places import PlaceIndex, Reference
from pardnn.backends.torch.user_step.slots import items_of
from pardnn.errors import UnsupportedError

#: Traces a step again; returns the trace, or None if it fails, and whether it equals a given one.
Again = Callable[[StepTrace], tuple[StepTrace | None, bool]]


class Assignments:
    """The assignments of the first step, undone for the next traces.

    Args:
        first: Trace of the first step.
        kept: Names of tensors that it has made and whose initial values are known.
        walk: Returns the object graph of the step.
    """

    def __init__(
        self, first: StepTrace, kept: Collection[str], walk: Callable[[], ObjectGraph]
    ) -> None:
        self._first, self._walk = first, walk
        self._settled: dict[str, Assigned] = {}
        self._unsettled: set[str] = set()
        self._read: set[str] | None = None
        self._same: set[str] = set()
        self._refusal: UnsupportedError | None = None
        self._kept: dict[str, Assigned] = {}
        self._resized = [n for n, each in first.changed.items() if _is_resized(n, each, kept)]
        # The others were in containers that the step only fills, and are already gone.
        there = {
            name: each
            for name, each in first.assigned.items()
            if is_there(each.change) or each.change.now is None
        }
        for name in [name for name in there if _begins_with(name, kept)]:
            self._kept[name] = there.pop(name)
        first.assigned = there
        for each in there.values():
            put_back(each.change)
        for name, flag in first.trainable.items():
            first.sources[name].get().requires_grad_(not flag)

    def settle(self, settled: ObjectGraph, trace: StepTrace | None = None) -> bool:
        """Start the next traces with the values that only the first trace assigns.

        An example is `self.kind = "causal"`, set when a mask is made at its first use.

        Args:
            settled: What the traces begin with; it is restored, and changed.
            trace: The trace of a later step; None if it failed for want of a value.

        Returns:
            Whether there are any.
        """
        again = trace.assigned if trace else {}
        early = self._settled.keys() & again.keys()
        if early:  # a number that is known only now
            restore(settled.contents)
            for name in early:
                put_back(self._settled.pop(name).change)
            settled.contents[:] = self._walk().contents
            self._unsettled |= early
            return True
        known = self._settled.keys() | again.keys() | self._unsettled
        left = {
            name: each
            for name, each in self._first.assigned.items()
            if name not in known and not each.is_traced
        }
        if left:
            restore(settled.contents)
            for each in left.values():
                _do_again(each)
            settled.contents[:] = self._walk().contents
            self._settled |= left
        return bool(left)

    def unmake(self, settled: ObjectGraph, trace: StepTrace) -> bool:
        """Remove plain numbers that only the first step sets, in new places.

        Args:
            settled: What the traces begin with; it is restored, and changed.
            trace: The trace of a later step.

        Returns:
            Whether there were any.
        """
        is_bound, index = of_optimizers(settled), PlaceIndex(settled)
        made = {
            name: each
            for name, each in self._first.changed.items()
            if each.is_new and type(each.now) in (int, float) and not is_bound(name)
            and name not in trace.changed and name not in self._first.assigned
        }  # fmt: skip
        if made:
            restore(settled.contents)
        for name, change in made.items():
            assert change.slot is not None
            is_named = isinstance(change.slot.key, str)
            content = {"value": encode(change.now, str)} if is_named else None
            place = index.reference(change.slot)
            self._first.assigned[name] = Assigned(change, content, place)
            put_back(change)
        settled.contents[:] = self._walk().contents if made else settled.contents
        return bool(made)

    def unkeep(self, names: Collection[str], settled: ObjectGraph) -> bool:
        """Restore tensors after all because later steps replace them; see `first_use`.

        Args:
            names: The names of the tensors.
            settled: What the traces begin with; it is restored, and changed.

        Returns:
            Whether there were any.
        """
        found = [name for name in self._kept if _begins_with(name, names)]
        if found:
            restore(settled.contents)
            for name in found:
                self._first.assigned[name] = self._kept.pop(name)
                put_back(self._first.assigned[name].change)
            settled.contents[:] = self._walk().contents
        return bool(found)

    def is_settled(self, trace: StepTrace, settled: ObjectGraph, again: Again) -> bool:
        """Find out, once, which places the step reads before it writes them.

        Args:
            trace: The trace of the step that repeats.
            settled: What the traces begin with.
            again: Traces the step once more; see `Again`.

        Returns:
            False if the objects of the step are no longer as the trace left them.

        Raises:
            UnsupportedError: E804, if a step depends on a fresh object that the last one left.
        """
        if self._refusal is not None:  # another selection of numbers does not help
            raise self._refusal
        fresh = {name: each for name, each in trace.assigned.items() if each.is_fresh}
        plain = {name: each for name, each in trace.assigned.items() if _is_plain(each)}
        if self._read is not None or not (fresh or plain):
            return True
        self._read = set()
        if plain and self._does_the_same(plain, trace, settled, again):
            self._same = {*plain}
        if fresh:
            self._find_read(fresh, trace, settled, again)
        restore(settled.contents)
        return False

    def _find_read(
        self, fresh: dict[str, Assigned], trace: StepTrace, settled: ObjectGraph, again: Again
    ) -> None:
        """Find out which places with fresh objects the step reads before it writes them."""
        assert self._read is not None
        groups: dict[str, list[str]] = {}
        for name in fresh:
            groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
        if self._again(fresh, trace, settled, again) is not trace:
            for names in groups.values():
                left = {name: fresh[name] for name in names}
                other = self._again(left, trace, settled, again)
                if other is not trace:
                    self._read |= left.keys()
                    self._refusal = self._refusal or _refusal(left, other)
            if self._refusal is not None:
                raise self._refusal

    def _does_the_same(
        self, plain: dict[str, Assigned], trace: StepTrace, settled: ObjectGraph, again: Again
    ) -> bool:
        """Whether a step is the same when it starts from the plain values that another one left.

        It need not assign them again.
        """
        restore(settled.contents)
        for each in plain.values():
            _do_again(each)
        other, is_same = again(trace)
        if other is None or not is_same:
            return False
        one, two = trace.assigned, other.assigned
        is_rest = one.keys() - plain.keys() <= two.keys() <= one.keys()
        return is_rest and all(agree(one[name].content, two[name].content) for name in two)

    def _again(
        self, left: dict[str, Assigned], trace: StepTrace, settled: ObjectGraph, again: Again
    ) -> StepTrace | None:
        """Trace a step that starts from what another one left; `trace` itself if it does so."""
        restore(settled.contents)
        for name, each in left.items():
            now, slot = each.change.now, each.change.slot
            assert slot is not None
            is_itself = isinstance(now, torch.Tensor) or not each.is_traced
            slot.set(now if is_itself else stand_in(now, name))
        other, is_same = again(trace)
        is_same = is_same and other is not None and trace.assigned.keys() == other.assigned.keys()
        if other is None or not is_same:
            return other
        pairs = ((each, other.assigned[name]) for name, each in trace.assigned.items())
        return trace if all(agree(a.content, b.content) for a, b in pairs) else other

    def check_resized(self, trace: StepTrace) -> None:
        """Reject a step if only its first run changes the length of a list.

        Args:
            trace: The trace of the step that repeats.

        Raises:
            UnsupportedError: E804.
        """
        if lost := [name for name in self._resized if name not in trace.changed]:
            raise changed_state(lost)

    def tell(self, trace: StepTrace) -> None:
        """Note the step's assignments among its effects.

        Args:
            trace: The trace of the step that repeats.

        Raises:
            UnsupportedError: E804, if it assigns something else than the first one.
        """
        first = self._first
        changed = [
            n
            for n, each in trace.assigned.items()
            if n in self._settled or (n not in first.assigned and not _is_same_number(each))
        ]
        assigned = self._settled | dict(trace.assigned)
        changed += [
            n
            for n, each in assigned.items()
            if each.content is None or not agree(each.content, first.assigned.get(n, each).content)
        ]
        changed += [n for n in first.assigned if n not in assigned]
        changed += [n for n in first.trainable if n not in trace.trainable]
        changed += [n for n in trace.trainable if n not in first.trainable]
        if changed:
            lines = (assigned[n].line for n in changed if n in assigned)
            raise changed_state(changed, next(lines, None))
        read = {n for n, each in assigned.items() if not each.is_fresh or n in (self._read or ())}
        same = self._same | {name for name, each in self._settled.items() if _is_plain(each)}
        note_assigned(trace, assigned, read, same)
        note_orders(trace.effects.noted, first.orders, trace.orders)


def note_assigned(
    trace: StepTrace,
    assigned: Mapping[str, Assigned],
    read: Collection[str],
    same: Collection[str] = (),
) -> None:
    """Note assignments among a step's effects, and the parameters that it freezes or frees.

    Args:
        trace: The trace of the step.
        assigned: What it assigns, by name; each has a content.
        read: Names of places that the next step may read.
        same: Names of places that do not change what the step does.
    """
    for name, content in _without_twins(assigned):
        data = recorded(content, trace.effects.recorded)
        is_read = "same" if name in same else name in read
        trace.effects.noted.append({"assign": [assigned[name].place, data, is_read]})
    for name, flag in trace.trainable.items():
        trace.effects.noted.append({"trainable": [name, flag]})


def _without_twins(assigned: Mapping[str, Assigned]) -> Iterator[tuple[str, Any]]:
    """Yield name and content; an object that two places hold appears once."""
    seen: dict[int, Reference | None] = {}
    for name, each in assigned.items():
        now = each.change.now
        if id(now) in seen and each.is_fresh:
            yield name, {"same": seen[id(now)]}
        else:
            seen[id(now)] = each.place
            yield name, each.content


def _is_plain(each: Assigned) -> bool:
    """Whether a plain value was assigned, the same at each run."""
    content = each.content
    return not each.is_fresh and isinstance(content, dict) and "value" in content


def _is_resized(name: str, change: Changed, kept: Collection[str]) -> bool:
    """Whether a list has other items than before, other than added kept tensors.

    Lists that each step fills have been restored by now.
    """
    if change.slot is not None or len(change.now) == len(change.then):
        return False
    added = range(len(change.then), len(change.now))
    return not added or any(f"{name}.{i}" not in kept for i in added)


def _begins_with(name: str, kept: Collection[str]) -> bool:
    """Whether a place holds one of some tensors, or an object with one."""
    return any(f"{each}.".startswith(f"{name}.") for each in kept)


def _refusal(left: dict[str, Assigned], other: StepTrace | None) -> UnsupportedError | None:
    """Return E804 if each step reads a place and refills it, which would capture each call again.

    Args:
        left: What the steps leave in these places, and read.
        other: Trace of a step that starts from it; None if it failed.
    """
    for name, each in left.items():
        again = None if other is None else other.assigned.get(name)
        is_changing = again is not None and not agree(again.content, each.content)
        then = each.change.then
        is_first = then is None or isinstance(then, torch.Tensor)
        if each.is_users and (is_changing or (each.is_traced and not is_first)):
            return read_again(name, each.line, then)
    return None


def put_back(change: Changed) -> None:
    """Restore the value that a place held before."""
    slot = change.slot
    assert slot is not None
    if change.is_new:
        items_of(slot.holder).pop(slot.key, None)
    else:
        slot.set(change.then)


def _is_same_number(each: Assigned) -> bool:
    """Whether a number was assigned that may equal the old one of the first trace."""
    then = isinstance(each.change.then, int | float)
    return then and isinstance(each.content, Leaf) and node_of(each.content.value) is not None


def _do_again(each: Assigned) -> None:
    """Set a place to what the first step left there."""
    slot = each.change.slot
    assert slot is not None
    if each.content == GONE:
        items_of(slot.holder).pop(slot.key)
    else:
        slot.set(each.change.now)


def assigns(trace: StepTrace) -> bool:
    """Whether a step assigns values."""
    return bool(trace.assigned or trace.trainable)


def trainable_flags(trace: StepTrace) -> dict[str, bool]:
    """Return `requires_grad` of each parameter of a trace, by name."""
    named = ((n, s.get()) for n, s in trace.sources.items() if s.kind == "parameter")
    return {n: t.requires_grad for n, t in named if isinstance(t, torch.Tensor) and t.is_leaf}
