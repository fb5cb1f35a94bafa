"""The local ops of one op, computed once for all ops that make the same call.

Problem: a step repeats its layers, and most devices make equal calls.
Idea: calls that differ only in the names of their tensors share one `Template`, in which tensors
are numbers.
Complexity: O(size of the arguments) for each further op of a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.graph.ir import Op, Tensor, alias_of, writes
from pardnn.plan.mesh import Box, Mesh
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import whole
from pardnn.shard.cache import cached
from pardnn.shard.partition.call import Call, call_of
from pardnn.shard.partition.interning import unread_inputs
from pardnn.shard.partition.per_device import (
    AxisLoops,
    LocalOp,
    LocalResult,
    input_names,
    local_ops,
)
from pardnn.shard.partition.strategy import can_combine
from pardnn.shard.partition.worker_ops import Region
from pardnn.shard.spmd.emitter import Emitter


class ArgumentTemplate(NamedTuple):
    """An argument of a localised call; without tensors, it is one value for all ops.

    Attributes:
        value: A literal, the slot of a tensor, or a structure with tensors by slot.
        slots: How many tensors it holds: 0 in a literal, -1 if it is one.
    """

    value: Any
    slots: int


class Template(NamedTuple):
    """The local ops of equal calls. Slots name the tensors of the local calls.

    Attributes:
        slots: Slot, and number of the tensor among those of the call.
        requests: By slot and device, what it needs, None for nothing.
        boxes: By slot and device, the box of that.
        results: By result and device, its part of the whole result, None: not computed.
        made: By result and device, the box of that.
        is_partial: By result, whether it is partial.
        fractions: By device, the fraction of the loops' iterations that it runs.
        arguments: By device, positional and by name.
    """

    slots: tuple[tuple[str, int], ...]
    requests: Mapping[str, tuple[Region | None, ...]]
    boxes: Mapping[str, tuple[Box | None, ...]]
    results: tuple[tuple[LocalResult | None, ...], ...]
    made: tuple[tuple[Box | None, ...], ...]
    is_partial: tuple[bool, ...]
    fractions: tuple[float, ...]
    arguments: tuple[tuple[list[ArgumentTemplate], dict[str, ArgumentTemplate]], ...]


class PartitionedOp(NamedTuple):
    """One op of the graph, partitioned.

    Attributes:
        template: Shared by all ops that make an equal call.
        names: By slot, the tensor of the graph.
        returned: The output that each described result becomes, see `result_names`.
    """

    template: Template
    names: Mapping[str, str]
    returned: tuple[str | None, ...]


#: By call, loops and mesh.
_TEMPLATES: dict[Any, Template | None] = cached({})


def returned_names(op: Op) -> tuple[str | None, ...]:
    """Return the output that each result of a call becomes."""
    listed = (op.arguments or {}).get("returns")
    return tuple(t.name for t in op.outputs) if listed is None else tuple(listed)


def result_names(op: Op) -> tuple[str | None, ...]:
    """Return the output that each described result becomes.

    Descriptions are of the tensors that a call returns, or else of those that it changes in place.
    """
    return returned_names(op) or tuple(t.name for t in op.outputs)


def replicate_op(op: Op, tensors: Mapping[str, Tensor], mesh: Mesh) -> PartitionedOp:
    """Return an op that every device runs whole; no description is needed.

    Args:
        op: Of the whole graph.
        tensors: The graph's tensors by name.
        mesh: The devices.
    """
    found = partition_op(op, (None,) * len(mesh.shape), tensors, mesh)
    assert found is not None
    return found


def partition_op(
    op: Op, axes: AxisLoops, tensors: Mapping[str, Tensor], mesh: Mesh
) -> PartitionedOp | None:
    """Return an op whose loops are cut; None if they cannot be.

    Args:
        op: A call of the graph.
        axes: The loop that is cut at each mesh axis.
        tensors: Of the graph, by name.
        mesh: The devices.

    Raises:
        DescriptionError: E220, if the operator's description is wrong.
    """
    numbers: dict[str, int] = {}
    arguments = op.arguments or {}
    structure = [_plain(arguments.get(key), numbers) for key in ("args", "kwargs")]
    inputs = tuple([numbers.setdefault(name, len(numbers)) for name in op.inputs])
    returned = result_names(op)
    description = description_of(op.kind) if "." in op.kind else None
    key = (
        op.kind, description and description.function, tuple(structure), inputs,
        tuple([(tensors[name].shape, tensors[name].dtype) for name in numbers]),
        tuple([None if name is None else (tensors[name].shape,) for name in returned]),
        axes, mesh,
    )  # fmt: skip
    if key not in _TEMPLATES:
        _TEMPLATES[key] = _template(op, axes, tensors, mesh, numbers)
    template = _TEMPLATES[key]
    if template is None:
        return None
    listed = tuple(numbers)
    return PartitionedOp(
        template, {slot: listed[number] for slot, number in template.slots}, returned
    )


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
    op: Op, axes: AxisLoops, tensors: Mapping[str, Tensor], mesh: Mesh, numbers: Mapping[str, int]
) -> Template | None:
    call, returned = call_of(op, tensors), result_names(op)
    if all(axis is None for axis in axes):
        names = {str(numbers[name]): name for name in call.shapes}
        found = _whole(call, returned, axes, tensors, mesh, numbers)
    elif description_of(call.kind) is None:
        return None
    else:
        found = local_ops(call, axes, mesh)
        if found is None or not _is_possible(found, returned):
            return None
        names = input_names(call)
    regions = {slot: [op.regions.get(slot) for op in found] for slot in names}
    results = tuple(tuple(op.results[n] for op in found) for n in range(len(returned)))
    return Template(
        slots=tuple((slot, numbers[name]) for slot, name in names.items()),
        requests={slot: tuple(row) for slot, row in regions.items()},
        boxes={slot: tuple(r and r.box for r in row) for slot, row in regions.items()},
        results=results,
        made=tuple(tuple(None if s is None else s.box for s in row) for row in results),
        is_partial=tuple(any(s is not None and any(s.reducers) for s in row) for row in results),
        fractions=tuple(
            next((result.weight for result in op.results if result is not None), 1.0)
            for op in found
        ),
        arguments=_argument_templates(found),
    )


def _whole(
    call: Call,
    returned: Sequence[str | None],
    axes: AxisLoops,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    numbers: Mapping[str, int],
) -> tuple[LocalOp, ...]:
    """Return the local ops of a call that all devices run whole."""
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
    unread = unread_inputs(call)
    regions = {
        slots[name]: Region(whole(shape), content=name not in unread)
        for name, shape in call.shapes.items()
    }
    results = tuple(
        None if name is None else LocalResult(whole(tensors[name].shape or ()), none, 1.0)
        for name in returned
    )
    return (LocalOp(local, regions, results),) * mesh.size


def _is_possible(found: Sequence[LocalOp], returned: Sequence[str | None]) -> bool:
    """Whether every result is computed and can be combined by something that a plan can say."""
    for op in found:
        for name, result in zip(returned, op.results, strict=True):
            if name is None:
                continue
            if result is None:
                return False
            if result.divisor is not None and returned[result.divisor] is None:
                return False
            names = [reducer.name for reducer in result.reducers if reducer is not None]
            if not all(can_combine(each, len(result.box)) for each in names):
                return False
            # The parts of a quotient are sums, cut again or not.
            inner = "sum" if names[:1] == ["quotient"] else "".join(names[:1])
            if any(each != inner for each in names[1:]):
                return False
    return True


def _argument_templates(
    found: Sequence[LocalOp],
) -> tuple[tuple[list[ArgumentTemplate], dict[str, ArgumentTemplate]], ...]:
    found_arguments: dict[int, tuple[list[ArgumentTemplate], dict[str, ArgumentTemplate]]] = {}
    for op in found:
        call = op.call
        if id(call) not in found_arguments:
            named = {key: _argument_template(value) for key, value in call.kwargs.items()}
            found_arguments[id(call)] = [_argument_template(value) for value in call.args], named
    return tuple(found_arguments[id(op.call)] for op in found)


def _argument_template(value: Any) -> ArgumentTemplate:
    numbers: dict[str, int] = {}
    _plain(value, numbers)
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return ArgumentTemplate(value["tensor"], -1)
    return (
        ArgumentTemplate(value, len(numbers))
        if numbers
        else ArgumentTemplate(localised(value, {}), 0)
    )


def filled(argument: ArgumentTemplate, local: Mapping[str, str]) -> Any:
    """Return an argument with the names of local tensors."""
    value, slots = argument
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


def non_local_tensor(
    emitter: Emitter, op: Op, partitioned: PartitionedOp, gathered: Mapping[str, str]
) -> str | None:
    """Return a tensor that an op writes, or views in written storage, but that is not local.

    Args:
        emitter: Has the layouts.
        op: The op.
        partitioned: What each device does of it.
        gathered: From `gathered_writes`: written by parts, which devices then exchange.

    Returns:
        Its name; None if all tensors are where they are needed.
    """
    if any(emitter.owners[name] in emitter.written for name in op.inputs):
        changed = writes(op)
        viewed = {emitter.owners[t.name] for t in op.outputs if alias_of(op, t) is not None}
        for slot, name in partitioned.names.items():
            owner = emitter.owners[name]
            if owner not in emitter.written or (name not in changed and owner not in viewed):
                continue
            if name in gathered.values():
                continue
            for box, own in zip(partitioned.template.boxes[slot], emitter.boxes[name], strict=True):
                if box is not None and box != own:
                    return name
    for number, name in enumerate(partitioned.returned):
        if (
            name is None
            or name in gathered
            or emitter.owners[name] == name
            or emitter.owners[name] not in emitter.written
        ):
            continue
        if (
            partitioned.template.is_partial[number]
            or partitioned.template.made[number] != emitter.boxes[name]
        ):
            return name
    for tensor in op.outputs:  # new contents of what an op changes beside its results
        if tensor.name in partitioned.returned:
            continue
        source = shared_input(emitter, op, tensor)
        if source is not None and emitter.boxes[tensor.name] != emitter.boxes[source]:
            return tensor.name
    return None


def shared_input(emitter: Emitter, op: Op, tensor: Tensor) -> str | None:
    """Return the input through which an output shares its storage; None if it owns it.

    Args:
        emitter: Knows the owners of storages.
        op: Of the whole graph.
        tensor: One of its outputs.
    """
    shared = alias_of(op, tensor)
    if shared is None or shared in op.inputs:
        return shared
    return next(name for name in op.inputs if emitter.owners[name] == emitter.owners[shared])
