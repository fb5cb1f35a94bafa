"""What a capture could get wrong without anyone noticing."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.user_step.sources import sources
from pardnn.errors import UnsupportedError
from tests.backends.torch import models
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.models import small, train

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def entry(step, make=ADAM):
    """A factory of a small model around `step(model, optimizer, x, y)`."""

    def factory():
        _, args = small(make)
        return step, args

    return factory


# Frozen numbers.


def test_no_number_of_the_step_count_is_frozen():
    step, args = small(ADAM)
    graph = capture(step, *args)
    items = [op for op in graph.ops if op.kind == "aten._local_scalar_dense.default"]
    assert len(items) == 4
    for op in graph.ops:
        if op.kind == "aten.addcdiv_.default":
            assert op.arguments["kwargs"]["value"] == {"tensor": op.inputs[-1]}


@pytest.mark.parametrize(("decay", "guard"), [(0.0, "exact"), (0.1, "nonzero")])
def test_a_branch_on_a_hyperparameter_is_noted(decay, guard):
    step, args = small(functools.partial(ADAM, weight_decay=decay))
    graph = capture(step, *args)
    (op,) = [op for op in graph.ops if op.name.endswith("weight_decay")]
    assert op.arguments == {"value": decay, "guard": guard}


def test_a_comparison_of_a_number_is_guarded_by_its_outcome():
    def step(model, optimizer, x, y):
        scale = 2.0 if optimizer.param_groups[0]["lr"] > 0.005 else 1.0
        return train(model, optimizer, F.cross_entropy(model(x), y) * scale)

    graph = capture(step, *entry(step)()[1])
    host = graph.ops[-1].arguments["host"]
    lr = {"tensor": "optimizer.param_groups.0.lr"}
    assert host["rows"] == [["gt", lr, 0.005]]
    assert [condition[:2] for condition in host["conditions"]] == [["#0", True]]


def test_settings_that_are_no_floats_are_listed():
    graph = capture(*_flat(small(ADAM)))
    settings = graph.ops[-1].arguments["settings"]
    assert settings["optimizer.param_groups.0.amsgrad"] is False
    assert settings["optimizer.param_groups.0.foreach"] is None


def _flat(pair):
    return (pair[0], *pair[1])


def test_a_float_argument_stays_live():
    def step(model, optimizer, x, y, weight):
        return train(model, optimizer, F.cross_entropy(model(x), y) * weight)

    def factory():
        _, args = small(ADAM)
        return step, (*args, 0.5)

    graph = assert_equal(factory)
    assert any(op.name == "weight" and op.kind == "input" for op in graph.ops)


# Hidden mutation, views, replaced tensors.


def test_statistics_changed_behind_the_schema_are_outputs():
    graph = capture(*_flat(models.resnet()))
    (op, *_) = [op for op in graph.ops if op.kind == "aten.native_batch_norm.default"]
    names = ["model.stem.1.running_mean", "model.stem.1.running_var"]
    assert op.arguments["mutates"] == names
    assert [t.alias_of for t in op.outputs[-2:]] == names


class Replacing(nn.Module):
    """Keeps a running mean by replacing its buffer, and a queue that it shifts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.queue = torch.zeros(4, 3)
        self.last = None

    def forward(self, x):
        out = self.linear(x) - self.mean
        self.mean = self.mean * 0.9 + 0.1 * out.detach().mean(0)
        self.queue = torch.cat([self.queue[1:], out.detach()[:1]])
        self.last = out.detach()
        return out + self.queue.mean(0)


def test_a_tensor_that_the_step_replaces_is_kept():
    def factory():
        torch.manual_seed(0)
        model = Replacing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        args = (model, optimizer, torch.randn(5, 6), torch.randint(3, (5,)))
        return models.classify_step, args

    graph = assert_equal(factory)
    names = {op.name for op in graph.ops}
    assert {"model.mean", "model.queue"} <= names
    assert "model.last" not in names


def test_views_written_in_place_are_read_anew():
    def step(model, optimizer, x, y):
        grid = torch.zeros(5, 6)
        whole = grid.view(30)
        for i in range(5):
            grid[i] = x[i] * (i + 1)
        transposed = grid.t()
        whole.mul_(0.5)
        transposed[0] += 1
        return train(model, optimizer, F.cross_entropy(model(whole.view(5, 6)), y))

    assert_equal(entry(step))
    assert_equal(entry(step), order=3)


def test_a_tensor_turned_in_place_is_a_view():
    def step(model, optimizer, x, y):
        turned = x.t().contiguous()
        kept = turned * 2
        turned.t_().unsqueeze_(0).squeeze_(0).add_(1)
        return train(model, optimizer, F.cross_entropy(model(turned + kept.t()), y))

    assert_equal(entry(step))


def test_strides_of_channels_last_are_followed():
    def factory():
        step, (model, optimizer, x, y) = models.resnet()
        model.to(memory_format=torch.channels_last)
        return step, (model, optimizer, x.to(memory_format=torch.channels_last), y)

    assert_equal(factory)


def test_an_old_alias_of_a_parameter_reads_the_new_value():
    def step(model, optimizer, x, y):
        weight = model[0].weight.detach()
        first = weight[0]
        loss = train(model, optimizer, F.cross_entropy(model(x), y))
        return loss.detach() + weight.sum() + first.sum()

    assert_equal(entry(step))
    assert_equal(entry(step), order=5)


def test_updates_by_hand():
    def step(model, x, y):
        loss = F.cross_entropy(model(x), y)
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            with torch.no_grad():
                p -= 0.1 * g
        return loss

    def data_step(model, x, y):
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad
        return loss

    for chosen in (step, data_step):
        assert_equal(lambda chosen=chosen: (chosen, (lambda a: (a[0], *a[2:]))(small(ADAM)[1])))


def test_gradients_that_are_never_cleared_are_state():
    def step(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    graph = assert_equal(entry(step))
    assert sum(op.name.endswith(".grad") for op in graph.ops) == 4


def test_a_constant_that_is_changed_is_new_in_each_step():
    def step(model, optimizer, x, y):
        weights = torch.tensor([1.0, 2.0, 3.0])
        weights.mul_(0.5)
        weights[0] += 1
        return train(model, optimizer, F.cross_entropy(model(x), y, weight=weights))

    assert_equal(entry(step))


def test_gradients_are_not_copied():
    graph = capture(*_flat(small(functools.partial(torch.optim.SGD, lr=0.1))))
    assert not [op for op in graph.ops if "clone" in op.kind]


def test_dropout_that_nothing_needs_still_draws():
    def step(model, optimizer, x, y):
        F.dropout(x, 0.5)
        return train(model, optimizer, F.cross_entropy(model(F.dropout(x, 0.1)), y))

    assert_equal(entry(step))


# Where models and optimizers are found.


def test_everything_may_be_reached_without_arguments():
    def factory():
        _, (model, optimizer, x, y) = small(ADAM)
        lock = threading.Lock()  # cannot be pickled, and need not be

        class Trainer:
            def __init__(self):
                self.net, self.by = model, optimizer
                self.data = (x, y)

            def train(self):
                with lock:
                    return models.classify_step(self.net, self.by, *self.data)

        return Trainer().train, ()

    assert_equal(factory)
    step, args = factory()
    names = [source.name for source in sources(step, args)]
    assert names[0] == "net.0.weight"
    assert "by.param_groups.0.lr" in names


def test_partial_and_closure():
    def factory():
        _, (model, optimizer, x, y) = small(ADAM)

        def step(x, *, y, scale=lambda loss: loss * 2):
            return train(model, optimizer, scale(F.cross_entropy(model(x), y)))

        return functools.partial(step, y=y), (x,)

    assert_equal(factory)


def test_tied_parameters_appear_once():
    graph = capture(*_flat(models.lstm()))
    parameters = [op.name for op in graph.ops if op.kind == "parameter"]
    assert "model.embedding.weight" in parameters
    assert "model.out.weight" not in parameters


def test_frozen_parameters_have_no_state():
    step, args = small(ADAM)
    args[0][0].weight.requires_grad_(False)
    graph = capture(step, *args)
    assert "model.0.weight" in {op.name for op in graph.ops}
    assert not [op for op in graph.ops if op.kind == "state" and "0.weight" in op.name]


@pytest.mark.parametrize("make", [ADAM, functools.partial(torch.optim.SGD, lr=1, momentum=0.9)])
def test_predicted_state_is_what_one_step_creates(make):
    step, args = small(make)
    graph = capture(step, *args)
    predicted = {op.name: op.outputs[0].bytes for op in graph.ops if op.kind == "state"}
    step(*args)
    live = {source.name: source.get().nbytes for source in sources(step, args)
            if source.kind == "state"}  # fmt: skip
    assert predicted == live


def test_two_views_of_one_tensor_may_be_the_batch():
    def factory():
        _, args = models.gpt2()
        tokens = torch.randint(64, (2, 9))

        def shifted(model, optimizer, x, y):
            logits = model(x).logits
            return train(model, optimizer, F.cross_entropy(logits.flatten(0, 1), y.reshape(-1)))

        return shifted, (*args[:2], tokens[:, :-1], tokens[:, 1:])

    assert_equal(factory)


# Shared storage.


def plain_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_what_one_call_writes_shares_a_group():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ops = {op.name: op for op in capture(plain_step, model, optimizer, torch.randn(8, 4)).ops}
    normalised = next(
        op for op in ops.values() if "batch_norm" in op.kind and op.backward_of is None
    )
    groups = {ops[f"model.1.{name}"].group for name in ("running_mean", "running_var")}
    assert groups == {normalised.group}


def test_two_parameters_over_one_storage_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].weight.data = model[0].weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"shares its memory with model\.1\.weight"):
        capture(plain_step, model, optimizer, torch.randn(8, 4))


def test_an_attribute_that_is_made_anew_may_share_storage():
    model = nn.utils.spectral_norm(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert capture(plain_step, model, optimizer, torch.randn(8, 4)).ops
