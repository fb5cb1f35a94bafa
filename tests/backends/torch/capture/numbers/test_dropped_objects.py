"""Objects that a step drops, and what would tell of their end."""

import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, weighed


class Plain:
    """An object of the user's."""

    scale = 1.0


class Telling:
    """One that notes its end."""

    def __init__(self, ended: list[int]) -> None:
        self.ended = ended

    def __del__(self) -> None:
        self.ended.append(1)


def by_reference(state: Any) -> Callable[[], bool]:
    state.held = Plain()
    ref = weakref.ref(state.held)
    return lambda: ref() is None


def by_dictionary(state: Any) -> Callable[[], bool]:
    state.held = Plain()
    held = weakref.WeakValueDictionary({"a": state.held})
    return lambda: not held


def by_finalizer(state: Any) -> Callable[[], bool]:
    state.held, ended = Plain(), []
    weakref.finalize(state.held, ended.append, 1)
    return lambda: bool(ended)


def by_method(state: Any) -> Callable[[], bool]:
    ended: list[int] = []
    state.held = Telling(ended)
    return lambda: bool(ended)


def made_in_the_step(state: Any) -> Callable[[], bool]:
    state.held = Plain()

    def is_gone() -> bool:
        if state.held is not None:
            ref = weakref.ref(state.held)
            state.held = None
            return ref() is None
        return False

    return is_gone


def step_of(told: Callable[[Any], Callable[[], bool]], *, drops: bool) -> Any:
    state = types.SimpleNamespace()
    is_gone = told(state)

    def weigh(loss: torch.Tensor) -> torch.Tensor:
        if drops:
            state.held = None
        return loss * (2.0 if is_gone() else 1.0)

    return weighed(weigh)


KINDS = [by_reference, by_dictionary, by_finalizer, by_method]


@pytest.mark.parametrize("told", [*KINDS, made_in_the_step])
def test_a_step_that_drops_what_tells_of_its_end_is_refused(told: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match="drops an object of class") as caught:
        assert_leaves_as_eager(lambda: step_of(told, drops=told is not made_in_the_step), 3)
    assert caught.value.code == "E804"


@pytest.mark.parametrize("told", KINDS)
def test_a_step_that_keeps_it_is_followed(told: Callable[..., Any]) -> None:
    assert assert_leaves_as_eager(lambda: step_of(told, drops=False), 3) == 1


def test_a_weak_reference_to_a_tensor_is_refused() -> None:
    scale = torch.ones(())
    ref = weakref.ref(scale)
    with pytest.raises(UnsupportedError, match="weak reference to a tensor"):
        assert_leaves_as_eager(lambda: weighed(lambda loss: loss * ref()), 3)


def test_one_to_the_module_that_holds_it_is_followed() -> None:
    module = torch.nn.BatchNorm1d(1)
    owner = weakref.ref(module)

    def between(i: int, _args: Any) -> None:
        module.get_buffer("running_mean").fill_(1.0 + i)

    def weigh(loss: torch.Tensor) -> torch.Tensor:
        return loss * owner().running_mean.sum()  # type: ignore[union-attr]

    assert assert_leaves_as_eager(lambda: weighed(weigh), 3, between=between) == 1


def test_recurrent_layers_refer_to_their_weights_so() -> None:
    layer = torch.nn.GRU(3, 3)

    def weigh(loss: torch.Tensor) -> torch.Tensor:
        return loss * layer(torch.ones(1, 3))[0].sum()

    assert assert_leaves_as_eager(lambda: weighed(weigh), 2) == 1
