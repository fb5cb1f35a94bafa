"""Tensors of a batch that are not as those of the capture: strides, classes, one in two places."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import is_neg as is_negative
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.runtime.input_checks import BatchTensors
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_as_eager, assert_leaves_as_eager

Loss = Callable[..., Any]


class Mode(enum.Enum):
    """One of a user's."""

    TRAIN = 1


class Marked(torch.Tensor):
    """A class of a user's."""


def training(loss: Loss, model: nn.Module, *batch: Any) -> Any:
    def step(model: Any, optimizer: Any, *batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model, *batch)
        found.backward()
        optimizer.step()
        return found

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), *batch), [model]


def captures(loss: Loss, model: Callable[[], nn.Module], *batches: tuple[Any, ...]) -> int:
    """Compare a step with eager ones, with one batch after the other."""

    def make() -> Any:
        torch.manual_seed(0)
        return training(loss, model(), *batches[0])

    def given(i: int) -> dict[int, Any]:
        return dict(enumerate(batches[i % len(batches)], 2))

    return assert_leaves_as_eager(make, max(2, len(batches)), given=given)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_one_tensor_twice_is_one_where_it_is() -> None:
    a, b = torch.ones(5, 4), torch.full((5, 4), 0.5)

    def loss(model: Any, x: Any, more: Any) -> torch.Tensor:
        weight = (2 if x is more[0] else 1) * (3 if more[0] is more[1] else 1)
        return mean(model, x) * weight + more[0].sum() + more[1].sum()

    patterns = [(a, (b, b)), (a, (a, b)), (a, (a, a)), (a, (b, a))]
    assert captures(loss, linear, *patterns) == len(patterns)


def test_attention_adds_up_in_eager_s_order_where_keys_are_values() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(5, 2, 4), torch.randn(5, 2, 4)

    def loss(model: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        return model(q, k, v)[0].square().mean()

    assert captures(loss, lambda: nn.MultiheadAttention(4, 2), (x, x, x), (x, y, y)) == 2


def test_a_parameter_may_be_given() -> None:
    def loss(model: Any, x: Any, y: Any) -> torch.Tensor:
        return mean(model, x) * (2 if isinstance(y, nn.Parameter) else 1) + y.square().sum()

    def make() -> Any:
        torch.manual_seed(0)
        return training(loss, linear(), torch.ones(5, 4), torch.ones(3, requires_grad=True))

    def given(i: int) -> dict[int, Any]:
        y = torch.full((3,), float(i), requires_grad=True)
        return {3: nn.Parameter(y) if i else y}

    assert assert_leaves_as_eager(make, given=given) == 2


def test_the_model_s_parameter_may_be_given() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = linear()
        y = torch.ones(3, requires_grad=True)

        def loss(model: Any, x: Any, y: Any) -> torch.Tensor:
            return mean(model, x) + y.square().sum()

        given.update({0: y.detach().clone().requires_grad_(), 1: model.bias, 2: model.bias})
        return training(loss, model, torch.ones(5, 4), y)

    given: dict[int, Any] = {}
    assert assert_leaves_as_eager(make, given=lambda i: {3: given[i]}) == 2


@pytest.mark.parametrize("form", [lambda w, b: {"w": w, "b": b}, lambda w, b: [w, b]])
def test_what_an_optimizer_updates_may_be_an_argument_itself(form: Any) -> None:
    def step(bias: Any, held: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        weight = held["w"] if isinstance(held, dict) else held[0]
        optimizer.zero_grad()
        loss = (x @ weight + bias).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Any:
        torch.manual_seed(0)
        weight, bias = torch.randn(4, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.Adam([weight, bias], lr=0.1)
        return step, (bias, form(weight, bias), optimizer, torch.ones(5, 4))

    assert_as_eager(make, steps=3, sizes=(1, 2))


def test_ranks_without_its_data_may_be_given_the_model_s_parameter() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(linear(), nn.Tanh(), nn.Linear(3, 3))

        def loss(model: Any, x: Any, weights: Any) -> torch.Tensor:
            return mean(model, x) + sum(weight.square().sum() for weight in weights)

        return training(loss, model, torch.ones(5, 4), [*model.parameters()])[:2]

    assert_as_eager(make, steps=3)


@pytest.mark.parametrize("held", ["a buffer", "of a closure", "in a dictionary"])
@pytest.mark.parametrize("first", [0, 1])
def test_whether_a_tensor_is_one_that_the_step_holds_is_not_asked(held: str, first: int) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model, x, c = linear(), torch.ones(5, 4), torch.full((5, 4), 0.5)
        model.register_buffer("c", c)
        known = {"c": c}

        def loss(model: Any, x: Any) -> torch.Tensor:
            is_held = {
                "a buffer": lambda: x is model.c, "of a closure": lambda: x is c,
                "in a dictionary": lambda: any(x is each for each in known.values()),
            }[held]()  # fmt: skip
            return mean(model, x * 2 if is_held else x)

        given.update({first: x, 1 - first: c})
        return training(loss, model, given[0])

    given: dict[int, Any] = {}
    with pytest.raises(UnsupportedError, match=r"'batch.0' is the tensor that .* holds") as caught:
        assert_leaves_as_eager(make, 4, given=lambda i: {2: given[i % 2]})
    assert caught.value.code == "E804"


ASKED: dict[str, Callable[[Any, Any], bool]] = {
    "of a tensor": lambda model, x: type(x) is torch.Tensor,
    "its name": lambda model, x: type(x).__name__ == "Tensor",
    "of a parameter": lambda model, x: type(model.weight) is nn.Parameter,
    "of a result": lambda model, x: type(model(x)) in {torch.Tensor},
    "of a class": lambda model, x: isinstance(nn.Linear, type) and type(nn.Linear) is type(object),
    "an attribute": lambda model, x: x.__class__ is torch.Tensor is model(x).__class__,
    "its attribute's name": lambda model, x: model.weight.__class__.__name__ == "Parameter",
    "by getattr": lambda model, x: getattr(x, "__class__") is torch.Tensor,  # noqa: B009
    "of others": lambda model, x: [y.__class__ for y in (model, 1)] == [nn.Linear, int],
    "to make another": lambda model, x: (
        x.__class__([2.0]).shape == (1,) and (3.5).__class__(2) == 2.0
    ),
    "one made here": lambda model, x: issubclass(type("Made", (nn.Linear,), {}), nn.Module),
}


@pytest.mark.parametrize("what", ASKED)
def test_the_class_of_a_tensor_is_that_of_an_eager_step(what: str) -> None:
    def loss(model: Any, x: Any) -> torch.Tensor:
        return mean(model, x) * (2 if ASKED[what](model, x) else 1)

    assert captures(loss, linear, (torch.ones(5, 4),)) == 1


def test_a_held_tensor_may_be_given_where_objects_of_other_kinds_are_compared() -> None:
    c, mode = torch.full((5, 4), 0.5), Mode.TRAIN

    def loss(model: Any, x: Any) -> torch.Tensor:
        is_plain = mode is Mode.TRAIN and x is not None and type(model) is nn.Linear
        return mean(model, x + c) * (2 if is_plain else 1)

    assert captures(loss, linear, (torch.ones(5, 4),), (c,)) == 1


def test_an_object_at_the_address_of_one_that_is_gone_is_another() -> None:
    given, held = torch.zeros(2), [torch.zeros(2)]
    tensors = BatchTensors({"x": given})
    found = [{id(held[0]): "model.c"}, {}]
    tensors.watch({"x": given}, lambda: found.pop(0), lambda _name: False)
    assert not list(tensors.changes({"x": held[0]}))


def test_strides_are_those_of_each_call() -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 4)
    others = (x, x.t().contiguous().t(), torch.randn(10, 4)[::2], torch.randn(1, 4).expand(5, 4))

    def loss(model: Any, x: Any) -> torch.Tensor:
        return mean(model, x) * (2.0 if x.is_contiguous() else 3.0) * x.stride(0)

    assert captures(loss, linear, *((each,) for each in others)) == len(others)
    assert captures(mean, linear, (x,), (torch.randn(7, 4)[:5],)) == 1


@pytest.mark.parametrize("channels", [1, 2])
def test_images_of_either_memory_format(channels: int) -> None:
    """With one channel only strides of a dim of size 1 tell them apart."""
    torch.manual_seed(3)
    x = torch.randn(2, channels, 6, 6)
    last = torch.empty_strided(x.shape, (36 * channels, 1, 6 * channels, channels)).copy_(x)

    def loss(model: Any, x: Any) -> torch.Tensor:
        found = model(x)
        return found.square().mean() * (2 if found.is_contiguous() else 1)

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3))

    assert captures(loss, model, (x,), (last,)) == 2


def test_hooks_are_those_of_each_call() -> None:
    x, y = (torch.ones(5, 4, requires_grad=True) for _ in range(2))
    y.register_hook(lambda gradient: gradient * 10)

    def loss(model: Any, x: Any) -> torch.Tensor:
        found = mean(model, x)
        return found + torch.autograd.grad(found, x, create_graph=True)[0].square().sum()

    def make() -> Any:
        torch.manual_seed(0)

        def step(model: Any, x: Any) -> torch.Tensor:
            found = torch.autograd.grad(loss(model, x), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), found, strict=True):
                    parameter.sub_(gradient, alpha=0.1)
            return found[0].sum()

        model = linear()
        return step, (model, x), [model]

    assert assert_leaves_as_eager(make, given=lambda i: {1: y if i % 2 else x}) == 2


def with_gradient() -> torch.Tensor:
    x = torch.ones(5, 4)
    x.grad = torch.ones(5, 4)
    return x


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "a Marked": (lambda: torch.ones(5, 4).as_subclass(Marked), "E801"),
    "computed from": (lambda: torch.ones(5, 4, requires_grad=True) * 2, "E801"),
    "has a gradient": (with_gradient, "E801"),
}


@pytest.mark.parametrize("told", REFUSED)
def test_a_tensor_that_is_more_than_its_numbers_is_refused(told: str) -> None:
    make, code = REFUSED[told]
    with pytest.raises(UnsupportedError, match=told) as caught:
        captures(mean, linear, (torch.ones(5, 4),), (make(),))
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["storage_offset", "untyped_storage", "data_ptr", "_version"])
def test_where_a_tensor_lies_is_not_asked(name: str) -> None:
    def asked(model: Any, x: torch.Tensor) -> torch.Tensor:
        found = {
            "storage_offset": lambda: x.storage_offset(), "data_ptr": lambda: x.data_ptr(),
            "untyped_storage": lambda: x.untyped_storage(), "_version": lambda: x._version,
        }[name]()  # fmt: skip
        return mean(model, x) * (1 if found is None else 2)

    step, args, _ = training(asked, linear(), torch.ones(5, 4))
    with pytest.raises(UnsupportedError, match=name) as caught:
        capture(step, *args)
    assert caught.value.code == "E804"


@pytest.mark.parametrize("name", ["is_conj", "is_neg", "is_inference", "is_negative"])
def test_a_function_of_torch_asks_as_the_method_does(name: str) -> None:
    def asked(model: Any, x: torch.Tensor) -> torch.Tensor:
        found = {
            "is_conj": lambda: torch.is_conj(x), "is_neg": lambda: torch.is_neg(x),
            "is_inference": lambda: torch.is_inference(x), "is_negative": lambda: is_negative(x),
        }[name]()  # fmt: skip
        return mean(model, x) * (2 if found else 1)

    step, args, _ = training(asked, linear(), torch.ones(5, 4))
    with pytest.raises(UnsupportedError, match=name[:6]) as caught:
        capture(step, *args)
    assert caught.value.code == "E804"
    assert torch.is_neg is is_negative


def test_tensors_of_the_step_s_own_may_be_asked() -> None:
    def loss(model: Any, x: torch.Tensor) -> Any:
        return mean(model, x) * (1 + torch.cat([x, x])[5:].storage_offset())

    assert captures(loss, linear, (torch.ones(5, 4),)) == 1


def test_a_gradient_on_the_batch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def given(_i: int) -> dict[int, Any]:
        return {2: torch.ones(5, 4)}

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return mean(model, x.requires_grad_())

    def make() -> Any:
        torch.manual_seed(0)
        return training(loss, linear(), torch.ones(5, 4))

    assert_leaves_as_eager(make, given=given)
    assert "does not leave" in caplog.text


def test_a_tensor_that_the_model_holds_is_no_other_batch() -> None:
    given, held = torch.zeros(2), torch.zeros(2)
    tensors = BatchTensors({"x": given})
    tensors.watch({"x": given}, lambda: {id(held): "model.weight"}, lambda _name: False)
    assert not list(tensors.changes({"x": torch.zeros(2)}))
    (change,) = tensors.changes({"x": held})
    assert (change.name, change.then) == ("x", "a tensor of its own")
    assert change.now == "the same tensor as model.weight"
