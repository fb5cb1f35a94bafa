"""What a step does not name: a cache that is cleared, a node that a variable holds."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.user_step.guards.parameter import held_node
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_as_eager, assert_leaves_as_eager, weighed
from tests.long_cases import long_but


def captures(
    weight: Callable[[], Any],
    between: Callable[[int], Any],
    steps: int = 5,
    begin: Callable[[], Any] = lambda: None,
) -> int:
    """Compare a step whose loss is weighed by `weight()` with eager ones; `begin` before both."""

    def make() -> Any:
        begin()
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * weight()
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, optimizer, torch.ones(5, 4)), [model]

    return assert_leaves_as_eager(make, steps, between=lambda i, _args: between(i))


def test_a_cleared_cache_shows_on_ranks_that_have_not_called_it() -> None:
    @functools.lru_cache
    def doubled(number: int) -> int:
        return 2 * number

    def make() -> Any:
        doubled.cache_clear()
        return weighed(lambda loss: loss * doubled(2))[:2]

    def given(i: int) -> dict[int, Any]:
        if i in (1, 3):
            doubled.cache_clear()
        return {}

    assert_as_eager(make, given, is_followed=True)


@pytest.mark.parametrize("clears", [(), (1, 4), (0, 2, 4)])
def test_a_cleared_cache_is_filled_with_what_is_read_then(clears: tuple[int, ...]) -> None:
    config = {"weight": 1.0}

    @functools.lru_cache
    def scaled(number: int) -> float:
        return config["weight"] * number

    def between(i: int) -> None:
        config["weight"] = 1.0 + i
        if i == 0 or i in clears:
            scaled.cache_clear()

    captures(lambda: scaled(2), between)


def cached_weight(maxsize: int | None, config: dict[str, Any], between: Any) -> int:
    """Compare steps that are weighed by a tensor in a cache; return how many were captured."""

    @functools.lru_cache(maxsize)
    def scaled(number: int) -> torch.Tensor:
        return torch.arange(number) * config["weight"]

    def begin() -> None:
        config.update(weight=1.0, number=4)
        scaled.cache_clear()

    return captures(
        lambda: scaled(config["number"]).sum(), lambda i: between(i, scaled), begin=begin
    )


@pytest.mark.parametrize("maxsize", long_but([128], [128, None]))
def test_a_cached_tensor_is_the_one_that_eager_steps_go_on_with(maxsize: int | None) -> None:
    config: dict[str, Any] = {}

    def between(i: int, _cache: Any) -> None:
        config["number"] = (4, 5, 4, 5, 4)[i]

    assert cached_weight(maxsize, config, between) == 2

    def write(i: int, _cache: Any) -> None:
        config["weight"] = 1.0 + i

    with pytest.raises(UnsupportedError, match=r"scaled\(\) keeps a tensor in its cache") as caught:
        cached_weight(maxsize, config, write)
    assert caught.value.code == "E804"


@pytest.mark.parametrize("maxsize", long_but([None], [128, None]))
def test_a_cache_of_tensors_that_is_cleared_is_filled_again(maxsize: int | None) -> None:
    config: dict[str, Any] = {}

    def between(i: int, cache: Any) -> None:
        config["weight"] = (1.0, 3.0, 5.0, 5.0, 5.0)[i]
        if i in (1, 2):
            cache.cache_clear()
            cache(7)

    cached_weight(maxsize, config, between)

    def once(i: int, cache: Any) -> None:
        config["weight"] = (1.0, 3.0, 3.0, 5.0, 5.0)[i]
        if i == 1:
            cache.cache_clear()

    with pytest.raises(UnsupportedError, match="keeps a tensor"):
        cached_weight(maxsize, config, once)


@pytest.mark.parametrize("maxsize", long_but([128], [128, None]))
def test_a_cached_tensor_that_is_written_between_calls_is_what_steps_find(
    maxsize: int | None,
) -> None:
    def write(i: int, cache: Any) -> None:
        if i in (2, 3):
            cache(4).mul_(i)
        elif i == 4:
            cache.cache_clear()

    assert cached_weight(maxsize, {}, write) == 4


def test_a_cache_in_which_only_others_were_made_is_no_change() -> None:
    def evaluate(i: int, cache: Any) -> None:
        cache(10 + i)

    assert cached_weight(128, {}, evaluate) == 1


def test_another_tensor_for_another_key_is_no_change() -> None:
    config: dict[str, Any] = {}

    def between(i: int, _cache: Any) -> None:
        config["weight"], config["number"] = (1.0, 4) if i < 2 else (3.0, 5)

    assert cached_weight(128, config, between) == 2


def test_what_a_cache_counts_is_not_asked() -> None:
    @functools.cache
    def doubled(number: int) -> int:
        return 2 * number

    with pytest.raises(UnsupportedError, match=r"cache_info\(\) \(test_caches.py:") as caught:
        captures(lambda: doubled(2) * doubled.cache_info().hits, lambda _i: None)
    assert caught.value.code == "E804"


def test_a_cache_that_fills_is_no_change() -> None:
    @functools.cache
    def doubled(number: int) -> int:
        return 2 * number

    assert captures(lambda: doubled(2), lambda i: doubled(10 + i)) == 1


def test_whether_memory_is_filled_is_that_of_each_call() -> None:
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory

    def between(i: int) -> None:
        settings.fill_uninitialized_memory = i % 2 == 0

    try:
        assert captures(lambda: 2 if settings.fill_uninitialized_memory else 1, between) == 2
    finally:
        settings.fill_uninitialized_memory = before


def node_of(tensor: Any) -> Any:
    """Return the node that adds up the gradient of a leaf."""
    return tensor.view_as(tensor).grad_fn.next_functions[0][0]


def test_a_node_that_a_variable_holds_is_refused() -> None:
    model, x = nn.Linear(4, 3), torch.ones(5, 4)
    named = list(model.named_parameters())

    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    loss = model(x).sum()  # a graph that is alive refers to the nodes, too
    assert held_node(named) is None
    node = node_of(model.bias)
    node.register_hook(lambda *_: None)
    assert held_node(named) == "bias"
    with pytest.raises(UnsupportedError, match="for a hook, as"):
        capture(step, model, x)
    del node
    assert held_node(named) is None
    loss.backward()


class Positions(nn.Module):
    """Makes a longer table where a longer sequence comes, as rotary embeddings do."""

    def __init__(self, by_number: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.by_number, self.n, self.cos = by_number, 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        if n > self.n if self.by_number else self.cos is None or n > len(self.cos):
            self.cos = torch.outer(torch.arange(n).float(), torch.ones(3)).cos()
            self.n = n if self.by_number else 0
        return self.layer(x) * self.cos[:n]


def growing(by_number: bool) -> Any:
    torch.manual_seed(0)
    model = Positions(by_number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.ones(2, 4, 3)), lambda: [model.layer, model.n]


@pytest.mark.parametrize("by_number", [False, True])
def test_a_table_grows_by_its_own_length_or_by_a_number_beside_it(by_number: bool) -> None:
    def given(i: int) -> dict[int, Any]:
        return {2: torch.ones(2, (4, 6, 3, 7)[i], 3)}

    assert assert_leaves_as_eager(lambda: growing(by_number), 4, given) == 4


def test_a_cache_that_the_user_froze_keeps_no_tensor_of_a_trace() -> None:
    """`gc.freeze()` hides objects from those who ask the collector for what refers to another."""

    @functools.lru_cache
    def table(number: int) -> torch.Tensor:
        return torch.arange(1.0, number)

    gc.collect()
    gc.freeze()
    try:
        captures(
            lambda: table(4).sum(), lambda i: i == 2 and table(4).mul_(2), begin=table.cache_clear
        )
    finally:
        gc.unfreeze()


def with_a_mask() -> tuple[Any, Any, nn.Module, torch.optim.Optimizer]:
    """A cached function, an object to keep what it returns, a model and its optimizer."""

    @functools.cache
    def mask(n: int) -> torch.Tensor:
        return torch.ones(n)

    class Held:
        mask: torch.Tensor | None = None

    model = nn.Linear(4, 4)
    return mask, Held(), model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_capture_leaves_no_tensor_of_its_own_in_a_cache_that_only_the_first_step_reads() -> None:
    mask, held, model, optimizer = with_a_mask()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        if held.mask is None:
            held.mask = mask(4)
        loss = (model(x) * held.mask).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(2):
        capture(step, model, optimizer, torch.ones(2, 4))
        assert type(mask(4)) is torch.Tensor
        mask.cache_clear()


@pytest.mark.parametrize("way", ["as it is", "copied", "after a step"])
def test_an_attribute_filled_from_a_cache_needs_a_copy_or_a_step_before(way: str) -> None:
    mask, held, model, optimizer = with_a_mask()
    x = torch.ones(2, 4)
    mask(4)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        if held.mask is None:
            held.mask = mask(4).clone() if way == "copied" else mask(4)
        optimizer.zero_grad()
        loss = (model(x) * held.mask).sum()
        loss.backward()
        optimizer.step()
        return loss

    if way == "as it is":
        with pytest.raises(UnsupportedError, match=r"mask\(n\).clone\(\)"):
            capture(step, model, optimizer, x)
        return
    if way == "after a step":
        step(model, optimizer, x)
    capture(step, model, optimizer, x)
