"""Ops of other people, contexts of torch, and where each op comes from."""

import functools

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch import models
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.models import small, train

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def entry(step, make=ADAM):
    """A factory of a small model around `step(model, optimizer, x, y)`."""
    return lambda: (step, small(make)[1])


def _captured(pair):
    return capture(pair[0], *pair[1])


# Other people's ops.


@torch.library.custom_op("pardnn_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("pardnn_test::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("pardnn_test::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_custom_ops_are_opaque_calls():
    def step(model, optimizer, x, y):
        shifted = x.clone()
        bump(shifted)
        return train(model, optimizer, F.cross_entropy(twice(model(shifted)), y))

    graph = assert_equal(entry(step))
    kinds = {op.kind: op for op in graph.ops}
    assert "pardnn_test::twice.default" in kinds
    changing = kinds["pardnn_test::bump.default"]
    assert changing.arguments["mutates"] == [changing.outputs[0].alias_of]


def test_a_custom_op_without_a_fake():
    def step(model, optimizer, x, y):
        return models.classify_step(model, optimizer, opaque(x), y)

    with pytest.raises(UnsupportedError) as caught:
        capture(step, *small(ADAM)[1])
    error = caught.value
    assert "pardnn_test" in error.message
    assert "register_fake" in error.message


def test_checkpointing_without_dropout():
    from torch.utils.checkpoint import checkpoint

    def step(model, optimizer, x, y):
        hidden = checkpoint(model, x, use_reentrant=False)
        return train(model, optimizer, F.cross_entropy(hidden, y))

    assert_equal(entry(step))


def test_autocast():
    def step(model, optimizer, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        return train(model, optimizer, loss)

    assert_equal(entry(step))


def test_hooks_on_parameters_run():
    def factory():
        step, args = small(ADAM)
        args[0][0].weight.register_hook(lambda grad: grad * 0.5)
        return step, args

    graph = assert_equal(factory)
    assert any(op.kind == "aten.mul.Tensor" and 0.5 in op.arguments["args"] for op in graph.ops)


# Where each op comes from.


def test_ops_know_line_module_and_forward_op():
    graph = _captured(models.gpt2())
    named = {op.name: op for op in graph.ops}
    calls = [op for op in graph.ops if not op.is_source and op.kind != "pardnn.loss"]
    assert all(op.source for op in calls)
    assert not any(op.source.startswith("/") for op in calls)
    forward = [op for op in calls if op.kind == "aten.native_layer_norm.default"]
    backward = [op for op in calls if op.kind == "aten.native_layer_norm_backward.default"]
    assert {op.module for op in forward} == {op.module for op in backward}
    assert "model.transformer.h.0.ln_1" in {op.module for op in forward}
    for op in backward:
        assert named[op.backward_of].kind == "aten.native_layer_norm.default"
    assert any(op.source.startswith("transformers/models/gpt2/modeling_gpt2.py:") for op in calls)


def test_a_graph_does_not_depend_on_the_line_that_captures() -> None:
    def step(model, optimizer, x, y):
        loss = train(model, optimizer, F.cross_entropy(model(x), y))
        return {"loss": loss, "norm": torch.nn.utils.get_total_norm(model.parameters())}

    factory = entry(step)
    here = _captured(factory())
    there = capture(factory()[0], *factory()[1])
    assert here.ops == there.ops
    assert any("clone" in op.kind for op in here.ops)


def test_views_tell_how_far_from_an_aligned_element_they_begin() -> None:
    """Counted from the tensor that they are views of, wherever that lies in the user's storage."""
    own = torch.nn.Parameter(torch.randn(600)[3:593].view(10, 59))

    def step(optimizer, x):
        loss = (own[1:, 1:] * x[2:, 1:]).sum() + own[0].sum()
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, torch.optim.SGD([own], lr=0.1), torch.randn(11, 59))
    found = {t.misaligned_bytes for op in graph.ops for t in op.outputs if t.alias_of is not None}
    assert {4 * (59 + 1) % 64, 4 * (2 * 59 + 1) % 64} <= found
    assert not any(t.misaligned_bytes for op in graph.ops for t in op.outputs if not t.alias_of)
