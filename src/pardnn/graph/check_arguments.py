"""The checker of `Op.arguments`: that they have the structure which all readers rely on.

What the structure is, `backends/torch/ops/codec.py` says. Whether an operator takes such arguments,
only its schema knows (the runtime) or its description (partitioning). O(size of the arguments).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from pardnn.errors import shown
from pardnn.graph.ir import LOSS_KIND, Op

_TORCH_NAMES = ("dtype", "layout", "memory_format", "device")
_FLOATS = ("inf", "-inf", "nan")
#: Types of what encodes itself. Most arguments are lists of integers: a call for each of them takes
#: a tenth of the time of planning a cut on 16 devices.
_PLAIN = frozenset({int, bool, float, str, type(None)})
_EFFECTS = (
    "set", "assign", "trainable", "tell", "call", "rebind", "print", "log", "check", "no_nan",
    "schedule", "order", "left",
)  # fmt: skip


def argument_faults(op: Op) -> Iterator[str]:
    """Yield what is wrong with the arguments of an op, each a sentence."""
    arguments = op.arguments
    if not arguments:
        return
    rules = _SOURCE if op.is_source else _MARK if op.kind == LOSS_KIND else _CALL
    for key, value in arguments.items():
        rule = rules.get(key)
        if rule is None:
            yield f"arguments have the unknown key {shown(key)}"
            continue
        fault = rule(op, value)
        if fault is not None:
            yield f"arguments.{key} {fault}"
    returned: Any = arguments.get("returns")
    if rules is _CALL and isinstance(returned, list | tuple):
        for tensor in op.outputs:
            if tensor.name not in returned and tensor.alias_of is None:
                yield f"arguments.returns lacks the output {shown(tensor.name)}"


def _args(op: Op, value: Any) -> str | None:
    if not isinstance(value, list | tuple):
        return "is not a list"
    found = cast("Sequence[Any]", value)
    inputs = op.inputs if len(op.inputs) < 8 else frozenset(op.inputs)
    if op.kind.startswith("pardnn."):  # their checker knows the structure
        return _reference_fault(found, inputs)
    for item in found:
        fault = None if type(item) in _PLAIN else _literal_fault(item, inputs)
        if fault is not None:
            return fault
    return None


def _kwargs(op: Op, value: Any) -> str | None:
    if not isinstance(value, dict):
        return "is not an object"
    return _args(op, list(cast("dict[str, Any]", value).values()))


def _literal_fault(value: Any, inputs: Collection[str]) -> str | None:
    """Return why an argument encodes none; None if it does."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if len(found) != 1:
            return f"holds {_text(found)}, expected an object with one key"
        ((key, item),) = found.items()
        if key == "tensor":
            is_read = isinstance(item, str) and item in inputs
            return None if is_read else f"refers to {_text(item)}, not among its inputs"
        is_known = (
            (key in _TORCH_NAMES and isinstance(item, str))
            or (key == "float" and item in _FLOATS)
            or (key == "complex" and _is_complex(item))
        )
        return None if is_known else f"holds {_text(found)}, which has no meaning"
    if isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            fault = None if type(item) in _PLAIN else _literal_fault(item, inputs)
            if fault is not None:
                return fault
    return None


def _is_complex(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    parts = cast("Sequence[Any]", value)
    numbers: list[Any] = [
        cast("dict[str, Any]", part).get("float") if isinstance(part, dict) else part
        for part in parts
    ]
    return len(numbers) == 2 and all(
        n in _FLOATS or (isinstance(n, int | float) and not isinstance(n, bool)) for n in numbers
    )


def _reference_fault(value: Any, inputs: Collection[str]) -> str | None:
    """Return which reference in a structure is to no input; None if none is."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if found.keys() == {"tensor"}:
            return _literal_fault(found, inputs)
        value = list(found.values())
    if isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            fault = None if type(item) in _PLAIN else _reference_fault(item, inputs)
            if fault is not None:
                return fault
    return None


def _returns(op: Op, value: Any) -> str | None:
    if not isinstance(value, list | tuple):
        return "is not a list"
    names = [name for name in cast("Sequence[Any]", value) if name is not None]
    outputs = {tensor.name for tensor in op.outputs}
    odd = [name for name in names if not isinstance(name, str) or name not in outputs]
    if odd:
        return f"names {_text(odd[0])}, which is not an output"
    return "names an output twice" if len(set(names)) < len(names) else None


def _mutates(op: Op, value: Any) -> str | None:
    is_list = isinstance(value, list | tuple)
    if is_list and all(name in op.inputs for name in cast("Sequence[Any]", value)):
        return None
    return "is not a list of tensors that it reads"


def _of_type(kind: type | tuple[type, ...], what: str) -> Callable[[Op, Any], str | None]:
    return lambda op, value: None if isinstance(value, kind) else f"is not {what}"


def _literal(op: Op, value: Any) -> str | None:
    """Check a number, or a source to copy, that a state begins with."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if found.keys() == {"copy_of"}:
            return None if isinstance(found["copy_of"], str) else "copies no source"
    return _literal_fault(value, ())


def _guard(op: Op, value: Any) -> str | None:
    return None if value in (None, "nonzero", "exact") else f"is {_text(value)}"


def _data(op: Op, value: Any) -> str | None:
    """Check the bytes of a constant: as many as its tensor has."""
    try:
        content = base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        return "is not base64"
    size = sum(tensor.bytes for tensor in op.outputs)
    return None if len(content) == size else f"holds {len(content)} bytes, its tensor has {size}"


def _shard(op: Op, value: Any) -> str | None:
    """Check which box of which tensor a source holds."""
    found: Mapping[str, Any] = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    box: Any = found.get("box")
    is_box = isinstance(box, list | tuple) and all(
        isinstance(ends, list | tuple) and [type(e) for e in cast("list[Any]", ends)] == [int, int]
        for ends in cast("Sequence[Any]", box)
    )
    is_shard = found.keys() == {"of", "box"} and isinstance(found["of"], str) and is_box
    return None if is_shard else f"is {_text(value)}, not a box of a tensor"


def _effects(op: Op, value: Any) -> str | None:
    """Check what the step tells objects of its user."""
    if not isinstance(value, list | tuple):
        return "is not a list"
    for effect in cast("Sequence[Any]", value):
        found = cast("dict[str, Any]", effect) if isinstance(effect, dict) else {}
        contents = [found[key] for key in found if key in _EFFECTS]
        is_one = len(contents) == 1 and found.keys() - _EFFECTS <= {"unless"}
        if not is_one or not isinstance(contents[0], list | tuple):
            return f"holds {_text(effect)}, not an effect of a step"
    return None


def _list_of_names(op: Op, value: Any) -> str | None:
    is_list = isinstance(value, list | tuple)
    is_names = is_list and all(isinstance(name, str) for name in cast("Sequence[Any]", value))
    return None if is_names else "is not a list of names"


def _text(value: Any) -> str:
    return shown(value) if isinstance(value, str) else shown(repr(value))[1:-1]


_CALL: Mapping[str, Callable[[Op, Any], str | None]] = {
    "args": _args, "kwargs": _kwargs, "returns": _returns, "mutates": _mutates,
    "redraws": _of_type(str, "a name of an op"), "of": _of_type(str, "a name of an op"),
    "collective": _of_type(dict, "an object"),
}  # fmt: skip
_SOURCE: Mapping[str, Callable[[Op, Any], str | None]] = {
    "args": _args, "kwargs": _kwargs, "initial": _literal, "value": _literal, "guard": _guard,
    "data": _data, "shard": _shard, "persistent": _of_type(bool, "a truth value"),
    "written": _of_type(bool, "a truth value"), "device": _of_type(str, "a device"),
    "summed": _of_type(bool, "a truth value"), "reset": _of_type(bool, "a truth value"),
}  # fmt: skip
_MARK: Mapping[str, Callable[[Op, Any], str | None]] = {
    "settings": _of_type(dict, "an object"), "host": _of_type(dict, "an object"),
    "effects": _effects,
    "schedules": _list_of_names, "result": lambda op, value: None,
    "opening": _of_type(bool, "a truth value"), "unread": _list_of_names,
    "replaced": _list_of_names, "moved": _list_of_names, "written": _of_type(dict, "an object"),
    "numbers": _list_of_names,
    "contents": _list_of_names,
}  # fmt: skip
