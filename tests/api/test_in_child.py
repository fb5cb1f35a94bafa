"""A child process plans: its plan or its error comes back, its memory does not."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pardnn.api.in_child import plan_in_child
from pardnn.errors import InfeasibleError
from pardnn.plan.plan import Plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def data_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def test_a_plan_comes_back_and_what_planning_held_does_not() -> None:
    plan, kept, before = Plan(placement={"a": 1}, order=((), ("a",))), [], data_kib()

    def make() -> Plan:
        kept.append(bytearray(64 << 20))
        return plan

    found = plan_in_child(make)
    assert dataclasses.replace(found, checksum=None) == plan
    assert not kept
    assert data_kib() - before < 8 << 10


def raising(error: BaseException) -> Any:
    def make() -> NoReturn:
        raise error

    return make


def test_an_error_for_people_comes_back_as_it_is() -> None:
    with pytest.raises(InfeasibleError, match="too small") as caught:
        plan_in_child(raising(InfeasibleError("too small", details={"device": 1})))
    assert (caught.value.code, caught.value.details) == ("E301", {"device": 1})


def test_any_other_error_keeps_its_text_and_its_lines() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'x'") as caught:
        plan_in_child(raising(KeyError("x")))
    assert "in make" in "".join(caught.value.__notes__)


def test_a_child_that_is_killed_is_told() -> None:
    with pytest.raises(RuntimeError, match="ended with status -9"):
        plan_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type]
