"""Partition-n-reduce: one loop of a call cut among k workers, and the op of each.

Idea: every worker makes one call of the same operator, on the boxes of `regions`, with attributes
that are localised if the description says so.
Complexity: O(accesses x dims) per worker.
Reference: Tofu (EuroSys 2019), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pardnn.errors import shown
from pardnn.plan.mesh import Parts
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import lengths
from pardnn.shard.partition.analysis import Analysis, analyse
from pardnn.shard.partition.call import Bound, Call, replaced
from pardnn.shard.partition.regions import Region, WorkerResult, boxes_of, has_own_calls
from pardnn.shard.tdl.interval import DescriptionError, Interval, evaluate
from pardnn.shard.tdl.language import KEEP, Shape
from pardnn.shard.tdl.registry import Description


@dataclass(frozen=True, slots=True)
class WorkerOp:
    """What one of k workers computes of a call.

    Attributes:
        call: The localised call, tensors named by slot; `shapes` and `outputs` are local.
        regions: What it needs of each input, by slot.
        results: Its parts of the whole results, None for one that is not computed.
        begin: First value of the loop that is cut.
    """

    call: Call
    regions: Mapping[str, Region]
    results: tuple[WorkerResult | None, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class WorkerShapes:
    """The local shapes of one worker of a cut call, from which `Local` attributes are computed.

    Attributes:
        loop: The loop that is cut.
        worker: Index of the worker.
        ranges: First and last value of each loop, inclusive.
        inputs: Local shapes by slot.
        outputs: Local shapes, None for what is not computed.
    """

    loop: str
    worker: int
    ranges: Mapping[str, tuple[int, int]]
    inputs: Mapping[str, Shape]
    outputs: tuple[Shape | None, ...]

    def cuts(self, *names: str) -> bool:
        """Whether one of these loops is the cut one."""
        return self.loop in names

    def begin(self, name: str) -> int:
        """First value of a loop on this worker."""
        return self.ranges[name][0]

    def extent(self, name: str) -> int:
        """Number of values of a loop on this worker."""
        return self.ranges[name][1] - self.ranges[name][0] + 1


class ObservedShapes(WorkerShapes):
    """Local shapes that note whether more was read than the cut loop."""

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute."""
        if name not in ("loop", "cuts", "was_asked", "__dict__", "__class__"):
            object.__setattr__(self, "was_asked", True)
        return super().__getattribute__(name)

    was_asked = False


def extents_of(description: Description, analysis: Analysis, bound: Bound) -> dict[str, int]:
    """Return the extent of each variable of a call.

    Args:
        description: Of the operator.
        analysis: Of the description.
        bound: The call, with its tensors bound to the parameters of the description.

    Raises:
        DescriptionError: E220, if a loop that can be cut runs over different sizes.
    """
    found: dict[str, int] = {}
    tensors, outputs = bound.tensors, bound.call.outputs
    for name, sources in analysis.extents.items():
        sizes: set[int] = set()
        for source in sources:
            if isinstance(source, int):
                sizes.add(source)
            elif source[0] == "input":
                sizes.add(tensors[str(source[1])].sizes.shape[source[2]])
            elif (shape := outputs[int(source[1])]) is not None:
                sizes.add(shape[source[2]])
        if len(sizes) > 1 and name not in analysis.loops:
            continue
        if len(sizes) > 1:
            raise DescriptionError(
                f"the description of {shown(description.name)} ({description.source}) is wrong: "
                f"variable {name!r} runs over dims of sizes {sorted(sizes)} in one call.\n"
                "Loops of different lengths need different names."
            )
        if sizes:
            found[name] = sizes.pop()
    return found


def depends(span: Interval | None, loop: str) -> bool:
    """Whether an interval depends on a loop."""
    return span is not None and loop in span.names


def span_of(span: Interval, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return an interval in numbers, with an exclusive end."""
    return evaluate(span.lower, ranges), evaluate(span.upper, ranges) + 1


def worker_ops_of(
    description: Description,
    analysis: Analysis,
    bound: Bound,
    loop: str,
    parts: Parts,
    points: Sequence[int] | None = None,
) -> tuple[WorkerOp, ...] | None:
    """Return the op of each worker, None if the loop cannot be cut in this way.

    Args:
        description: Of the operator.
        analysis: Of the description.
        bound: The call.
        loop: The one that is cut.
        parts: Number of the workers, or the share of each.
        points: Where each worker begins, and the end of the loop; None: as `parts` says.
    """
    extents = extents_of(description, analysis, bound)
    found = boxes_of(analysis, bound, extents, loop, parts, points)
    if found is None:
        return None
    regions, results, ranges = found
    ops: list[WorkerOp] = []
    has_own = has_own_calls(analysis, loop)
    for w in range(len(ranges)):
        own = [s[w] for s in results]
        op = None if has_own else _same_call(ops, regions[w], own, ranges[w][loop][0])
        ops.append(
            op or _worker_op(description, analysis, bound, loop, w, ranges[w], regions[w], own)
        )
    return tuple(ops) if not description.is_exact or all(map(_is_exact, ops)) else None


def _is_exact(op: WorkerOp) -> bool:
    result = next(result for result in op.results if result is not None)
    numbers = {math.prod(lengths(region.box)) for region in op.regions.values()}
    return numbers <= {math.prod(lengths(result.box))}


def _same_call(
    ops: Sequence[WorkerOp],
    regions: Mapping[str, Region],
    results: Sequence[WorkerResult | None],
    begin: int,
) -> WorkerOp | None:
    """Return an op with the same call as the worker before, None if the call is another."""
    if not ops or len(ops[-1].regions) < len(regions):
        return None
    call = ops[-1].call
    for slot, region in regions.items():
        if call.shapes[slot] != lengths(region.box):
            return None
    for shape, result in zip(call.outputs, results, strict=True):
        if result is not None and lengths(result.box) != shape:
            return None
    return WorkerOp(call, regions, tuple(results), begin)


def local_attributes(
    analysis: Analysis, local: WorkerShapes, shown: WorkerShapes | None = None
) -> dict[str, Any]:
    """Return the arguments of a worker's call that replace those of the whole call.

    Args:
        analysis: Of the call.
        local: Shapes of the worker.
        shown: Shapes from which attributes are computed; `local` if not given.
    """
    attributes: dict[str, Any] = {}
    if analysis.attributes:
        seen = shown or local
        given = {k: v(seen) if callable(v) else v for k, v in analysis.attributes.items()}
        attributes = {name: value for name, value in given.items() if value is not KEEP}
    if local.worker:
        for write in analysis.writes:
            if write is not None and local.loop in write.reducers:
                attributes |= write.without
    return attributes


def _worker_op(
    description: Description,
    analysis: Analysis,
    bound: Bound,
    loop: str,
    worker: int,
    ranges: Mapping[str, tuple[int, int]],
    regions: Mapping[str, Region],
    results: Sequence[WorkerResult | None],
) -> WorkerOp:
    inputs = {slot: lengths(region.box) for slot, region in regions.items()}
    outputs = tuple(None if result is None else lengths(result.box) for result in results)
    attributes = local_attributes(analysis, WorkerShapes(loop, worker, ranges, inputs, outputs))
    call = replaced(description, bound.call, attributes) if attributes else bound.call
    dropped = {name for name, value in attributes.items() if value is None}
    kept = {slot: region for slot, region in regions.items() if slot not in dropped}
    dtypes = {slot: bound.tensors[slot].dtype for slot in inputs}
    local = Call(call.kind, call.args, call.kwargs, inputs, outputs, dtypes)
    return WorkerOp(local, kept, tuple(results), ranges[loop][0])


def partition(call: Call, loop: str, workers: int) -> tuple[WorkerOp, ...] | None:
    """Return the op of each of `workers` if one loop of a call is cut.

    Args:
        call: Any call of a described operator.
        loop: As in `Strategy.loop`.
        workers: At least 1.

    Returns:
        One op per worker, which together give all results; None if this loop cannot be cut among so
        many workers: it is too short, or the region of a worker would not be one box.

    Raises:
        DescriptionError: E220, if the operator has no description or a wrong one.
    """
    description = description_of(call.kind)
    if description is None:
        raise DescriptionError(
            f"{shown(call.kind)} has no description, so it runs whole on every device.\n"
            "Describe it with @pardnn.describe to let it be cut."
        )
    analysis, bound = analyse(description, call)
    if loop not in analysis.loops:
        raise DescriptionError(f"{shown(call.kind)} has no loop {loop!r} that can be cut")
    return worker_ops_of(description, analysis, bound, loop, workers)
