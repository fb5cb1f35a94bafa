"""Equivalence classes of tensors that share a layout: union-find that maps dims.

Idea: a class has a root tensor; every member maps the dims of the root to its own. So `w` and
`w.t()` can be in one class, and so can a tensor and the result of an in-place write to it. State
that stays in place has a fixed layout; other tensors are merged with it voluntarily only if its
layout suits both.
Complexity: O(tensors log tensors), smaller classes move into larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from pardnn.errors import InfeasibleError, shown
from pardnn.plan.mesh import FREE, Layout, placements
from pardnn.shard.sharding import FixedLayouts

Dims = tuple[int | None, ...]
"""For each dim of a root the dim of a member, None if the member has none."""


@dataclass
class TensorClasses:
    """Equivalence classes of tensors, under construction.

    Attributes:
        shapes: Of all tensors, by name.
        root: Class of each tensor, named by its root.
        dims: Of each tensor, by dim of its root.
        members: Of each class.
        blocked: Of each class, dims of the root that no layout may cut.
        fixed: The layout of classes whose layout is fixed, by dims of the root.
        axis_sizes: Devices along each mesh axis, if any is fixed.
        torn: Pairs of tensors that must share a class although their fixed layouts differ.
    """

    shapes: Mapping[str, tuple[int, ...]]
    root: dict[str, str] = field(default_factory=dict)
    dims: dict[str, Dims] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    blocked: dict[str, set[int]] = field(default_factory=dict)
    fixed: dict[str, Layout] = field(default_factory=dict)
    axis_sizes: tuple[int, ...] = ()
    torn: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Every tensor is a class of its own."""
        self.root.update(zip(self.shapes, self.shapes, strict=True))
        self.dims.update({name: identity(len(shape)) for name, shape in self.shapes.items()})
        self.members.update({name: [name] for name in self.shapes})

    def merge(self, one: str, other: str, dims: Dims | None = None, *, hard: bool = False) -> bool:
        """Merge the classes of two tensors.

        Args:
            one: A tensor.
            other: A tensor.
            dims: For each dim of `one` that of `other`; the same if not given.
            hard: Whether they must be one class, even if then some dims cannot be cut.

        Returns:
            Whether they are one class now.
        """
        if self.root[one] == self.root[other]:
            if dims is None and self.dims[one] == self.dims[other]:
                return True
            return self._agree(one, other, dims or identity(len(self.shapes[one])), hard)
        if dims is None:
            dims = identity(len(self.shapes[one]))
        if dims is identity(len(dims)) and self._joins(one, other):
            return True
        if len(self.members[self.root[one]]) < len(self.members[self.root[other]]):
            one, other, dims = other, one, inverse(dims, len(self.shapes[other]))
        kept, moved = self.root[one], self.root[other]
        back = inverse(self.dims[other], len(self.shapes[other]))
        # dim of the kept root -> of one -> of other -> of the moved root
        through = composed(composed(self.dims[one], dims), back)
        if not hard and not self._covers(kept, moved, through):
            return False
        if self.fixed and not self._may_share(kept, moved, through):
            if not hard:
                return False
            self.torn.append((one, other))
        for name in self.members.pop(moved):
            self.root[name] = kept
            self.dims[name] = composed(through, self.dims[name])
            self.members[kept].append(name)
        if moved in self.fixed:
            layout = carried(self.fixed.pop(moved), through)
            both = joined(self.fixed.get(kept), layout)
            self.fixed[kept] = layout if both is None else both
        lost = {None, *self.blocked.pop(moved, ())}
        self._block(kept, {d for d, m in enumerate(through) if m in lost})
        return True

    def _joins(self, one: str, other: str) -> bool:
        """Add a tensor to a class of its shape, the usual case: no dims have to be mapped."""
        kept, moved = self.root[one], self.root[other]
        if len(self.members[moved]) > 1 or moved in self.blocked or moved in self.fixed:
            return False
        if self.shapes[moved] != self.shapes[one] or self.shapes[one] != self.shapes[kept]:
            return False
        if None in self.dims[one]:  # a dim of it may be lost: what it was mixed into has it not
            return False
        del self.members[moved]
        self.root[other] = kept
        self.dims[other] = self.dims[one]
        self.members[kept].append(other)
        return True

    def _agree(self, one: str, other: str, dims: Dims, hard: bool) -> bool:
        expected = composed(self.dims[one], dims)
        differ = {d for d, found in enumerate(self.dims[other]) if found != expected[d]}
        differ = {d for d in differ if self.shapes[self.root[one]][d] > 1}
        if differ and hard:
            self._block(self.root[one], differ)
        return hard or not differ

    def _may_share(self, kept: str, moved: str, through: Dims) -> bool:
        """Whether a layout that is fixed in either class suits the members of both."""
        own, other = self.fixed.get(kept), self.fixed.get(moved)
        if other is not None:
            if any(d not in (None, FREE) and d not in through for d in other):
                return False
            other = carried(other, through)
        if own is None and other is None:
            return True
        layout = joined(own, other)
        if layout is None:
            return False
        members = [(self.shapes[m], self.dims[m]) for m in self.members[kept]]
        members += [(self.shapes[m], composed(through, self.dims[m])) for m in self.members[moved]]
        return all(is_possible(*form, layout, self.axis_sizes) for form in dict.fromkeys(members))

    def _covers(self, kept: str, moved: str, through: Dims) -> bool:
        """Whether no dim that could be cut is lost."""
        if through is identity(len(self.shapes[moved])):
            return self.shapes[kept] == self.shapes[moved]
        large = {d for d, size in enumerate(self.shapes[kept]) if size > 1}
        others = {d for d, size in enumerate(self.shapes[moved]) if size > 1}
        return {through[d] for d in large} == others

    def _block(self, root: str, dims: set[int]) -> None:
        if dims:
            self.blocked.setdefault(root, set()).update(dims)


def joined(one: Layout | None, other: Layout | None) -> Layout | None:
    """Return a layout that agrees with two partly free ones; None if there is none."""
    if one is None or other is None:
        return one or other
    if any(a != b and FREE not in (a, b) for a, b in zip(one, other, strict=True)):
        return None
    return tuple(b if a == FREE else a for a, b in zip(one, other, strict=True))


def carried(layout: Layout, through: Dims) -> Layout:
    """Return a layout by the dims of a map's source, given by those of its target."""
    there = {own: d for d, own in enumerate(through)}
    return tuple(FREE if d == FREE else None if d is None else there.get(d) for d in layout)


def is_possible(
    shape: tuple[int, ...], dims: Dims, layout: Layout, axis_sizes: tuple[int, ...]
) -> bool:
    """Return whether a tensor can have a layout; the smallest block is cut last, rounded down.

    Args:
        shape: Of the tensor.
        dims: Its dim for each dim of its root.
        layout: By dims of the root, for the first mesh axes; `FREE` cuts nothing.
        axis_sizes: Devices along each mesh axis.
    """
    least = list(shape)
    for dim, count in zip(layout, axis_sizes, strict=False):
        if dim is not None and dim != FREE:
            own = dims[dim]
            if own is None or least[own] < count:
                return False
            least[own] //= count
    return True


@cache
def identity(rank: int) -> Dims:
    """Return the identity map of dims: always the same object."""
    return tuple(range(rank))


def composed(first: Dims, second: Dims) -> Dims:
    """Return the dims reached by one map after the other."""
    if first is identity(len(second)):
        return second
    if second is identity(len(second)):
        return first
    return tuple(None if d is None else second[d] for d in first)


def inverse(dims: Dims, rank: int) -> Dims:
    """Return the map back, of a tensor with `rank` dims."""
    if dims is identity(rank):
        return dims
    found: list[int | None] = [None] * rank
    for one, other in enumerate(dims):
        if other is not None:
            found[other] = one
    return tuple(found)


def check_fixed(classes: TensorClasses, fixed: FixedLayouts) -> None:
    """Raise if tensors that must share a layout cannot have the fixed one.

    Args:
        classes: Tensors that share a layout.
        fixed: The fixed layouts.

    Raises:
        InfeasibleError: E301, naming the tensors.
    """
    for one, other in classes.torn[:1]:
        raise _torn(classes, fixed, one, other)
    for root, layout in classes.fixed.items():
        blocked = classes.blocked.get(root, set())
        for member in classes.members[root]:
            form = classes.shapes[member], classes.dims[member]
            if not blocked.isdisjoint(layout) or not is_possible(*form, layout, fixed.mesh.shape):
                raise _torn(classes, fixed, root, member)


def _torn(classes: TensorClasses, fixed: FixedLayouts, one: str, other: str) -> InfeasibleError:
    members = classes.members[classes.root[one]]
    state = [name for name in (one, other, *members) if name in fixed.layouts] or [one]
    words = " and ".join(
        f"{shown(name)} as ({', '.join(placements(fixed.layouts.get(name, ())))})"
        for name in list(dict.fromkeys(state))[:2]
    )
    return InfeasibleError(
        f"the state is cut, {words}, but {shown(one)} and {shown(other)} are of one storage that "
        "the step writes, and have to be cut alike: no cut leaves the state where it is.\nPlan "
        "this step first and keep its state for the other one.",
        details={"state": state[:2], "tensors": [one, other]},
    )
