"""What fused updates write: gradients where they unscale them, and nowhere else."""

from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.ops.schema import signature, written_names
from pardnn.graph.ir import writes
from pardnn.shard.microbatch.rewrite import cut_batch

OPS = torch.ops.aten
#: Each with the number of its states, whether it counts steps, and its numbers.
UPDATES = {
    "adam": (OPS._fused_adam_.default, 3, True, {"beta1": 0.9, "beta2": 0.99, "amsgrad": True}),
    "adamw": (OPS._fused_adamw_.default, 3, True, {"beta1": 0.9, "beta2": 0.99, "amsgrad": True}),
    "sgd": (
        OPS._fused_sgd_.default, 1, False,
        {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "is_first_step": False},
    ),
    "adagrad": (OPS._fused_adagrad_.tensor_lr, 1, True, {"lr_decay": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1003])
@pytest.mark.parametrize("name", UPDATES)
def test_what_a_call_writes_is_what_is_said_of_it(
    name: str, size: int, maximize: bool, scale: float | None
) -> None:
    op, num_states, is_counting, numbers = UPDATES[name]
    torch.manual_seed(0)
    lists = [[torch.rand(size)] for _ in range(min(2 + num_states, 4))]
    lists += [[torch.zeros(size)]] if num_states == 3 else []  # the largest second moment
    lists += [[torch.tensor(1.0)]] if is_counting else []
    numbers = {**numbers, "weight_decay": 0.1, "maximize": maximize}
    numbers |= {} if name == "sgd" else {"eps": 1e-8}
    numbers["lr"] = torch.tensor(0.1) if op is OPS._fused_adagrad_.tensor_lr else 0.1
    if scale is not None:
        numbers |= {"grad_scale": torch.tensor(scale), "found_inf": torch.tensor(0.0)}
    before = [[t.clone() for t in each] for each in lists]
    op(*lists, **numbers)
    changed = {
        name
        for name, was, now in zip(signature(op).names, before, lists, strict=False)
        if not torch.equal(was[0], now[0])
    }
    assert changed == written_names(signature(op), tuple(lists), numbers)
    assert ("grads" in changed) == (scale is not None)


def test_a_gradient_that_an_update_reads_is_added_up_anywhere() -> None:
    """Or the device of a parameter would have to make the first piece's gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, model, optimizer, torch.rand(4, 6), torch.tensor([0, 2, 1, 1]))
    updates = [op for op in graph.ops if "_fused_adamw_" in op.kind]
    assert len(updates) == 6
    for op in updates:
        assert len(writes(op)) == len(op.outputs) == 3
        assert op.inputs[1] not in writes(op)
    names = {op.name for op in cut_batch(graph, 2).ops}
    assert "native_layer_norm_backward@1" in names
