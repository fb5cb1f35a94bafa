"""The initial value of optimizer state, taken from the call that creates it.

A rank must create its shard of the state without running the optimizer's first step. The first
trace has the call that creates each state tensor; if this call fills it with one number, the number
is the state's `initial`; if it copies a parameter or buffer, that source is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pardnn.backends.torch.capture.constant_folding import constant_content
from pardnn.backends.torch.capture.numbers.first_numbers import (
    IN_A_CONTAINER,
    containers_in_states,
)
from pardnn.backends.torch.capture.rewrites import sgd
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.user_step.object_graph import ObjectGraph
from pardnn.backends.torch.user_step.sources import Source

FILLS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "zero_": 0.0, "zero": 0.0,
          "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}  # fmt: skip
FILLED_BY = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1, "fill": 1, "scalar_tensor": 0}
_COPIES = ("aten.clone.default", "aten._to_copy.default", "aten.copy_.default")
#: Initial value of a momentum buffer that is created as a copy of the first gradient g:
#: -0.0 * momentum + g is g bit by bit, also where g is -0.0.
MOMENTUM_INITIAL = -0.0
#: Writes the first gradient into a momentum that was allocated empty.
FUSED_SGD = "aten._fused_sgd_.default"


def initial_values(
    tracer: Tracer, created: Iterable[Source], objects: ObjectGraph, numbers: Mapping[str, float]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the initial value of each tensor that the first step created and others find.

    Args:
        tracer: The tracer of the first step.
        created: Sources that did not exist before it.
        objects: The object graph after it.
        numbers: Numbers that places held before it, by name.

    Returns:
        The number that fills each tensor, or {"copy_of": source}, by source name; and why others
        start from neither, which is an error only if the graph reads them.
    """
    initial: dict[str, Any] = {}
    irregular: dict[str, str] = {}
    within = containers_in_states(objects)
    for source in created:
        live = source.get()
        if not isinstance(live, torch.Tensor):
            continue
        value = tracer.aliases.fresh_value(live)
        found, reason = initial_value(value), "is not filled with one number when it is created"
        if found is None and (of := copied_source(value)) is not None:
            found = {"copy_of": of}
        elif found is None and is_copied_gradient(value):
            reason = _momentum_reason(source, objects)
            found = None if reason else MOMENTUM_INITIAL
        if source.name in numbers and source.kind != "input":
            found = float(numbers[source.name])  # `self.total += loss.detach()`
        elif source.kind == "buffer" and not is_of_a_module(source, objects):
            found, reason = None, "is created by the first step, in an object that is not a module"
        if source.kind == "state" and source.parameter is None and len(source.slots) > 1:
            found, reason = None, "is in several places of the optimizer's state"
        if any(slot.path or id(slot.holder) in within for slot in source.slots):
            found, reason = None, IN_A_CONTAINER
        if found is None:
            irregular[source.name] = reason or ""
        else:
            initial[source.name] = found
    return initial, irregular


def is_of_a_module(source: Source, objects: ObjectGraph) -> bool:
    """Whether a module holds a tensor, as an attribute or a registered buffer."""
    modules = [e.value for e in objects.stateful if isinstance(e.value, torch.nn.Module)]
    holders = {id(holder) for module in modules for holder in (module, module._buffers)}
    return any(id(slot.holder) in holders and not slot.path for slot in source.slots)


def _momentum_reason(source: Source, objects: ObjectGraph) -> str | None:
    for entry in objects.stateful:
        if not isinstance(entry.value, torch.optim.Optimizer):
            continue
        for parameter, state in entry.value.state.items():
            if any(s.holder is state and s.key == "momentum_buffer" for s in source.slots):
                return momentum_reason(entry.value, parameter)
    return "is created as a copy of another tensor"


def initial_value(value: Value) -> float | None:
    """Return the number with which the first trace filled a tensor; None if there is none."""
    storage = value.storage
    assert storage is not None
    number = _fill(storage.owner.call)
    if number is None and ".empty" in storage.owner.call.kind and storage.writes:
        number = _fill(storage.writes[0])
    return number


def _fill(call: Call) -> float | None:
    if call.kind == "constant":
        return _uniform(call)
    name = call.kind.split(".")[1] if call.kind.startswith("aten.") else ""
    if name in FILLS:
        return FILLS[name]
    if name in FILLED_BY and len(call.args) > FILLED_BY[name]:
        number = call.args[FILLED_BY[name]]
        return float(number) if isinstance(number, int | float) else None
    if name in ("clone", "_to_copy") and call.inputs[0].storage is not None:
        copied = call.inputs[0].storage
        return initial_value(call.inputs[0]) if not copied.writes and not copied.source else None
    return None


def _uniform(call: Call) -> float | None:
    content = constant_content(call)
    same = content.numel() > 0 and bool((content == content.reshape(-1)[0]).all())
    return float(content.reshape(-1)[0]) if same and not content.dtype.is_complex else None


def copied_source(value: Value) -> str | None:
    """Return the source whose original content a tensor was created from.

    One change of dtype is allowed, as `copy_` makes it; None for any other tensor.
    """
    dtypes: list[Any] = []
    while value.storage is not None and not value.storage.source:
        owner, call = value.storage.owner, value.storage.owner.call
        if ".empty" in call.kind and value.storage.writes:
            call = value.storage.writes[0]
        if call.kind not in _COPIES or len(call.reads) == 0:
            return None
        copied = call.inputs[-1]
        storage, version = call.reads[-1]
        if storage is not copied.storage or version or _extent(copied) != _extent(owner):
            return None
        assert owner.geometry is not None
        dtypes.append(owner.geometry[3])
        value = copied
    if value.storage is None or value.geometry is None or value is not value.storage.owner:
        return None
    dtypes.append(value.geometry[3])
    num_casts = sum(a != b for a, b in itertools.pairwise(dtypes))
    return value.call.name if value.call.kind in ("parameter", "buffer") and num_casts < 2 else None


def _extent(value: Value) -> Any:
    return value.geometry and value.geometry[0]


def is_copied_gradient(value: Value) -> bool:
    """Whether a tensor was created as a copy of another one, as SGD creates its momentum."""
    assert value.storage is not None
    first = [write.kind for write in value.storage.writes[:1]]
    return value.storage.owner.call.kind == "aten.clone.default" or first == [FUSED_SGD]


def momentum_reason(optimizer: Any, parameter: torch.Tensor) -> str | None:
    """Return why SGD's momentum cannot start from zero; None if it can."""
    if not isinstance(optimizer, torch.optim.SGD):
        return "is created as a copy of another tensor"
    if sgd.DAMPENED in optimizer.state[parameter]:
        return None  # dampening spares the first step
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]) and group["dampening"] != 0:
            return (
                f"is created as a copy of the first gradient, and dampening is "
                f"{group['dampening']}, so that zero momentum would not give the same first step"
            )
    return None
