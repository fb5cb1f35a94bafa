"""Capture puts everything back, and allocates no tensor data."""

import collections
import functools
import random
import types

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.restore import restore
from pardnn.backends.torch.user_step.object_graph import walk_objects
from pardnn.errors import UserCodeError
from tests.backends.torch import models
from tests.backends.torch.models import small, train

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def _fingerprint(step, args):
    objects = walk_objects(step, list(args))
    tensors = [(f.name, id(f.value), f.value._version, f.value.grad) for f in objects.tensors]
    contents = [(name, repr(content)) for name, _, content in objects.contents[1:]]
    return [*tensors, *contents, torch.get_rng_state().tolist(), random.getstate()]


def test_everything_is_put_back():
    step, args = models.resnet()
    args[0].eval()
    args[0].note = {"a": [1, 2]}
    step(*args)
    before = _fingerprint(step, args)
    keys = list(args[1].state)
    capture(step, *args)
    assert _fingerprint(step, args) == before
    assert all(a is b for a, b in zip(keys, args[1].state, strict=True))
    assert not args[0].training


def test_everything_is_put_back_after_an_error():
    def step(model, optimizer, x, y):
        models.classify_step(model, optimizer, x, y)
        model.extra = x
        raise KeyError("mine")

    _, args = small(ADAM)
    before = _fingerprint(models.classify_step, args)
    with pytest.raises(UserCodeError) as caught:
        capture(step, *args)
    assert _fingerprint(models.classify_step, args) == before
    assert "while running your step for capture" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_five_billion_parameters_allocate_nothing():
    import resource

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(25_000, 25_000, bias=False) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(4, 25_000)

    def step(model, optimizer, x):
        return train(model, optimizer, model(x).square().mean())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(step, model, optimizer, x)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    parameters = sum(op.outputs[0].bytes for op in graph.ops if op.kind == "parameter")
    assert parameters == 4 * 8 * 25_000**2 >= 4 * 5e9
    assert grown < 200_000  # KiB: one parameter alone takes 2.4 million


def test_a_model_on_the_meta_device_is_planned():
    with torch.device("meta"):
        model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(
        models.classify_step, model, optimizer, torch.randn(2, 6), torch.zeros(2, dtype=torch.long)
    )
    assert model.weight.is_meta
    assert len(graph.ops) > 5


def test_a_variable_is_put_back_where_it_holds_a_container_of_another_kind() -> None:
    held = types.CellType([])
    contents = [("held", held, {}), ("empty", types.CellType([]), None)]
    restore(contents)
    assert [cell.cell_contents for _, cell, _ in contents] == [{}, None]
    order = collections.OrderedDict(a=1, b=2)
    restore([("order", order, {"b": 2, "a": 1})])
    assert list(order) == ["b", "a"]
