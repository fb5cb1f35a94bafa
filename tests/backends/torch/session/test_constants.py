"""Real tensors that a graph has as constants: changed between calls, and written by the step."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, on_ranks, telling, weighed


def of_class(t: torch.Tensor) -> Callable[[], torch.Tensor]:
    class Settings:
        scale = t

    return lambda: Settings.scale * 1.0


REACHED: dict[str, Callable[[torch.Tensor], Callable[[], torch.Tensor]]] = {
    "bound method": lambda t: t.clone,
    "set": lambda t: lambda held={t}: next(iter(held)) * 1.0,  # type: ignore[misc]
    "class": of_class,
    "operator": lambda t: lambda call=operator.methodcaller("add", t): call(torch.zeros(())),  # type: ignore[misc]
}
WRITES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "in place": lambda t, i: t.fill_(1.0 + i // 2),
    "data": lambda t, i: t.data.fill_(1.0 + i // 2),
    "numpy": lambda t, i: t.numpy().__setitem__(..., 1.0 + i // 2),
}


@pytest.mark.parametrize("reached", REACHED)
def test_a_write_between_calls_is_followed(reached: str) -> None:
    assert followed(REACHED[reached], WRITES["in place"], torch.ones(())) == 2


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_a_write_that_raises_no_version_is_followed(write: str) -> None:
    assert followed(REACHED["class"], WRITES[write], torch.ones(())) == 2


def test_of_large_constants_the_version_is_compared() -> None:
    def mean(t: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda held={t}: next(iter(held)).mean()  # type: ignore[misc]

    assert followed(mean, WRITES["in place"], torch.ones(1 << 15)) == 5  # before each call


def followed(
    reached: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
    write: Callable[[torch.Tensor, int], Any],
    tensor: torch.Tensor,
) -> int:
    """Compare four calls with eager ones; return how often the step was captured."""

    def make() -> Any:
        get = reached(tensor.fill_(1.0))
        return weighed(lambda loss: loss * get())

    return assert_leaves_as_eager(make, 4, between=lambda i, _: write(tensor, i))


def test_what_the_step_makes_of_an_array_may_be_written() -> None:
    def weigh(loss: torch.Tensor) -> torch.Tensor:
        return loss * torch.from_numpy(np.ones(2, np.float32)).add_(1.0).sum()

    assert assert_leaves_as_eager(lambda: weighed(weigh), 3) == 1


def test_a_step_that_writes_where_no_placeholder_can_be_is_refused() -> None:
    add = torch.zeros(()).add_
    with pytest.raises(UnsupportedError, match=r"\(.*test_constants.py:\d+\) that it") as caught:
        assert_leaves_as_eager(lambda: weighed(lambda loss: loss + add(1.0)), 3)
    assert caught.value.code == "E804"


def test_on_several_ranks_it_is_refused_as_rank_0_alone_knows_the_tensor() -> None:
    scale = torch.ones(())
    times = scale.mul

    def make() -> Any:
        return telling(lambda loss, model: model[0].weight.grad.mul_(times(2.0)))

    def written(_args: Any) -> Any:
        return scale.add_(1.0).item()

    for found in on_ranks(make, 2, state=written, steps=3, is_followed=True):
        assert found.startswith("E509")
        assert "a tensor of shape [] that the step computes with" in found
