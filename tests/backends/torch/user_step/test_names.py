"""Names of sources: an attribute may be called what an argument is."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from tests.backends.torch.stepping import Entry, assert_as_eager


class Trainer:
    """Holds the example batch; its step takes another one, and may read the one it holds."""

    def __init__(self, *, reads: bool) -> None:
        torch.manual_seed(0)
        self.model, self.reads = nn.Linear(4, 4), reads
        self.x, self.y = torch.randn(3, 4), torch.randn(3, 4)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train once."""
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), self.x if self.reads else y)
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("reads", [False, True])
def test_a_batch_that_the_step_s_object_holds_too(reads: bool) -> None:
    def make() -> Entry:
        trainer = Trainer(reads=reads)
        return trainer.step, (trainer.x, trainer.y)

    def given(i: int) -> dict[int, Any]:
        generator = torch.Generator().manual_seed(i)
        return {k: torch.randn(3, 4, generator=generator) for k in (0, 1)}

    assert_as_eager(make, given, steps=3, sizes=(1, 2))


def test_the_argument_has_the_name_and_the_attribute_another() -> None:
    trainer = Trainer(reads=True)
    graph = capture(trainer.step, trainer.x, trainer.y)
    kinds = {op.name: op.kind for op in graph.ops if op.name.startswith("x")}
    assert kinds == {"x": "input", "x (2)": "buffer"}
