"""A step that draws from an iterator or changes a set is refused, also if it happens to repeat."""

import gc
import itertools
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._tensor_str import PRINT_OPTS

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, telling


def ones() -> Any:
    while True:
        yield 1.0


DRAWN: dict[str, tuple[Any, Any]] = {
    "list_iterator": (iter([1.0] * 9), next),
    "cycle": (itertools.cycle([1.0]), next),
    "count": (itertools.count(), next),
    "zip": (zip([1.0] * 9, itertools.repeat(2)), next),
    "generator": ((1.0 for _ in range(9)), next),
    "Random": (random.Random(0), lambda r: r.random() < 2.0),
    "Generator": (np.random.default_rng(0), lambda r: r.random() < 2.0),
    "RandomState": (np.random.RandomState(0), lambda r: r.random() < 2.0),
}
CHANGED: dict[str, tuple[Any, Any]] = {
    "set": (set(), lambda s: s.add(1)),
    "ndarray": (np.zeros(3), lambda a: a.__setitem__(0, a[0] + 1)),
    "bytearray": (bytearray(2), lambda b: b.__setitem__(0, 1)),
}


def refused(source: Any, draw: Any) -> str:
    def tell(loss: torch.Tensor, model: Any) -> None:
        if draw(source) == -1.0:
            print("never")

    made, args = telling(tell)
    with pytest.raises(UnsupportedError) as caught:
        capture(made, *args)
    assert caught.value.code == "E804"
    return caught.value.message


@pytest.mark.parametrize("kind", DRAWN)
def test_what_goes_on_from_step_to_step_is_refused(kind: str) -> None:
    message = refused(*DRAWN[kind])
    assert f"takes from 'source', a {kind}" in message
    assert "as an argument" in message


def test_a_generator_of_the_users_is_not_seeded() -> None:
    generator = torch.Generator().manual_seed(1)
    assert "takes from 'source', a Generator" in refused(generator, lambda g: g.manual_seed(7))


@pytest.mark.parametrize("kind", CHANGED)
def test_what_is_changed_in_place_is_refused(kind: str) -> None:
    assert "changes Python state: source" in refused(*CHANGED[kind])


def test_what_a_step_counts_in_its_thread_or_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CALLS", "0")
    own = threading.local()
    own.calls = 0

    def count(held: Any) -> int:
        held.calls += 1
        return held.calls

    def set_to(value: str) -> int:
        os.environ["CALLS"] = value
        return 0

    assert "calls of a threading.local" in refused(own, count)
    assert "os.environ['CALLS']" in refused(None, lambda _: set_to(os.environ["CALLS"] + "1"))
    made, args = telling(lambda loss, model: set_to("1"))
    capture(made, *args)  # which each step sets alike


def one_more_digit() -> None:
    torch.set_printoptions(precision=PRINT_OPTS.precision + 1)


def one_more_level() -> None:
    logging.disable(logging.root.manager.disable + 1)


def one_more_filter() -> None:
    warnings.filterwarnings("ignore", message="x" * len(warnings.filters))


SETTINGS: dict[str, Callable[[], Any]] = {
    "sys.path": lambda: sys.path.append("/nowhere"),
    "warnings.filters": one_more_filter,
    "logging.getLogger": lambda: logging.getLogger("x").addHandler(logging.NullHandler()),
    "logging.disable": one_more_level,
    "torch.set_printoptions": one_more_digit,
    "garbage collector": lambda: gc.enable(),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_that_a_step_changes_each_time_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    with warnings.catch_warnings():
        try:
            assert name in refused(None, lambda _: SETTINGS[name]())
        finally:
            torch.set_printoptions(precision=4)
            logging.disable(logging.NOTSET)


def test_an_iterator_that_only_exists_is_none() -> None:
    kept = iter([1.0]), random.Random(0), ones(), {1}

    def tell(loss: torch.Tensor, model: Any) -> None:
        assert len(kept) == 4

    made, args = telling(tell)
    capture(made, *args)


def test_a_number_that_a_function_holds_is_counted() -> None:
    def tell(loss: torch.Tensor, model: Any) -> None:
        tell.calls += 1  # type: ignore[attr-defined]

    tell.calls = 5  # type: ignore[attr-defined]
    made, args = telling(tell)
    graph = capture(made, *args)
    assert tell.calls == 5  # type: ignore[attr-defined]
    written = graph.step_notes["host"]["writes"]
    assert [name for name, _ in written] == ["tell.calls"]


class Meter:
    total, calls, losses, table = 0.0, 0, [], {}
    pair, last, text = (1, 2), None, "a"

    @classmethod
    def add(cls, loss: torch.Tensor) -> None:
        cls.total += loss.item()

    @classmethod
    def count(cls, _loss: torch.Tensor) -> None:
        cls.calls += 1

    @classmethod
    def collect(cls, loss: torch.Tensor) -> None:
        cls.losses.insert(0, loss.item())

    @classmethod
    def look_up(cls, _loss: torch.Tensor) -> None:
        cls.table.setdefault(2, 4)

    @classmethod
    def swap(cls, _loss: torch.Tensor) -> None:
        cls.pair = cls.pair[::-1]

    @classmethod
    def keep(cls, loss: torch.Tensor) -> None:
        cls.last = SimpleNamespace(loss=loss)

    @classmethod
    def again(cls, _loss: torch.Tensor) -> None:
        cls.pair = (1, 2)


class Special(Meter):
    pass


@pytest.mark.parametrize(
    ("tell", "held"),
    [
        (Meter.collect, "'losses' of the class 'Meter'"),
        (Special.count, "'calls' of the class 'Sp"),
        (Meter.swap, "'pair' of the class 'Meter'"),
        (Meter.keep, "'last' of the class 'Meter'"),
    ],
)
def test_what_classes_hold_is_refused_where_it_changes_at_each_call(tell: Any, held: str) -> None:
    step, args = telling(lambda loss, _model: tell(loss))
    with pytest.raises(UnsupportedError, match=rf"{held}.*test_unseen_state.py:1") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert (Meter.losses, "calls" in vars(Special)) == ([], False)


@pytest.mark.parametrize("tell", [Meter.add, Meter.count])
def test_numbers_of_classes_are_counted(tell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "total", 0.0)
    monkeypatch.setattr(Meter, "calls", 0)

    def make() -> Any:
        Meter.total, Meter.calls = 0.0, 0
        return *telling(lambda loss, _model: tell(loss)), lambda: [Meter.total, Meter.calls]

    def between(i: int, _args: Any) -> None:
        Meter.calls += 10 * (i == 2)

    assert assert_leaves_as_eager(make, 4, between=between) == 1


def test_a_table_of_plain_values_may_be_in_a_class() -> None:
    step, args = telling(lambda loss, _model: (Meter.look_up(loss), Meter.again(loss)))
    capture(step, *args)
    assert Meter.table == {2: 4}
