"""Ways of torch's own to write a step: optimizers in hooks, solvers, queues, transforms."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from tests.backends.torch import models, stepping
from tests.backends.torch.beside_eager import assert_equal
from tests.backends.torch.capture import test_capture_equal
from tests.backends.torch.capture.test_advice import entry
from tests.backends.torch.models import small
from tests.backends.torch.stepping import assert_leaves_as_eager
from tests.long_cases import long_but


def optimizer_in_backward() -> models.Entry:
    """As torch's tutorial has it: a gradient is used and dropped as soon as it is there."""
    _, (model, _, x, y) = small()
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step, (model, x, y)


def test_an_optimizer_per_parameter_in_the_backward_pass() -> None:
    graph = assert_equal(optimizer_in_backward)
    assert any(op.name == "optimizers.model.0.weight.state.model.0.weight.exp_avg"
               for op in graph.ops)  # fmt: skip
    settings = graph.ops[-1].arguments["settings"]
    assert settings["optimizers.model.0.weight.param_groups.0.amsgrad"] is False
    assert not any("<" in name for name in settings)


def chosen(m: Any, x: torch.Tensor) -> torch.Tensor:
    is_long = torch.tensor(x.shape[1]) > 3
    return torch.cond(is_long, lambda x: m(x).sin(), lambda x: -m(x), (x,)).square().mean()


def solved(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Runge and Kutta's fourth order on a fixed grid, interpolated as torchdiffeq does."""
    times, grid = torch.linspace(0, 1, 3), torch.linspace(0, 1, 5)
    assert (times[1:] > times[:-1]).all()
    solution, j, y = [x], 1, x

    def slope(t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(m(y)) * t

    for t0, t1 in itertools.pairwise(grid):
        dt = t1 - t0
        k1 = slope(t0, y)
        k2 = slope(t0 + dt / 3, y + dt * k1 / 3)
        k3 = slope(t0 + dt * 2 / 3, y + dt * (k2 - k1 / 3))
        k4 = slope(t1, y + dt * (k1 - k2 + k3))
        after = y + (k1 + 3 * (k2 + k3) + k4) * dt * 0.125
        while j < len(times) and t1 >= times[j]:
            part = after if t1 == times[j] else y + (times[j] - t0) / (t1 - t0) * (after - y)
            solution.append(part)
            j += 1
        y = after
    return torch.stack(solution).square().mean()


def euler(m: Any, x: torch.Tensor) -> torch.Tensor:
    t, dt = 0.0, 0.25
    while t < 1.0:
        x = x + dt * torch.tanh(m(x) + t)
        t += dt
    return x.square().mean()


def hessian(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.hessian(lambda z: m(z).sin().sum())(x[0]).square().mean()


def jacobians(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda z: m(z).sin()))(x).square().mean()


def of_parameters(m: Any, x: torch.Tensor) -> torch.Tensor:
    def loss_of(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(m, parameters, (x,)).square().mean()

    slopes = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))
    return sum(slope.square().mean() for slope in slopes(dict(m.named_parameters()), x).values())


ON_RANKS = (solved, hessian, of_parameters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "loss_of",
    [euler, of_parameters, *long_but((), [chosen, solved, hessian, jacobians])],
)
def test_solvers_and_transforms(loss_of: Any) -> None:
    compare = assert_equal if loss_of in ON_RANKS else test_capture_equal.assert_equal
    compare(functools.partial(entry, loss_of))


def by_hand(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for each in tensors:
            each -= 0.1 * each.grad
            each.grad = None


def by_data(tensors: list[torch.Tensor]) -> None:
    for each in tensors:
        each.data.sub_(0.1 * each.grad)
        each.grad.zero_()


@pytest.mark.parametrize("are_given", [False, True])
@pytest.mark.parametrize("update", [by_hand, by_data])
def test_plain_tensors_that_a_step_updates_by_hand(update: Any, are_given: bool) -> None:
    """As tutorials begin: no module, no optimizer, `requires_grad=True`."""

    def make() -> Any:
        torch.manual_seed(0)
        tensors = [torch.randn(5, 3, requires_grad=True), torch.zeros(3, requires_grad=True)]
        x, y = torch.randn(4, 5), torch.randn(4, 3)

        def step(x: torch.Tensor, y: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
            weight, bias = given if are_given else tensors
            loss = nn.functional.mse_loss(x @ weight + bias, y)
            loss.backward()
            update([weight, bias])
            return loss

        return step, (x, y, tensors if are_given else []), tensors

    assert_leaves_as_eager(make)


def test_a_module_is_moved_to_where_it_is() -> None:
    """As SwitchTransformers' routers are in `forward`, and models by careful steps."""

    def make() -> Any:
        model, x, y = stepping.small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            model[2] = model[2].to(x.dtype)
            loss = nn.functional.mse_loss(model.to(x.device)(x), y)
            loss.backward()
            model.float()
            optimizer.step()
            return loss

        return step, (model, optimizer, x, y), [model, optimizer]

    assert_leaves_as_eager(make)


def test_a_function_that_is_to_be_compiled_whole_runs_as_it_is_written() -> None:
    """Under a trace Dynamo compiles nothing, and would raise."""
    plain = stepping.weighed(lambda x: x.sin() * 2)
    whole = stepping.weighed(torch.compile(lambda x: x.sin() * 2, fullgraph=True, backend="eager"))
    graphs = [capture(made[0], *made[1]) for made in (plain, whole)]
    kinds = [[op.kind for op in graph.ops] for graph in graphs]
    assert kinds[0] == kinds[1]


def test_a_draw_that_is_given_no_generator() -> None:
    """`torch.randn(n, generator=None)` is an overload whose generator has no default."""

    def noisy(m: Any, x: torch.Tensor) -> Any:
        noise = torch.randn(x.shape, generator=None)
        return m(x + 0.1 * noise).square().mean()

    assert_equal(functools.partial(entry, noisy))
