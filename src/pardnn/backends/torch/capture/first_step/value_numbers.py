"""Value numbering: which tensors of two traces have equal content, whatever calls made them.

Problem: the first step makes states that the later ones find, and has literals where they have
numbers. Its calls differ from theirs, and yet it may compute the same.

Idea: the content of a storage is numbered by how it was computed: kind, arguments, numbers of the
inputs. A source is numbered by its name, a state that the first step creates by its initial value.
A copy has the number of its original. Small tensors of known numbers are computed, and so is what
Python computes from them. In addition there are the identities on which initial values rely: 0 + x
and x + 0 are x, a positive number times 0 is 0, a choice between two equal numbers is that number,
and in sums and differences a number is as good as a tensor full of it.

Complexity: O(calls), and the length of their arguments.

Source: Alpern, Wegman, Zadeck, Detecting equality of variables in programs, POPL 1988.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pardnn.backends.torch.capture.constant_folding import constant_content
from pardnn.backends.torch.capture.first_step.initial_state import (
    FILLED_BY,
    FILLS,
    FUSED_SGD,
    MOMENTUM_INITIAL,
)
from pardnn.backends.torch.capture.first_step.numbering import MAX_KNOWN, Numbering, is_zero
from pardnn.backends.torch.capture.step_trace import StepTrace
from pardnn.backends.torch.capture.trace_ir import (
    ITEM,
    Call,
    Geometry,
    Storage,
    Value,
    flags_of,
)
from pardnn.backends.torch.ops.codec import find_call, flatten_result, instances, literal
from pardnn.backends.torch.ops.host_scalars import SCALAR_FUNCTIONS, node_of
from pardnn.graph.ir import SOURCE_KINDS

_COPIES = ("clone", "_to_copy", "copy_")
_ADDITIONS, _PRODUCTS = ("add", "add_"), ("mul", "mul_")
#: Sums and differences of two terms.
_OF_TERMS = {
    "add": "sum", "add_": "sum",
    "sub": "difference", "sub_": "difference", "rsub": "difference",
}  # fmt: skip
#: Types in which kernels compute as they store: a number is rounded in the same way.
_UNWIDENED = (torch.float32, torch.float64)


class NumberedTrace:
    """The numbers of the final content of the storages of a trace.

    Args:
        trace: The trace of a step.
        numbering: The numbering of all traces that it is compared with.
        starts: Initial values of sources by name: a number, or {"copy_of": source}.

    Attributes:
        made: Number of the result of each call.
        generator: Number of the random generator's state.
    """

    def __init__(self, trace: StepTrace, numbering: Numbering, starts: Mapping[str, Any]) -> None:
        self.made: dict[Call, int] = {}
        self.generator = numbering.of("generator")
        self._trace, self._numbering, self._starts = trace, numbering, starts
        # Keyed with the geometry in which it was written.
        self._contents: dict[Storage, tuple[int, Geometry]] = {}
        self._scalars: dict[Value, Any] = {}
        self._draws: dict[Call, int] = {}
        tracer = trace.tracer
        for call in tracer.calls[: trace.length]:
            # A fake view of known content, such as a literal, has its own storage.
            if call in tracer.undoing or (call.view and call.outputs[0].base is not None):
                continue
            if call.kind in SOURCE_KINDS:
                self._add_source(call)
            elif call.outputs and call.outputs[0].geometry is None:
                self._add_number(call)
            else:
                self._add_call(call)

    def of(self, item: Any) -> Any:
        """Return the number of a tensor or of a number that only a run knows; else the item itself.

        Args:
            item: A tensor or number of the trace.
        """
        node = node_of(item)
        if node is not None:
            return item if node.value is None else self._scalar(node.value)
        if not isinstance(item, torch.Tensor):
            return item
        aliases = self._trace.tracer.aliases
        return self._tensor(aliases.value(item)) if aliases.knows(item) else None

    def of_value(self, value: Value) -> Any:
        """Return the number of a value of the trace; known host scalars are returned unchanged."""
        return self._scalar(value) if value.geometry is None else self._tensor(value)

    # Values.

    def _tensor(self, value: Value) -> int:
        assert value.storage is not None
        assert value.geometry is not None
        if value.storage not in self._contents:
            return self._numbering.of("unknown", id(value.storage))
        content, whole = self._contents[value.storage]
        if value.geometry == whole:
            return content
        known = self._numbering.known(content)
        shape, strides, offset, dtype = value.geometry
        is_plain = dtype == getattr(known, "dtype", None) and not any(flags_of(value.geometry))
        if known is not None and whole == _contiguous(known) and is_plain:
            with _disable_current_modes():
                return self._numbering.of_known(
                    known.contiguous().as_strided(shape, strides, offset)
                )
        return self._numbering.of("view", content, value.geometry, whole)

    def _scalar(self, value: Value) -> Any:
        """Return a number, or a tuple with the number of its computation."""
        hints = self._trace.tracer.scalars.hints
        return hints[value] if value in hints else self._scalars[value]

    def _key(self, data: Any) -> Any:
        """Return arguments with values replaced by their numbers."""
        if isinstance(data, Value):
            if data.geometry is not None:
                return "tensor", self._tensor(data)
            data = self._scalar(data)
        if isinstance(data, tuple) and data[:1] == ("host",):
            return data
        return tuple(map(self._key, data)) if isinstance(data, list | tuple) else literal(data)

    # Calls.

    def _add_source(self, call: Call) -> None:
        (value,) = call.outputs
        numbering = self._numbering
        if value.geometry is None or value.storage is None:
            self._scalars[value] = ("host", numbering.of("source", call.name))
            return
        shape, _, _, dtype = value.geometry
        start = self._starts.get(call.name)
        if call.kind == "constant":
            if shape.numel() <= MAX_KNOWN:
                content = numbering.of_known(constant_content(call))
            else:
                content = numbering.of("constant", repr(call.arguments))
        elif isinstance(start, dict):
            copied = self._trace.values[start["copy_of"]]
            content = self._copied(numbering.of("source", copied.call.name), copied, dtype)
        elif start is not None:
            content = numbering.of_fill(start, dtype, shape)
        else:
            content = numbering.of("source", call.name)
        self._set(value, content)

    def _add_number(self, call: Call) -> None:
        """Number what Python reads from a tensor or computes."""
        (value,) = call.outputs
        if call.kind == ITEM:
            number = self._tensor(call.inputs[0])
            known = self._numbering.known(number)
            self._scalars[value] = (
                known.item() if known is not None else ("host", self._numbering.of("item", number))
            )
            return
        operands = [self._scalar(x) if isinstance(x, Value) else x for x in call.args]
        if call.kind == "scalar.pos" or (call.kind == "scalar.bool" and _is_bool(call.args[0])):
            self._scalars[value] = operands[0]
            return
        keys = tuple(x if isinstance(x, tuple) else literal(x) for x in operands)
        if call.kind == "scalar.where" and keys[1] == keys[2]:
            self._scalars[value] = operands[1]
            return
        if not any(isinstance(x, tuple) for x in operands):
            with contextlib.suppress(ArithmeticError, ValueError, TypeError):
                function = SCALAR_FUNCTIONS[call.kind.partition(".")[2]]
                self._scalars[value] = function(*operands)
                return
        self._scalars[value] = ("host", self._numbering.of(call.kind, keys))

    def _add_call(self, call: Call) -> None:
        name = call.kind.split(".")[1].removeprefix("_foreach_") if "." in call.kind else call.kind
        args, kwargs = call.args, call.kwargs
        if call.kind == FUSED_SGD and kwargs.get("is_first_step"):
            (momentum,) = args[2]
            shape, _, _, dtype = momentum.geometry
            self._set(momentum, self._numbering.of_fill(MOMENTUM_INITIAL, dtype, shape))
            kwargs = kwargs | {"is_first_step": False, "dampening": 0.0}
        target = call.mutated[0] if call.mutated else call.returns[0] if call.returns else None
        content = None
        if target is not None and len(call.outputs) == 1 and call.kind.startswith("aten."):
            content = self._simple(name, args, kwargs, target)
        if content is None and self._computed(call, args, kwargs):
            return
        if content is None and name in _OF_TERMS and target is not None:
            content = self._of_terms(name, args, kwargs, target)
        if content is not None:
            self.made[call] = content
            self._set(call.outputs[0], content)
            return
        key: list[Any] = [call.kind, self._key(args), self._key(sorted(kwargs.items()))]
        if call.random:
            draw = self._draws[call.replays] if call.replays else self.generator
            self._draws[call] = draw
            key.append(draw)
            if not call.replays:
                shapes = tuple(value.geometry and value.geometry[0] for value in call.outputs)
                self.generator = self._numbering.of("drawn", call.kind, shapes, draw)
        number = self.made[call] = self._numbering.of(*key)
        for i, value in enumerate(call.outputs):
            self._set(value, self._numbering.of_output(number, i, self._alike(call, i)))

    def _alike(self, call: Call, index: int) -> int:
        """Return the first output of a call in the same memory as another one."""
        storages = [value.storage for value in call.outputs]
        return index if call.mutated else storages.index(storages[index])

    def _set(self, value: Value, content: int) -> None:
        """Note the content of a value, and so of its storage."""
        assert value.storage is not None
        assert value.geometry is not None
        if not _is_whole(value):
            assert value.storage.owner.geometry is not None
            before = self._contents.get(value.storage)
            key = "part", content, value.geometry, before
            whole = value.storage.owner.geometry
            self._contents[value.storage] = self._numbering.of(*key), whole
        else:
            self._contents[value.storage] = content, value.geometry

    def _copied(self, number: int, value: Value, dtype: torch.dtype) -> int:
        """Return the number of a copy in a dtype."""
        assert value.geometry is not None
        if dtype == value.geometry[3]:
            return number
        known = self._numbering.known(number)
        if known is not None:
            with _disable_current_modes():
                return self._numbering.of_known(known.to(dtype))
        return self._numbering.of("cast", number, dtype)

    def _simple(
        self, name: str, args: list[Any], kwargs: dict[str, Any], target: Value
    ) -> int | None:
        """Return the number of a fill, a copy, or a sum or product with zeros; None of other ops.

        Args:
            name: The name of the op.
            args: Its arguments.
            kwargs: Its keyword arguments.
            target: What it writes or returns.
        """
        assert target.storage is not None
        assert target.geometry is not None
        shape, _, _, dtype = target.geometry
        if name in FILLS:
            return self._numbering.of_fill(FILLS[name], dtype, shape)
        if name in FILLED_BY and len(args) > FILLED_BY[name]:
            filled = args[FILLED_BY[name]]
            if isinstance(filled, Value):
                filled = self._scalar(filled) if filled.geometry is None else None
            is_number = isinstance(filled, bool | int | float)
            return self._numbering.of_fill(filled, dtype, shape) if is_number else None
        operands = [x[0] if isinstance(x, list) and len(x) == 1 else x for x in args]
        tensors = [x for x in operands if isinstance(x, Value) and x.geometry is not None]
        if name in _COPIES and tensors:
            copied = tensors[-1]
            is_alike = copied.geometry is not None and copied.geometry[0] == shape
            return self._copied(self._tensor(copied), copied, dtype) if is_alike else None
        is_of_two = len(operands) == 2 and bool(tensors) and tensors[0] is operands[0]
        if is_of_two and name in _ADDITIONS:
            alpha = self._key(kwargs.get("alpha", 1))
            return self._sum(tensors[0], operands[1], target, is_plain=alpha in ("1", "1.0"))
        if is_of_two and name in _PRODUCTS and len(tensors) == 1:
            other = operands[1]
            factor = self._scalar(other) if isinstance(other, Value) else other
            zeros = self._tensor(tensors[0])
            is_kept = isinstance(factor, int | float) and factor > 0
            return zeros if is_kept and self._numbering.is_zero(zeros) else None
        return None

    def _sum(self, left: Value, right: Any, target: Value, *, is_plain: bool) -> int | None:
        """Return the number of a sum of which one term is zero; None of any other.

        Args:
            left: A tensor.
            right: A tensor or number.
            target: What the sum is written to.
            is_plain: Whether the second term has no factor.
        """
        assert left.geometry is not None
        assert target.geometry is not None
        if is_zero(right):
            return self._copied(self._tensor(left), left, target.geometry[3])
        if not isinstance(right, Value) or right.geometry is None:
            return None
        shape, _, _, dtype = target.geometry
        numbers = self._tensor(left), self._tensor(right)
        for term, number, other in ((left, numbers[0], numbers[1]), (right, *numbers[::-1])):
            assert term.geometry is not None
            is_alike = (term.geometry[0], term.geometry[3]) == (shape, dtype)
            if self._numbering.is_zero(other) and is_alike and (is_plain or term is left):
                return number
        return None

    def _of_terms(
        self, name: str, args: list[Any], kwargs: dict[str, Any], target: Value
    ) -> int | None:
        """Return the number of a sum or difference of two alike tensors, or of one and a number."""
        assert target.geometry is not None
        shape, _, _, dtype = target.geometry
        if len(args) != 2 or self._key([*kwargs.values()]) not in ((), ("1",)):
            return None
        numbers: list[int] = []
        for term in args:
            number = self._scalar(term) if isinstance(term, Value) and not term.geometry else term
            if isinstance(number, Value):
                assert number.geometry is not None
                if (number.geometry[0], number.geometry[3]) != (shape, dtype):
                    return None
                numbers.append(self._tensor(number))
            elif type(number) in (int, float) and dtype in _UNWIDENED:
                numbers.append(self._numbering.of_fill(number, dtype, shape))
            else:
                return None
        if name == "rsub":
            numbers.reverse()
        kind = _OF_TERMS[name]
        return self._numbering.of(kind, *(sorted(numbers) if kind == "sum" else numbers))

    def _computed(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Compute the results of a call on known numbers, if they are small."""
        if call.random or "empty" in call.kind or not call.kind.startswith("aten."):
            return False
        values = [*call.outputs, *call.mutated]
        if any(v.geometry is None or v.geometry[0].numel() > MAX_KNOWN for v in values):
            return False
        if any(value.device != "cpu" for value in values):
            return False
        env: dict[Value, Any] = {}
        for value in instances([args, list(kwargs.values())], Value):
            known = self._scalar(value) if value.geometry is None else None
            if value.geometry is not None:
                known = self._numbering.known(self._tensor(value))
            if known is None or isinstance(known, tuple):
                return False
            env[value] = known.clone() if isinstance(known, torch.Tensor) else known
        with _disable_current_modes(), torch.no_grad():
            try:
                kwargs = {key: _filled(each, env) for key, each in kwargs.items()}
                result = find_call(call.kind)(*_filled(args, env), **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return False
        env |= {v: x for v, x in zip(call.returns, flatten_result(result), strict=False) if v}
        for value in call.outputs:
            made = env.get(value, env.get(value.base) if value.base else None)
            if not isinstance(made, torch.Tensor):
                return False
            self._set(value, self._numbering.of_known(made))
        self.made[call] = self._numbering.of("computed")
        return True


def _filled(data: Any, env: Mapping[Value, Any]) -> Any:
    if isinstance(data, Value):
        return env[data]
    return [_filled(each, env) for each in data] if isinstance(data, list | tuple) else data


def _is_bool(operand: Any) -> bool:
    return isinstance(operand, Value) and operand.kind is bool


def _is_whole(value: Value) -> bool:
    """Whether a value covers its storage, as its owner or as a view of all its elements."""
    assert value.storage is not None
    owner, geometry = value.storage.owner.geometry, value.geometry
    assert owner is not None
    assert geometry is not None
    is_alike = owner[0].numel() == geometry[0].numel() and owner[2:] == geometry[2:]
    return is_alike and 0 not in geometry[1]


def _contiguous(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of a contiguous tensor of the same shape and dtype."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.shape, strides, 0, tensor.dtype
