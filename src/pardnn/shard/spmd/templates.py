"""What the devices do of one op, worked out once for all ops that make the same call.

A step repeats its layers, and devices do alike: calls that differ in the names of their tensors
alone share one `Template`, in which tensors are numbers. O(size of the arguments) for each further
op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.graph.ir import Op, Tensor, alias_of, writes
from pardnn.plan.mesh import Box, Mesh
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import whole
from pardnn.shard.partition.call import Call, call_of
from pardnn.shard.partition.per_device import Axes, Leaf, LeafShare, input_names, leaves
from pardnn.shard.partition.pieces import Region
from pardnn.shard.spmd.builder import Builder, Want


class Form(NamedTuple):
    """An argument of a localised call; one that holds no tensor is one value for all ops.

    Attributes:
        value: A literal, the slot of a tensor, or a structure with tensors by slot.
        slots: How many tensors it holds: 0 in a literal, -1 if it is one.
    """

    value: Any
    slots: int


class Template(NamedTuple):
    """What the devices do of equal calls. Slots name the tensors of the localised calls.

    Attributes:
        leaves: One per device; tensors named by slot.
        slots: Slot, and number of the tensor among those of the call.
        wants: By slot, what each device needs, None for nothing.
        boxes: By slot, the boxes of that.
        shares: By result, what each device's is of the whole one, None: not computed.
        made: By result, the boxes of that.
        is_partial: By result, whether it is combined of several.
        fractions: Which share of the loops each device runs.
        arguments: Of each device, positional and by name.
    """

    leaves: tuple[Leaf, ...]
    slots: tuple[tuple[str, int], ...]
    wants: Mapping[str, tuple[Want | None, ...]]
    boxes: Mapping[str, tuple[Box | None, ...]]
    shares: tuple[tuple[LeafShare | None, ...], ...]
    made: tuple[tuple[Box | None, ...], ...]
    is_partial: tuple[bool, ...]
    fractions: tuple[float, ...]
    arguments: tuple[tuple[list[Form], dict[str, Form]], ...]


class Work(NamedTuple):
    """What the devices do of one op.

    Attributes:
        template: Of all ops like it.
        names: Slot to tensor of the graph.
        returned: Output that each result becomes.
    """

    template: Template
    names: Mapping[str, str]
    returned: tuple[str | None, ...]


_KEPT: dict[Any, Template | None] = {}


def returned_names(op: Op) -> tuple[str | None, ...]:
    """Return the output that each result of a call becomes."""
    listed = (op.arguments or {}).get("returns")
    return tuple(t.name for t in op.outputs) if listed is None else tuple(listed)


def whole_work(op: Op, tensors: Mapping[str, Tensor], mesh: Mesh) -> Work:
    """Return the work if every device runs all of an op; no description is needed."""
    found = cut_work(op, (None,) * len(mesh.shape), tensors, mesh)
    assert found is not None
    return found


def cut_work(op: Op, axes: Axes, tensors: Mapping[str, Tensor], mesh: Mesh) -> Work | None:
    """Return the work if loops of an op are cut; None if they cannot be.

    Raises:
        DescriptionError: E220, if the operator's description is wrong.
    """
    numbers: dict[str, int] = {}
    arguments = op.arguments or {}
    structure = [_plain(arguments.get(key), numbers) for key in ("args", "kwargs")]
    inputs = tuple([numbers.setdefault(name, len(numbers)) for name in op.inputs])
    returned = returned_names(op)
    description = description_of(op.kind) if "." in op.kind else None
    key = (
        op.kind, description and description.function, tuple(structure), inputs,
        tuple([(tensors[name].shape, tensors[name].dtype) for name in numbers]),
        tuple([None if name is None else (tensors[name].shape,) for name in returned]),
        axes, mesh.shape,
    )  # fmt: skip
    if key not in _KEPT:
        if len(_KEPT) > 20_000:
            _KEPT.clear()
        _KEPT[key] = _template(op, axes, tensors, mesh, numbers)
    template = _KEPT[key]
    if template is None:
        return None
    listed = tuple(numbers)
    return Work(template, {slot: listed[number] for slot, number in template.slots}, returned)


def _plain(value: Any, numbers: dict[str, int]) -> Any:
    """Return an encoded argument as something with a hash, tensors by number."""
    of = type(value)
    if of is dict:
        if len(value) == 1 and "tensor" in value:
            return (of, numbers.setdefault(value["tensor"], len(numbers)))
        return (of, tuple([(key, _plain(item, numbers)) for key, item in value.items()]))
    if of is list or of is tuple:
        return tuple([_plain(item, numbers) for item in value])
    return value if of is str or of is int else (of, value)  # 1, 1.0 and True differ


def _template(
    op: Op, axes: Axes, tensors: Mapping[str, Tensor], mesh: Mesh, numbers: Mapping[str, int]
) -> Template | None:
    call, returned = call_of(op, tensors), returned_names(op)
    if all(axis is None for axis in axes):
        names, found = {str(numbers[name]): name for name in call.shapes}, _whole(
            call, returned, axes, tensors, mesh, numbers
        )  # fmt: skip
    elif description_of(call.kind) is None:
        return None
    else:
        found = leaves(call, axes, mesh)
        if found is None or not _is_possible(found, returned):
            return None
        names = input_names(call)
    regions = {slot: [leaf.regions.get(slot) for leaf in found] for slot in names}
    shares = tuple(tuple(leaf.shares[n] for leaf in found) for n in range(len(returned)))
    return Template(
        leaves=found,
        slots=tuple((slot, numbers[name]) for slot, name in names.items()),
        wants={
            slot: tuple(r and Want(r.box, r.fill, r.content) for r in row)
            for slot, row in regions.items()
        },
        boxes={slot: tuple(r and r.box for r in row) for slot, row in regions.items()},
        shares=shares,
        made=tuple(tuple(None if s is None else s.box for s in row) for row in shares),
        is_partial=tuple(any(s is not None and any(s.reducers) for s in row) for row in shares),
        fractions=tuple(
            next((share.weight for share in leaf.shares if share is not None), 1.0)
            for leaf in found
        ),
        arguments=_forms(found),
    )


def _whole(
    call: Call,
    returned: Sequence[str | None],
    axes: Axes,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    numbers: Mapping[str, int],
) -> tuple[Leaf, ...]:
    """Return what each device does of a call that all run."""
    slots = {name: str(number) for name, number in numbers.items()}
    local = Call(
        call.kind,
        tuple(localised(value, slots) for value in call.args),
        {key: localised(value, slots) for key, value in call.kwargs.items()},
        {slots[name]: shape for name, shape in call.shapes.items()},
        call.outputs,
        {slots[name]: dtype for name, dtype in call.dtypes.items()},
    )
    none = (None,) * len(axes)
    regions = {slots[name]: Region(whole(shape)) for name, shape in call.shapes.items()}
    shares = tuple(
        None if name is None else LeafShare(whole(tensors[name].shape or ()), none, 1.0)
        for name in returned
    )
    return (Leaf(local, regions, shares),) * mesh.size


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


def _forms(found: Sequence[Leaf]) -> tuple[tuple[list[Form], dict[str, Form]], ...]:
    forms: dict[int, tuple[list[Form], dict[str, Form]]] = {}
    for leaf in found:
        call = leaf.call
        if id(call) not in forms:
            named = {key: _form(value) for key, value in call.kwargs.items()}
            forms[id(call)] = [_form(value) for value in call.args], named
    return tuple(forms[id(leaf.call)] for leaf in found)


def _form(value: Any) -> Form:
    held: dict[str, int] = {}
    _plain(value, held)
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return Form(value["tensor"], -1)
    return Form(value, len(held)) if held else Form(localised(value, {}), 0)


def filled(form: Form, local: Mapping[str, str]) -> Any:
    """Return an argument with the names of local tensors."""
    value, slots = form
    if slots == 0:
        return value
    return {"tensor": local[value]} if slots < 0 else localised(value, local)


def localised(value: Any, local: Mapping[str, str]) -> Any:
    """Return an argument with the names of local tensors."""
    of = type(value)
    if of is list or of is tuple:
        return [localised(item, local) for item in value]
    if of is dict:
        if len(value) == 1 and "tensor" in value:
            return {"tensor": local[value["tensor"]]}
        return {key: localised(item, local) for key, item in value.items()}
    return value


def misplaced(b: Builder, op: Op, work: Work) -> str | None:
    """Return a tensor that an op writes or views in written storage, but does not find locally.

    None if all is where it is needed.
    """
    if any(b.owners[name] in b.written for name in op.inputs):
        changed = writes(op)
        viewed = {b.owners[t.name] for t in op.outputs if alias_of(op, t) is not None}
        for slot, name in work.names.items():
            owner = b.owners[name]
            if owner not in b.written or (name not in changed and owner not in viewed):
                continue
            for box, own in zip(work.template.boxes[slot], b.boxes[name], strict=True):
                if box is not None and box != own:
                    return name
    for number, name in enumerate(work.returned):
        if name is None or b.owners[name] == name or b.owners[name] not in b.written:
            continue
        if work.template.is_partial[number] or work.template.made[number] != b.boxes[name]:
            return name
    for tensor in op.outputs:  # new contents of what an op changes beside its results
        if tensor.name in work.returned:
            continue
        source = shared_input(b, op, tensor)
        if source is not None and b.boxes[tensor.name] != b.boxes[source]:
            return tensor.name
    return None


def shared_input(b: Builder, op: Op, tensor: Tensor) -> str | None:
    """Return the input through which an output shares its storage; None if it owns it."""
    shared = alias_of(op, tensor)
    if shared is None or shared in op.inputs:
        return shared
    return next(name for name in op.inputs if b.owners[name] == b.owners[shared])
