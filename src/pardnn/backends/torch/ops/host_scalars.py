"""Host scalars: numbers that Python computes between calls, as symbolic values of the trace.

Problem: `tensor.item()` and the floats of an optimizer's `param_groups` must not be frozen at the
values of the traced step.

Idea: while tracing they are `torch.SymFloat`, `torch.SymInt` or `torch.SymBool` around a
`HostNode`, which records every arithmetic operation on them. Where Python or C++ needs the number
itself (`bool`, `float`, `int`, a size), torch guards on the node: one with a hint returns it, and
the tracer records which inputs it was computed from; one without a hint raises.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

#: Host arithmetic by the name that follows "scalar." in an op's kind: Python's own functions, so
#: that a run has the bits of the eager step.
SCALAR_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "and": operator.and_,
    "bool": bool,
    "eq": operator.eq,
    "float": float,
    "floordiv": operator.floordiv,
    "ge": operator.ge,
    "gt": operator.gt,
    "is_integer": float.is_integer,
    "le": operator.le,
    "lookup": operator.getitem,
    "lshift": operator.lshift,
    "lt": operator.lt,
    "max": max,
    "min": min,
    "mod": operator.mod,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "not": operator.not_,
    "or": operator.or_,
    "pos": operator.pos,
    "pow": operator.pow,
    "round": round,
    "rshift": operator.rshift,
    "sub": operator.sub,
    "truediv": operator.truediv,
    "trunc": math.trunc,
    "where": lambda condition, a, b: a if condition else b,
    "xor": operator.xor,
}

#: Functions of the `math` module that are recorded where an argument is a symbol.
MATH_FUNCTIONS = {
    name: "math_pow" if name == "pow" else name
    for name in (
        "ceil", "cos", "exp", "expm1", "fabs", "floor", "isfinite", "isinf", "isnan", "log",
        "log10", "log1p", "log2", "pow", "sin", "sqrt", "tanh",
    )
}  # fmt: skip
SCALAR_FUNCTIONS |= {new: getattr(math, name) for name, new in MATH_FUNCTIONS.items()}

#: NumPy's functions, whose last bits differ from `math`'s; NumPy calls them as methods of a symbol.
NUMPY_FUNCTIONS = ("cos", "exp", "log", "log10", "log2", "sin", "sqrt", "tanh")


def _of_numpy(name: str, number: Any) -> float:
    return float(getattr(np, name)(number))


SCALAR_FUNCTIONS |= {f"numpy_{name}": partial(_of_numpy, name) for name in NUMPY_FUNCTIONS}

#: torch's name of a node method -> the function's name above.
_FUNCTION_OF_METHOD = {
    "abs": "abs", "add": "add", "and_": "and", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "ceil": "ceil", "eq": "eq", "float_pow": "pow",
    "float_truediv": "truediv", "floor": "floor", "floordiv": "floordiv", "ge": "ge", "gt": "gt",
    "int_floordiv": "floordiv", "int_truediv": "truediv", "is_integer": "is_integer", "le": "le",
    "lshift": "lshift", "lt": "lt", "mod": "mod", "mul": "mul", "ne": "ne", "neg": "neg",
    "or_": "or", "pos": "pos", "pow": "pow", "pow_by_natural": "pow", "rshift": "rshift",
    "round": "round", "sub": "sub", "sym_and": "and", "sym_float": "float", "sym_int": "trunc",
    "sym_max": "max", "sym_min": "min", "sym_not": "not", "sym_or": "or", "sym_sqrt": "sqrt",
    "truediv": "truediv", "trunc": "trunc",
}  # fmt: skip
_BOOLEAN = frozenset({
    "and", "bool", "eq", "ge", "gt", "is_integer", "isfinite", "isinf", "isnan", "le", "lt", "ne",
    "not", "or",
})  # fmt: skip
_INTEGRAL = frozenset({"ceil", "floor", "trunc"})
_BITWISE = frozenset({"and", "or", "xor"})
_OF_NUMPY = {f"numpy_{name}" for name in NUMPY_FUNCTIONS}
_ALWAYS_FLOAT = frozenset({"float", "truediv", *MATH_FUNCTIONS.values(), *_OF_NUMPY}) - _INTEGRAL
_SYMBOLS = {float: torch.SymFloat, int: torch.SymInt, bool: torch.SymBool}


class ScalarRecorder(Protocol):
    """What a node needs of the tracer.

    Attributes:
        is_index_asked: Whether Python has used any node as an index.
        hints: The number in the traced step behind each value that does not depend on data.
    """

    hints: dict[Any, Any]
    is_index_asked: bool

    def scalar_call(self, function: str, operands: list[Any], kind: type) -> Any:
        """Record a call of host arithmetic and return its value.

        Args:
            function: A key of `SCALAR_FUNCTIONS`.
            operands: Values of the trace and literals.
            kind: float, int or bool: the type of the result.
        """

    def guard_scalar(self, node: HostNode, *, is_truth: bool = False) -> Any:
        """Return the number behind `node` that Python needs, and guard what Python needs of it.

        Args:
            node: The node of the number.
            is_truth: Whether Python only needs to know if it is true.

        Raises:
            UnsupportedError: E802, if only a run knows it.
        """


class HostNode:
    """The node behind a symbolic host scalar; torch's `SymNode` by duck typing.

    Attributes:
        value: The trace's value; None for a literal.
        kind: float, int or bool.
        hint: The number in the traced step; None if only a run knows it.
        parents: The nodes that it was computed from.
        function: The key of `SCALAR_FUNCTIONS` that computed it; None for literals, inputs and
            `.item()`.
        tensor: The tensor whose `.item()` was called.
    """

    def __init__(
        self,
        recorder: ScalarRecorder,
        value: Any,
        kind: type,
        hint: Any = None,
        *,
        function: str | None = None,
        parents: tuple[HostNode, ...] = (),
    ) -> None:
        self.recorder = recorder
        self.value = value
        self.kind = kind
        self.hint = hint
        self.function = function
        self.parents = parents
        self.tensor: torch.Tensor | None = None
        if value is not None and hint is not None:
            recorder.hints[value] = hint

    def __deepcopy__(self, _memo: Any) -> HostNode:
        return self  # a copy of a number is that number

    @property
    def operand(self) -> Any:
        """The value of the trace, or the literal."""
        return self.hint if self.value is None else self.value

    def is_int(self) -> bool:
        """Whether it stands for an int."""
        return self.kind is int

    def is_float(self) -> bool:
        """Whether it stands for a float."""
        return self.kind is float

    def is_bool(self) -> bool:
        """Whether it stands for a bool."""
        return self.kind is bool

    def is_nested_int(self) -> bool:
        """Return False: there are no ragged sizes."""
        return False

    def is_constant(self) -> bool:
        """Return False, so that torch does not fold it."""
        return False

    def is_symbolic(self) -> bool:
        """Return True: a guard decides what may depend on it."""
        return True

    def has_hint(self) -> bool:
        """Return False, so that torch reads the number through a guard, which is recorded."""
        return False

    def maybe_as_int(self) -> int | None:
        """Return the number of a literal; None for any other node."""
        return self.hint if self.value is None and self.kind is int else None

    def maybe_as_float(self) -> float | None:
        """Return the number of a literal; None for any other node."""
        return self.hint if self.value is None and self.kind is float else None

    def maybe_as_bool(self) -> bool | None:
        """Return the bool of a literal; None for any other node."""
        return self.hint if self.value is None and self.kind is bool else None

    def nested_int(self) -> None:
        """Return None: there are no ragged sizes."""

    def wrap_float(self, number: float) -> HostNode:
        """Return the node of a literal."""
        return HostNode(self.recorder, None, float, number)

    def wrap_int(self, number: int) -> HostNode:
        """Return the node of a literal."""
        return HostNode(self.recorder, None, int, number)

    def wrap_bool(self, truth: bool) -> HostNode:
        """Return the node of a literal."""
        return HostNode(self.recorder, None, bool, truth)

    def clone(self) -> HostNode:
        """Return itself: nodes are immutable."""
        return self

    def str(self) -> str:
        """Return the number's text, guarded; a placeholder if only a run knows it."""
        if self.hint is None:
            return f"<host {self.kind.__name__}>"
        return repr(self.recorder.guard_scalar(self))

    def __repr__(self) -> builtins.str:
        """Return a text for debugging."""
        return f"<host {self.kind.__name__}>"

    __str__ = _graph_repr = __repr__

    def statically_known_true(self, file: builtins.str, line: int) -> bool:
        """Return False: nothing is known without a guard."""
        return False

    def expect_true(self, file: builtins.str, line: int) -> bool:
        """Return True for torch's check `base >= 0` of a power; a run raises if it fails."""
        return True

    def guard_float(self, file: builtins.str, line: int) -> float:
        """Return the number, guarded."""
        return float(self.recorder.guard_scalar(self))

    def guard_int(self, file: builtins.str, line: int) -> int:
        """Return the number, guarded."""
        return int(self.recorder.guard_scalar(self))

    def guard_bool(self, file: builtins.str, line: int) -> bool:
        """Return the bool, guarded."""
        return self.bool_()

    guard_or_false = guard_or_true = guard_size_oblivious = guard_bool

    def bool_(self) -> bool:
        """Return the bool, guarded."""
        return bool(self.recorder.guard_scalar(self, is_truth=True))

    def int_(self) -> int:
        """Return the number, guarded, as an index."""
        self.recorder.is_index_asked = True
        return int(self.recorder.guard_scalar(self))

    def sym_ite(self, then: HostNode, otherwise: HostNode) -> HostNode:
        """Return one of two nodes by this condition, guarded."""
        return then if self.bool_() else otherwise

    def round(self, ndigits: int | None = None) -> HostNode:
        """Record `round(self, ndigits)`."""
        return self._call("round", *([] if ndigits is None else [self.wrap_int(ndigits)]))

    def _call(self, function: str, *others: HostNode) -> HostNode:
        operands = (self, *others)
        hint = None
        if all(node.hint is not None for node in operands):
            hint = SCALAR_FUNCTIONS[function](*(node.hint for node in operands))
        kind = _result_kind(function, operands)
        value = self.recorder.scalar_call(function, [node.operand for node in operands], kind)
        return HostNode(self.recorder, value, kind, hint, function=function, parents=operands)


def _result_kind(function: str, operands: tuple[HostNode, ...]) -> type:
    if function in _BITWISE and any(node.kind is int for node in operands):
        return int
    is_flag = function == "where" and all(node.kind is bool for node in operands)
    if function in _BOOLEAN or is_flag:
        return bool
    if function in _INTEGRAL:
        return int
    if function in _ALWAYS_FLOAT or any(node.kind is float for node in operands):
        integral_round = function == "round" and len(operands) == 1
        return int if integral_round else float
    return int


def _recording(function: str) -> Callable[..., HostNode]:
    def method(self: HostNode, *others: HostNode) -> HostNode:
        return self._call(function, *others)

    return method


for _method, _function in _FUNCTION_OF_METHOD.items():
    if _method != "round":
        setattr(HostNode, _method, _recording(_function))


def symbol(node: HostNode) -> torch.SymFloat | torch.SymInt | torch.SymBool:
    """Return the symbolic number around a node."""
    return _SYMBOLS[node.kind](node)


def node_of(number: Any) -> HostNode | None:
    """Return the `HostNode` of a symbolic number; None for anything else."""
    if isinstance(number, (torch.SymFloat, torch.SymInt, torch.SymBool)):
        node = number.node
        return node if isinstance(node, HostNode) else None
    return None


def choose(condition: Any, one: Any, other: Any) -> Any:
    """Return `one if condition else other`, as a symbol if the condition is one.

    Args:
        condition: A bool, or its symbol.
        one: A number or symbol.
        other: Another one.
    """
    node = node_of(condition)
    if node is None:
        return one if condition else other
    return symbol(node._call("where", *(_node(number, node) for number in (one, other))))


def as_symbol(number: Any, other: Any) -> Any:
    """Return a number as a symbol: itself, or a literal node next to another symbol.

    Args:
        number: A number or symbol.
        other: A symbol of the same trace.
    """
    node = node_of(other)
    assert node is not None
    return symbol(_node(number, node))


def _node(number: Any, other: HostNode) -> HostNode:
    wrap = {float: other.wrap_float, int: other.wrap_int, bool: other.wrap_bool}
    return node_of(number) or wrap[type(number)](number)


def call_math(function: str, *numbers: Any) -> Any:
    """Call a function on numbers, at least one of them a symbol; return a symbol.

    Args:
        function: Its name in `SCALAR_FUNCTIONS`.
        numbers: Its arguments.
    """
    other = next(node for number in numbers if (node := node_of(number)) is not None)
    first, *others = (_node(number, other) for number in numbers)
    return symbol(first._call(function, *others))


def tested_input(node: HostNode, *, is_truth: bool) -> HostNode | None:
    """Return the input that a node is or compares with zero; None if the node computes more.

    Args:
        node: The node of the number that Python needs.
        is_truth: Whether Python only needs to know if it is true.
    """
    if node.function is None:
        return node
    literal = [p for p in node.parents if p.value is None]
    direct = [p for p in node.parents if p.value is not None and p.function is None]
    is_test = node.function in ("eq", "ne") and len(literal) == 1 and literal[0].hint == 0
    return direct[0] if is_truth and is_test and len(direct) == 1 else None
