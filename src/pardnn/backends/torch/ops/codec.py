"""The codec of calls: the `arguments` of an op, to and from JSON values, and their binding.

`arguments` of a call is `{"args": [...], "kwargs": {...}}`, optionally `"returns"`, `"mutates"` and
`"redraws"`.

- null, booleans, numbers, strings and lists are literal.
- `{"tensor": name}` is a value of the graph, tensor or host scalar.
- `{"dtype": "float32"}`, `{"layout": "strided"}`, `{"memory_format": "contiguous_format"}`.
- `{"device": "accelerator"}` is the device of the rank that runs the op, `{"device": "cpu"}` the
  host beside it.
- `{"float": "inf"}`, "-inf" or "nan": numbers that JSON does not have. `{"complex": [re, im]}`.
- `returns`: for each result of the call, lists flattened, the output that it becomes; null for a
  result that is not a tensor or that no op reads. Absent: the outputs in order.
- `redraws`: the earlier random op whose draws this op repeats (an RNG replay).
- `mutates`: inputs that the call changes in place although its name has no trailing underscore.

An output that is not returned aliases an input: it is the name of that input's new content.

A graph file may come from anywhere. A kind is looked up among the registered ops by identifiers
alone, and everything else is data, so a file can name an op, but cannot contain code.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pardnn.backends.torch.devices import bytes_of
from pardnn.backends.torch.ops.host_scalars import SCALAR_FUNCTIONS
from pardnn.backends.torch.ops.kernel_memory import LARGER, compact
from pardnn.backends.torch.ops.memory_formats import BACKWARD, FORWARD, in_format, in_format_of
from pardnn.backends.torch.ops.partition_ops import bind_partition_op, keep_boxes, name_ones
from pardnn.errors import FileError, UnsupportedError
from pardnn.graph.ir import LOSS_KIND, SOURCE_KINDS, Op
from pardnn.plan.partitioned_graph import DRAW

#: Its last output, the workspace of its backward pass, exists only if gradients are recorded.
_FUSED_RNN = "aten.mkldnn_rnn_layer.default"
_FUSED_RNN_OUTPUTS = 4
Environment = dict[str, Any]
Call = Callable[[Environment], None]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
#: Ops with effects beyond their arguments: on files, other libraries, other processes.
_FORBIDDEN_NAMESPACES = frozenset({"_c10d_functional", "c10d", "profiler", "rpc", "script"})
_FORBIDDEN_OPS = frozenset({"from_file", "_import_from_c", "save", "set_data"})


def op_kind(overload: torch._ops.OpOverload) -> str:
    """Return an overload's kind: "aten.mm.default", or "mylib::op.default" outside ATen."""
    namespace, name = overload._schema.name.split("::")
    separator = "." if namespace == "aten" else "::"
    return f"{namespace}{separator}{name}.{overload._overloadname}"


def find_call(kind: str) -> Callable[..., Any]:
    """Return the function behind an op's kind.

    Raises:
        FileError: E402, if `kind` does not have the form of a call.
        UnsupportedError: E801, if no such op is registered in this process.
    """
    if kind.startswith("scalar."):
        function = SCALAR_FUNCTIONS.get(kind.removeprefix("scalar."))
        if function is None:
            raise UnsupportedError(f"there is no host arithmetic {kind!r:.80}")
        return function
    parts = kind.replace("::", ".").split(".")
    if len(parts) != 3 or not all(_IDENTIFIER.match(part) for part in parts):
        raise FileError(f"{kind!r:.80} is not a call; an example is 'aten.mm.default'")
    namespace, name, overload = parts
    if namespace in _FORBIDDEN_NAMESPACES or name in _FORBIDDEN_OPS:
        raise UnsupportedError(f"op {kind!r:.80} may not be part of a graph")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise UnsupportedError(
            f"no op {kind!r:.80} is registered in this process (torch {torch.__version__}).\n"
            "If it is an op of a library, import that library first."
        )
    return found


def literal(value: Any) -> str:
    """Return the text of a literal: equal for numbers of one kind, Python's or NumPy's."""
    return repr(float(value) if isinstance(value, float) else value)


def encode(value: Any, name_of: Callable[[Any], str], accelerator: str = "cpu") -> Any:
    """Return one argument as a JSON value.

    Args:
        value: The argument; values of the trace are whatever `name_of` accepts.
        name_of: Name of a value of the trace; raises KeyError for everything else.
        accelerator: Device type of the model, which is encoded as "accelerator".

    Raises:
        UnsupportedError: E801, if it cannot be encoded.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        parts = (value.real, value.imag)
        return {"complex": [encode(part, name_of, accelerator) for part in parts]}
    if isinstance(value, list | tuple):
        return [encode(item, name_of, accelerator) for item in value]
    for kind in ("dtype", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": "accelerator" if value.type == accelerator else value.type}
    try:
        return {"tensor": name_of(value)}
    except KeyError:
        raise UnsupportedError(
            f"an argument of type {type(value).__name__} cannot be written to a graph file"
        ) from None


def _torch_constant(kind: str, name: Any) -> Any:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, getattr(torch, kind)):
        raise FileError(f"{name!r:.80} is not a {kind} of torch {torch.__version__}", code="E407")
    return found


def _decode_one(key: str, value: Any, device: torch.device) -> Any:
    if key in ("dtype", "layout", "memory_format"):
        return _torch_constant(key, value)
    if key == "device" and value == "accelerator":
        return device
    if key == "device" and value in ("cpu", "meta"):
        return torch.device(value)
    if key == "float" and value in ("inf", "-inf", "nan"):
        return float(value)
    if key == "complex" and isinstance(value, list) and len(value) == 2:
        return complex(*(decode(part, device) for part in value))
    raise FileError(f"arguments hold {{{key!r:.40}: {value!r:.80}}}, which has no meaning")


def decode(data: Any, device: torch.device) -> Any:
    """Return the argument that a JSON value encodes, with a `Reference` for each graph value.

    Raises:
        FileError: E402 or E407, if it encodes no argument.
    """
    if isinstance(data, list):
        return [decode(item, device) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise FileError(f"arguments hold {data!r:.80}, expected an object with one key")
    ((key, value),) = data.items()
    if key == "tensor" and isinstance(value, str):
        return Reference(value)
    return _decode_one(key, value, device)


class Reference(str):
    """Name of a value of the graph, as opposed to a string argument."""

    __slots__ = ()


def _substitute(data: Any, env: Environment) -> Any:
    if isinstance(data, Reference):
        return env[data]
    if isinstance(data, list):
        return [_substitute(item, env) for item in data]
    return data


def instances(data: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """Return the instances of `kind` inside nested lists and tuples, in order."""
    if isinstance(data, kind):
        return [data]
    if isinstance(data, list | tuple):
        return [found for item in data for found in instances(item, kind)]
    return []


def _bind_call(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Return a function from the environment to the result, with all else resolved."""
    direct = all(isinstance(arg, Reference) for arg in args)
    live = {key: value for key, value in kwargs.items() if instances(value, Reference)}
    if live:
        slots = [(i, arg) for i, arg in enumerate(args) if instances(arg, Reference)]

        def with_keywords(env: Environment) -> Any:
            filled = args.copy()
            for i, data in slots:
                filled[i] = _substitute(data, env)
            return function(*filled, **kwargs | {k: _substitute(v, env) for k, v in live.items()})

        return with_keywords
    if direct and len(args) == 1:
        (only,) = args
        return lambda env: function(env[only], **kwargs)
    if direct and len(args) == 2:
        first, second = args
        return lambda env: function(env[first], env[second], **kwargs)
    flat = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, Reference)]
    nested = [(i, a) for i, a in enumerate(args) if isinstance(a, list) and instances(a, Reference)]

    def positional(env: Environment) -> Any:
        filled = args.copy()
        for i, name in flat:
            filled[i] = env[name]
        for i, data in nested:
            filled[i] = _substitute(data, env)
        return function(*filled, **kwargs)

    return positional


def flatten_result(result: Any) -> list[Any]:
    """Return the results of a call in order, with lists flattened; a None in them is kept."""
    if result is None:
        return []
    if not isinstance(result, list | tuple):
        return [result]
    flat: list[Any] = []
    for item in result:
        flat += flatten_result(item) if isinstance(item, list | tuple) else [item]
    return flat


def _store_outputs(call: Call, op: Op, returns: Sequence[str | None] | None) -> Call:
    outputs = [tensor.name for tensor in op.outputs]
    returned = outputs if returns is None else list(returns)
    aliases = [(t.name, t.alias_of) for t in op.outputs if t.name not in returned]
    if not aliases and len(returned) == 1 and returned[0] is not None:
        (only,) = returned

        def store_one(env: Environment) -> None:
            result = call(env)
            env[only] = result[0] if isinstance(result, list | tuple) else result

        return store_one

    def store(env: Environment) -> None:
        result = call(env)
        if returned:
            for name, value in zip(returned, flatten_result(result), strict=True):
                if name is not None:
                    env[name] = value
        for name, alias in aliases:
            env[name] = env[alias]

    return store


def bind(op: Op, device: torch.device | str, function: Callable[..., Any] | None = None) -> Call:
    """Resolve an op once, so that running it costs little more than the call.

    Args:
        op: A call, not a source; for the loss op the function does nothing.
        device: What `{"device": "accelerator"}` decodes to.
        function: Called with the op's arguments; None: the operator of its kind.

    Returns:
        A function that reads the op's inputs from the environment, name to value, and stores its
        outputs there. In-place calls change the value that they alias. Gradient recording should be
        off when it is called.

    Raises:
        FileError: E402 or E407, if the op's arguments are invalid.
        UnsupportedError: E801, if its kind is not registered in this process.
    """
    if op.kind in SOURCE_KINDS:
        raise ValueError(f"{op.kind} {op.name!r} exists before the step; it is not a call")
    if op.kind == LOSS_KIND:
        return lambda env: None
    arguments = op.arguments
    if arguments is None or not isinstance(arguments.get("args", []), list):
        raise FileError(f"op {op.name!r:.80} ({op.kind!r:.80}) has no argument structure")
    device = torch.device(device)
    kind, boxes = op.kind, None
    ones: dict[str, Any] = {}
    if kind == DRAW:
        kind, arguments, boxes = draw_arguments(op, arguments, ones)
    args = [decode(item, device) for item in arguments.get("args", [])]
    kwargs = {key: decode(item, device) for key, item in arguments.get("kwargs", {}).items()}
    unknown = set(instances([args, *kwargs.values()], Reference)) - {*op.inputs, *ones}
    if unknown:
        raise FileError(f"op {op.name!r:.80} refers to {min(unknown)!r:.80}, not among its inputs")
    if kind.startswith("pardnn."):
        return _store_outputs(bind_partition_op(op, args, device), op, arguments.get("returns"))
    call = _bind_call(function or _function(op, kind), args, kwargs)
    if boxes is not None:
        call = keep_boxes(call, boxes, ones, device, flatten_result)
    return _store_outputs(call, op, arguments.get("returns"))


def _function(op: Op, kind: str) -> Callable[..., Any]:
    function = find_call(kind)
    if kind in LARGER:
        return lambda *args, **kwargs: compact(function(*args, **kwargs))
    if kind == FORWARD:
        return lambda x, *args, **kwargs: function(in_format(x), *args, **kwargs)
    if kind == BACKWARD:
        return lambda dy, x, *args, **kwargs: function(
            in_format_of(dy, x), in_format(x), *args, **kwargs
        )
    if not records_gradients(op, kind):
        return function

    def as_in_training(*args: Any, **kwargs: Any) -> Any:
        # The kernel sees gradient recording enabled, but autograd records nothing.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return function(*args, **kwargs)

    return as_in_training


def records_gradients(op: Op, kind: str) -> bool:
    """Whether the kernel of a call must see gradient recording enabled."""
    return kind == _FUSED_RNN and len(op.outputs) >= _FUSED_RNN_OUTPUTS


def draw_arguments(
    op: Op, arguments: dict[str, Any], ones: dict[str, Any]
) -> tuple[str, dict[str, Any], list[Any]]:
    """Return the kind of a draw's random call, its arguments, and the box kept of each result.

    Args:
        op: The draw.
        arguments: The arguments of the draw.
        ones: Gets the tensors of ones, see `partition_ops.name_ones`.

    Raises:
        FileError: E402, if they are not the arguments of a draw.
    """
    try:
        kind, args, kwargs, boxes = arguments["args"]
        named = {key: name_ones(item, ones) for key, item in kwargs.items()}
        return kind, arguments | {"args": name_ones(args, ones), "kwargs": named}, boxes
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"draw {op.name!r:.80} has no arguments of one: {error}") from error


def encode_constant(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the `arguments` of a constant: base64 of the bytes of a tensor on the host."""
    content = bytes_of(tensor).numpy().tobytes()
    return {"data": base64.b64encode(content).decode()}


def constant_value(op: Op, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the tensor of an op of kind "constant", new at each call.

    Args:
        op: The constant.
        device: Where the tensor goes, unless the op says "cpu".

    Raises:
        FileError: E402, if its bytes do not fit its shape and dtype.
    """
    (output,) = op.outputs
    dtype = _torch_constant("dtype", output.dtype)
    try:
        content = base64.b64decode((op.arguments or {})["data"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"constant {op.name!r:.80} holds no data: {error}") from error
    shape = output.shape or ()
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise FileError(
            f"constant {op.name!r:.80} holds {len(content)} bytes; its shape {list(shape)} of "
            f"{output.dtype} takes {math.prod(shape) * dtype.itemsize}"
        )
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0)
    flat = flat.to(dtype)
    made = torch.empty_strided(shape, output.strides, dtype=dtype) if output.strides else None
    value = flat.reshape(shape) if made is None else made.copy_(flat.reshape(shape))
    return value if op.arguments and op.arguments.get("device") == "cpu" else value.to(device)
