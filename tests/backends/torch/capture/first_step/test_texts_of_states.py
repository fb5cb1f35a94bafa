"""What optimizer states hold besides tensors and numbers."""

from types import SimpleNamespace

import torch
from torch import nn

from pardnn.backends.torch.user_step.held_numbers import texts_of_states
from pardnn.backends.torch.user_step.object_graph import walk_objects


def test_texts_are_those_of_optimizer_states_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight].update(
        kind="exact", none=None, flags=("a", 1), type=torch.float32, n=1, held=[1], m=torch.ones(2)
    )
    trainer = SimpleNamespace(phase="warm", model=model, optimizer=optimizer, labels=["a", "b"])

    def step() -> None:
        trainer.optimizer.step()

    objects = walk_objects(step, [])
    found = texts_of_states(objects, {id(model.weight): "weight"})
    expected = {"kind": "exact", "none": None, "flags": ("a", 1), "type": torch.float32}
    assert found == {f"trainer.optimizer.state.weight.{n}": x for n, x in expected.items()}
