"""Code that runs or not by data, and leaves nothing else behind: as eager, whichever way."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import (
    Entry,
    assert_as_eager,
    cut_plan,
    eager,
    on_ranks,
    small,
)
from tests.long_cases import long_but


def finite_loss(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
    return loss


def neither_nan_nor_inf(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    if not (torch.isnan(loss) or torch.isinf(loss)):
        loss.backward()
        optimizer.step()
    return loss


def small_norm(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 10 and loss.item() < 100.0: optimizer.step()  # fmt: skip # noqa: E701
    return loss


def returned_before(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    if not math.isfinite(loss.item()):
        return loss
    loss.backward()
    optimizer.step()
    return loss


def skipped_parts(model, optimizer, x, y):
    total = torch.zeros(())
    for part in (x, x * 0.5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(part), y)
        total += loss.detach()
        if loss.isnan():
            continue
        loss.backward()
        optimizer.step()
    return total


def scaled_gradients(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if loss.isnan():
        pass
    else:
        optimizer.step()
    if loss > 1.5:
        for parameter in model.parameters():
            parameter.grad.mul_(0.25)
    return loss + model[0].weight.grad.sum().detach()


def nan_at_two(i: int) -> dict[int, Any]:
    torch.manual_seed(i)
    x = torch.randn(4, 5)
    x[0, 0] = {1: math.nan, 3: 1e9}.get(i, 0.5)
    return {2: x}


def in_a_function(model, optimizer, x, y):
    def update(loss):
        if loss.isfinite():
            optimizer.step()

    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    update(loss)
    with torch.no_grad():
        model[0].bias.mul_(0.5)
    return loss


def made(step: Callable[..., Any], **options: Any) -> Entry:
    model, x, y = small()
    return step, (model, torch.optim.Adam(model.parameters(), lr=0.05, **options), x, y)


class Counter:
    """Holds numbers."""

    def __init__(self) -> None:
        self.taken, self.all, self.total, self.losses = 0, 0, 0.0, []
        self.best = math.inf
        self.name = ""


COUNTER = Counter()


def counted_and_printed(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if loss.isfinite():
        optimizer.step()
        COUNTER.taken += 1
        COUNTER.total += loss.item()
        COUNTER.losses.append(loss.item())
        print("taken", COUNTER.taken, f"{loss.item():.3f}")
    COUNTER.all += 1
    print("of", COUNTER.all)
    return loss


def only_told(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    if loss.item() > 0.7: print("large", loss.item())  # fmt: skip # noqa: E701
    print("always")
    if not math.isfinite(loss.item()):
        COUNTER.taken += 1
    COUNTER.all += 2
    loss.backward()
    optimizer.step()
    return loss


def all_finite(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters()):
        optimizer.step()
        COUNTER.taken += 1
    if any(p.grad.norm() > 0.3 for p in model.parameters()):
        print("large")
    COUNTER.best = min(COUNTER.best, loss.item())
    COUNTER.total = max(1, loss.item(), COUNTER.total)
    return loss


def nested(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if torch.isfinite(loss):
        if loss > 0.7:
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            print("halved")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm < 0.9:
            optimizer.step()
            COUNTER.taken += 1
    return loss + model[0].weight.grad.sum().detach()


def both_ways(model, optimizer, x, y):
    optimizer.zero_grad()
    loss, scale, more = F.mse_loss(model(x), y), 1.0, 0.0
    if loss.item() > 1.4:
        scale = 0.5
    if loss < 0.7:
        more = scale * 3
    else:
        more = 2.0
        print("large")
    (loss * more).backward()
    with torch.no_grad():
        if loss > 1.4:
            for parameter in model.parameters():
                parameter.grad.mul_(scale)
            COUNTER.taken += 1
        elif loss > 0.9:
            model[0].bias.mul_(0.5)
            print("middle", loss.item())
        else:
            COUNTER.all += 1
    optimizer.step()
    return loss


STEPS = [
    finite_loss, neither_nan_nor_inf, small_norm, returned_before, skipped_parts,
    scaled_gradients, in_a_function,
]  # fmt: skip


@pytest.mark.parametrize(
    "step",
    long_but({"finite_loss", "skipped_parts"}, STEPS),
    ids=lambda step: step.__name__,
)
def test_either_way_is_as_eager(step: Callable[..., Any]) -> None:
    sizes = (1, 2) if step is finite_loss else (2,)
    assert_as_eager(lambda: made(step), nan_at_two, steps=6, sizes=sizes)


@pytest.mark.parametrize(
    "step",
    [nested, both_ways, *long_but((), [counted_and_printed, only_told, all_finite])],
)
def test_what_is_told_and_counted_is_that_of_the_way_taken(step: Callable[..., Any]) -> None:
    def fresh() -> Entry:
        COUNTER.__init__()
        return made(step)

    assert_as_eager(fresh, nan_at_two, lambda _: vars(COUNTER), steps=6, sizes=(2,))


@pytest.mark.long
def test_other_optimizers() -> None:
    def momentum() -> Entry:
        model, x, y = small()
        options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}
        return finite_loss, (model, torch.optim.SGD(model.parameters(), **options), x, y)

    # The first step is skipped: the momentum is that of the first one that is taken.
    assert_as_eager(momentum, lambda i: nan_at_two(i + 1), sizes=(2,), steps=4)
    assert_as_eager(lambda: made(finite_loss, foreach=True), nan_at_two, sizes=(2,), steps=4)


def test_a_cut_step_is_undone_too() -> None:
    expected = eager(lambda: made(finite_loss), nan_at_two)
    for found in on_ranks(lambda: made(finite_loss), 2, nan_at_two, plan_of=cut_plan):
        for ours, theirs in zip(found, expected, strict=True):
            one, other = float.fromhex(ours[0]), float.fromhex(theirs[0])
            assert one == pytest.approx(other, rel=1e-4, nan_ok=True)


def refused(tell: Callable[..., Any]) -> str:
    """Return why a step is refused that calls `tell(loss, model, optimizer)` before its update."""
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        made = tell(loss, model, optimizer)
        optimizer.step()
        return loss if made is None else made

    with pytest.raises(UnsupportedError) as caught:
        capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    assert caught.value.code == "E802"
    assert "test_choices.py:" in caught.value.message
    return caught.value.message


def test_code_that_does_more_is_refused() -> None:
    counter = Counter()
    _, (_, owner, *_) = made(finite_loss)
    schedule = torch.optim.lr_scheduler.StepLR(owner, 3)

    def other_tensor(loss, model, optimizer):
        scale = loss
        if loss > 1:
            scale = loss * 2
        model[0].weight.grad.mul_(scale)

    def steps_schedule(loss, model, optimizer):
        if loss > 1:
            optimizer.step()
            schedule.step()

    def renames(loss, model, optimizer):
        if loss > 1:
            optimizer.step()
            counter.name = "large"

    def drops(loss, model, optimizer):
        if loss > 1:
            optimizer.step()
            optimizer.zero_grad()

    def draws(loss, model, optimizer):
        if loss > 1:
            model[0].weight.grad.add_(torch.randn(6, 5))

    def makes(loss, model, optimizer):
        if loss > 1:
            model[0].bias.grad.mul_(2)
            model.extra = loss * 2
        return model.extra

    def any_of(loss, model, optimizer):
        while loss > 1 or loss < 0:
            optimizer.step()

    def warns(loss, model, optimizer):
        if loss > 1:
            counter.name = "large"

    assert "gives 'scale' a value that is neither a number nor a tensor" in refused(other_tensor)
    assert "steps a schedule" in refused(steps_schedule)
    assert "changes 'counter.name'" in refused(renames)
    assert "drops or replaces a gradient" in refused(drops)
    assert "draws random numbers" in refused(draws)
    assert "changes 'model.extra'" in refused(makes)
    assert "branches on a tensor" in refused(any_of)
    assert "changes 'counter.name'" in refused(warns)
