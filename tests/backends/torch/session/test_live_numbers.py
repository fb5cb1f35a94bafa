"""Numbers of objects that change between calls and that a step only reads are inputs of a graph."""

import copy
import functools
import math
import pickle
import sys
from collections.abc import Callable
from math import cos, pi
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from tests.backends.torch.stepping import assert_as_eager, assert_leaves_as_eager, small, weighed
from tests.backends.torch.user_step import settings

CALLS = 8
SCALE = 1.0


class _Base:
    scale = 1.0


class _Scaled(_Base):
    @classmethod
    def of_class(cls) -> float:
        return cls.scale


class _Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def captures(weigh: Callable[[Any], Any], change: Callable[[int], Any], calls: int = CALLS) -> int:
    return assert_leaves_as_eager(lambda: weighed(weigh), calls, between=lambda i, _args: change(i))


def test_an_attribute_that_changes_at_every_call_is_captured_twice() -> None:
    held = SimpleNamespace(scale=1.0)
    assert captures(lambda x: x * held.scale, lambda i: setattr(held, "scale", 1 / (i + 1))) == 2


def test_beside_an_optimizer_with_settings_that_are_ints() -> None:
    """SGD passes `alpha=1 - dampening` only if it is no plain 1: no symbol can stand for it."""
    held = SimpleNamespace(scale=1.0)

    def make() -> Any:
        step, (model, _, x, y), found = weighed(lambda loss: loss * held.scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return step, (model, optimizer, x, y), [found, optimizer.state]

    def change(i: int, _args: Any) -> None:
        held.scale = 1 / (i + 1)

    assert assert_leaves_as_eager(make, CALLS, between=change) == 2


def test_a_count_that_was_a_float_for_a_while_is_an_int_again() -> None:
    counts, given = [0], {0: 0, 1: 1.5, 3: 0}

    def weigh(loss: Any) -> Any:
        loss = loss * 0.9 ** counts[0]
        counts[0] += 1
        return loss

    def change(i: int, _args: Any) -> None:
        counts[0] = given.get(i, counts[0])

    assert assert_leaves_as_eager(lambda: weighed(weigh, counts), 5, between=change) == 2


def test_an_item_of_a_dictionary_and_of_a_list_as_well() -> None:
    items, rates = {"scale": 1.0}, [1.0, 2.0]
    assert captures(lambda x: x / items["scale"], lambda i: items.update(scale=0.5 + i)) == 2
    assert captures(lambda x: x / rates[1], lambda i: rates.__setitem__(1, 0.5 + i)) == 2


def test_a_slot_a_closure_and_a_global_as_well() -> None:
    slotted, scale, this = _Slotted(), 1.0, sys.modules[__name__]

    def of_closure(i: int) -> None:
        nonlocal scale
        scale = 0.5 + i

    def of_globals(i: int) -> None:
        global SCALE
        SCALE = 0.5 + i

    assert captures(lambda x: x * slotted.scale, lambda i: setattr(slotted, "scale", 0.5 + i)) == 2
    assert captures(lambda x: x * scale, of_closure) == 2
    assert captures(lambda x: x * SCALE / (1 + this.SCALE), of_globals) == 2


def test_an_attribute_of_a_class_and_a_name_of_a_module_as_well() -> None:
    held = _Scaled()

    def weigh(loss: Any) -> Any:
        return loss * _Base.scale + type(held).scale / held.scale + held.of_class() * loss

    assert captures(weigh, lambda i: setattr(_Base, "scale", 0.5 + i)) == 2
    times = functools.partial(setattr, settings, "TIMES")
    assert captures(lambda x: x * settings.TIMES, lambda i: times(1 + i)) == 2
    times(1)


def test_what_hides_an_attribute_of_a_class_is_read() -> None:
    held = _Scaled()

    def change(i: int) -> None:
        _Base.scale = 0.5 + i
        if i == 4:
            _Scaled.scale = 2.5
        elif i == 5:
            held.scale = 7.0
        elif i == 6:
            del held.scale, _Scaled.scale

    assert captures(lambda x: x * held.scale, change) == 4


def test_an_attribute_of_a_class_that_the_step_sets_is_captured_once_more() -> None:
    def weigh(loss: Any) -> Any:
        _Base.scale = 2.0
        return loss * _Base.scale

    assert captures(weigh, lambda i: setattr(_Base, "scale", 0.5 + i), 3) == 2


def test_an_epoch_of_which_a_branch_asks_has_a_capture_for_each_way() -> None:
    held = SimpleNamespace(epoch=0)

    def weigh(loss: Any) -> Any:
        if held.epoch < 3:
            return loss * (held.epoch + 1) / 3
        return loss * 0.5 * (1 + math.cos(held.epoch / 10))

    assert captures(weigh, lambda i: setattr(held, "epoch", i)) == 3


def test_a_count_that_is_converted_and_given_to_imported_functions_is_captured_twice() -> None:
    held = SimpleNamespace(epoch=0)

    def weigh(loss: Any) -> Any:
        late = int(held.epoch > 3) + 2 * float(held.epoch > 5)
        warmed = 1 + float(held.epoch) / 4 + int(held.epoch * 1.5) + int(True)
        return loss * (warmed + late + cos(pi * held.epoch / 10))

    assert captures(weigh, lambda i: setattr(held, "epoch", i)) == 2


def test_a_number_that_python_needs_itself_is_captured_as_often_as_it_changes() -> None:
    held = SimpleNamespace(depth=1, scale=1.0)

    def weigh(loss: Any) -> Any:
        for _ in range(held.depth):
            loss = loss * 0.5 * held.scale
        return loss

    def change(i: int) -> None:
        held.depth, held.scale = 1 + i // 4, 1 / (i + 1)

    assert captures(weigh, change) == 3  # one that knows of `scale`, and one for each depth


def test_a_number_that_is_pickled_is_captured_as_often_as_it_changes() -> None:
    held = SimpleNamespace(scale=1.0, name="a")

    def weigh(loss: Any) -> Any:
        copied = pickle.loads(pickle.dumps(vars(held)))
        return loss * copied["scale"] * copy.deepcopy(held).scale

    assert captures(weigh, lambda i: setattr(held, "scale", 0.5 + i), 3) == 3


def test_a_number_that_no_op_takes_as_an_input_is_captured_as_often_as_it_changes() -> None:
    held = SimpleNamespace(p=0.1)

    def weigh(loss: Any) -> Any:
        return F.dropout(loss, held.p)

    assert captures(weigh, lambda i: setattr(held, "p", i / 10), 4) == 4


def test_a_number_that_torch_branches_on_is_captured_once_for_each_value() -> None:
    dropout, criterion = nn.Dropout(0.1), nn.CrossEntropyLoss(label_smoothing=0.1)
    scores, labels = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.5, 1.0]]), torch.tensor([0, 1])

    def change(i: int) -> None:
        dropout.p, criterion.label_smoothing = (0.1, 0.2) if i % 2 else (0.3, 0.0)

    assert captures(lambda x: dropout(x) + criterion(x * scores, labels), change) == 2


def test_a_number_that_runs_by_its_name_but_is_not_read_may_change() -> None:
    held, is_told = SimpleNamespace(count=0), [False]

    def weigh(loss: Any) -> Any:
        return loss * held.count if is_told[0] else loss

    assert captures(weigh, lambda i: setattr(held, "count", i)) == 2

    def with_another_type(i: int) -> None:
        held.count = None if i == 5 else i

    def asks(loss: Any) -> Any:
        return loss * 2 if held.count is None else loss

    assert captures(asks, with_another_type) == 3


def test_a_number_that_a_later_path_writes_is_written() -> None:
    def make() -> Any:
        held = SimpleNamespace(scale=1.0, warm=True)
        made = weighed(lambda loss: _scaled(held, loss), held)
        return made

    def between(i: int, args: tuple[Any, ...]) -> None:
        held = args[0].held
        held.scale, held.warm = (held.scale + 1, True) if i < 4 else (held.scale, False)

    def with_held() -> Any:
        step, args, held = make()
        args[0].held = held[1]
        return step, args, held

    assert assert_leaves_as_eager(with_held, CALLS, between=between) <= 4


def _scaled(held: Any, loss: Any) -> Any:
    if not held.warm:
        held.scale *= 0.9
    return loss * held.scale


def test_two_ranks_read_their_own() -> None:
    def make() -> Any:
        _, args, _ = weighed(lambda loss: loss)
        model = args[0]
        model.tau = 1.0

        def scaled(model: Any, optimizer: Any, x: Any, y: Any, i: float) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) / model.tau
            loss.backward()
            optimizer.step()
            return loss

        return scaled, (*args, 0.0)

    def anneal(args: tuple[Any, ...]) -> str:
        args[0].tau *= 0.9  # after each call
        return ""

    assert_as_eager(make, state=anneal, is_followed=True, steps=4)


def clipped(clip: Callable[..., Any]) -> Any:
    model, x, y = small()

    def step(model: Any, optimizer: Any, x: Any, y: Any, limit: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip(model.parameters(), limit)
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.3), x, y, 1.0), [model]


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_a_limit_of_gradients_that_changes_at_every_call_is_captured_once(name: str) -> None:
    make = functools.partial(clipped, getattr(torch.nn.utils, name))
    assert assert_leaves_as_eager(make, 4, given=lambda i: {4: 0.3 / (i + 1)}) == 1


@pytest.mark.parametrize(
    "weigh",
    [
        F.celu,
        lambda x, w: -Normal(x, w).log_prob(x + 1),
        lambda x, w: w**x,
        lambda x, w: x.expand(4)[: int(4 * min(w, 1.0))].sum(),
    ],
)
def test_a_float_that_code_takes_in_its_own_way_is_captured_at_each_value(
    weigh: Callable[..., Any],
) -> None:
    def make() -> Any:
        model, x, y = small()

        def step(model: Any, optimizer: Any, x: Any, y: Any, weight: float) -> torch.Tensor:
            optimizer.zero_grad()
            loss = weigh(F.mse_loss(model(x), y), weight)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, 0.5), [model]

    given = [0.5, 0.25, 0.25, 2.0]
    assert assert_leaves_as_eager(make, 4, given=lambda i: {4: given[i]}) == 3


@pytest.mark.parametrize(
    "divided",
    [
        lambda w, n: w // 0.2,
        lambda w, n: 2.0 // w,
        lambda w, n: divmod(w, 0.2)[0],
        lambda w, n: n // 0.1 + n // w,
        lambda w, n: 7 // w + 7 // n,
    ],
)
def test_floats_are_divided_with_a_remainder_as_python_does(divided: Callable[..., Any]) -> None:
    def make() -> Any:
        model, x, y = small()

        def step(model: Any, optimizer: Any, x: Any, y: Any, weight: float, count: int) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * divided(weight, count) * 0.1
            loss.backward()
            optimizer.step()
            return loss

        args = model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, 0.5, 3
        return step, args, [model]

    # 1.0 // 0.2 is 4.0, and 1.0 / 0.2 is 5.0.
    assert assert_leaves_as_eager(make, given=lambda i: {4: [0.5, 1.0, 0.2][i], 5: i + 1}) == 1
