"""Each rewrite that a refusal advises is captured, and computes what the refused step did."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization
from torch.nn.utils import rnn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch import models
from tests.backends.torch.capture.test_capture_equal import assert_equal

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
FOUR = torch.arange(4)


class Case(NamedTuple):
    """Code, a part of the advice, what is refused, and what it becomes."""

    code: str
    advice: str
    refused: Loss
    rewritten: Loss


def masked_write(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m(x).clone()
    y[torch.nonzero(x[:, 0] > 0).squeeze(1)] = 0.5
    return y.square().mean()


def shrunk(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m(x)
    while y.norm() > 1:
        y = y / 2
    return y.sin().sum()


def shrunk_ten_times(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m(x)
    for _ in range(10):
        y = torch.where(y.norm() > 1, y / 2, y)
    return y.sin().sum()


def classes(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] * 2).clamp(0, 3).long()


def doubled_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    out, i = x.clone(), int(x[:, 0].argmax())
    out[i].mul_(2)
    return m(out).square().mean()


def doubled(m: Any, x: torch.Tensor) -> torch.Tensor:
    out, i = x.clone(), int(x[:, 0].argmax())
    out[i] = out[i] * 2
    return m(out).square().mean()


def ragged(m: Any, x: torch.Tensor) -> torch.Tensor:
    nested = torch.nested.nested_tensor([x[:2], x[:3]], layout=torch.jagged)
    return m(nested).values().square().sum()


def padded(m: Any, x: torch.Tensor) -> torch.Tensor:
    parts, lengths = rnn.pad_sequence([x[:2], x[:3]], batch_first=True), torch.tensor([2, 3])
    mask = torch.arange(3) < lengths[:, None]
    return (m(parts).square() * mask[..., None]).sum()


def hessian(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.hessian(lambda z: m(z).sin().sum()))(x).square().mean()


def forward_over_reverse(m: Any, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.jacrev(lambda z: m(z).tanh().sum())
    return torch.func.vmap(torch.func.jacfwd(slope))(x).square().mean()


def reverse_over_reverse(m: Any, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda z: m(z).tanh().sum())
    return torch.func.vmap(torch.func.jacrev(slope))(x).square().mean()


def reverse_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda z: m(z).sin().sum())
    return torch.func.vmap(torch.func.jacrev(slope))(x).square().mean()


def sparse_product(m: Any, x: torch.Tensor) -> torch.Tensor:
    places = torch.tensor([[0, 1, 1], [2, 0, 3]])
    return torch.sparse.mm(torch.sparse_coo_tensor(places, x[:3, 0], (3, 4)), m(x)).square().sum()


def summed_product(m: Any, x: torch.Tensor) -> torch.Tensor:
    (rows, columns), values = torch.tensor([[0, 1, 1], [2, 0, 3]]), x[:3, 0]
    product = torch.zeros(3, 6).index_add_(0, rows, values[:, None] * m(x)[columns])
    return product.square().sum()


def left_out(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m(x)
    if torch.rand([]) >= 0.5:
        y = F.dropout(m(y))
    return y.square().mean()


def left_out_by_selecting(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m(x)
    y = torch.where(torch.rand([]) < 0.5, y, F.dropout(m(y)))
    return y.square().mean()


CASES: dict[str, Case] = {
    "if": Case(
        "E802", "torch.where(condition, a, b)",
        lambda m, x: m(x).mean() if x.mean() > 0 else m(x).square().mean(),
        lambda m, x: torch.where(x.mean() > 0, m(x).mean(), m(x).square().mean()),
    ),
    "layer left out": Case("E802", "torch.rand([]) < p", left_out, left_out_by_selecting),
    "max": Case(
        "E802", "torch.clamp",
        lambda m, x: m(x).mean() / max(x.norm(), 1.0),
        lambda m, x: m(x).mean() / torch.clamp(x.norm(), min=1.0),
    ),
    "rounded": Case(
        "E802", "round(x.item(), 3) for np.round",
        lambda m, x: m(x).mean() * bool(print(np.round(x.mean().item(), 3)) is None),
        lambda m, x: m(x).mean() * bool(print(round(x.mean().item(), 3)) is None),
    ),
    "while": Case("E802", "a fixed number of times", shrunk, shrunk_ten_times),
    "atan": Case(
        "E802", "torch.atan for math.atan",
        lambda m, x: m(x).mean() * math.atan(x.square().sum()),
        lambda m, x: m(x).mean() * torch.atan(x.square().sum()).item(),
    ),
    "exponent": Case(
        "E802", "x ** t.detach() for",
        lambda m, x: (m(x).square() ** m(x).norm().item()).mean(),
        lambda m, x: (m(x).square() ** m(x).norm().detach()).mean(),
    ),
    "lerp": Case(
        "E802", "x.lerp(y, t.detach())",
        lambda m, x: m(x).lerp(x, x.mean().item()).square().mean(),
        lambda m, x: m(x).lerp(x, x.mean().detach()).square().mean(),
    ),
    "fmean": Case(
        "E802", "torch.stack(losses).mean()",
        lambda m, x: m(x).mean() * statistics.fmean([v.item() for v in x.square().sum(1)]),
        lambda m, x: m(x).mean() * torch.stack([*x.square().sum(1)]).mean().item(),
    ),
    "position": Case("E803", "x[i] = x[i] * 2", doubled_in_place, doubled),
    "slice": Case(
        "E803", "torch.arange(n) < length",
        lambda m, x: m(x)[: int((x[:, 0] > 0).sum()) + 1].square().sum(),
        lambda m, x: (
            m(x).square() * ((x[:, 0] > 0).sum() + 1 > FOUR)[:, None]
        ).sum(),
    ),
    "one hot": Case(
        "E802", "num_classes",
        lambda m, x: m(x).mean() * F.one_hot(classes(x))[:, 0].sum(),
        lambda m, x: m(x).mean() * F.one_hot(classes(x), num_classes=4)[:, 0].sum(),
    ),
    "mask": Case(
        "E803", "torch.where(mask, x, 0).sum() / mask.sum()",
        lambda m, x: m(x)[x > 0].mean(),
        lambda m, x: torch.where(x > 0, m(x), 0).sum() / (x > 0).sum(),
    ),
    "masked select": Case(
        "E803", "(loss * mask).sum() / mask.sum()",
        lambda m, x: torch.masked_select(m(x).square(), x > 0).mean(),
        lambda m, x: (m(x).square() * (x > 0)).sum() / (x > 0).sum(),
    ),
    "nonzero": Case(
        "E803", "torch.where(mask, new, old)", masked_write,
        lambda m, x: torch.where(x[:, :1] > 0, 0.5, m(x)).square().mean(),
    ),
    "bincount": Case(
        "E803", "torch.zeros(n).index_add_(0, ids, torch.ones(len(ids)))",
        lambda m, x: (torch.bincount(classes(x), minlength=4) * m(x)[:, 0]).sum(),
        lambda m, x: (
            torch.zeros(4).index_add_(0, classes(x), torch.ones(4)) * m(x)[:, 0]
        ).sum(),
    ),
    "unique": Case(
        "E803", "the values that occur are those with a count > 0",
        lambda m, x: m(x).mean() * len(torch.unique(classes(x))),
        lambda m, x: m(x).mean()
        * (torch.zeros(4).index_add_(0, classes(x), torch.ones(4)) > 0).sum(),
    ),
    "repeat": Case(
        "E803", "output_size=n",
        lambda m, x: m(x).repeat_interleave(classes(x) * 0 + 2, 0).sin().sum(),
        lambda m, x: m(x).repeat_interleave(classes(x) * 0 + 2, 0, output_size=8).sin().sum(),
    ),
    "sparse": Case("E803", "index_add_(0, rows", sparse_product, summed_product),
    "jagged": Case("E803", "pad_sequence", ragged, padded),
    "cond": Case(
        "E801", "torch.where(p, f(x), g(x))",
        lambda m, x: torch.cond(
            x.mean() > 0, lambda x: F.dropout(m(x)), lambda x: -m(x), (x,)
        ).exp().sum(),
        lambda m, x: torch.where(x.mean() > 0, F.dropout(m(x)), -m(x)).exp().sum(),
    ),
    "hessian": Case("E801", "jacrev(grad(f))", hessian, reverse_twice),
    "forward over reverse": Case(
        "E801", "jacrev(grad(f))", forward_over_reverse, reverse_over_reverse
    ),
}  # fmt: skip


#: Refused in the backward pass.
IN_BACKWARD = ("exponent", "lerp", "forward over reverse")


def entry(loss_of: Loss) -> models.Entry:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return models.train(model, optimizer, loss_of(model, x))

    return step, (model, torch.optim.Adam(model.parameters(), lr=0.01), torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_advised_rewrite(name: str) -> None:
    case = CASES[name]
    step, args = entry(case.refused)
    with pytest.raises(UnsupportedError, match=re.escape(case.advice)) as caught:
        capture(step, *args)
    assert caught.value.code == case.code
    file = "models.py" if name in IN_BACKWARD else "test_advice.py"
    assert file in caught.value.details["source"]
    assert not re.search(r"0x[0-9a-f]+|object at", str(caught.value))
    rewritten, others = entry(case.rewritten)
    if name != "cond":  # in eager, torch compiles both functions
        losses = []
        for each, given in ((rewritten, others), (step, args)):
            torch.manual_seed(1)  # the first number drawn is above one half
            losses.append(each(*given))
        torch.testing.assert_close(*losses)
    assert_equal(functools.partial(entry, case.rewritten))


def quantized(kind: Callable[[], nn.Module]) -> models.Entry:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), kind())

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return models.train(model, optimizer, model(x).square().mean())

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore")
def test_fake_quantization_without_a_branch() -> None:
    fused = quantization.FusedMovingAvgObsFakeQuantize
    step, args = quantized(quantization.FakeQuantize)
    with pytest.raises(UnsupportedError, match=f"{fused.__name__} has no branch"):
        capture(step, *args)
    assert_equal(lambda: quantized(fused))
