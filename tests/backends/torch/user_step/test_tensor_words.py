"""Words of memory tell every change of a tensor's data, layout or gradient, and call none equal."""

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pardnn.backends.torch.user_step import tensor_words
from pardnn.backends.torch.user_step.guards.parameter import ParameterGuards
from pardnn.backends.torch.user_step.tensor_words import PLACES, TensorWords
from tests.strategies import examples

found = pytest.mark.skipif(PLACES is None, reason="this torch keeps its words elsewhere")


def test_this_torch_has_its_words_where_they_are_looked_for() -> None:
    assert (PLACES is not None) == sys.platform.startswith("linux")
    assert {tensor_words._find() for _ in range(100)} == {PLACES}


@pytest.fixture(params=["words", "getters"], autouse=True)
def _places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "getters" and "looked_for" not in request.node.name:
        monkeypatch.setattr(tensor_words, "PLACES", None)


def set_storage(t: torch.Tensor) -> None:
    t.set_(torch.zeros(4, 4).untyped_storage(), 0, (4, 4), (4, 1))


def swapped(t: torch.Tensor) -> None:
    torch.utils.swap_tensors(t, torch.zeros(4, 4))
    gc.collect(1)  # the tensor that was here is gone


def shared(t: torch.Tensor) -> None:
    t.share_memory_()


def resized_storage(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(0)
    t.untyped_storage().resize_(1 << 16)


#: Of a tensor of 4 x 4.
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda t: setattr(t, "data", torch.zeros(4, 4)),
    "data of the same storage": lambda t: setattr(t, "data", t.data[:2]),
    "its transpose": lambda t: setattr(t, "data", t.data.t()),
    "transposed": lambda t: t.t_(),
    "another offset": lambda t: setattr(t, "data", torch.zeros(32)[1:17].view(4, 4)),
    "a later part of it": lambda t: setattr(t, "data", t.data[1:]),
    "a view of another type": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "another type": lambda t: setattr(t, "data", t.data.half()),
    "another shape": lambda t: setattr(t, "data", t.data.view(2, 8)),
    "a dimension more": lambda t: t.unsqueeze_(0),
    "many dimensions": lambda t: setattr(t, "data", t.data.view(1, 1, 1, 1, 4, 4)),
    "fewer rows": lambda t: t.resize_(3, 4),
    "a negative view": lambda t: setattr(t, "data", torch._neg_view(t.data)),
    "set_": set_storage,
    "swap_tensors": swapped,
    "shared memory": shared,
    "a resized storage": resized_storage,
    "another class": lambda t: setattr(t, "__class__", nn.Parameter),
}


@found
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told(name: str) -> None:
    still = [torch.zeros(4, 4), nn.Parameter(torch.zeros(3)), torch.zeros(())]
    tensor = torch.zeros(4, 4)
    words = TensorWords([*still, tensor])
    assert words.hold() == (tensor_words.PLACES is not None)
    CHANGES[name](tensor)
    assert not words.hold()


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda _: None,
    "in place": lambda t: t.add_(1),
    "read": lambda t: (t + 1).sum().item(),
    "viewed": lambda t: [t[0], t.t(), t.detach()],
    "its data taken for itself": lambda t: setattr(t, "data", t.data),
    "by NumPy": lambda t: t.numpy().fill(3),
}


@found
@pytest.mark.parametrize("name", WRITES)
def test_values_may_change(name: str) -> None:
    tensor = torch.zeros(4, 4)
    words = TensorWords([tensor])
    kept = WRITES[name](tensor)
    assert words.hold() == (tensor_words.PLACES is not None)
    del kept


def test_data_that_changes_back_and_forth_is_the_same_again() -> None:
    tensor = torch.zeros(4, 4)
    words, before = TensorWords([tensor]), tensor.data
    tensor.data = torch.ones(4, 4)
    assert not words.hold()
    tensor.data = before
    assert words.hold() == (tensor_words.PLACES is not None)


def test_what_has_another_class_is_left_to_the_getters() -> None:
    for odd in (torch.eye(3).to_sparse(), torch.zeros((1,) * 6), torch.eye(2).to_mkldnn()):
        words = TensorWords([torch.zeros(2), odd])
        assert not words.hold()


def test_none_at_all() -> None:
    assert TensorWords([]).hold() == (tensor_words.PLACES is not None)


@found
@given(st.integers(0, 1 << 30))
@examples(25)
def test_words_hold_only_where_all_getters_tell_the_same(seed: int) -> None:
    rng = random.Random(seed)
    tensors = [torch.zeros(4, 4) for _ in range(4)]
    words = TensorWords(tensors)

    def told() -> list[Any]:
        return [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.device, t.is_neg()) for t in tensors]

    before = told()
    for _ in range(rng.randint(0, 2)):
        pool = [*CHANGES.values(), *WRITES.values()]
        tensor = rng.choice(tensors)
        if tensor.shape == (4, 4) and tensor.dtype == torch.float32:
            rng.choice(pool)(tensor)
    if words.hold():
        assert told() == before


def parameters() -> tuple[nn.Parameter, nn.Parameter, torch.Tensor]:
    frozen = nn.Parameter(torch.zeros(2)).requires_grad_(False)
    return nn.Parameter(torch.zeros(4)), frozen, torch.zeros(3)


def frozen_made_of_weights(p: torch.Tensor, frozen: torch.Tensor, _: torch.Tensor) -> None:
    frozen.mul_(nn.Parameter(torch.ones(2)))


GRADIENTS: dict[str, Callable[..., Any]] = {
    "requires_grad": lambda p, *_: p.requires_grad_(False),
    "requires_grad of a frozen one": lambda _p, frozen, _: frozen.requires_grad_(),
    "requires_grad of a buffer": lambda _p, _f, buffer: buffer.requires_grad_(),
    "grad": lambda p, *_: p.square().sum().backward(),
    "grad of a frozen one": lambda _p, frozen, _: setattr(frozen, "grad", torch.zeros(2)),
    "grad of a buffer": lambda _p, _f, buffer: setattr(buffer, "grad", torch.zeros(3)),
    "a frozen one that is made of weights": frozen_made_of_weights,
    "swapped": lambda p, *_: torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(4), False)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_is_told(name: str) -> None:
    tensors = parameters()
    guards = ParameterGuards(list(zip("abc", tensors, strict=True)))
    assert not guards.changes()
    GRADIENTS[name](*tensors)
    assert guards.changes()
    assert guards.changes()  # it was not taken for known


def test_a_gradient_that_is_replaced_is_told_and_one_that_is_added_to_is_not() -> None:
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.zeros(4)
    guards = ParameterGuards([("p", p)])
    p.grad.add_(1)
    assert not guards.changes()
    for _ in range(20):  # its place may be the one that is free
        p.grad = None
        p.grad = torch.zeros(4)
        assert [change.name for change in guards.changes()] == ["p.grad"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_parameter_that_was_not_of_the_tried_class_is_asked() -> None:
    base = torch.zeros(4, 4, requires_grad=True)
    view = base.clone()[1]  # its autograd data are those of a view
    guards = ParameterGuards([("view", view)])
    assert not guards.changes()
    view.retain_grad()
    view.sum().backward()
    assert guards.changes()


def both() -> tuple[TensorWords, TensorWords, torch.Tensor, tuple[torch.Tensor, ...]]:
    tensor, of_gradients = torch.zeros(4, 4), parameters()
    words = TensorWords([torch.zeros(2), tensor])
    return words, TensorWords(of_gradients, gradients=True), tensor, of_gradients


@found
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_joint_look_expects_what_each_does(is_before: bool, is_first: bool) -> None:
    for change in [*CHANGES.values(), *GRADIENTS.values()]:
        data, gradients, tensor, of_gradients = both()
        if (change in CHANGES.values()) != is_first:
            continue
        joint = data.beside(gradients) if not is_before else None
        assert joint is None or joint.hold() == (tensor_words.PLACES is not None)
        change(*([tensor] if is_first else of_gradients))
        joint = joint or data.beside(gradients)
        assert not joint.hold()
        assert (gradients if is_first else data).hold() == (tensor_words.PLACES is not None)


@found
def test_a_joint_look_at_nothing_or_at_one_unknown_tensor() -> None:
    is_found = tensor_words.PLACES is not None
    tensor = torch.zeros(2)
    odd, known = TensorWords([torch.eye(3).to_sparse()]), TensorWords([tensor])
    joint = known.beside(TensorWords([], gradients=True)), TensorWords([]).beside(known)
    assert [each.hold() for each in joint] == [is_found] * 2
    assert not odd.beside(known).hold()
    assert not known.beside(odd).hold()
    tensor.data = torch.zeros(2)
    assert [each.hold() for each in joint] == [False] * 2


def test_what_a_look_has_told_is_not_asked_again() -> None:
    p = nn.Parameter(torch.zeros(4))
    guards = ParameterGuards([("p", p)])
    p.requires_grad_(False)
    assert not guards.changes(is_told=True)
    assert guards.changes()
