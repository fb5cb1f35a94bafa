"""Tensors that code binds anew under a condition on data are those of eager, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import Entry, assert_as_eager, small
from tests.long_cases import long_but


class Holder:
    """Holds tensors and numbers."""

    def __init__(self) -> None:
        self.best, self.last, self.lowest, self.waited = torch.tensor(9.0), None, 9.0, 0

    def state(self) -> list[Any]:
        return [self.best.item().hex(), float(self.lowest).hex(), self.waited]


HOLDER = Holder()


def best_of_all(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if loss < HOLDER.best:
        HOLDER.best = loss.detach()
    return loss + HOLDER.best


def early_stopping(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if loss.item() < HOLDER.lowest:
        HOLDER.lowest = loss.item()
        HOLDER.waited = 0
    else:
        HOLDER.waited += 1
    return loss


def counted_since(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if loss > 1.6:
        HOLDER.waited = 0  # which it is at the first step: nothing changes there
    else:
        HOLDER.waited += 1
    return loss


def clipped_by_name(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient.norm() > 0.5:
            gradient = gradient / gradient.norm()
        parameter.grad = gradient
    optimizer.step()
    return loss


def either_way(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    held = loss.detach()
    if held > 1.5:
        scale = held * 0.25
        if held > 3:
            scale = scale * 0.125
    else:
        scale = held + 1
    for parameter in model.parameters():
        parameter.grad.mul_(scale)
    optimizer.step()
    return loss


def _projected(parameter, gradient, update):
    """As AdamP projects an update, with one way out."""
    ratio = 1.0
    alike = F.cosine_similarity(gradient.view(1, -1), parameter.view(1, -1), dim=1).abs()
    if alike.max() < 0.2:
        normal = parameter / parameter.norm()
        update = update - normal * (normal * update).sum()
        ratio = 0.1
    return update, ratio


def projected(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            update, ratio = _projected(parameter, parameter.grad, parameter.grad * 0.1)
            parameter.mul_(1 - 0.01 * ratio)
            parameter.sub_(update)
    return loss


def made(step: Callable[..., Any]) -> Entry:
    HOLDER.__init__()
    model, x, y = small()
    return step, (model, torch.optim.SGD(model.parameters(), lr=0.05), x, y)


def batch(i: int) -> dict[int, Any]:
    torch.manual_seed(i)
    return {2: torch.randn(4, 5) * (0.3, 2.0, 0.1, 5.0)[i % 4]}


@pytest.mark.parametrize(
    "step",
    long_but(
        {"early_stopping", "clipped_by_name", "projected"},
        [best_of_all, early_stopping, counted_since, clipped_by_name, either_way, projected],
    ),
)
def test_whichever_tensor_is_chosen_is_that_of_eager(step: Callable[..., Any]) -> None:
    assert_as_eager(lambda: made(step), batch, lambda _: HOLDER.state(), steps=6, sizes=(1,))
    assert_as_eager(lambda: made(step), batch, steps=6, sizes=(2,))  # a tensor is on one rank


def refused(code: Callable[[Any, Any], Any]) -> str:
    """Return why a step is refused that calls `code(loss, model)` before its update."""
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        code(loss, model)
        optimizer.step()
        return loss

    with pytest.raises(UnsupportedError) as caught:
        capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    assert caught.value.code == "E802"
    return caught.value.message


def test_what_could_tell_a_copy_from_the_original_is_refused() -> None:
    def original_written(loss, model):
        gradient = model[0].weight.grad
        if loss > 1:
            gradient = gradient * 2
        model[0].weight.grad.mul_(0.5)
        model[0].weight.data.sub_(gradient)

    def copy_written(loss, model):
        gradient = model[0].weight.grad
        if loss > 1:
            gradient = gradient * 2
        gradient.mul_(0.5)  # of the parameter's own gradient, where the loss is small

    def original_written_by_the_copy(loss, model):
        gradient = model[0].weight.grad
        if loss > 1:
            gradient = gradient * 2
        model[0].weight.grad.mul_(gradient)

    def copy_of_what_stays_written(loss, model):
        held = HOLDER.best
        if loss > 1:
            held = loss.detach() * 2
        held.mul_(0.5)  # of what later steps find, where the loss is small
        model[0].weight.grad.mul_(held)

    def with_a_gradient(loss, model):
        again = loss
        if loss > 1:
            again = loss * 2
        model[0].weight.grad.mul_(again.detach())

    def laid_out_otherwise(loss, model):
        square = torch.ones(3, 3)
        if loss > 1:
            square = square.t() * 2
        model[0].weight.grad.mul_(square.sum())

    def of_another_shape(loss, model):
        held = torch.ones(3)
        if loss > 1:
            held = torch.ones(4)
        model[0].weight.grad.mul_(held.sum())

    def held_with_a_gradient(loss, model):
        if loss > 1:
            HOLDER.waited += 1
            HOLDER.best = loss

    def held_of_another_shape(loss, model):
        if loss > 1:
            HOLDER.waited += 1
            HOLDER.best = loss.detach().expand(3)

    for code in (held_with_a_gradient, held_of_another_shape):
        assert "gives 'HOLDER.best' a tensor that is not like the one before" in refused(code)
    assert "that is written later" in refused(original_written)
    assert "that is written later" in refused(original_written_by_the_copy)
    assert "into which later code writes" in refused(copy_written)
    assert "into which later code writes" in refused(copy_of_what_stays_written)
    for code in (with_a_gradient, laid_out_otherwise, of_another_shape):
        assert "neither a number nor a tensor like the other one" in refused(code)


def test_a_copy_may_be_written_where_nothing_reads_the_originals() -> None:
    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        scale = loss.detach() * 1
        if loss > 1.5:
            scale = loss.detach() * 0.5
        scale.clamp_(max=2.0)
        model[0].weight.grad.mul_(scale)
        optimizer.step()
        return loss

    assert_as_eager(lambda: made(step), batch, steps=4, sizes=(2,))
