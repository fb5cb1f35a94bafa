"""RNG replays: checkpoints over dropout, and states that the user restores."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.runtime.random_ops import drawn_once
from pardnn.errors import FileError, UnsupportedError
from tests.backends.torch import executors, models
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.plans import random_plan
from tests.backends.torch.stepping import assert_as_eager


def layers() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3)
    )
    args = model, torch.optim.Adam(model.parameters(), lr=0.01)
    return *args, torch.randn(5, 6), torch.randint(3, (5,))


def entry(forward: Any) -> Any:
    def step(model, optimizer, x, y):
        return models.train(model, optimizer, F.cross_entropy(forward(model, x), y))

    return lambda: (step, layers())


def one_after_the_other(model, x):
    h = checkpoint(model[:2], x, use_reentrant=False)
    return model[4](checkpoint(model[2:4], h, use_reentrant=False))


def reentrant(model, x):
    h = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=True)
    return model[2:](h)


def in_segments(model, x):
    return checkpoint_sequential(model, 3, x, use_reentrant=False)


def one_in_the_other(model, x):
    def inner(x):
        return model[1](torch.tanh(model[0](x)))

    def outer(x):
        return model[3](torch.tanh(model[2](checkpoint(inner, x, use_reentrant=False))))

    return model[4](checkpoint(outer, x, use_reentrant=False)) + torch.rand(5, 3)


def by_hand(model, x):
    state = torch.default_generator.get_state()
    once = model[1](model[0](x))
    torch.default_generator.set_state(state)
    return model[2:](once + model[1](model[0](x)))


FORWARD = [one_after_the_other, reentrant, in_segments, one_in_the_other, by_hand]


@pytest.mark.parametrize("forward", FORWARD)
def test_what_is_computed_again_draws_the_same_numbers(forward):
    graph = assert_equal(entry(forward), order=3)
    again = {op.arguments["redraws"] for op in graph.ops if "redraws" in (op.arguments or {})}
    assert again
    assert again <= {op.name for op in graph.ops}


NESTED = entry(one_in_the_other)


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_draw_them_again_wherever_they_are(size):
    executors.assert_equal(NESTED, random_plan(executors.captured(NESTED), size, seed=2))


def test_one_device_may_draw_in_another_order_than_the_step():
    graph = executors.captured(executors.branches)
    late, early = (op.name for op in graph.ops if "bernoulli" in op.kind)
    plan = random_plan(graph, 1)
    order = executors.reordered(graph, plan.order[0], late=late, early=early)
    executors.assert_equal(executors.branches, dataclasses.replace(plan, order=(order,)))


def other_numbers(model, x):
    state = torch.get_rng_state()
    noise = torch.randn(5, 6)
    torch.set_rng_state(state)
    return model(x + noise)


def seeding(model, x):
    torch.default_generator.manual_seed(7)
    return model(x)


def left_behind(model, x):
    with torch.random.fork_rng(devices=[]):
        return model(x)


@pytest.mark.parametrize("forward", [other_numbers, seeding, left_behind])
def test_numbers_that_nobody_can_tell_are_refused(forward):
    step, args = entry(forward)()
    with pytest.raises(
        UnsupportedError, match="(state of|not leave) (a|the) random generator"
    ) as caught:
        capture(step, *args)
    assert caught.value.code == "E801"


READS = {
    "sum": lambda: torch.get_rng_state().sum(),
    "number": lambda: int(torch.random.get_rng_state()[24]),
    "bytes": lambda: hash(torch.get_rng_state().clone().numpy().tobytes()) % 7,
    "list": lambda: torch.get_rng_state().tolist()[24],
}


@pytest.mark.parametrize("read", READS)
def test_a_state_is_no_data(read):
    step, args = entry(lambda model, x: model[::2](x) * READS[read]())()
    with pytest.raises(
        UnsupportedError, match=r"reads the state of .* \(.*test_rng_replays"
    ) as caught:
        capture(step, *args)
    assert caught.value.code == "E804"


def test_a_state_that_is_kept_is_none_either():
    kept = []

    def forward(model, x):
        kept.append(torch.get_rng_state())
        return model(x)

    step, args = entry(forward)()
    with pytest.raises(UnsupportedError, match=r"reads the state of .* \(.*test_rng_replays"):
        capture(step, *args)


class Reversible(torch.autograd.Function):
    """Keeps no result: the backward pass computes it again from the state that the block keeps."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block, ctx.x = block, x.detach()
        return block.drawn(ctx.x)

    @staticmethod
    def backward(ctx, *grads):
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            x = ctx.x.requires_grad_()
            torch.set_rng_state(ctx.block.state)
            ctx.block.layers(x).backward(grads[0])
        return x.grad, None


class Block(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.state = layers, None

    def drawn(self, x):
        self.state = torch.get_rng_state()
        with torch.no_grad():
            return self.layers(x)


def test_a_state_that_a_module_keeps_for_the_backward_pass():
    def make():
        model, optimizer, x, y = layers()
        blocks = nn.Sequential(Block(model[:2]), Block(model[2:4]))

        def step(blocks, head, optimizer, x, y):
            h = x.detach().requires_grad_()
            for block in blocks:
                h = Reversible.apply(h, block)
            return models.train(head, optimizer, F.cross_entropy(head(h), y))

        return step, (blocks, model[4], optimizer, x, y)

    assert_as_eager(make, sizes=(1, 2), is_followed=True)


def test_traces_begin_in_other_states():
    def forward(model, x):
        return model[::2](x) * torch.default_generator.get_state().sum()

    step, args = entry(forward)()
    with pytest.raises(UnsupportedError, match="not the same twice"):
        capture(step, *args)


def copied(model, x):
    state = torch.get_rng_state().clone()
    assert len(state) == state.numel() == 5056
    once = model[1](model[0](x))
    torch.set_rng_state(state)
    return model[2:](once + model[1](model[0](x)))


def test_a_copy_of_a_state_may_be_set():
    assert_equal(entry(copied))


@pytest.mark.parametrize("seed", [torch.seed, lambda: torch.manual_seed(4)])
def test_a_step_that_seeds_and_draws_nothing_is_refused(seed):
    step, args = entry(lambda model, x: model[::2](x + 0 * bool(seed())))()
    with pytest.raises(UnsupportedError, match="not leave the random generator where") as caught:
        capture(step, *args)
    assert caught.value.code == "E801"


def test_a_file_that_replays_what_nothing_draws_is_refused():
    ops = {op.name: op for op in executors.captured(NESTED).ops}
    op = next(op for op in ops.values() if "redraws" in (op.arguments or {}))
    assert drawn_once(op, ops) == op.arguments["redraws"]
    ops[op.name] = dataclasses.replace(op, arguments=op.arguments | {"redraws": "nothing"})
    with pytest.raises(FileError, match="draws the numbers of 'nothing'"):
        drawn_once(op, ops)
