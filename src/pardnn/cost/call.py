"""A call as cost models see it: arguments with tensors in place of references, no names.

Two ops with the same call have the same cost, so a call's signature is the key of measured costs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pardnn.graph.ir import LOSS_KIND, Graph, Op, Tensor, writes

#: Key of the references in `Op.arguments`: a one-entry object whose value names a tensor.
_REFERENCE = "tensor"


@dataclass(frozen=True, slots=True)
class Call:
    """One op's call.

    Attributes:
        op: Whose call it is.
        name: Bare name of the operator: "mm" for "aten.mm.default".
        args: Positional arguments, `Tensor` in place of references.
        kwargs: Keyword arguments, likewise.
        inputs: Tensors that are read, each once, in the order of the arguments.
    """

    op: Op
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Tensor, ...]

    def tensor(self, position: int) -> Tensor | None:
        """The positional argument there, if it is a tensor."""
        found = self.args[position] if position < len(self.args) else None
        return found if isinstance(found, Tensor) else None

    def literal(self, position: int, name: str, default: Any) -> Any:
        """The argument at that position, or called `name`, or `default`.

        Args:
            position: Among the positional arguments.
            name: As a keyword.
            default: If it is not given.
        """
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


def tensors_by_name(graph: Graph) -> dict[str, Tensor]:
    """Every tensor of the graph under its name."""
    return {tensor.name: tensor for op in graph.ops for tensor in op.outputs}


def bare_name(kind: str) -> str:
    """Operator name in a kind: "mm" for "aten.mm.default", "op" for "mylib::op.default"."""
    if "::" in kind:
        return kind.split("::", 1)[1].split(".")[0]
    parts = kind.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def reference(value: Any) -> str | None:
    """Name of the tensor that an encoded argument refers to, if it is a reference."""
    if isinstance(value, dict):
        ((key, name), *others) = cast(dict[str, Any], value or {"": None}).items()
        if key == _REFERENCE and isinstance(name, str) and not others:
            return name
    return None


def _rebuilt(value: Any, found: Callable[[str], Any]) -> Any:
    """Return the encoded argument with `found(name)` in place of every reference."""
    name = reference(value)
    if name is not None:
        return found(name)
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {key: _rebuilt(item, found) for key, item in fields.items()}
    if isinstance(value, list | tuple):
        return [_rebuilt(item, found) for item in cast(Sequence[Any], value)]
    return value


def _arguments(op: Op) -> tuple[list[Any], dict[str, Any]]:
    arguments = op.arguments or {"args": [{"tensor": name} for name in op.inputs]}
    return list(arguments.get("args", ())), dict(arguments.get("kwargs", {}))


def call_of(op: Op, tensors: Mapping[str, Tensor]) -> Call:
    """Return the op's call.

    An op without `arguments` (a graph from elsewhere) has its inputs as arguments.
    """
    found: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        return found.setdefault(name, tensors[name])

    args, kwargs = (_rebuilt(part, tensor) for part in _arguments(op))
    for name in op.inputs:
        found.setdefault(name, tensors[name])
    return Call(op, bare_name(op.kind), tuple(args), kwargs, tuple(found.values()))


def is_host(op: Op) -> bool:
    """Whether the op is arithmetic on host scalars only."""
    if op.kind.startswith("scalar."):
        return True
    return bool(op.outputs) and all(
        (tensor.dtype or "").startswith("host.") for tensor in op.outputs
    )


def is_view(op: Op) -> bool:
    """Whether the op only makes another view of a storage: no element is read or written."""
    return op.memory == "reference" and bool(op.outputs) and not writes(op)


def is_free(op: Op) -> bool:
    """Whether the op is no call at all: a source, or the mark of the loss."""
    return op.is_source or op.kind == LOSS_KIND


def signature(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """Text that two ops share exactly if they make the same call on tensors of the same form.

    It holds the kind, the literal arguments, and for each tensor its dtype, shape, strides and
    which arguments are one tensor; no names, so equal layers have equal signatures. Ops that move
    tensors of a sharded plan do so whatever the place of each box: its sizes count.
    """
    numbers: dict[str, int] = {}

    def form(name: str) -> list[Any]:
        tensor = tensors[name]
        shape = None if tensor.shape is None else list(tensor.shape)
        size: Any = tensor.bytes if shape is None else shape
        return [tensor.dtype, size, strides_of(tensor)]

    def number(name: str) -> dict[str, int]:
        return {"tensor": numbers.setdefault(name, len(numbers))}

    call: Any = [_rebuilt(part, number) for part in _arguments(op)]
    if op.kind.startswith("pardnn."):
        call = _sized(call)
    return json.dumps([op.kind, *call, [form(name) for name in numbers]], sort_keys=True)


def _sized(value: Any) -> Any:
    """Return encoded arguments with a box, a list of [start, stop], replaced by its sizes."""
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {key: _sized(item) for key, item in fields.items()}
    if not isinstance(value, list):
        return value
    items = cast(list[Any], value)
    if items and all(isinstance(item, list) and len(item) == 2 for item in items):  # pyright: ignore[reportUnknownArgumentType]
        pairs = cast(list[list[Any]], items)
        if all(isinstance(end, int) for pair in pairs for end in pair):
            return [stop - start for start, stop in pairs]
    return [_sized(item) for item in items]


def call_key(op: Op, tensors: Mapping[str, Tensor]) -> Any:
    """Return what is equal for ops of equal cost under any cost model; made in a few microseconds.

    As `signature`, but contiguous strides may be spelled in two ways; of views the kind counts,
    and of ops that move tensors of a sharded plan not the place of each slice.
    """
    if is_view(op):
        return op.kind
    numbers: dict[str, int] = {}
    call: Any = None
    if op.arguments is not None and not op.kind.startswith("pardnn."):
        arguments = op.arguments
        call = _plain(arguments.get("args"), numbers), _plain(arguments.get("kwargs"), numbers)
    for name in op.inputs:
        numbers.setdefault(name, len(numbers))
    read = tuple([_form(tensors[name]) for name in numbers])
    made = tuple([_form(tensor) for tensor in op.outputs])
    return op.kind, op.arguments is None, call, read, made


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.bytes, tensor.shape, tensor.dtype, tensor.strides


def _plain(value: Any, numbers: dict[str, int]) -> Any:
    """Return an encoded argument as something with a hash, references by number."""
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        if len(fields) == 1:
            ((key, name),) = fields.items()
            if key == _REFERENCE and isinstance(name, str):
                return (dict, numbers.setdefault(name, len(numbers)))
        return (dict, tuple([(key, _plain(item, numbers)) for key, item in fields.items()]))
    if isinstance(value, list | tuple):
        return tuple([_plain(item, numbers) for item in cast(Sequence[Any], value)])
    of = value.__class__
    return value if of is str or of is int else (of, value)  # 1, 1.0 and True differ


def strides_of(tensor: Tensor) -> list[int] | None:
    """Strides in elements, None if contiguous, so that both spellings of contiguous agree."""
    if tensor.strides is None or tensor.shape is None:
        return None
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return list(tensor.strides)
        expected *= size
    return None


def numel(tensor: Tensor) -> int:
    """Number of elements; for a tensor of unknown shape as if it were float32."""
    return tensor.bytes // 4 if tensor.shape is None else math.prod(tensor.shape)


def bytes_touched(tensor: Tensor) -> int:
    """Bytes that reading it moves: an expanded dim (stride 0) is read once."""
    if not tensor.shape or not tensor.strides or 0 not in tensor.strides or not tensor.bytes:
        return tensor.bytes
    repeats = math.prod(
        size for size, stride in zip(tensor.shape, tensor.strides, strict=True) if stride == 0
    )
    return tensor.bytes // max(repeats, 1)
