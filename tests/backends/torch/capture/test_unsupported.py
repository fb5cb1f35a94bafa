"""What capture refuses, with the line and the usual rewrite."""

import dataclasses
import functools
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.dlpack import from_dlpack

from pardnn.backends.torch.capture import fake_cache
from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError, UsageError, UserCodeError
from tests.backends.torch import models
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.models import small, train

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def entry(step, make=ADAM):
    """A factory of a small model around `step(model, optimizer, x, y)`."""
    return lambda: (step, small(make)[1])


# Refusals. Each names the line of the user's code.


def refused(step, args=None, code=None) -> UnsupportedError:
    _, default = small(ADAM)
    with pytest.raises(UnsupportedError) as caught:
        capture(step, *(default if args is None else args))
    assert code in (None, caught.value.code)
    assert not re.search(r"0x[0-9a-f]+|object at", caught.value.message)
    return caught.value


def test_a_branch_on_a_tensor():
    def step(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        if loss > 10:  # the line
            loss = loss / 2
        return train(model, optimizer, loss)

    error = refused(step, code="E802")
    line = step.__code__.co_firstlineno + 2
    assert error.details["source"] == f"tests/backends/torch/capture/test_unsupported.py:{line}"
    assert "torch.where" in error.message


@pytest.mark.parametrize(
    ("use", "code"),
    [
        (lambda x: x * math.atan(x.mean()), "E802"),
        (lambda x: x * float(x.detach().numpy().mean()), "E802"),
        (lambda x: x * float(np.from_dlpack(x.detach()).mean()), "E802"),
        (lambda x: x * from_dlpack(torch.to_dlpack(x.detach())).mean(), "E802"),
        (lambda x: x + torch.ones(int(x.sum())).sum(), "E803"),
        (lambda x: x + torch.ones(x.argmax().item()).sum(), None),
        (lambda x: x + x[x > 0].sum(), "E803"),
        (lambda x: x + torch.nonzero(x).sum(), "E803"),
        (lambda x: x + torch.equal(x, x), "E802"),
    ],
)
def test_numbers_and_shapes_that_depend_on_data(use, code):
    def step(model, optimizer, x, y):
        return train(model, optimizer, F.cross_entropy(model(use(x)), y))

    error = refused(step, code=code)
    assert "test_unsupported.py" in error.details["source"]


def test_a_number_that_is_only_returned_is_no_matter():
    def step(model, optimizer, x, y):
        loss = train(model, optimizer, F.cross_entropy(model(x), y))
        return {"loss": loss, "logged": loss.item()}

    graph = capture(step, *entry(step)()[1])
    assert sum(op.kind == "aten._local_scalar_dense.default" for op in graph.ops) == 5


def test_a_list_that_the_step_reads():
    seen = []

    def closure(model, optimizer, x, y):
        seen.append(len(seen))
        return models.classify_step(model, optimizer, x, y)

    assert refused(closure, code="E804").details["changed"] == ["seen"]
    assert seen == []


def test_host_randomness_and_iterators():
    batches = iter([torch.randn(5, 6) for _ in range(9)])
    numbers = iter(range(9))

    def dice(model, optimizer, x, y):
        return models.classify_step(model, optimizer, x * random.random(), y)

    def loader(model, optimizer, x, y):
        return models.classify_step(model, optimizer, next(batches), y)

    def literal(model, optimizer, x, y):
        return models.classify_step(model, optimizer, x * next(numbers), y)

    def seeded(model, optimizer, x, y):
        return models.classify_step(model, optimizer, x * random.Random(x[0, 0].item()).random(), y)

    assert "random module" in refused(dice, code="E804").message
    assert "reads the content of a tensor" in refused(seeded, code="E802").message
    assert "takes from 'batches', a list_iterator" in refused(loader, code="E804").message
    assert "takes from 'numbers', a range_iterator" in refused(literal, code="E804").message


def test_another_default_dtype():
    def scaled(model, optimizer, x, y):
        torch.set_default_dtype(torch.float32)
        torch.set_default_dtype(torch.float64)
        scale = torch.ones(1) * 0.1
        torch.set_default_dtype(torch.float32)
        return models.classify_step(model, optimizer, x * scale.float(), y)

    assert "sets torch's default dtype (" in refused(scaled).message
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda loss: None, "nothing"),
        (lambda loss: loss.detach().expand(3), "a float32 tensor of shape [3]"),
        (lambda loss: (1, torch.zeros((), dtype=torch.long)), "a tuple of a int, a int64 tensor"),
    ],
)
def test_no_loss(result, said):
    """Neither returned nor what `backward` was called on."""

    def step(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        parameters = [*model.parameters()]
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad
        optimizer.step()
        return result(loss)

    assert said in refused(step, code="E805").message


def test_a_loss_field_is_taken_first():
    @dataclasses.dataclass
    class Out:
        aux: torch.Tensor
        loss: torch.Tensor

    def step(model, optimizer, x, y):
        loss = train(model, optimizer, F.cross_entropy(model(x), y))
        return Out(loss * 0, loss)

    assert_equal(entry(step))


def test_nothing_to_train():
    def step(model, x, y):
        return F.cross_entropy(model(x), y)

    _, (model, _, x, y) = small(ADAM)
    with pytest.raises(UsageError, match="nothing to train") as caught:
        capture(step, model, x, y)
    assert caught.value.exit_status == 2


def test_own_generator_and_reseeding():
    generator = torch.Generator()

    def own(model, optimizer, x, y):
        return models.classify_step(model, optimizer, x + torch.rand(5, 6, generator=generator), y)

    def reseeding(model, optimizer, x, y):
        torch.manual_seed(0)
        return models.classify_step(model, optimizer, F.dropout(x), y)

    assert "generator" in refused(own).message
    assert "sets the state" in refused(reseeding).message


def test_large_constants_and_hidden_parameters():
    big = [torch.zeros(600, 600)]
    hidden = [nn.Parameter(torch.zeros(6))]

    def step(model, optimizer, x, y):
        return models.classify_step(model, optimizer, x + Hidden.big.sum(), y)

    def trainable(model, optimizer, x, y):
        return models.classify_step(model, optimizer, x + Hidden.parameter, y)

    def as_array(model, optimizer, x, y):
        return models.classify_step(model, optimizer, x + float(Hidden.big.numpy()[0, 0]), y)

    class Hidden:
        pass

    Hidden.big, Hidden.parameter = big[0], hidden[0]
    assert "register_buffer" in refused(step).message
    assert "belongs to no model" in refused(trainable).message
    Hidden.big = torch.zeros(2, 2)
    assert "does not reach" in refused(as_array).message


def test_numpy_in_the_batch():
    _, (model, optimizer, x, y) = small(ADAM)

    def step(model, optimizer, x, y):
        return models.classify_step(model, optimizer, torch.from_numpy(x), y)

    assert "torch.from_numpy" in refused(step, (model, optimizer, x.numpy(), y)).message


def recurrent(fused):
    def step(model, optimizer, x, y):
        with torch.backends.mkldnn.flags(enabled=fused):
            out, _ = model(x)
        return train(model, optimizer, F.mse_loss(out, y))

    def factory():
        torch.manual_seed(0)
        model = nn.LSTM(4, 4, num_layers=2, dropout=0.1)
        return step, (model, ADAM(model.parameters()), torch.randn(3, 2, 4), torch.randn(3, 2, 4))

    return factory


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_fused_recurrent_layer_and_its_rewrite(monkeypatch):
    graph = assert_equal(recurrent(fused=True))
    layers = [op for op in graph.ops if op.kind == "aten.mkldnn_rnn_layer.default"]
    assert len(layers) == 2
    assert all(op.outputs[3].bytes > 0 for op in layers)  # the workspace of the backward pass
    assert_equal(recurrent(fused=False))
    monkeypatch.setattr(fake_cache, "_MAX_RNN_BYTES", 100)
    error = refused(*recurrent(fused=True)())
    assert "torch.backends.mkldnn.flags" in error.message
    assert "test_unsupported.py" in error.details["source"]


def test_sparse_gradients():
    model = nn.EmbeddingBag(6, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = (model, optimizer, torch.zeros(5, 2, dtype=torch.long), torch.zeros(5).long())
    assert "sparse=False" in refused(models.classify_step, args, "E803").message


SAMPLERS = {
    "gamma": lambda x: torch.distributions.Gamma(x, x).rsample(),
    "beta": lambda x: torch.distributions.Beta(x, x).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "poisson": lambda x: torch.poisson(x),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5), x.clamp(0.1, 0.9)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_that_reject_are_refused_where_they_stand(name):
    def step(model, optimizer, x):
        out = model(x).square() + 0.5
        return train(model, optimizer, (SAMPLERS[name](out) * out).mean())

    model = nn.Linear(4, 4)
    error = refused(step, (model, ADAM(model.parameters()), torch.ones(3, 4)), "E822")
    assert "test_unsupported.py" in error.details["source"]


def test_an_optimizer_that_searches_is_named():
    def step(model, optimizer, x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    model, _, x, y = small(ADAM)[1]
    error = refused(step, (model, torch.optim.LBFGS(model.parameters()), x, y), "E802")
    assert "torch.optim.LBFGS runs its closure (tests/" in error.message
    assert "float" not in error.message


def test_hooks_that_no_parameter_lists_are_refused():
    step, args = entry(models.classify_step)()
    model, weight = args[0], next(args[0].parameters())
    alive = model(args[2]).sum()  # a graph refers to the nodes, too
    capture(step, *args)
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (gradients[0] * 0.1,))
    held = [node]
    error = refused(step, args, "E801")
    assert "register_post_accumulate_grad_hook" in error.message
    assert error.details["tensor"] == f"model.{next(iter(dict(model.named_parameters())))}"
    del node, held[:], alive
    capture(step, *args)
    torch.autograd.graph.register_multi_grad_hook([weight], lambda gradients: None)
    refused(step, args, "E801")


def test_a_hook_that_notes_in_which_backward_it_ran_is_named():
    step, args = entry(models.classify_step)()
    weight = next(args[0].parameters())
    torch.autograd.graph.register_multi_grad_hook([weight], lambda gradient: None, mode="any")
    error = refused(step, args, "E804")
    assert "register_multi_grad_hook" in error.message
    assert "within the step" in error.message


def with_gradients(is_reset_first):
    def step(model, optimizer, x):
        if is_reset_first:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if not is_reset_first:
            optimizer.zero_grad()
        return loss

    model = nn.Linear(4, 4)
    model(torch.ones(3, 4)).sum().backward()
    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 4))


def test_a_gradient_left_over_from_before_is_a_state_where_it_is_read():
    for is_reset_first in (True, False):
        step, args = with_gradients(is_reset_first)
        gradients = [op for op in capture(step, *args).ops if op.name.endswith(".grad")]
        assert len(gradients) == (0 if is_reset_first else 2)


RAISING = {
    "float": lambda x: float("abc"),
    "getattr": lambda x: x.no_such_name,
    "getattr of a name": lambda x: getattr(x, "no_such_" + "name"),
    "math": lambda x: math.sqrt(-1.0),
    "index": lambda x: x[len(x)],
    "open": lambda x: Path("/no/such/file").read_text(),
    "list": lambda x: list(Path("/no/such/folder").iterdir()),
}


@pytest.mark.parametrize("kind", RAISING)
def test_what_the_users_own_call_raises_is_told_as_that(kind: str) -> None:
    def step(model, optimizer, x, y):
        RAISING[kind](x)
        return models.classify_step(model, optimizer, x, y)

    _, args = small(ADAM)
    with pytest.raises(UserCodeError, match="test_unsupported.py") as caught:
        capture(step, *args)
    assert caught.value.code == "E110"
    assert caught.value.__cause__ is not None
