"""Tensors that a model makes at its first use and keeps: later steps find them, as eager does."""

from __future__ import annotations

import functools
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.first_step.first_use import KeptTensors, caches_with_fakes
from pardnn.backends.torch.capture.source_location import Locator
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.parallelize import parallelize
from pardnn.errors import UnsupportedError
from tests.backends.torch import models
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.capture import test_capture_equal
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_leaves_as_eager
from tests.long_cases import long_but


class Attention(nn.Module):
    """Attends with a mask, causal or sloped, that it makes when it first knows the length."""

    mask: Any
    hidden: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.query, self.kind, self.mask, self.length = nn.Linear(6, 6), kind, None, 0
        self.tables: dict[int, torch.Tensor] = {}

    def bias(self, length: int) -> torch.Tensor:
        if self.kind == "attribute":
            if self.mask is None:
                self.mask = torch.triu(torch.full((length, length), -torch.inf), 1)
            return self.mask
        if self.kind == "buffer":
            if not hasattr(self, "hidden"):
                hidden = torch.tril(torch.ones(length, length)) == 0
                self.register_buffer("hidden", hidden, persistent=False)
            return torch.zeros(length, length).masked_fill(self.hidden, -9.0)
        if self.kind == "longest":
            if length > self.length:
                self.length, slopes = length, torch.tensor([0.5, 0.25])
                at = torch.arange(length)
                self.mask = -(at[:, None] - at).abs() * slopes[:, None, None]
            return self.mask[:, :length, :length].sum(0)
        if length not in self.tables:
            self.tables[length] = torch.zeros(length, length)
        return self.tables[length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ x.transpose(1, 2) + self.bias(x.shape[1])
        return scores.softmax(-1) @ x


class Running(nn.Module):
    """Keeps a running mean from its first use on."""

    def __init__(self, *, rebound: bool = False, of_data: bool = False) -> None:
        super().__init__()
        self.layer, self.mean, self.rebound, self.of_data = nn.Linear(6, 6), None, rebound, of_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.mean is None:
            self.mean = y.detach().mean((0, 1)) if self.of_data else torch.zeros(6)
        out, new = y - self.mean, 0.1 * y.detach().mean((0, 1))
        if self.rebound:
            self.mean = 0.9 * self.mean + new
        else:
            self.mean.mul_(0.9).add_(new)
        return out


def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    return models.train(model, optimizer, model(x).square().mean())


def trained(make: Any) -> models.Entry:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(6, 6))
    return step, (model, torch.optim.Adam(model.parameters(), lr=0.01), torch.randn(2, 5, 6))


@pytest.mark.parametrize("kind", ["attribute", *long_but((), ["buffer", "longest", "dictionary"])])
def test_a_mask_of_constants(kind: str) -> None:
    factory = functools.partial(trained, functools.partial(Attention, kind))
    compare = assert_equal if kind in ("attribute", "longest") else test_capture_equal.assert_equal
    graph = compare(factory)
    assert not any(op.kind == "buffer" for op in graph.ops)
    entry, args = factory()
    capture(entry, *args)
    assert args[0][0].mask is None
    assert not args[0][0].tables
    assert not hasattr(args[0][0], "hidden")


def test_a_mask_that_is_there_already() -> None:
    def factory() -> models.Entry:
        step, args = trained(functools.partial(Attention, "attribute"))
        step(*args)
        return step, args

    graph = test_capture_equal.assert_equal(factory)
    assert [op.name for op in graph.ops if op.kind == "buffer"] == ["model.0.mask"]


def test_a_mean_that_every_step_updates() -> None:
    graph = assert_equal(functools.partial(trained, Running))
    (mean,) = [op for op in graph.ops if op.kind == "buffer"]
    assert mean.arguments == {"initial": 0.0}


@pytest.mark.parametrize("how", ["rebound", "of_data"])
def test_what_the_first_step_alone_knows_is_a_graph_of_its_own(how: str) -> None:
    def make() -> Any:
        entry, args = trained(functools.partial(Running, **{how: True}))
        return entry, args, args

    assert assert_leaves_as_eager(make) == 2


class Registering(nn.Module):
    """Registers a running mean at its first use, in the state dict or not."""

    mean: Any

    def __init__(self, *, persistent: bool, of_data: bool) -> None:
        super().__init__()
        self.layer, self.persistent, self.of_data = nn.Linear(6, 6), persistent, of_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if not hasattr(self, "mean"):
            mean = y.detach().mean((0, 1)) if self.of_data else torch.zeros(6)
            self.register_buffer("mean", mean, persistent=self.persistent)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
        return y - self.mean


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("of_data", [True, False])
def test_a_buffer_that_the_first_step_registers(persistent: bool, of_data: bool) -> None:
    def make() -> Any:
        make_layer = functools.partial(Registering, persistent=persistent, of_data=of_data)
        entry, args = trained(make_layer)
        model = args[0]
        return entry, args, lambda: [*args, [*dict(model.named_buffers())], [*model.state_dict()]]

    assert assert_leaves_as_eager(make, steps=2) == 1 + of_data


@functools.cache
def cached_mask(length: int) -> torch.Tensor:
    return torch.triu(torch.full((length, length), -1.0), 1)


@functools.lru_cache(maxsize=4)
def cached_slopes(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length).float(), torch.tensor([0.5])


def attending(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    slopes, scale = cached_slopes(x.shape[1])
    scores = model(x) @ x.transpose(1, 2) + cached_mask(x.shape[1]) + slopes * scale
    return models.train(model, optimizer, scores.softmax(-1).square().mean())


def attention() -> models.Entry:
    _, args = trained(functools.partial(nn.Linear, 6, 6))
    return attending, args


def test_tables_in_a_cache_of_functions() -> None:
    cached_mask.cache_clear()
    cached_slopes.cache_clear()
    assert_equal(attention)
    step, args = attention()
    capture(step, *args)
    step(*args)  # finds no fake tensor in a cache


@functools.cache
def cached_scale(layer: Any) -> torch.Tensor:
    return layer.weight.detach().mean()


@functools.cache
def cached_count() -> torch.Tensor:
    return torch.zeros(1)


def scaled(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) * cached_scale(model[1])).square().mean()
    return models.train(model, optimizer, loss)


def counting(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) * cached_count().add_(1)).square().mean()
    return models.train(model, optimizer, loss)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (scaled, "keeps from an earlier step"),
        (counting, r"cached_count\(\).*the step writes into it"),
    ],
)
def test_a_cache_of_what_changes_is_refused_and_left_clean(step: Any, why: str) -> None:
    _, args = trained(functools.partial(nn.Linear, 6, 6))
    with pytest.raises(UnsupportedError, match=why):
        capture(step, *args)
    assert torch.isfinite(step(*args))


@functools.cache
def cached_positions(length: int, width: int) -> torch.Tensor:
    table = torch.zeros(length, width)
    table[:, ::2] = torch.arange(length)[:, None]
    return table.sin_()


@functools.cache
def count_for(layer: int) -> torch.Tensor:
    return cached_count().add_(layer)


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_table_that_is_written_while_it_is_made(is_checked: bool) -> None:
    def attending(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) + cached_positions(*x.shape[1:])).square().mean()
        if is_checked and not torch.isfinite(loss):  # a trace ends here, and the next finds caches
            raise RuntimeError("the loss is not finite")
        return models.train(model, optimizer, loss)

    cached_positions.cache_clear()
    _, args = trained(functools.partial(nn.Linear, 6, 6))
    assert_equal(lambda: (attending, trained(functools.partial(nn.Linear, 6, 6))[1]))
    assert torch.isfinite(attending(*args))  # finds no fake tensor in the cache


def test_a_table_that_another_cached_function_writes_is_refused() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return models.train(model, optimizer, (model(x) * count_for(1)).square().mean())

    cached_count.cache_clear()
    count_for.cache_clear()
    _, args = trained(functools.partial(nn.Linear, 6, 6))
    with pytest.raises(UnsupportedError, match="the step writes into it"):
        capture(step, *args)


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_not_left_in_the_object_is_told_once(
    is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    step, args = trained(functools.partial(Attention, "attribute"))
    if is_kept:  # as the notice advises
        step(*args)
    mask = args[0][0].mask
    fast = parallelize(step, *args, device="cpu", decide=lambda g, n, _: random_plan(g, n))
    fast(args[2])
    fast(torch.randn(3, 5, 6))  # is captured anew
    fast.close()
    told = [each.getMessage() for each in caplog.records if "each parallel step" in each.msg]
    assert len(told) == 1 - is_kept
    assert is_kept or "'model.0.mask'" in told[0]
    assert args[0][0].mask is mask
    assert (mask is not None) == is_kept


def test_caches_that_were_made_since_the_last_look_are_found() -> None:
    mode = FakeTensorMode()

    def found() -> list[Any]:
        return [cache for cache, _ in caches_with_fakes(mode)]

    def made() -> Any:
        cache = functools.cache(lambda: mode.from_tensor(torch.zeros(2)))
        cache()
        return cache

    assert found() == []
    first = made()
    assert found() == [first]
    second = made()
    assert set(found()) == {first, second}
    del first  # as many as before: one is gone, another is new
    third = made()
    assert set(found()) == {second, third}
    second.cache_clear()
    assert found() == [third]


class Scaled(nn.Module):
    """Takes its scale from a count at its first use, and again where it was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.scale = nn.Linear(6, 6), 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.scale is None:
            self.scale = torch.full((6,), 1.0 * self.count)
        y = self.layer(x) * self.scale
        if self.count == 3:
            self.scale = None
        return y


def test_a_tensor_of_numbers_that_change_is_not_made_anew_by_later_steps() -> None:
    def make() -> Any:
        made, args = trained(Scaled)
        return made, args, [args[0]]

    assert_leaves_as_eager(make, steps=7)


def test_such_a_tensor_in_an_object_that_is_no_module_is_refused() -> None:
    held = SimpleNamespace(count=0, scale=None)

    def scaled(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        if held.scale is None:
            held.scale = torch.full((6,), 1.0 + held.count)
        held.count += 1
        return models.train(model, optimizer, (model(x) * held.scale).square().mean())

    _, args = trained(nn.Identity)
    with pytest.raises(UnsupportedError, match=r"makes 'held\.scale' from numbers") as caught:
        capture(scaled, *args)
    assert caught.value.code == "E806"
    assert held == SimpleNamespace(count=0, scale=None)


class Tempered(nn.Module):
    """Keeps a tensor of a number that the user may change, one for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate, self.tables = nn.Linear(6, 6), 0.5, SimpleNamespace()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.tables, f"of{len(x)}"):
            setattr(self.tables, f"of{len(x)}", torch.full((len(x), 1, 1), self.rate))
        return self.layer(x) * getattr(self.tables, f"of{len(x)}")


def test_a_kept_tensor_of_what_changed_between_two_calls_is_refused() -> None:
    step, args = trained(Tempered)
    fast = parallelize(
        step, *args, device="cpu", decide=lambda graph, size, _: random_plan(graph, size)
    )
    model, _, x = args
    fast(x)
    fast(x[:1])
    model[0].rate = 2.0
    with pytest.raises(UnsupportedError, match=r"'model\.0\.tables\.of2' and keeps") as caught:
        fast(x)
    assert caught.value.code == "E806"
    model[0].rate = 0.5
    fast(x)
    assert fast.captures == 3
    fast.close()


class Held(NamedTuple):
    mask: Any


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize(
    "hold",
    [
        lambda mask: mask,
        lambda mask: [("a", 1), (0, [mask])],
        lambda mask: ({"a": {"b": (1, mask)}},),
        lambda mask: OrderedDict(mask=mask),
        lambda mask: {"held": [Held(mask)]},
        lambda mask: functools.reduce(lambda held, _: [held], range(20), mask),
    ],
)
def test_tensors_deep_in_what_a_cache_holds_are_found(size: int | None, hold: Any) -> None:
    mode = FakeTensorMode()
    cache = functools.lru_cache(size)(lambda _: hold(mode.from_tensor(torch.zeros(2))))
    cache(1)
    assert [found for found, _ in caches_with_fakes(mode)] == [cache]


def test_a_tensor_whose_place_is_gone_is_not_made() -> None:
    """Each step makes the dictionary anew that holds it, as augmentations of kornia do."""
    mode = FakeTensorMode()
    first, later = (Tracer(mode, Locator({}, is_silent=True)) for _ in range(2))
    with mode, first:
        kept = torch.ones(2) * 3
    value = first.aliases.value(kept)
    assert KeptTensors(first.calls, {"model.params.shape": value}).make({}, later, mode) == []
