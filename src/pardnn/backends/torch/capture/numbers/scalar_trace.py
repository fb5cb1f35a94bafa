"""Host scalars of a trace: their calls, and what Python needed to know about them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pardnn.backends.torch.capture.numbers.questions import Questions
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.source_location import Locator, is_internal_frame
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.ops.codec import instances
from pardnn.backends.torch.ops.host_scalars import HostNode, node_of, symbol, tested_input

#: What evaluates an autograd graph; under `detect_anomaly`, it looks for NaN in each gradient.
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
#: What NumPy does with the numbers of an array, and of how many floats it takes some side by side.
_FOLDED, _PAIRWISE, _MANY = ("add", "mul"), 8, (list, tuple, np.ndarray)
_SMALLEST_FLOAT = 5e-324
_FIRST_SENTINEL = 0x5EED0000


class ScalarTrace:
    """Records host arithmetic among the calls of a trace; the `ScalarRecorder` of its nodes.

    Args:
        calls: The calls of the trace; extended.
        locator: Finds the user's line of each call.

    Attributes:
        guards: Host scalar inputs that a branch depended on: "nonzero" or "exact".
        conditions: Computed host scalars that a branch depended on, what they were, and the line.
        hints: The traced step's number for each host scalar that does not depend on data.
        is_index_asked: Whether any number was used as an index or a count.
        forced_decisions: Outcomes of the next branches on data.
        choices: Returns the outcome of a branch whose code can be undone.
        questions: The outcomes of all others, which are errors unless they are checks.
    """

    def __init__(self, calls: list[Call], locator: Locator) -> None:
        self.guards: dict[Value, str] = {}
        self.conditions: dict[Value, tuple[Any, str | None]] = {}
        self.hints: dict[Value, Any] = {}
        self.is_index_asked = False
        self.forced_decisions: list[bool] = []
        self.choices: Callable[[HostNode], bool | None] | None = None
        self.questions = Questions()
        self._calls, self._locator = calls, locator
        self._sentinels: dict[float, HostNode] = {}
        self._of_numpy: set[Value] = set()

    def add_number(self, number: float, arguments: dict[str, Any]) -> Any:
        """Make a new source op of a host scalar; return its symbol."""
        call = Call(kind="input", arguments=arguments)
        self._calls.append(call)
        kind = float if isinstance(number, float) else type(number)  # NumPy's float64 is one
        value = Value(call, kind=kind)
        call.outputs.append(value)
        return symbol(HostNode(self, value, kind, number))

    def scalar_call(self, function: str, operands: list[Any], kind: type) -> Value:
        """Record a call of host arithmetic, as a `ScalarRecorder`, and return its value."""
        call = Call(kind=f"scalar.{function}", args=operands)
        call.inputs = list(dict.fromkeys(instances(operands, Value)))
        value = self.finish(call, kind)
        if function in _FOLDED and self._is_folded_by_numpy():
            self._of_numpy.add(value)
        return value

    def _is_folded_by_numpy(self) -> bool:
        """Whether NumPy adds or multiplies the numbers of an array, of few enough for its order.

        Raises:
            UnsupportedError: E802, if it would take floats in another order than objects.
        """
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and not _is_of(frame, "numpy"):
            if not (_is_of(frame, "torch") or _is_of(frame, "pardnn")):
                return False
            frame = frame.f_back
        held = [] if frame is None else frame.f_locals.values()
        if any(isinstance(x, _MANY) and np.size(x) >= _PAIRWISE for x in held):
            raise unsupported.data_dependent_branch(self._locator.line(), "numpy")
        return frame is not None

    def is_of_numpy(self, node: HostNode) -> bool:
        """Whether a number is one of NumPy's in an eager step, as what is computed from one is."""
        nodes, seen = [node], {id(node)}
        while nodes:
            at = nodes.pop()
            if at.value in self._of_numpy or (at.function or "").startswith("numpy_"):
                return True
            nodes += [each for each in at.parents if id(each) not in seen]
            seen.update(map(id, at.parents))
        return False

    def finish(self, call: Call, kind: type) -> Value:
        """Append a call to the trace and return its value, a host scalar."""
        value = Value(call, kind=kind)
        call.outputs = call.returns = [value]
        self._locator.annotate(call)
        self._calls.append(call)
        return value

    def sentinel(self, number: Any) -> Any:
        """Return a plain float that stands for a symbol, for an op whose schema takes no symbols.

        It is a subnormal number that no program uses; `node_behind` maps it back.
        """
        node = node_of(number)
        if node is None or node.kind is not float:
            return number
        sentinel = (_FIRST_SENTINEL + len(self._sentinels)) * _SMALLEST_FLOAT
        self._sentinels[sentinel] = node
        return sentinel

    def node_behind(self, number: float) -> HostNode | None:
        """Return the node that a sentinel stands for; None if the number is none."""
        return self._sentinels.get(number) if self._sentinels else None

    def guard_scalar(self, node: HostNode, *, is_truth: bool = False) -> Any:
        """Return the number behind a node and guard what Python needs of it, as `ScalarRecorder`.

        For an input, that is its value or whether it is zero; for what is computed from inputs, the
        outcome.
        """
        if node.hint is None and self.forced_decisions:
            return self.forced_decisions.pop(0)
        if node.hint is None and is_anomaly_check():
            return self.questions.no_nan(node, self._locator.line())
        chosen = self.choices(node) if node.hint is None and is_truth and self.choices else None
        if chosen is not None:
            return chosen
        if node.hint is None and is_truth:
            return self.questions.outcome(node, self._locator.line())
        if node.hint is None:
            raise unsupported.data_dependent_branch(self._locator.line(), node.kind.__name__)
        if node.value is None:
            return node.hint
        tested = tested_input(node, is_truth=is_truth)
        if tested is not None:
            is_nonzero = is_truth and bool(tested.hint)
            if self.guards.get(tested.value) != "exact":
                self.guards[tested.value] = "nonzero" if is_nonzero else "exact"
        elif is_truth and node.kind is not bool:
            truth = self.scalar_call("bool", [node.value], bool)
            self.conditions.setdefault(truth, (bool(node.hint), self._locator.line()))
        else:
            self.conditions.setdefault(node.value, (node.hint, self._locator.line()))
        return node.hint


def _is_of(frame: types.FrameType, package: str) -> bool:
    return (frame.f_globals.get("__name__") or "").partition(".")[0] == package


def is_anomaly_check() -> bool:
    """Whether `torch.autograd.detect_anomaly` asks for a number, rather than Python code.

    The user's hooks and functions run below the engine, too, but have their own frames.
    """
    if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return False
    frame = sys._getframe(1)
    while frame is not None and is_internal_frame(frame):
        if frame.f_code is _ENGINE:
            return True
        frame = frame.f_back
    return False
