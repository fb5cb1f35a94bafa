"""Random ops: every device draws the whole tensor, as one device would, and keeps its shard.

So values do not depend on the number of devices, and k replicas count as one draw.
"""

from __future__ import annotations

from typing import Any

from pardnn.errors import UnsupportedError, shown
from pardnn.graph.ir import Op, Tensor, writes
from pardnn.plan.partitioned_graph import DRAW, UPDATE
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.boxes import whole
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.regions import Region
from pardnn.shard.spmd.emitter import Anchor, Emitter, box_list, local_tensor
from pardnn.shard.spmd.multi_fetch import reshard
from pardnn.shard.spmd.templates import localised, returned_names
from pardnn.shard.tdl.registry import canonical_name

#: Without a description, and random anyway: run whole, and one draw for all devices.
RANDOM = frozenset({
    "aten.multinomial", "aten.poisson", "aten.binomial", "aten.normal", "aten._standard_gamma",
    "aten._sample_dirichlet", "aten.rrelu_with_noise",
})  # fmt: skip
#: Of their first argument only the shape counts.
SHAPE_ONLY = frozenset({
    "aten.native_dropout", "aten.dropout", "aten.rand_like", "aten.randn_like",
    "aten.randint_like", "aten.normal_", "aten.uniform_", "aten.exponential_", "aten.random_",
    "aten.log_normal_", "aten.geometric_", "aten.cauchy_", "aten.bernoulli_", "aten.bernoulli.p",
})  # fmt: skip
#: Their first result is their first argument times what was drawn.
SCALING = frozenset({"aten.native_dropout", "aten.dropout"})


def _operator(kind: str) -> str:
    return ".".join(canonical_name(kind).split(".")[:2])


def is_random_op(kind: str) -> bool:
    """Whether an op draws random numbers."""
    if kind.startswith("scalar.") or "." not in kind:
        return False
    operator = _operator(kind)
    if operator in RANDOM:
        return True
    described = description_of(kind)
    return described is not None and described.is_random and "empty" not in operator


def emit_random_op(emitter: Emitter, op: Op) -> None:
    """Write the draws of all devices for a random op, whatever loops are cut.

    Raises:
        UnsupportedError: E822, if it returns one result and writes another into an argument.
    """
    _check_one_result(op)
    call = call_of(op, emitter.tensors)
    names = {_operator(op.kind), canonical_name(op.kind)}
    shape_only = None
    if names & SHAPE_ONLY and call.args and isinstance(call.args[0], dict):
        shape_only = call.args[0]["tensor"]
    is_scaling = bool(names & SCALING) and shape_only is not None
    anchor = Anchor(op, tuple(f"{op.name}@{device}" for device in emitter.devices))
    provided: dict[str, list[str | None]] = {}
    listed = _tensor_names([*call.args[shape_only is not None :], *call.kwargs.values()])
    for name in listed:
        requests = [Region(whole(emitter.tensors[name].shape or ()))] * len(emitter.devices)
        provided[name] = reshard(emitter, emitter.own(name), requests, anchor)
    scaled: list[str | None] = []
    if is_scaling:
        assert shape_only is not None
        boxes = emitter.boxes[op.outputs[0].name]
        scaled = reshard(emitter, emitter.own(shape_only), [Region(box) for box in boxes], anchor)
    for device in emitter.devices:
        local = {name: str(found[device]) for name, found in provided.items()}
        args = [localised(value, local) for value in call.args[shape_only is not None :]]
        if shape_only is not None:
            args.insert(0, _ones(emitter.tensors[shape_only]))
        kwargs = {key: localised(value, local) for key, value in call.kwargs.items()}
        inputs = list(local.values())
        is_final = not is_scaling and not writes(op)
        drawn = _emit_draw(emitter, op, device, [op.kind, args, kwargs], inputs, is_final=is_final)
        if is_scaling:
            _scale(emitter, op, device, str(scaled[device]), drawn, anchor)
        elif writes(op):
            _overwrite(emitter, op, device, drawn, anchor)


def _check_one_result(op: Op) -> None:
    if writes(op) and op.outputs[0].name in returned_names(op) and not op.outputs[0].alias_of:
        raise UnsupportedError(
            f"op {shown(op.name)} ({op.kind}, {op.source or 'unknown line'}) draws random numbers, "
            "returns a result and writes an argument besides, which cannot be cut.\n"
            "Plan with a placement of whole ops (--algorithm auto-whole or pardnn).",
            code="E822",
            details={"op": op.name},
        )


def _tensor_names(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return list(dict.fromkeys(name for item in value for name in _tensor_names(item)))
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return [value["tensor"]]
    return []


def _ones(tensor: Tensor) -> dict[str, Any]:
    strides = None if tensor.strides is None else list(tensor.strides)
    return {"ones": [list(tensor.shape or ()), tensor.dtype, strides]}


def _emit_draw(
    emitter: Emitter,
    op: Op,
    device: int,
    call: list[Any],
    inputs: list[str],
    *,
    is_final: bool,
) -> str:
    """Write one device's draw; return the name of its first result."""
    returned = returned_names(op)
    outputs: list[Tensor] = []
    boxes: list[Any] = []
    for name in returned:
        if name is None:
            boxes.append(None)
            continue
        box = emitter.boxes[name][device]
        is_named = is_final or outputs
        here = f"{name}@{device}" if is_named else emitter.fresh(f"{name}:drawn") + f"@{device}"
        outputs.append(local_tensor(emitter.tensors[name], here, box))
        boxes.append(box_list(box))
    name = f"{op.name}@{device}" if is_final else emitter.fresh(f"{op.name}:draw") + f"@{device}"
    workspace = sum(emitter.tensors[name].bytes for name in returned if name is not None)
    emitter.emit(
        device,
        Op(
            name=name, kind=DRAW, inputs=tuple(dict.fromkeys(inputs)), outputs=tuple(outputs),
            after=emitter.after(op, device), workspace=workspace, source=op.source,
            module=op.module, step=op.step, arguments={"args": [*call, boxes], "of": op.name,
                "returns": _returns(returned, outputs)},
        ),
    )  # fmt: skip
    emitter.helpers.setdefault((op.name, device), []).append(name)
    return outputs[0].name


def _returns(returned: tuple[str | None, ...], outputs: list[Tensor]) -> list[str | None]:
    names = iter(outputs)
    return [None if name is None else next(names).name for name in returned]


def _scale(emitter: Emitter, op: Op, device: int, source: str, drawn: str, anchor: Anchor) -> None:
    """Multiply an input with what was drawn."""
    tensor = op.outputs[0]
    output = local_tensor(tensor, f"{tensor.name}@{device}", emitter.boxes[tensor.name][device])
    args = [{"tensor": source}, {"tensor": drawn}]
    emitter.helper(
        device, f"{op.name}@{device}", "aten.mul.Tensor", args, (source, drawn), output, anchor
    )


def _overwrite(emitter: Emitter, op: Op, device: int, drawn: str, anchor: Anchor) -> None:
    """Put what was drawn into the storage that the op changes."""
    (name,) = writes(op)
    target = f"{name}@{device}"
    tensor = op.outputs[0]
    box = emitter.boxes[name][device]
    local = tuple((0, end - begin) for begin, end in box)
    output = local_tensor(tensor, f"{tensor.name}@{device}", box, target)
    args = [{"tensor": target}, box_list(local), {"tensor": drawn}]
    emitter.helper(device, f"{op.name}@{device}", UPDATE, args, (target, drawn), output, anchor,
             memory="reference", more={"mutates": [target]})  # fmt: skip
