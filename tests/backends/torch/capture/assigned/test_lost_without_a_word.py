"""What a step is given or leaves, and was lost: batches held twice, settings, modules, numbers."""

from __future__ import annotations

import copy
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, small


def _batches(first: int) -> Callable[[int], dict[int, Any]]:
    """Return the batch of each call: arguments `first` and the next one."""

    def given(i: int) -> dict[int, Any]:
        torch.manual_seed(100 + i)
        return {first: torch.randn(4, 5), first + 1: torch.randn(4, 3)}

    return given


def _made(change: Callable[[Any], Any], **attributes: Any) -> Any:
    """Return a step that calls `change(trainer)` first; its result scales the loss."""
    model, x, y = small()
    trainer = types.SimpleNamespace(model=model, n=0, **attributes)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(trainer: Any, x: Any, y: Any) -> Any:
        trainer.n += 1
        factor = change(trainer)
        trainer.optimizer.zero_grad()
        loss = F.mse_loss(trainer.model(x), y) * (1 if factor is None else factor)
        loss.backward()
        trainer.optimizer.step()
        return loss

    return step, (trainer, x, y), trainer


def _compared(change: Callable[[Any], Any], **attributes: Any) -> None:
    assert_leaves_as_eager(lambda: _made(change, **attributes), 4, _batches(1))


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_batch_that_something_else_holds_too(is_buffer: bool) -> None:
    def make() -> Any:
        step, (trainer, x, y), held = _made(lambda _: None)
        if is_buffer:
            trainer.model.register_buffer("example", x)
        else:
            trainer.example = x
        return step, (trainer, x, y), held

    assert_leaves_as_eager(make, 3, _batches(1))


def test_a_held_batch_that_the_step_reads_stays_the_first_one() -> None:
    def reads(trainer: Any) -> Any:
        return trainer.example.mean()

    def make() -> Any:
        step, (trainer, x, y), held = _made(reads)
        trainer.example = x
        return step, (trainer, x, y), held

    assert_leaves_as_eager(make, 3, _batches(1))


def _at_a_count(trainer: Any) -> None:
    if trainer.n == 2:
        trainer.optimizer.param_groups[0]["lr"] = 0.01


def _always(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 0.05


def _by_count(trainer: Any) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.1 * (1 - trainer.n / 10)


@pytest.mark.parametrize("change", [_at_a_count, _always, _by_count])
def test_a_rate_that_the_step_sets_stays(change: Any) -> None:
    _compared(change)


@pytest.mark.parametrize("is_each_time", [True, False])
def test_a_buffer_of_data_that_nobody_reads(is_each_time: bool) -> None:
    def registers(trainer: Any) -> None:
        if is_each_time or not hasattr(trainer.model, "last"):
            trainer.model.register_buffer("last", trainer.model[0].weight.detach().sum())

    _compared(registers)


def test_new_memory_for_a_parameter() -> None:
    def halves(trainer: Any) -> None:
        weight = trainer.model[0].weight
        with torch.no_grad():
            weight.add_(0.5)
            weight.set_(weight * 0.5)

    _compared(halves)


def _once(trainer: Any) -> Any:
    if not hasattr(trainer, "ready"):
        trainer.ready = 1
        return 2
    return 1


def _each_time(trainer: Any) -> None:
    trainer.ready = 2.5


@pytest.mark.parametrize("change", [_once, _each_time])
def test_a_number_in_a_new_attribute(change: Any) -> None:
    _compared(change)


def test_a_number_under_a_key_that_is_no_text() -> None:
    def counts(trainer: Any) -> None:
        trainer.table[4] += 1

    step, args, _ = _made(counts, table=defaultdict(int))
    with pytest.raises(UnsupportedError, match="under the key '4', which is") as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    made = _made(counts, table=defaultdict(int, {4: 0}))
    made[0](*made[1])
    assert made[2].table == {4: 1}
    assert_leaves_as_eager(lambda: _made(counts, table=defaultdict(int, {4: 0})), 3, _batches(1))


def test_a_module_that_takes_the_place_of_another_is_refused() -> None:
    def replaces(trainer: Any) -> None:
        trainer.model[1] = nn.ReLU()

    step, args, _ = _made(replaces)
    with pytest.raises(UnsupportedError, match=r"test_lost_without_a_word\.py:\d+.*model\.1"):
        capture(step, *args)


def _copies(trainer: Any) -> Any:
    """Keep copies of what holds numbers of the step: counts, rates."""
    trainer.settings.n += 1
    mine = copy.deepcopy(trainer.settings)
    mine.weights[0] *= 3
    trainer.rates = copy.deepcopy(trainer.optimizer.state_dict())["param_groups"][0]["lr"]
    return mine.weights[0] + mine.n


def test_a_copy_of_what_holds_a_count() -> None:
    def make() -> Any:
        return _made(_copies, settings=types.SimpleNamespace(n=0, weights=[1.0]), rates=0.0)

    assert_leaves_as_eager(make, 4, _batches(1))
