"""Steps on real ranks beside the same steps run eagerly, with Python's state after each."""

from __future__ import annotations

import contextlib
import enum
import io
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pardnn.backends.torch.parallelize import Parallel, parallelize
from pardnn.backends.torch.user_step.slots import items_of
from pardnn.graph.ir import Graph
from pardnn.plan.file import stamped
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan
from pardnn.shard.search.tofu import search
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import connect, run_ranks

Entry = tuple[Callable[..., Any], tuple[Any, ...]]
Given = Callable[[int], dict[int, Any]]
State = Callable[[tuple[Any, ...]], Any]


def small() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.randn(4, 5), torch.randn(4, 3)


def telling(tell: Any, *more: Any) -> Entry:
    """Return a step that calls `tell(loss, model, *more)` before the update."""
    model, x, y = small()

    def step(model, optimizer, x, y, *more):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        tell(loss, model, *more)
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.3), x, y, *more)


def cut_plan(graph: Graph, size: int) -> Plan:
    """Return a plan that cuts every op over the ranks."""
    found = legalize(graph, search(graph, make_mesh((size,))))
    return stamped(spmd_partition(graph, found), graph)


def _nothing(_given: Any) -> Any:
    return {}


def _steps(call: Callable[..., Any], factory: Entry, num_steps: int, given: Given, state: State):
    """Call a step with each step's arguments; return losses, Python's state and what it printed."""
    _, args = factory
    found = []
    for i in range(num_steps):
        now = dict(enumerate(args)) | given(i)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                result = call(now)
            except ValueError as error:
                found.append(["raised", str(error)])
                break
        loss = result[0] if isinstance(result, tuple) else result
        found.append([loss.item().hex(), repr(state(args)), printed.getvalue()])
    return found


def eager(
    make: Callable[[], Entry], given: Given = _nothing, state: State = _nothing, steps: int = 5
) -> list[Any]:
    """Return what the user's own step gives."""
    made = make()
    return _steps(lambda now: made[0](*now.values()), made, steps, given, state)


def on_ranks(
    make: Callable[[], Entry],
    size: int,
    given: Given = _nothing,
    state: State = _nothing,
    steps: int = 5,
    plan_of: Callable[[Graph, int], Plan] = random_plan,
    is_followed: bool = False,
) -> list[Any]:
    """Return what each rank gives, or the error that it ended with.

    `is_followed`: whether what changes between calls is captured and planned anew.
    """

    def body(rank: int, store: str) -> Any:
        if size > 1:
            connect(rank, size, store, 10.0)
        step, args = make()
        # Rank 0 plans what it captures: a plan made here would take a capture more.
        fast: Parallel = parallelize(
            step, *args, decide=lambda graph, size, _: plan_of(graph, size), device="cpu",
            timeout=10,
        )  # fmt: skip
        if not is_followed:
            fast._variants._make._decide = None  # type: ignore[attr-defined]
        indices = fast._binding._batch  # the arguments that are passed at each step
        found = _steps(
            lambda now: fast(*(now[k] for k in indices)), (step, args), steps, given, state
        )
        fast.close()
        return found

    outcomes = run_ranks(size, body)
    return [
        o.value if o.status == 0 else f"{o.error.get('code')} {o.error['message']}"
        for o in outcomes
    ]


def left_by(call: Callable[[int], Any], held: Any, steps: int) -> list[Any]:
    """Call a step some times; return its losses, and what Python's objects hold after each."""
    found = []
    for i in range(steps):
        result = call(i)
        loss = result[0] if isinstance(result, tuple) else result
        found.append([loss.item().hex(), seen(held() if callable(held) else held)])
    return found


def seen(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Return what a value holds, tensors by their numbers; two results are compared with `==`."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), repr(value.detach().tolist())
    if isinstance(value, torch.optim.Optimizer):
        held = value.state_dict()
        return seen([sorted(held["state"].items()), held["param_groups"]], around)
    if isinstance(value, str | int | float | enum.Enum | type | None) or id(value) in around:
        return repr(value)
    around = (*around, id(value))
    if isinstance(value, dict):
        return type(value).__name__, [(repr(k), seen(x, around)) for k, x in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, [seen(each, around) for each in value]
    if isinstance(value, nn.Module):
        own = {k: x for k, x in vars(value).items() if not k.startswith("_")}
        modules = dict(value.named_children())
        return seen({**own, **value.state_dict(), **modules}, around)
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    if callable(value):
        return repr(type(value))
    return type(value).__name__, seen(dict(items_of(value)), around)


def weighed(weigh: Callable[[Any], Any], held: Any = None) -> Any:
    """Return a step whose loss is `weigh` of a plain one, its arguments, and what it may change."""
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = weigh(F.mse_loss(model(x), y))
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y), [model, held]


def assert_leaves_as_eager(
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], Any]],
    steps: int = 3,
    given: Given = _nothing,
    between: Callable[[int, tuple[Any, ...]], Any] = lambda _i, _args: None,
) -> int:
    """Compare steps of one rank, in this process, with eager ones: losses, and all that they leave.

    Args:
        make: Returns a step, its arguments, and what holds all that it may change: objects, or a
            function that returns them.
        steps: Number of calls.
        given: Other arguments at some call, by index.
        between: Called before each call, with its number and all arguments of `make`.

    Returns:
        How often the step was captured.
    """

    def calls(call: Callable[..., Any], args: tuple[Any, ...], batch: Sequence[int]) -> Any:
        def one(i: int) -> Any:
            between(i, args)
            now = dict(enumerate(args)) | given(i)
            return call(*(now[k] for k in batch))

        return one

    step, args, held = make()
    expected = left_by(calls(step, args, range(len(args))), held, steps)
    step, args, held = make()
    fast: Parallel = parallelize(
        step, *args, device="cpu", decide=lambda graph, size, _: random_plan(graph, size)
    )
    found = left_by(calls(fast, args, fast._binding._batch), held, steps)
    fast.close()
    assert found == expected
    return fast.captures


def assert_as_eager(
    make: Callable[[], Entry],
    given: Given = _nothing,
    state: State = _nothing,
    steps: int = 5,
    sizes: tuple[int, ...] = (2,),
    is_followed: bool = False,
) -> None:
    expected = eager(make, given, state, steps)
    for size in sizes:
        for found in on_ranks(make, size, given, state, steps, is_followed=is_followed):
            assert found == expected
