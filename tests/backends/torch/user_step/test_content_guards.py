"""Changes of values that have no items by key, or that all code shares, are noticed."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.user_step.guards.content import shared_values
from pardnn.backends.torch.user_step.guards.guards import Guards

PREFIX = "PARDNN"
REPLACED = F.relu, torch.special.expit
FROZEN: set[int] = set()
WEIGHTS, TABLE, LARGE = np.ones(4), bytearray(4), np.zeros(1 << 18)


def scaled(x: Any, factors: Any = [1.0], *, more: Any = {"b": 2.0}) -> Any:  # noqa: B006
    return x * factors[0] * more["b"] * scaled.gain  # type: ignore[attr-defined]


scaled.gain = 1.0  # type: ignore[attr-defined]


def step(x: Any) -> Any:
    depth = int(os.environ.get(f"{PREFIX}_TEST_DEPTH", "1"))
    depth += len("A\ud800") - 2  # no variable can have such a name
    x = F.relu(x) + torch.special.expit(x)
    return scaled(x) * len(FROZEN) * WEIGHTS[0] * TABLE[1] * LARGE[0] * depth


def grown_environment() -> None:
    os.environ["PARDNN_TEST_DEPTH"] = "3"


CHANGES: dict[str, Callable[[], Any]] = {
    "FROZEN": lambda: FROZEN.add(3),
    "WEIGHTS": lambda: WEIGHTS.fill(2.5),
    "TABLE": lambda: TABLE.__setitem__(1, 7),
    "scaled.gain": lambda: setattr(scaled, "gain", 2.0),
    "scaled.default.0.0": lambda: next(iter(scaled.__defaults__ or ())).__setitem__(0, 3.0),
    "scaled.default.more.b": lambda: (scaled.__kwdefaults__ or {})["more"].update(b=5.0),
    "os.environ['PARDNN_TEST_DEPTH']": grown_environment,
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.are_deterministic_algorithms_enabled()": lambda: torch.use_deterministic_algorithms(
        True
    ),
    "F.relu": lambda: setattr(F, "relu", torch.tanh),
    "torch.special.expit": lambda: setattr(torch.special, "expit", torch.tanh),
    "torch.is_grad_enabled()": lambda: torch.set_grad_enabled(False),
    "torch.get_default_device(), or a function mode": lambda: torch.set_default_device("meta"),
    "torch.backends.cuda.math_sdp_enabled()": lambda: torch.backends.cuda.enable_math_sdp(False),
    "torch.backends.mha._is_fastpath_enabled": lambda: torch.backends.mha.set_fastpath_enabled(
        False
    ),
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.set_flags(False),
    "is_autocast_enabled('cpu')": lambda: torch.set_autocast_enabled("cpu", True),
    "get_autocast_dtype('cpu')": lambda: torch.set_autocast_dtype("cpu", torch.float16),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PARDNN_TEST_DEPTH", "1")
    guards = Guards(step, [torch.ones(2)], [0])
    assert not guards.changes({})
    try:
        CHANGES[name]()
        for _ in range(2):  # it is not taken for known
            assert [change.name for change in guards.changes({})] == [name]
    finally:
        F.relu, torch.special.expit = REPLACED
        torch.set_grad_enabled(True)
        torch.set_default_device(None)
        torch.backends.mha.set_fastpath_enabled(True)
        torch.backends.cuda.enable_math_sdp(True)
        torch.backends.mkldnn.set_flags(True)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert not [
        each for each in guards.changes({}) if each.name.startswith(("torch", "is_", "get"))
    ]


def test_other_modes_are_no_change() -> None:
    guards, threads = Guards(step, [torch.ones(2)], [0]), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert not guards.changes({})
        torch.set_default_dtype(torch.float64)
        assert [change.name for change in guards.changes({})] == ["torch.get_default_dtype()"]
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)


def test_large_arrays_are_not_compared_at_every_call() -> None:
    guards = Guards(step, [torch.ones(2)], [0])
    LARGE[0] = 1.0
    assert not guards.changes({})


def test_small_contents_are_compared_before_large_ones() -> None:
    rows = [np.zeros(60_000, dtype=np.uint8) for _ in range(30)]
    weights, seen = np.ones(3), {1, 2}
    guards = Guards(lambda x: x * rows[0][0] * weights[1] * len(seen), [torch.ones(2)], [0])
    weights[1] = 2.0
    seen.add(3)
    assert {change.name for change in guards.changes({})} == {"weights", "seen"}


def test_of_libraries_the_variables_that_they_name_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PARDNN_TEST_DEPTH", "4")
    (get,) = dict(shared_values({"getenv", "PARDNN_TEST_DEPTH", "depth"})).values()
    assert get() == "4"
    assert not dict(shared_values({"PARDNN_TEST_DEPTH"}))
