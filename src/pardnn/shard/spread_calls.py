"""The devices' parts of one op: regions provided, arguments localised, results settled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import LOSS_KIND, Op, Tensor, alias_of, writes
from pardnn.plan.mesh import Mesh
from pardnn.shard.boxes import is_dense, whole
from pardnn.shard.call import Call, call_of, fingerprint
from pardnn.shard.leaves import Axes, Leaf, LeafShare, input_names, leaves
from pardnn.shard.partition import Region
from pardnn.shard.registry import description_of
from pardnn.shard.spread_build import At, Builder, Held, Want, part
from pardnn.shard.spread_moves import packed, provide
from pardnn.shard.spread_settle import settle


class Work(NamedTuple):
    """What the devices do of one op.

    Attributes:
        leaves: One per device; tensors named by slot.
        names: Slot to tensor of the graph.
        returned: Output that each result becomes.
        is_whole: Every device runs all of it.
    """

    leaves: tuple[Leaf, ...]
    names: Mapping[str, str]
    returned: tuple[str | None, ...]
    is_whole: bool


def returned_names(op: Op) -> tuple[str | None, ...]:
    """Return the output that each result of a call becomes."""
    listed = (op.arguments or {}).get("returns")
    return tuple(t.name for t in op.outputs) if listed is None else tuple(listed)


def whole_work(op: Op, tensors: Mapping[str, Tensor], mesh: Mesh) -> Work:
    """Return the work if every device runs all of an op; no description is needed."""
    call = call_of(op, tensors)
    regions = {name: Region(whole(shape)) for name, shape in call.shapes.items()}
    none = (None,) * len(mesh.shape)
    returned = returned_names(op)
    shares = tuple(
        None if name is None else LeafShare(whole(tensors[name].shape or ()), none, 1.0)
        for name in returned
    )
    leaf = Leaf(call, regions, shares)
    return Work((leaf,) * mesh.size, {name: name for name in call.shapes}, returned, True)


def cut_work(op: Op, axes: Axes, tensors: Mapping[str, Tensor], mesh: Mesh) -> Work | None:
    """Return the work if loops of an op are cut; None if they cannot be.

    Raises:
        DescriptionError: E220, if the operator's description is wrong.
    """
    if all(axis is None for axis in axes):
        return whole_work(op, tensors, mesh)
    call = call_of(op, tensors)
    if description_of(call.kind) is None:
        return None
    key = (fingerprint(call), axes, mesh)
    if key not in _KEPT:
        if len(_KEPT) > 20_000:
            _KEPT.clear()
        _KEPT[key] = leaves(call, axes, mesh)
    found = _KEPT[key]
    returned = returned_names(op)
    if found is None or not _is_possible(found, returned):
        return None
    return Work(found, input_names(call), returned, False)


_KEPT: dict[Any, tuple[Leaf, ...] | None] = {}


def _is_possible(found: Sequence[Leaf], returned: Sequence[str | None]) -> bool:
    """Whether every result is computed and can be combined by something that a plan can say."""
    for leaf in found:
        for name, share in zip(returned, leaf.shares, strict=True):
            if name is None:
                continue
            if share is None:
                return False
            reducers = {reducer.name for reducer in share.reducers if reducer is not None}
            if len(reducers) > 1 or not reducers <= {"sum", "mean", "max", "min", "prod"}:
                return False
    return True


def misplaced(b: Builder, op: Op, work: Work) -> str | None:
    """Return a tensor that an op writes or views in written storage, but does not find locally.

    None if all is where it is needed.
    """
    for slot, name in work.names.items():
        is_shared = name in writes(op) or any(
            alias_of(op, t) is not None and b.owners[t.name] == b.owners[name] for t in op.outputs
        )
        if not is_shared or b.owners[name] not in b.written:
            continue
        for leaf, own in zip(work.leaves, b.boxes[name], strict=True):
            region = leaf.regions.get(slot)
            if region is not None and region.box != own:
                return name
    for number, name in enumerate(work.returned):
        if name is None or b.owners[name] not in b.written or b.owners[name] == name:
            continue
        for leaf, own in zip(work.leaves, b.boxes[name], strict=True):
            share = leaf.shares[number]
            if share is None or share.box != own or any(share.reducers):
                return name
    listed = set(work.returned)
    for tensor in op.outputs:  # new contents of what an op changes beside its results
        source = _shared_input(b, op, tensor)
        if tensor.name in listed or source is None:
            continue
        if b.boxes[tensor.name] != b.boxes[source]:
            return tensor.name
    return None


def _shared_input(b: Builder, op: Op, tensor: Tensor) -> str | None:
    """Return the input through which an output shares its storage; None if it owns it."""
    shared = alias_of(op, tensor)
    if shared is None or shared in op.inputs:
        return shared
    return next(name for name in op.inputs if b.owners[name] == b.owners[shared])


def run(b: Builder, op: Op, work: Work) -> None:
    """Write the devices' parts of an op.

    Raises:
        InvalidPlanError: E410, if it writes what is not local.
    """
    name = misplaced(b, op, work)
    if name is not None:
        raise InvalidPlanError(
            f"op {shown(op.name)} ({op.source or op.kind}) shares the storage of {shown(name)}, "
            "which is changed in place, but would need a part of it that is elsewhere.\n"
            "Give all views of one storage the same blocks, or leave them and the op whole."
        )
    at = At(op, tuple(f"{op.name}@{device}" for device in b.devices))
    local = _inputs(b, op, work, at)
    raws = {t.name: _raw(b, op, work, t) for t in op.outputs}
    for device in b.devices:
        if op.kind != LOSS_KIND or device == 0:
            _emit(b, op, work, device, local[device], raws)
    for number, result in enumerate(work.returned):
        if result is None:
            continue
        shares = [leaf.shares[number] for leaf in work.leaves]
        own = b.own(result)
        if raws[result].names == own.names:
            continue
        source = _shared_input(b, op, b.tensors[result])
        is_view = source is not None and all(
            source in here.values() and f"{source}@{device}" in local[device].values()
            for device, here in enumerate([work.names] * len(local))
        )
        settle(b, raws[result], [s for s in shares if s is not None], at, is_view=is_view)


def _inputs(b: Builder, op: Op, work: Work, at: At) -> list[dict[str, str]]:
    """Return, per device, the local tensor in each slot."""
    local: list[dict[str, str]] = [{} for _ in b.devices]
    provided: dict[Any, list[str | None]] = {}
    for slot, name in work.names.items():
        wants: list[Want | None] = []
        for device, leaf in enumerate(work.leaves):
            region = leaf.regions.get(slot)
            if region is None or (op.kind == LOSS_KIND and device > 0):
                wants.append(None)
            else:
                wants.append(Want(region.box, region.fill, region.content))
        key = (name, tuple(wants))
        if key not in provided:
            provided[key] = provide(b, b.own(name), wants, at)
        for device, found in enumerate(provided[key]):
            if found is not None:
                local[device][slot] = found
    if not _takes_gaps(op):
        _close_gaps(b, op, work, local, at)
    return local


#: Rooms of descriptions whose kernels look at strides. Others may take a dense tensor for granted,
#: as the backward pass of layer norm does, and be wrong without a word.
_STRIDED = ("elementwise", "matmul", "view")


def _takes_gaps(op: Op) -> bool:
    description = description_of(op.kind) if "." in op.kind else None
    return description is not None and description.function.__module__.endswith(_STRIDED)


def _close_gaps(b: Builder, op: Op, work: Work, local: Sequence[dict[str, str]], at: At) -> None:
    """Copy inputs that have gaps here and none in the graph, but for those that are changed."""
    changed = writes(op)
    for device, here in enumerate(local):
        for slot, name in here.items():
            tensor, region = b.tensors[work.names[slot]], work.leaves[device].regions[slot]
            if name not in b.gaps or tensor.name in changed:
                continue
            everything = whole(tensor.shape or ())
            if is_dense(tensor, everything, everything):
                here[slot] = packed(b, tensor, device, region.box, name, at)


def _raw(b: Builder, op: Op, work: Work, tensor: Tensor) -> Held:
    """Return under which names the devices leave an output, and what that is of the whole."""
    own = b.own(tensor.name)
    if tensor.name not in work.returned:
        return own
    number = work.returned.index(tensor.name)
    shares = [leaf.shares[number] for leaf in work.leaves]
    boxes = tuple(None if share is None else share.box for share in shares)
    is_partial = any(share is not None and any(share.reducers) for share in shares)
    if not is_partial and boxes == own.boxes:
        return own
    base = b.fresh(f"{tensor.name}:here")
    names = tuple(
        name if not is_partial and box == mine else f"{base}@{device}"
        for device, (name, box, mine) in enumerate(zip(own.names, boxes, own.boxes, strict=True))
    )
    return Held(tensor, names, boxes)


def _emit(
    b: Builder, op: Op, work: Work, device: int, local: Mapping[str, str], raws: Mapping[str, Held]
) -> None:
    leaf = work.leaves[device]
    outputs: list[Tensor] = []
    renamed: dict[str | None, str | None] = {None: None}
    for tensor in op.outputs:
        name, box = raws[tensor.name].names[device], raws[tensor.name].boxes[device]
        assert name is not None
        assert box is not None
        renamed[tensor.name] = name
        source = _shared_input(b, op, tensor)
        alias = None
        if source is not None:
            alias = next(local[slot] for slot, n in work.names.items() if n == source)
            if alias in b.gaps:
                b.gaps.add(name)
        outputs.append(part(tensor, name, box, alias))
    share = fraction(leaf)
    inputs = tuple(dict.fromkeys(local.values()))
    backward = f"{op.backward_of}@{device}"
    b.emit(
        device,
        Op(
            name=f"{op.name}@{device}", kind=op.kind, inputs=inputs, after=b.after(op, device),
            outputs=tuple(outputs), memory=op.memory,
            seconds=op.seconds and {kind: s * share for kind, s in op.seconds.items()},
            workspace=math.ceil(op.workspace * share), source=op.source, module=op.module,
            backward_of=backward if backward in b.names else None, step=op.step,
            arguments=_arguments(op, leaf.call, work, local, renamed),
        ),
    )  # fmt: skip


def fraction(leaf: Leaf) -> float:
    """Return which share of the loops of an op a device runs."""
    return next((share.weight for share in leaf.shares if share is not None), 1.0)


def _arguments(
    op: Op,
    call: Call,
    work: Work,
    local: Mapping[str, str],
    renamed: Mapping[str | None, str | None],
) -> dict[str, Any] | None:
    """Return the call on a device's parts."""
    if op.arguments is None:
        return None
    found = dict(op.arguments)
    if "args" in found or call.args:
        found["args"] = [localised(value, local) for value in call.args]
    if "kwargs" in found or call.kwargs:
        found["kwargs"] = {key: localised(value, local) for key, value in call.kwargs.items()}
    if "returns" in found:
        found["returns"] = [renamed[name] for name in work.returned]
    if "mutates" in found:
        slots = {name: slot for slot, name in work.names.items()}
        found["mutates"] = [local[slots[name]] for name in found["mutates"]]
    return found


def localised(value: Any, local: Mapping[str, str]) -> Any:
    """Return an argument with the names of local tensors."""
    if isinstance(value, list | tuple):
        return [localised(item, local) for item in value]
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return {"tensor": local[value["tensor"]]}
        return {key: localised(item, local) for key, item in value.items()}
    return value
