"""Training with checkpoints, for tests: ranks that save, load and go on; one device beside them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pardnn
from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.backends.torch.user_step.sources import batch_indices
from pardnn.plan.plan import Plan
from pardnn.plan.state_layout import state_layout
from tests.backends.torch import models
from tests.backends.torch.executors import batches, bits, captured, loss_of
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import Outcome, connect, run_ranks

Factory = Callable[[], models.Entry]
Body = Callable[["Rank"], Any]


def in_double(factory: Factory) -> models.Entry:
    step, args = factory()
    for arg in args:
        if isinstance(arg, nn.Module):
            arg.double()
    floats = (torch.float32,)
    return step, tuple(
        a.double() if isinstance(a, torch.Tensor) and a.dtype in floats else a for a in args
    )


class Order(torch.utils.data.Sampler[int]):
    """The numbers of four batches in a new order each epoch; the position in them is its state."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(4, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for i in order[self.position :]:
            self.position += 1
            yield i
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}


def batch_numbers(order: Order) -> Iterator[int]:
    """Yield the numbers of batches without end.

    A `DataLoader` draws a seed at the start of each epoch, also of one that is gone on with: from a
    generator of its own, or the step's numbers would be others.
    """
    own = torch.Generator()
    while True:
        yield from torch.utils.data.DataLoader(
            range(4),  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=order,
            generator=own,
        )


@functools.cache
def plan_of(factory: Factory, size: int, algorithm: str = "placed", seed: int = 0) -> Plan:
    graph = captured(factory)
    if algorithm == "placed":
        return random_plan(graph, size, seed=seed)
    objective = "bytes" if algorithm == "tofu" else "seconds"  # else it leaves small tensors whole
    cluster = pardnn.Cluster.uniform(size)
    plan = pardnn.plan(graph, cluster, algorithm, objective, costs="v100")
    shards = [shard for found in state_layout(graph, plan).values() for shard in found]
    assert any(shard.box is not None for shard in shards), "nothing is cut: the test shows nothing"
    return plan


class Rank:
    """One rank of a run, with a learning rate schedule for each optimizer and an order of batches.

    `other` starts from other weights, moments and numbers than the factory's: all must be loaded.
    """

    def __init__(
        self,
        factory: Factory,
        plan: Plan,
        rank: int,
        *,
        other: bool = False,
        timeout: float = 40,
        **kwargs: Any,
    ) -> None:
        self.rank = rank
        self.user_step, self.args = factory()
        self.indices = batch_indices(self.args)
        optimizers = [a for a in self.args if isinstance(a, torch.optim.Optimizer)]
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]
        self.order = Order()
        torch.manual_seed(99)
        if other:
            torch.manual_seed(7)
            for module in (a for a in self.args if isinstance(a, nn.Module)):
                for tensor in module.state_dict().values():
                    tensor.copy_(torch.rand(tensor.shape) * 3)
        self.fast: Parallel = parallelize(
            self.user_step, *self.args, plan=plan, timeout=timeout, device="cpu", **kwargs
        )

    def step(self, i: int) -> str:
        loss = bits(loss_of(self.fast(*batches(self.args, self.indices, i))))
        for schedule in self.schedules:
            schedule.step()
        return loss

    def extra(self) -> dict[str, Any]:
        schedules = [schedule.state_dict() for schedule in self.schedules]
        return {"schedules": schedules, "order": self.order.state_dict()}

    def load(self, path: Path, **kwargs: Any) -> Any:
        extra = self.fast.load(path, **kwargs)
        for schedule, state in zip(self.schedules, extra["schedules"], strict=True):
            schedule.load_state_dict(state)
        self.order.__dict__.update(extra["order"])
        return extra

    def train(self, steps: int) -> list[str]:
        """Train on the next batches of the order; return the losses."""
        return [self.step(i) for i in itertools.islice(batch_numbers(self.order), steps)]


def on_ranks(
    factory: Factory, plan: Plan, body: Body, *, limit_s: float = 240.0, **kwargs: Any
) -> list[Outcome]:
    """Run `body` on forked ranks, each with its `Rank`."""
    size = plan.num_devices

    def run(rank: int, store: str) -> Any:
        connect(rank, size, store, 40).close()
        one = Rank(factory, plan, rank, **kwargs)
        try:
            return body(one)
        finally:
            one.fast.close()

    return run_ranks(size, run, limit_s=limit_s)


def values(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.status for outcome in outcomes] == [0] * len(outcomes), [
        outcome.error for outcome in outcomes if outcome.error
    ]
    return [outcome.value for outcome in outcomes]


@functools.cache
def uninterrupted(factory: Factory, steps: int) -> list[str]:
    """Bits of the losses and of the last random state on one device."""

    def run(_rank: int, _store: str) -> Any:
        step, args = factory()
        optimizers = [a for a in args if isinstance(a, torch.optim.Optimizer)]
        schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]
        torch.manual_seed(99)
        indices = batch_indices(args)
        losses = []
        for i in itertools.islice(batch_numbers(Order()), steps):
            given = dict(zip(indices, batches(args, indices, i), strict=True))
            losses.append(bits(loss_of(step(*(given.get(k, a) for k, a in enumerate(args))))))
            for schedule in schedules:
                schedule.step()
        return [*losses, bits(torch.get_rng_state())]

    (value,) = values(run_ranks(1, run, limit_s=240))
    return value


def saved_at(factory: Factory, plan: Plan, path: Path, step: int = 3) -> list[Any]:
    """Train `step` steps on the ranks of a plan and save; return the losses of each rank."""

    def body(one: Rank) -> list[str]:
        losses = one.train(step)
        one.fast.save(path, extra=one.extra())
        return losses

    return values(on_ranks(factory, plan, body))


def resumed(factory: Factory, plan: Plan, path: Path, steps: tuple[int, int]) -> list[Any]:
    """Load on the ranks of another plan and train on; return losses and random state of each."""

    def body(one: Rank) -> list[str]:
        one.load(path)
        assert one.fast.steps == steps[0]
        return [*one.train(steps[1] - steps[0]), bits(torch.get_rng_state())]

    return values(on_ranks(factory, plan, body, other=True))
