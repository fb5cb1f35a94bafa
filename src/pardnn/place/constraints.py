"""Constraints in terms that algorithms know: co-location groups, and devices that can run an op.

Problem: algorithms know that ops of a group share a device, and that an op may run on some devices
only. A pin, a ban and "together" are of this kind. "Apart" is not: it says that no device runs ops
of two of some sets.
Idea: any plan that obeys "apart" gives each device to one of the sets. So devices are assigned
first, each to the set with most work there in a placement made without "apart", by depth-first
search; then only devices that can run an op remain (`sides`). A conflict between constraints is
proven before any algorithm runs (`conflict`): exactly for groups and devices, then for memory and
links by what every plan must hold and send.
Complexity: O(ops K) for each set of constraints that is tried; exponential in the number of "apart"
constraints at worst, ended after `MAX_STEPS`.
Deviations: none; ours.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from pardnn.graph.csr import GraphArrays
from pardnn.place.colocation import colocated
from pardnn.place.ordering.memory_bounded import limits
from pardnn.plan.demands.named import Named
from pardnn.sim.machine import Machine
from pardnn.sim.peak import op_needs, residual_bytes

T = TypeVar("T")

#: Steps of the search for sides of "apart"; then nothing is proven.
MAX_STEPS = 20_000


class Setting(NamedTuple):
    """What constraints are checked against.

    Attributes:
        arrays: The graph.
        machine: Durations and links; infinite seconds where a device cannot run an op.
        capacities: Usable bytes of each device; None is unlimited.
        overwrites: From `first_overwrites`.
    """

    arrays: GraphArrays
    machine: Machine
    capacities: list[int | None]
    overwrites: Int64[ndarray, "w 2"]


class Reduced(NamedTuple):
    """Constraints without "apart" as groups and devices.

    Attributes:
        joined: Group of each op, with "together" applied; not closed.
        group: The same, closed.
        allowed: Whether constraints and durations let a device run a closed group.
    """

    joined: Int64[ndarray, " n"]
    group: Int64[ndarray, " n"]
    allowed: Bool[ndarray, "g k"]


def reduced(setting: Setting, constraints: Sequence[Named]) -> Reduced:
    """Return what constraints mean for groups, without "apart"."""
    arrays, machine = setting.arrays, setting.machine
    joined = _joined(arrays.group, constraints)
    group = colocated(arrays._replace(group=joined), setting.overwrites)
    able = np.isfinite(machine.seconds)[machine.device_class].T.copy()
    for each in constraints:
        ops = [i for row in each.members for i in row]
        here = np.isin(np.arange(machine.num_devices), [*each.devices])
        if each.constraint.kind == "pin":
            able[ops] &= here
        elif each.constraint.kind == "forbid":
            able[ops] &= ~here
    allowed = np.ones((int(group.max()) + 1, machine.num_devices), dtype=bool)
    np.logical_and.at(allowed, group, able)
    return Reduced(joined, group, allowed)


def _joined(group: Int64[ndarray, " n"], constraints: Sequence[Named]) -> Int64[ndarray, " n"]:
    """Return groups, those joined that are to be together; numbered without gaps."""
    root = np.arange(int(group.max()) + 1)
    for each in constraints:
        if each.constraint.kind == "together":
            met = np.unique(root[group[[i for row in each.members for i in row]]])
            root[np.isin(root, met)] = met[0]
    return np.unique(root[group], return_inverse=True)[1].astype(np.int64)


def sides(
    found: Reduced, constraints: Sequence[Named], work: Float64[ndarray, "n k"]
) -> tuple[Bool[ndarray, "g k"] | None, bool]:
    """Return the devices of each group once every device is on one side of each "apart".

    Args:
        found: The other constraints.
        constraints: All of them.
        work: Seconds of each op on each device in a placement to stay close to; zeros if there is
            none.

    Returns:
        The devices, None if no sides were found; and whether the search was complete.
    """
    apart = [each for each in constraints if each.constraint.kind == "apart"]
    num_groups, k = found.allowed.shape
    members = [
        [np.isin(np.arange(num_groups), found.group[list(row)]) for row in each.members]
        for each in apart
    ]
    if any(np.sum(sets, axis=0).max() > 1 for sets in members):
        return None, True
    gain = [np.array([work[list(row)].sum(axis=0) for row in each.members]) for each in apart]
    choices = [(c, d) for c in range(len(apart)) for d in range(k)]
    search = _Search(members, gain, choices)
    return search.run(found.allowed, 0), search.steps <= MAX_STEPS


class _Search:
    """Depth-first search for the side of each device in each "apart"."""

    def __init__(
        self,
        members: list[list[Bool[ndarray, " g"]]],
        gain: list[Float64[ndarray, "m k"]],
        choices: list[tuple[int, int]],
    ) -> None:
        self.members, self.gain, self.choices, self.steps = members, gain, choices, 0
        self.given = [np.zeros(len(sets), dtype=np.int64) for sets in members]

    def run(self, allowed: Bool[ndarray, "g k"], at: int) -> Bool[ndarray, "g k"] | None:
        """Return devices of groups that obey the choices from `i` on; None if there are none."""
        if not allowed.any(axis=1).all():
            return None
        if at == len(self.choices):
            return allowed
        c, d = self.choices[at]
        left = sum(1 for other, _ in self.choices[at:] if other == c)
        if int((self.given[c] == 0).sum()) > left:
            return None
        for side in self._sides(c, d):
            self.steps += 1
            if self.steps > MAX_STEPS:
                return None
            below = allowed.copy()
            for other, groups in enumerate(self.members[c]):
                if other != side:
                    below[groups, d] = False
            self.given[c][side] += 1
            found = self.run(below, at + 1)
            self.given[c][side] -= 1
            if found is not None:
                return found
        return None

    def _sides(self, c: int, d: int) -> list[int]:
        """Return the sides that a device may be on, the best first: with most work there."""
        count = self.given[c]
        return sorted(range(len(count)), key=lambda m: (-self.gain[c][m][d], count[m], m))


def holds(setting: Setting, constraints: Sequence[Named]) -> bool:
    """Return False if no plan can meet constraints; True if one may."""
    found = reduced(setting, constraints)
    if not found.allowed.any(axis=1).all():
        return False
    nowhere = np.zeros((len(found.group), setting.machine.num_devices))
    allowed, is_complete = sides(found, constraints, nowhere)
    if allowed is None and is_complete:
        return False
    return _has_room(setting, found) and _has_links(setting, found)


def _has_room(setting: Setting, found: Reduced) -> bool:
    """Return False if what groups hold all the time, or an op at once, exceeds their devices."""
    room = limits(setting.capacities)
    resident = residual_bytes(setting.arrays, found.group)
    most = np.where(found.allowed, room, -1).max(axis=1)
    if bool((op_needs(setting.arrays) > most[found.group]).any()):
        return False
    unlimited = [size is None for size in setting.capacities]
    for devices in np.unique(found.allowed, axis=0):
        inside = ~(found.allowed & ~devices).any(axis=1)
        if not bool((devices & unlimited).any()) and resident[inside].sum() > room[devices].sum():
            return False
    return True


def _has_links(setting: Setting, found: Reduced) -> bool:
    """Return False if an op can reach one that must come after it from none of its devices."""
    a, reach = setting.arrays, np.isfinite(setting.machine.latency)
    if bool(reach.all()):
        return True
    after = np.repeat(np.arange(a.num_ops), np.diff(a.after_ptr))
    reader = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    before = np.concatenate([a.after_op, a.tensor_op[a.input_tensor]])
    then = np.concatenate([after, reader])
    source, target = found.allowed[found.group[before]], found.allowed[found.group[then]]
    return bool(((source @ reach) & target).any(axis=1).all())


def conflict(setting: Setting, constraints: Sequence[Named]) -> tuple[Named, ...]:
    """Return a minimal set of constraints that cannot hold together; empty if there is none.

    It is also empty if no plan is possible without any constraints.
    """
    if holds(setting, constraints) or not holds(setting, ()):
        return ()
    return irreducible(constraints, lambda rest: not holds(setting, rest))


def irreducible(constraints: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> tuple[T, ...]:
    """Return a subset that fails, but no longer does if any one of its constraints is removed.

    Args:
        constraints: They fail together.
        fails: Whether a subset fails; then every superset fails, too. It is called some 13 times
            for each constraint that is returned, of thousands.
    """
    kept: list[T] = []
    later = list(reversed(constraints))
    while later and not fails(kept):
        # The first that the shortest end that fails begins with is needed; by bisection, as a file
        # may hold thousands.
        number = 1 + bisect.bisect_left(
            range(1, len(later)), True, key=lambda n: fails([*kept, *reversed(later[:n])])
        )
        kept.append(later[number - 1])
        later = later[: number - 1]
    return tuple(kept)
