"""Gradients that are reset between calls are in no checkpoint, and None after loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from tests.backends.torch import models
from tests.backends.torch.checkpoint.test_unread import adding, called, on_ranks, parallel


def leaving(kind: str) -> models.Entry:
    """A step that updates at each call and leaves its gradients to the next one."""
    _, args = adding(kind)

    def adds(model, optimizer, x, y, i):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return adds, args


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_were_reset_before_saving_are_none_after_loading(
    size: int, tmp_path: Path
) -> None:
    def body() -> list[Any]:
        fast, args = parallel(leaving("momentum"))
        called(fast, args, range(2))
        args[1].zero_grad()
        fast.save(tmp_path)
        expected = called(fast, args, range(3))
        fast.load(tmp_path)
        again = [each.grad is None for each in args[0].parameters()], called(fast, args, range(3))
        fast.close()
        resumed, args = parallel(leaving("momentum"))
        resumed.load(tmp_path)
        losses = called(resumed, args, range(3))
        resumed.close()
        return [expected, *again, losses]

    for expected, are_none, again, resumed in on_ranks(size, body):
        assert all(are_none)
        assert expected == again == resumed
