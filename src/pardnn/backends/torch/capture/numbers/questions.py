"""Branches on data, tried both ways: if one way only raises, the branch is a check.

See `effects`. A trial ends at the next call on tensors: then that way does not only raise. What the
raising way prints before, and the numbers in its message, are recorded; see `failing_way`.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pardnn.backends.torch.capture.numbers.failing_way import FailingWay
from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.trace_ir import ITEM
from pardnn.backends.torch.ops.host_scalars import HostNode, node_of
from pardnn.errors import UserCodeError

#: Each check costs up to two traces as far as the check.
_MAX_CHECKS = 32
#: What torch calls on a gradient to learn whether it has a NaN.
_NAN_SEARCH = ("aten.isnan.default", "aten._is_any_true.default", ITEM)


@dataclass(frozen=True)
class Check:
    """A branch on data of which one way only raises.

    Attributes:
        outcome: The outcome of the condition if it does not raise.
        kind: Name of the exception's class.
        line: "file.py:line" of the user's code; None if unknown.
        way: Effects of the other branch, and the exception's text.
        effect: The recorded effect.
    """

    outcome: bool
    kind: str
    line: str | None
    way: FailingWay
    effect: str = "check"


class NoCheck(BaseException):
    """A trial has reached a call on tensors. The user's `except Exception` does not catch it."""


class Questions:
    """The branches on data of one trace.

    Args:
        checks: The checks known from earlier traces, in order.
        trial: Outcome of the first unknown one; None raises there.

    Attributes:
        is_trying: Whether the trial has begun.
        on_check: Called with the node and the check at each known one; returns False if the check's
            output belongs to another trace.
        on_trial: Called where the trial begins.
        way_to: Returns the effects of the trial, and the text of the exception that ended it.
        left: What else the trial changed before it raised, in words; None if nothing.
    """

    def __init__(self, checks: tuple[Check, ...] = (), trial: bool | None = None) -> None:
        self.checks, self.trial = checks, trial
        self.is_trying = False
        self.on_check: Callable[[HostNode, Check], bool] = lambda _node, _check: True
        self.on_trial: Callable[[], None] = lambda: None
        self.way_to: Callable[[BaseException], FailingWay] | None = None
        self.left: str | None = None
        self._line: str | None = None
        self._asked = 0

    def outcome(self, node: HostNode, line: str | None) -> bool:
        """Return the outcome of a condition for which the step does not raise.

        Raises:
            UnsupportedError: E802, if it is not a check.
        """
        if self.is_trying:
            raise NoCheck
        self._asked += 1
        if self._asked > len(self.checks):
            return self._tried(node, line)
        check = self.checks[self._asked - 1]
        if check.line != line:
            raise unsupported.data_dependent_branch(line, node.kind.__name__)
        if not self.on_check(node, check):
            self.checks = self.checks[: self._asked - 1]
            return self._tried(node, line)
        return check.outcome

    def no_nan(self, node: HostNode, line: str | None) -> bool:
        """Note a check of `torch.autograd.detect_anomaly`; return that there is no NaN.

        Args:
            node: Whether a gradient has a NaN.
            line: The line of the backward pass.
        """
        made = node.operand.call
        while made.kind in _NAN_SEARCH:
            made = made.inputs[0].call
        forward = made.backward_of
        of = f"{made.source}, op {forward.kind}" if forward else f"op {made.kind}"
        text = f"the backward pass makes the first NaN of the step in the gradient of {of}"
        way = FailingWay(0, (), {}, (), [text])
        self.on_check(node, Check(False, "RuntimeError", line, way, "no_nan"))
        return False

    def must_be(self, flag: Any, outcome: bool, error: Exception, line: str | None) -> None:
        """Note a check that an op makes.

        Args:
            flag: What it asks: a bool, or a symbol.
            outcome: The outcome of the flag where it does not raise.
            error: The error that it raises; raised at once if the flag is the same in every step.
            line: The line of the call.
        """
        node = node_of(flag)
        if node is not None:
            kind = type(error).__name__.removeprefix("_")
            self.on_check(node, Check(outcome, kind, line, FailingWay(0, (), {}, (), [str(error)])))
        elif flag is not outcome:
            raise error

    def _tried(self, node: HostNode, line: str | None) -> bool:
        """Begin the trial and return its outcome."""
        if self.trial is None or self._asked > _MAX_CHECKS:
            raise unsupported.data_dependent_branch(line, node.kind.__name__)
        self.is_trying, self._line = True, line
        self.on_trial()
        return self.trial

    def learned(self, error: BaseException) -> Questions:
        """Return the questions for the next attempt, after a trial.

        Args:
            error: What ended the trial: a user's error as the cause of this package's.

        Raises:
            UnsupportedError: E802, if a branch that raises leaves anything but effects.
        """
        raised = error.__cause__
        if isinstance(error, UserCodeError) and raised is not None and _is_raised(raised):
            if self.left is not None:
                raise unsupported.left_by_a_check(self._line, self.left)
            assert self.way_to is not None
            way = self.way_to(raised)
            check = Check(not self.trial, type(raised).__name__, self._line, way)
            return Questions((*self.checks, check), True)
        return Questions(self.checks, False if self.trial else None)


def _is_raised(error: BaseException) -> bool:
    """Whether `raise`, `assert` or `sys.exit` made it, not a call that failed in the tracer."""
    if isinstance(error, SystemExit):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
