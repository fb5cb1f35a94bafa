"""Calls as Python statements: the text of what `ops.codec.bind` makes closures of.

`find_call` decides which calls exist: registered operators and host arithmetic. Their names are
identifiers joined by dots; a part that is a Python keyword (`aten.random_.from`) is read by
`getattr`. Keyword arguments must be in the operator's schema.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from typing import Any

import torch

from pardnn.backends.torch.codegen.text import RANK_DEVICE, Identifiers, box_text, filled, tokens
from pardnn.backends.torch.ops.codec import (
    Reference,
    decode,
    draw_arguments,
    find_call,
    instances,
    records_gradients,
)
from pardnn.backends.torch.ops.kernel_memory import LARGER
from pardnn.backends.torch.ops.memory_formats import BACKWARD, FORWARD
from pardnn.backends.torch.ops.partition_ops import COMBINE, concatenation_dim
from pardnn.errors import FileError, shown
from pardnn.graph.ir import FROM_HOST, TO_HOST, Op, Tensor, contiguous_strides
from pardnn.plan.partitioned_graph import DRAW, FETCH, JOIN, REDUCE, SLICE, UPDATE

_INFIX = {
    "add": "+", "and": "&", "eq": "==", "floordiv": "//", "ge": ">=", "gt": ">", "le": "<=",
    "lshift": "<<", "lt": "<", "mod": "%", "mul": "*", "ne": "!=", "or": "|", "pow": "**",
    "rshift": ">>", "sub": "-", "truediv": "/", "xor": "^",
}  # fmt: skip
_PREFIX = {"neg": "-", "not": "not ", "pos": "+"}
_BUILTINS = frozenset({"abs", "bool", "float", "max", "min", "round"})


class CallWriter:
    """Writes the calls of one program.

    Args:
        names: The names of its variables.
        tensors: The tensors of the planned graph, by name.
    """

    def __init__(self, names: Identifiers, tensors: dict[str, Tensor]) -> None:
        self.names = names
        self.tensors = tensors

    def lines(self, op: Op) -> list[str]:
        """Return the statements that run an op, whose inputs are in their variables.

        Raises:
            FileError: E402 or E407, if the op's arguments are invalid.
            UnsupportedError: E801, if its kind is not registered in this process.
        """
        arguments = op.arguments
        if arguments is None or not isinstance(arguments.get("args", []), list):
            raise FileError(f"op {shown(op.name)} ({shown(op.kind)}) has no argument structure")
        if op.kind == DRAW:
            return self._draw(op, arguments)
        if op.kind.startswith("pardnn."):
            return self._partition_op(op, arguments)
        args, kwargs = _decoded(op, arguments, op.inputs)
        returned = arguments.get("returns")
        outputs = [t.name for t in op.outputs] if returned is None else list(returned)
        targets = [None if name is None else self.names[name] for name in outputs]
        if op.kind.startswith("scalar."):
            lines = [f"{targets[0]} = {_arithmetic(op, args, self.names)}"]
        else:
            lines = _assigned(targets, *_call(op, op.kind, args, kwargs, self.names))
        lines += [
            f"{self.names[tensor.name]} = {self.names[tensor.alias_of or '']}"
            for tensor in op.outputs
            if tensor.name not in outputs
        ]
        if not records_gradients(op, op.kind):
            return lines
        # The kernel sees gradient recording enabled, but autograd records nothing.
        below = "with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():"
        return [below, *(f"    {line}" for line in lines)]

    def _draw(self, op: Op, arguments: dict[str, Any]) -> list[str]:
        """Return a random call on whole tensors that keeps boxes of its results."""
        ones: dict[str, Any] = {}
        kind, arguments, boxes = draw_arguments(op, arguments, ones)
        args, kwargs = _decoded(op, arguments, [*op.inputs, *ones])
        lines: list[str] = []
        for name, (shape, strides, dtype) in ones.items():
            made = self.empty(self.names[name], shape, strides, dtype)
            lines += [*made, f"{self.names[name]}.fill_(1)"]
        drawn = self.names.new("drawn")
        head, parts, tail, _ = _call(op, kind, args, kwargs, self.names)
        lines += filled(f"{drawn} = flatten_result({head}", parts, f"{tail})")
        returned = arguments.get("returns") or [tensor.name for tensor in op.outputs]
        for number, (name, box) in enumerate(zip(returned, boxes, strict=True)):
            if name is not None and box is not None:
                part = f"box_copy({drawn}[{number}], {_plain(box)})"
                lines.append(f"{self.names[name]} = {part}")
        return lines + [f"del {name}" for name in (drawn, *map(self.names.__getitem__, ones))]

    def empty(
        self, variable: str, shape: Sequence[int], strides: Sequence[int], dtype: Any
    ) -> list[str]:
        """Return the statement that makes a tensor with any content.

        Args:
            variable: The variable into which it is put.
            shape: The shape of the tensor.
            strides: The strides in elements.
            dtype: The dtype; refused if it is not a torch type.
        """
        if not isinstance(dtype, torch.dtype):
            raise FileError(f"{variable} has a type of elements that torch does not know")
        parts = [repr(tuple(map(int, shape))), repr(tuple(map(int, strides)))]
        parts += [f"dtype={dtype}", "device=device"]
        return filled(f"{variable} = torch.empty_strided(", parts)

    def buffer(self, variable: str, tensor: Tensor, shape: Sequence[int]) -> list[str]:
        """Return the statement that makes the tensor that an op fills.

        Args:
            variable: The variable into which it is put.
            tensor: A tensor of the graph.
            shape: The shape of the tensor.
        """
        dtype = getattr(torch, tensor.dtype or "float32", None)
        return self.empty(variable, shape, tensor.strides or contiguous_strides(shape), dtype)

    # The ops that partitioning adds, see `ops.partition_ops`.

    def _partition_op(self, op: Op, arguments: dict[str, Any]) -> list[str]:
        args, _ = _decoded(op, arguments, op.inputs)
        if op.kind == TO_HOST:
            host, name = args
            return [f"{self.names[host]}.copy_({self.names[name]})"]
        write = {
            SLICE: self._slice, UPDATE: self._update, JOIN: self._join, FETCH: self._fetch,
            REDUCE: self._reduce, FROM_HOST: self._from_host,
        }.get(op.kind)  # fmt: skip
        if write is None:
            raise FileError(f"op {shown(op.name)} ({shown(op.kind)}) cannot run: no such call")
        (output,) = op.outputs
        try:
            return write(self.names[output.name], output, *args)
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise FileError(
                f"op {shown(op.name)} ({shown(op.kind)}) cannot run: {error}"
            ) from error

    def box(self, name: str, box: Any) -> str:
        """Return the view of a box of a tensor of the graph."""
        return box_text(self.names[name], box, self.tensors[name].shape or ())

    def _slice(self, made: str, _output: Tensor, name: str, box: Any) -> list[str]:
        return [f"{made} = {self.box(name, box)}"]

    def _from_host(self, made: str, output: Tensor, name: str) -> list[str]:
        return [*self.buffer(made, output, output.shape or ()), f"{made}.copy_({self.names[name]})"]

    def _update(self, made: str, _output: Tensor, name: str, box: Any, source: str) -> list[str]:
        target = self.names[name]
        return [f"{self.box(name, box)}.copy_({self.names[source]})", f"{made} = {target}"]

    def _join(self, made: str, _output: Tensor, name: str, shards: Any) -> list[str]:
        copies = [
            f"copy_unless_there({self.box(name, box)}, {self.names[shard]})"
            for shard, box in shards
        ]
        return [*copies, f"{made} = {self.names[name]}"]

    def _fetch(self, made: str, output: Tensor, shape: Any, fill: Any, shards: Any) -> list[str]:
        lines = self.buffer(made, output, shape)
        names = [self.names[name] for name, _ in shards]
        dim = concatenation_dim(shape, [box for _, box in shards]) if fill is None else None
        if dim is not None and len(names) > 1:
            joined = [f"[{names[0]}", *names[1:-1], f"{names[-1]}]"]
            return [*lines, *filled("torch.cat(", [*joined, str(dim), f"out={made}"])]
        if fill is not None:
            lines += filled(f"{made}.fill_(", tokens(fill, self.names))
        for name, (_, box) in zip(names, shards, strict=True):
            lines.append(f"{box_text(made, box, shape)}.copy_({name})")
        return lines

    def _reduce(self, made: str, output: Tensor, how: Any, parts: Any, weights: Any) -> list[str]:
        first, *others = (self.names[name] for name in parts)
        combine = f"torch.{COMBINE[how].__name__}"
        if weights is None and output.strides is None and len(others) == 1:
            return [f"{made} = {combine}({first}, {others[0]}).contiguous()"]
        strides = None if output.strides is None else _plain(output.strides)
        copied = f"{made} = copy_with_strides({first}, {strides})"
        if weights is None:
            return [copied, *(f"{combine}({made}, {each}, out={made})" for each in others)]
        scaled = [f"{copied}.mul_({float(weights[0])!r})"]
        for each, weight in zip(others, weights[1:], strict=True):
            scaled.append(f"{made}.add_({each}, alpha={float(weight)!r})")
        return scaled


def _decoded(
    op: Op, arguments: dict[str, Any], known: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    args = [decode(item, RANK_DEVICE) for item in arguments.get("args", [])]
    kwargs = {key: decode(item, RANK_DEVICE) for key, item in arguments.get("kwargs", {}).items()}
    unknown = set(instances([args, *kwargs.values()], Reference)) - {*known}
    if unknown:
        raise FileError(f"op {shown(op.name)} refers to {shown(min(unknown))}, not an input of it")
    return args, kwargs


def _call(
    op: Op, kind: str, args: list[Any], kwargs: dict[str, Any], names: Identifiers
) -> tuple[str, list[str], str, Sequence[Any]]:
    """Return the text before the arguments, these, the text after them, and the schema's results.

    Args:
        op: The op that makes the call, for error messages.
        kind: The kind of the call.
        args: The decoded arguments.
        kwargs: The decoded keyword arguments.
        names: The names of the variables.
    """
    schema = find_call(kind)._schema
    unknown = kwargs.keys() - {each.name for each in schema.arguments}
    if unknown:
        raise FileError(f"op {shown(op.name)} ({shown(kind)}) takes no {shown(min(unknown))}")
    parts = kind.replace("::", ".").split(".")
    text, parts = ("aten", parts[1:]) if parts[0] == "aten" else ("torch.ops", parts)
    for part in parts:
        text = f'getattr({text}, "{part}")' if keyword.iskeyword(part) else f"{text}.{part}"
    head, tail = (f"compact({text}(", "))") if kind in LARGER else (f"{text}(", ")")
    parts = _argument_tokens(args, kwargs, names)
    if kind == FORWARD:
        parts[0] = f"in_format({parts[0]})"
    elif kind == BACKWARD:
        parts[:2] = f"in_format_of({parts[0]}, {parts[1]})", f"in_format({parts[1]})"
    return head, parts, tail, schema.returns


def _argument_tokens(args: list[Any], kwargs: dict[str, Any], names: Identifiers) -> list[str]:
    found = [token for item in args for token in tokens(item, names)]
    for key, value in kwargs.items():
        first, *rest = tokens(value, names)
        if keyword.iskeyword(key):  # such as `from`
            first = f'**{{"{key}": {first}'
            (rest or [first])[-1] += "}"
            found += [first, *rest] if rest else [first + "}"]
        else:
            found += [f"{key}={first}", *rest]
    return found


def _arithmetic(op: Op, args: list[Any], names: Identifiers) -> str:
    """Return host arithmetic as Python; operands are variables and literals."""
    find_call(op.kind)
    function = op.kind.removeprefix("scalar.")
    if function == "lookup" and len(args) == 2:
        table, index = (", ".join(tokens(item, names)) for item in args)
        return f"{table}[{index}]"
    if any(isinstance(item, list) for item in args):
        raise FileError(f"op {shown(op.name)} computes with a list")
    texts = [token for item in args for token in tokens(item, names)]
    texts = [f"({text})" if text.startswith("-") else text for text in texts]
    if function in _INFIX and len(texts) == 2:
        return f" {_INFIX[function]} ".join(texts)
    if function in _PREFIX and len(texts) == 1:
        return _PREFIX[function] + texts[0]
    if function == "where" and len(texts) == 3:
        return f"{texts[1]} if {texts[0]} else {texts[2]}"
    if function == "is_integer":
        return f"float.is_integer({', '.join(texts)})"
    if function.startswith("numpy_"):
        return f"float(numpy.{function.removeprefix('numpy_')}({', '.join(texts)}))"
    of = "operator." if function in _INFIX or function in _PREFIX else "math."
    function = function.removeprefix("math_")
    return f"{'' if function in _BUILTINS else of}{function}({', '.join(texts)})"


def _assigned(
    targets: list[str | None], head: str, parts: list[str], tail: str, returns: Sequence[Any]
) -> list[str]:
    """Return a call whose results go to variables.

    Args:
        targets: The variables of its results, lists flattened; None for an unread result.
        head: The text before its arguments.
        parts: Its arguments.
        tail: The text after them.
        returns: The results in its schema.
    """
    is_list = any(isinstance(each.type, torch.ListType) for each in returns)
    if not any(targets):
        return filled(head, parts, tail)
    if len(targets) == 1:
        # Of several results, the first, as at run time.
        tail += "[0]" if is_list or len(returns) > 1 else ""
        return filled(f"{targets[0]} = {head}", parts, tail)
    names = [name or "_" for name in targets]
    head = f"flatten_result({head}" if is_list and len(returns) > 1 else head
    tail += ")" if is_list and len(returns) > 1 else ""
    # Unread results are not kept.
    lines = filled(f"{', '.join(names)} = {head}", parts, tail)
    return lines + ["del _"] * ("_" in names)


def _plain(value: Any) -> Any:
    """Return nested sequences of whole numbers as tuples, whose text is code."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else int(value)
