"""A plain value that the first step leaves, and with which the next does the same, is no change."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import pardnn
from tests.backends.torch.ranks import connect, run_ranks
from tests.long_cases import long_but

Made = tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip


def vit() -> Made:
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SMALL)).double()
    batch = torch.randn(4, 3, 8, 8).double(), torch.randint(3, (4,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch


def bert() -> Made:
    config = BertConfig(vocab_size=20, max_position_embeddings=8, **SMALL)
    model = BertForSequenceClassification(config).double()
    batch = torch.randint(20, (4, 8)), torch.randint(3, (4,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch


class Chosen(nn.Module):
    """Chooses what it does at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4).double(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "square"
        y = self.linear(x)
        return y.square() if self.kind == "square" else y.abs()


class Alternating(Chosen):
    """Does something else after what it has left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind is None:
            self.kind = "abs"
            return y.square()
        return y.abs()


def step(model: Any, optimizer: Any, *batch: Any) -> Any:
    optimizer.zero_grad()
    out = model(batch[0], labels=batch[1]).loss if len(batch) > 1 else model(*batch).mean()
    out.backward()
    optimizer.step()
    return out


def own(kind: type[Chosen]) -> Made:
    model = kind()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(3, 4).double(),)


def trained(make: Callable[[], Made], kinds: list[str | None], size: int = 1) -> list[Any]:
    """Return losses by `parallelize` and eager ones, and the captures of each rank."""

    def losses(parallel: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model, optimizer, batch = make()
        run, count = (lambda *given: step(model, optimizer, *given)), 0
        fast: Any = None
        if parallel:
            fast = run = pardnn.parallelize(
                step, model, optimizer, *batch, algorithm="round-robin", costs="v100", timeout=20
            )
        found = []
        for kind in kinds:
            if kind != "as it is":
                model.kind = kind  # type: ignore[assignment]
            found.append(run(*batch).item())
        if parallel:
            count = fast.captures
            fast.close()
        return found, count

    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        fast, count = losses(True)
        return [fast, losses(False)[0], count]

    outcomes = run_ranks(size, body)
    assert [each.status for each in outcomes] == [0] * size, outcomes
    return [each.value for each in outcomes]


@pytest.mark.parametrize(
    ("make", "size"), long_but([(vit, 1), (bert, 2)], itertools.product([vit, bert], [1, 2]))
)
def test_a_classifier_is_captured_once(make: Callable[[], Made], size: int) -> None:
    for fast, eager, captures in trained(make, ["as it is"] * 3, size):
        assert fast == pytest.approx(eager, rel=1e-12)
        assert captures == 1


def test_a_value_that_is_set_by_hand_later_is_a_change() -> None:
    kinds = ["as it is", "as it is", "abs", "abs", "square", None]
    ((fast, eager, captures),) = trained(lambda: own(Chosen), kinds)
    assert fast == pytest.approx(eager, rel=1e-12)
    assert captures == 2


def test_the_value_that_the_step_leaves_may_be_there_before_it() -> None:
    ((fast, eager, captures),) = trained(lambda: own(Chosen), ["square", "square"])
    assert fast == pytest.approx(eager, rel=1e-12)
    assert captures == 1


def test_a_step_that_goes_otherwise_by_what_it_has_left_is_captured_again() -> None:
    ((fast, eager, captures),) = trained(lambda: own(Alternating), ["as it is"] * 3)
    assert fast == pytest.approx(eager, rel=1e-12)
    assert captures == 2
