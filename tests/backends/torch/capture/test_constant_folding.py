"""What hangs on constants alone is the same in every step, so a step may decide by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch import models
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.models import small
from tests.backends.torch.stepping import assert_as_eager


def trained(model: nn.Module, loss_of: Any, *batch: torch.Tensor) -> models.Entry:
    def step(model, optimizer, *batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.Adam(model.parameters(), lr=0.01), *batch)


def masked_transformer() -> models.Entry:
    """torch asks whether a mask that it is given is the causal one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)

    def loss_of(model, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return model(x, mask=mask).square().mean()

    return trained(model, loss_of, torch.randn(2, 5, 8))


def contrast_without_oneself() -> models.Entry:
    """Indexing by a mask of fixed content has a fixed shape."""
    torch.manual_seed(1)

    def loss_of(model, x):
        features = F.normalize(model(torch.cat([x, -x])), dim=1)
        count = len(features)
        similar = features @ features.T
        others = similar[~torch.eye(count, dtype=torch.bool)].view(count, -1)
        pairs = torch.arange(count).repeat_interleave(torch.tensor([2] * (count // 2) + [0] * 4))
        return F.cross_entropy(others, (pairs + 1) % (count - 1))

    return trained(nn.Linear(6, 4), loss_of, torch.randn(4, 6))


def speech(lengths: Any) -> models.Entry:
    torch.manual_seed(2)

    def loss_of(model, x, words):
        odds = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(odds, words, *lengths(*odds.shape[:2]), zero_infinity=True)

    return trained(nn.Linear(6, 9), loss_of, torch.randn(3, 12, 6), torch.randint(1, 9, (3, 4)))


def counted(steps: int, batch: int) -> Any:
    return torch.full((batch,), steps), torch.full((batch,), 4)


def listed(steps: int, batch: int) -> Any:
    return (steps,) * batch, (4,) * batch


def policy() -> models.Entry:
    """A distribution looks at its arguments, and raises where they are wrong."""
    torch.manual_seed(3)

    def loss_of(model, x, action, gain):
        odds = torch.distributions.Categorical(logits=model(x))
        spread = torch.distributions.Normal(gain, torch.ones_like(gain))
        return -(odds.log_prob(action) * spread.rsample()).mean() - 0.01 * odds.entropy().mean()

    batch = torch.randn(5, 6), torch.randint(3, (5,)), torch.randn(5)
    return trained(nn.Linear(6, 3), loss_of, *batch)


def rate_from_outside() -> models.Entry:
    """The rate is an argument, and the step itself puts it where the optimizer reads it."""
    step, args = small(lambda parameters: torch.optim.AdamW(parameters, lr=1.0))

    def set_and_step(model, optimizer, x, y, rate):
        for group in optimizer.param_groups:
            group["lr"] = rate
        return step(model, optimizer, x, y)

    return set_and_step, (*args, 0.003)


STEPS: dict[str, Any] = {
    "masked transformer": masked_transformer,
    "contrast": contrast_without_oneself,
    "lengths in tensors": lambda: speech(counted),
    "lengths in tuples": lambda: speech(listed),
    "policy": policy,
    "rate": rate_from_outside,
}


@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_bitwise_equal(name: str) -> None:
    assert_equal(STEPS[name])


@pytest.mark.parametrize("what", ["batch", "parameter", "random"])
def test_what_may_change_is_decided_in_each_step(what: str) -> None:
    def make() -> Any:
        step, args = small(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

        def deciding(model, optimizer, x, y):
            value = {"batch": x, "parameter": model[0].weight, "random": torch.rand(3)}[what]
            if (value.detach() * torch.ones(1) > {"parameter": 0.369}.get(what, 0.8)).any():
                x = x * 2
            return step(model, optimizer, x, y)

        return deciding, args

    def batch(i: int) -> dict[int, Any]:
        x = make()[1][2]
        return {2: x * (0.1, 1.0, 0.2)[i % 3]}

    assert_as_eager(make, batch, steps=6)


def test_what_may_change_decides_nothing_that_needs_a_gradient() -> None:
    step, args = small(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def deciding(model, optimizer, x, y):
        scaled = model[0].weight
        if (x * torch.ones(1) > 9).any():
            scaled = scaled * 2
        return step(model, optimizer, x + scaled.sum(), y)

    with pytest.raises(UnsupportedError, match="under a condition on data"):
        capture(deciding, *args)


def test_lengths_of_the_batch_are_data() -> None:
    def loss_of(model, x, words, lengths):
        odds = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(odds, words, torch.full((len(x),), len(odds)), lengths)

    _, (model, _, *batch) = speech(counted)
    step, args = trained(model, loss_of, *batch, torch.tensor([2, 3, 4]))
    with pytest.raises(UnsupportedError, match="as wide as the longest target"):
        capture(step, *args)


class Sharpness(torch.optim.SGD):
    """Steps uphill first, and keeps the weights meanwhile, as SAM does."""

    @torch.no_grad()
    def climb(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def fall(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old"]
        self.step()


def twice() -> models.Entry:
    _, args = small(lambda parameters: Sharpness(parameters, lr=0.1, momentum=0.9))

    def step(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.climb()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.fall()
        optimizer.zero_grad()
        return loss

    return step, args


def test_state_that_each_step_makes_anew_needs_no_first_value() -> None:
    assert_equal(twice)


def test_a_number_is_read_off_what_has_one_element() -> None:
    """As madgrad reads its count; `tolist` of it is a list."""

    def make() -> models.Entry:
        def loss_of(model, x):
            count = torch.zeros(1) + 2
            scale = (torch.ones(1, 1) * 3).item()
            return model(x).square().mean() * float(count) * scale * (2 if count > 1 else 1)

        torch.manual_seed(0)
        return trained(nn.Linear(6, 4), loss_of, torch.randn(4, 6))

    assert_equal(make)
