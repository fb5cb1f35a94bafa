"""Which region of a tensor of the graph each local tensor is, followed op by op.

The checker of partitioned graphs reads it: slices, fetches, joins and updates move data, and what
each of them makes has to be the right region of one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

from pardnn.graph.ir import Op
from pardnn.plan.mesh import Box
from pardnn.plan.partitioned_graph import FETCH, JOIN, REDUCE, SLICE, UPDATE


class Region(NamedTuple):
    """What a local tensor is: a box of a tensor of the graph, or of another local tensor."""

    of: str
    box: Box


class _Buffer(NamedTuple):
    """What a buffer is made of so far: its shape, its fill, and slices with their boxes."""

    shape: Any
    fill: Any
    rows: list[Any]


def arguments_of(op: Op) -> list[Any]:
    """Return the positional arguments of an op; none where it states none."""
    return (op.arguments or {}).get("args", [])


@final
class LocalRegions:
    """The regions of local tensors, as far as they are known.

    Args:
        ops: Of the partitioned graph.

    Attributes:
        open: Buffers that updates and joins complete, by the name that they have then.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self._local = {tensor.name: tensor for op in ops for tensor in op.outputs}
        self._known: dict[str, Region] = {}
        self._completed = _completed(ops)
        self.open: dict[str, _Buffer] = {}
        self._rules: Mapping[str, Callable[[Op], Region | str | None]] = {
            SLICE: self._slice, FETCH: self._fetch, JOIN: self._join, UPDATE: self._update,
            REDUCE: self._reduce,
        }  # fmt: skip

    def note(self, name: str, region: Region) -> None:
        """Note what a local tensor is.

        Args:
            name: Of the tensor.
            region: What it is.
        """
        self._known[name] = region

    def made_by(self, op: Op) -> Region | str | None:
        """Return the region that an op makes; a sentence if it cannot be one, None if unknown.

        Args:
            op: Of the partitioned graph; those before it were asked.

        Raises:
            KeyError, TypeError, ValueError, IndexError: If its arguments have another form.
        """
        rule = self._rules.get(op.kind)
        return None if rule is None else rule(op)

    def _slice(self, op: Op) -> Region | str:
        reference, ends = arguments_of(op)
        name = reference["tensor"]
        shape = self._shape(name)
        box = tuple([(int(a), int(b)) for a, b in ends])
        if len(box) != len(shape) or any(
            not 0 <= a <= b <= size for (a, b), size in zip(box, shape, strict=True)
        ):
            return f"it cuts {ends!r:.80} out of {name!r:.60} of shape {list(shape)}"
        own = self._known.get(name) or Region(name, tuple([(0, size) for size in shape]))
        ends = zip(own.box, box, strict=True)
        return Region(own.of, tuple([(c + a, c + b) for (c, _), (a, b) in ends]))

    def _fetch(self, op: Op) -> Region | str | None:
        shape, fill, rows = arguments_of(op)
        if tuple(shape) != (op.outputs[0].shape or ()):
            return f"it makes {list(shape)}, its output has {op.outputs[0].shape}"
        return self._continued(op, _Buffer(shape, fill, list(rows)))

    def _join(self, op: Op) -> Region | str | None:
        target, rows = arguments_of(op)
        shape, fill, before = self.open[target["tensor"]]
        return self._continued(op, _Buffer(shape, fill, [*before, *rows]))

    def _update(self, op: Op) -> Region | str | None:
        target, ends, source = arguments_of(op)
        name = target["tensor"]
        if name in self.open:
            shape, fill, before = self.open[name]
            return self._continued(op, _Buffer(shape, fill, [*before, [source, ends]]))
        found = self._assembled(_Buffer(self._shape(name), 0.0, [[source, ends]]))
        before = self._known.get(name)
        if isinstance(found, Region) and before is not None and found.of == before.of:
            return found if found == before else "it puts a shard in another one's place"
        return found

    def _reduce(self, op: Op) -> str | None:
        how, addends, weights = arguments_of(op)
        if how == "quotient" and len(addends) != 2:
            return f"it is a quotient of {len(addends)} tensors"
        if not addends or (weights is not None and len(weights) != len(addends)):
            return "it has no addends, or not as many weights"
        shape = op.outputs[0].shape
        if any(self._local[each["tensor"]].shape != shape for each in addends):
            return f"its addends are not all of shape {list(shape or ())}"
        return None

    def _continued(self, op: Op, made: _Buffer) -> Region | str | None:
        """Return the region in a buffer; what is filled in later may be missing.

        Args:
            op: A fetch, an update or a join.
            made: What the buffer is made of so far.
        """
        shape, fill, rows = made
        (output,) = op.outputs
        filled = sum(math.prod([b - a for a, b in ends]) for _, ends in rows)
        is_open = filled < math.prod(shape)  # else it is overwritten
        if is_open and output.name in self._completed:
            self.open[output.name] = made
            fill = 0.0 if fill is None else fill
        return self._assembled(_Buffer(shape, fill, rows))

    def _assembled(self, made: _Buffer) -> Region | str | None:
        shape, fill, rows = made
        origins: set[tuple[str, tuple[int, ...]]] = set()
        filled = 0
        for reference, ends in rows:
            name = reference["tensor"]
            box = tuple([(int(a), int(b)) for a, b in ends])
            lengths = tuple([b - a for a, b in box])
            is_inside = all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
            if lengths != (self._local[name].shape or ()) or not is_inside:
                return f"{name!r:.60} of shape {self._local[name].shape} does not fit {ends!r:.80}"
            filled += math.prod(lengths)
            place = self._known.get(name)
            if place is None:
                origins.add((name, ()))
            else:
                low = zip(place.box, box, strict=True)
                origins.add((place.of, tuple([begin - a for (begin, _), (a, _) in low])))
        needed = math.prod(shape)
        if rows and fill is None and filled != needed:
            return f"its slices hold {filled} of {needed} elements"
        if len({of for of, _ in origins}) == 1 and len(origins) > 1:
            return "its slices are not arranged as in the tensor"
        if len(origins) != 1 or not next(iter(origins))[1]:
            return None
        ((of, low),) = origins
        return Region(of, tuple((a, a + n) for a, n in zip(low, shape, strict=True)))

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._local[name].shape or ()


def _completed(ops: Sequence[Op]) -> frozenset[str]:
    """Return what updates and joins take up; of arguments that make no sense nothing."""
    found: set[str] = set()
    for op in ops:
        for target in arguments_of(op)[:1] if op.kind in (UPDATE, JOIN) else ():
            if isinstance(target, dict):
                found.add(str(cast("dict[str, Any]", target).get("tensor")))
    return frozenset(found)
