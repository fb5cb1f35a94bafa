"""The local ops of one call on all devices of a mesh, one loop cut per mesh axis.

Idea: `worker_ops` cuts a call into the ops of the workers along one axis, each of which is a call
again; the next axis cuts each of these. Offsets of boxes add up, so the boxes of a local op are in
indices of the whole tensors. An input that a worker needs whole stays whole inside its group: the
data "fetched from the other group as extra input tensors" of step 2 of the recursion.
Complexity: O(devices) local ops.
Reference: Tofu (EuroSys 2019), section 5.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from pardnn.plan.mesh import Box, Mesh, Parts, num_parts
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import offset
from pardnn.shard.partition.analysis import analyse
from pardnn.shard.partition.call import Call, bind_call
from pardnn.shard.partition.interning import unread_inputs
from pardnn.shard.partition.worker_ops import Region, WorkerOp, WorkerResult, worker_ops_of
from pardnn.shard.sharding import AxisLoops
from pardnn.shard.tdl.language import Reducer


@dataclass(frozen=True, slots=True)
class LocalResult:
    """Which part of the whole result a device computes.

    Attributes:
        box: Where it lies; elements out of bounds are dropped.
        reducers: Per mesh axis, what combines it with the results of the devices along that axis
            where boxes overlap; None if each has its own or all have the same.
        weight: Fraction of the iterations of all cut loops, for "mean".
    """

    box: Box
    reducers: tuple[Reducer | None, ...]
    weight: float

    @property
    def divisor(self) -> int | None:
        """Which result divides the sum of the partial ones; None if none does."""
        found = (reducer for reducer in self.reducers if reducer is not None)
        return next((reducer.by for reducer in found if reducer.name == "quotient"), None)


@dataclass(frozen=True, slots=True)
class LocalOp:
    """What one device computes of a call: a call again, on boxes of the inputs.

    Attributes:
        call: The localised call, tensors named by slot; `shapes` and `outputs` are local.
        regions: What it needs of each input, by slot, in indices of the whole input.
        results: Its results, in indices of the whole ones, None for one that is not computed.
    """

    call: Call
    regions: Mapping[str, Region]
    results: tuple[LocalResult | None, ...]


def local_ops(call: Call, axes: AxisLoops, mesh: Mesh) -> tuple[LocalOp, ...] | None:
    """Return the op of each device if the loops `axes` of a call are cut, one per mesh axis.

    Args:
        call: Of a described operator.
        axes: Loops, one per mesh axis.
        mesh: The devices.

    Returns:
        One op per device; None if some loop is too short or cannot be cut in this way.

    Raises:
        DescriptionError: E220, if the operator has no description or a wrong one.
    """
    found: list[LocalOp] = [_whole(call)]
    for loop, parts in zip(axes, mesh.parts, strict=True):
        cut: list[LocalOp] = []
        for op in found:
            ops = _worker_ops(op.call, loop, parts) if loop is not None else None
            if loop is None:
                cut += [_widened(op)] * num_parts(parts)
            elif ops is None:
                return None
            else:
                cut += [_nested(op, inner) for inner in ops]
        found = cut
    return tuple(found)


def _worker_ops(call: Call, loop: str, parts: Parts) -> tuple[WorkerOp, ...] | None:
    """As `partition`, and None if a local call has lost the loop."""
    description = description_of(call.kind)
    if description is None:
        return None
    analysis, bound = analyse(description, call)
    return (
        worker_ops_of(description, analysis, bound, loop, parts) if loop in analysis.loops else None
    )


def input_names(call: Call) -> dict[str, str]:
    """Return the name of the tensor in each slot of a described call."""
    description = description_of(call.kind)
    assert description is not None
    return dict(bind_call(description, call).names)


def _whole(call: Call) -> LocalOp:
    description = description_of(call.kind)
    if description is None:
        return LocalOp(call, _regions(call, set()), _results(call))
    bound = bind_call(description, call)
    local = replace(
        bound.call,
        shapes={slot: call.shapes[name] for slot, name in bound.names.items()},
        dtypes={slot: call.dtypes.get(name) for slot, name in bound.names.items()},
    )
    unread = unread_inputs(call)
    sizes = {slot for slot, name in bound.names.items() if name in unread}
    return LocalOp(local, _regions(local, sizes), _results(local))


def _regions(call: Call, unread: Set[str]) -> dict[str, Region]:
    return {
        slot: Region(tuple((0, n) for n in shape), content=slot not in unread)
        for slot, shape in call.shapes.items()
    }


def _results(call: Call) -> tuple[LocalResult | None, ...]:
    return tuple(
        None if shape is None else LocalResult(tuple((0, n) for n in shape), (), 1.0)
        for shape in call.outputs
    )


def _widened(op: LocalOp) -> LocalOp:
    results = (s and replace(s, reducers=(*s.reducers, None)) for s in op.results)
    return replace(op, results=tuple(results))


def _nested(outer: LocalOp, inner: WorkerOp) -> LocalOp:
    regions = {slot: _region(outer.regions[slot], region) for slot, region in inner.regions.items()}
    results = tuple(map(_result, outer.results, inner.results))
    return LocalOp(inner.call, regions, results)


def _region(outer: Region, inner: Region) -> Region:
    fill = outer.fill if inner.fill is None else inner.fill
    return Region(offset(outer.box, inner.box), fill, outer.content and inner.content)


def _result(outer: LocalResult | None, inner: WorkerResult | None) -> LocalResult | None:
    if outer is None or inner is None:
        return None
    box = offset(outer.box, inner.box)
    return LocalResult(box, (*outer.reducers, inner.reducer), outer.weight * inner.weight)
