"""Values that change between two calls of a step, each as a pattern of `between`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.sweep.steps import classes, loss_step, sgd, small

Change = Callable[[list[Any]], None]
Made = tuple[Callable[..., Any], list[Any], Change]

FACTOR = 1.0
TABLE = {"factor": 1.0}


class Switch:
    """A class attribute that a step reads."""

    factor = 1.0


def _weighed(weigh: Callable[..., Any], more: list[Any], change: Change) -> Made:
    """Return a step whose loss is `weigh(loss, *more)`."""
    model, x, y = small()

    def step(model: Any, optimizer: Any, x: Any, y: Any, *more: Any) -> Any:
        optimizer.zero_grad()
        loss = weigh(F.mse_loss(model(x), y), *more)
        loss.backward()
        optimizer.step()
        return loss

    return step, [model, sgd(model, momentum=0.9), x, y, *more], change


def _argument(weigh: Callable[..., Any], before: Any, after: Any) -> Callable[[], Made]:
    return lambda: _weighed(weigh, [before], lambda args: args.__setitem__(4, after))


def _net(layer: nn.Module | None, change: Callable[[nn.Module, Any], Any]) -> Callable[[], Made]:
    """Return a pattern that changes a net of two layers with `layer` between, or its optimizer."""

    def pattern() -> Made:
        torch.manual_seed(0)
        between = layer or nn.Tanh()
        net = nn.Sequential(nn.Linear(16, 8), between, nn.Linear(8, 8))
        args = [net, sgd(net, momentum=0.9), torch.randn(4, 16), torch.randn(4, 8)]
        return loss_step, args, lambda args: change(args[0], args[1])

    return pattern


def _criterion(criterion: nn.Module, change: Callable[[nn.Module], Any]) -> Callable[[], Made]:
    def pattern() -> Made:
        model, x, y = classes()

        def step(model: Any, criterion: Any, optimizer: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, [model, criterion, sgd(model), x, y], lambda args: change(args[1])

    return pattern


def _set(name: str, value: Any) -> Callable[..., Any]:
    return lambda net, optimizer: setattr(net[1], name, value)


def _group(name: str, value: Any) -> Callable[..., Any]:
    return lambda net, optimizer: optimizer.param_groups[0].__setitem__(name, value)


def _global_number() -> Made:
    global FACTOR
    FACTOR = 1.0

    def change(args: list[Any]) -> None:
        global FACTOR
        FACTOR = 3.0

    return _weighed(lambda loss: loss * FACTOR, [], change)


def _global_dict() -> Made:
    return _weighed(lambda loss: loss * TABLE["factor"], [], lambda args: TABLE.update(factor=3.0))


def _class_attribute() -> Made:
    return _weighed(
        lambda loss: loss * Switch.factor, [], lambda args: setattr(Switch, "factor", 3.0)
    )


def _closure_cell() -> Made:
    factor = 1.0

    def change(args: list[Any]) -> None:
        nonlocal factor
        factor = 3.0

    return _weighed(lambda loss: loss * factor, [], change)


def _closure_list() -> Made:
    factors = [1.0]
    return _weighed(lambda loss: loss * factors[0], [], lambda args: factors.__setitem__(0, 3.0))


def _closure_tensor_written() -> Made:
    factor = torch.tensor(1.0)
    return _weighed(lambda loss: loss * factor, [], lambda args: factor.fill_(3.0))


def _closure_tensor_rebound() -> Made:
    factor = torch.tensor(1.0)

    def change(args: list[Any]) -> None:
        nonlocal factor
        factor = torch.tensor(3.0)

    return _weighed(lambda loss: loss * factor, [], change)


def _default_argument() -> Made:
    def weigh(loss: Any, factor: float = 1.0) -> Any:
        return loss * factor

    return _weighed(weigh, [], lambda args: setattr(weigh, "__defaults__", (3.0,)))


def _function_replaced() -> Made:
    holder = SimpleNamespace(weigh=lambda loss: loss)
    return _weighed(
        lambda loss: holder.weigh(loss), [], lambda args: setattr(holder, "weigh", torch.sqrt)
    )


def _config_object() -> Made:
    return _weighed(
        lambda loss, c: loss * c.factor,
        [SimpleNamespace(factor=1.0)],
        lambda args: setattr(args[4], "factor", 3.0),
    )


def _config_flag() -> Made:
    return _weighed(
        lambda loss, c: loss * 3 if c.flag else loss,
        [SimpleNamespace(flag=False)],
        lambda args: setattr(args[4], "flag", True),
    )


def _config_dict() -> Made:
    return _weighed(
        lambda loss, c: loss * c["factor"], [{"factor": 1.0}],
        lambda args: args[4].update(factor=3.0),
    )  # fmt: skip


def _config_of_model() -> Made:
    model, x, y = small()
    model.config = SimpleNamespace(factor=1.0)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * model.config.factor
        loss.backward()
        optimizer.step()
        return loss

    return step, [model, sgd(model), x, y], lambda args: setattr(args[0].config, "factor", 3.0)


def _batch_written() -> Made:
    model, x, y = small()
    return loss_step, [model, sgd(model), x, y], lambda args: args[2].mul_(2)


def _batch_replaced() -> Made:
    model, x, y = small()
    return loss_step, [model, sgd(model), x, y], lambda args: args.__setitem__(2, args[2] * 2)


def _batch_dict_entry() -> Made:
    model, x, y = small()

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        return loss_step(model, optimizer, batch["x"], batch["y"])

    def change(args: list[Any]) -> None:
        args[2]["x"] = args[2]["x"] * 2

    return step, [model, sgd(model), {"x": x, "y": y}], change


def _batch_rebound_container() -> Made:
    model, x, y = small()

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        return loss_step(model, optimizer, batch[0], batch[1])

    return (
        step, [model, sgd(model), [x, y]],
        lambda args: args.__setitem__(2, [args[2][0] * 2, args[2][1]]),
    )  # fmt: skip


def _batch_aliased() -> Made:
    model, x, _ = small()
    head = nn.Sequential(*model, nn.Linear(8, 16))
    return loss_step, [head, sgd(head), x, x], lambda args: args.__setitem__(3, args[3] * 2)


def _held_container_rebound() -> Made:
    holder = SimpleNamespace(weights=[1.0, 2.0])
    return _weighed(
        lambda loss, h: loss * sum(h.weights), [holder],
        lambda args: setattr(args[4], "weights", [5.0]),
    )  # fmt: skip


def _leftover_gradient() -> Made:
    model, x, y = small()

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def change(args: list[Any]) -> None:
        for parameter in args[0].parameters():
            parameter.grad = torch.ones_like(parameter)

    return step, [model, sgd(model), x, y], change


def _leftover_gradient_zeroed() -> Made:
    model, x, y = small()

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, [model, sgd(model), x, y], lambda args: args[0].zero_grad()


def _added_group() -> Made:
    model, x, y = small()
    optimizer = sgd(model[0])

    def change(args: list[Any]) -> None:
        args[1].add_param_group({"params": list(args[0][2].parameters())})

    return loss_step, [model, optimizer, x, y], change


def _scheduler_between() -> Made:
    model, x, y = small()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    return loss_step, [model, optimizer, x, y], lambda args: scheduler.step()


def _layer_replaced(net: Any, optimizer: Any) -> None:
    net[1] = nn.ReLU()


def _written_weight(net: Any, optimizer: Any) -> None:
    with torch.no_grad():
        net[0].weight.mul_(2)


def _hook_added(net: Any, optimizer: Any) -> None:
    net[0].register_forward_hook(lambda module, args, out: out * 3)


def _loaded(net: Any, optimizer: Any) -> None:
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})


def _state_cleared(net: Any, optimizer: Any) -> None:
    optimizer.state.clear()


class Scaled(nn.Module):
    """Holds a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return x * self.factor


def _forward_replaced(net: Any, optimizer: Any) -> None:
    net[0].forward = lambda x: F.linear(x, net[0].weight * 3, net[0].bias)


def _optimizer_hook_added(net: Any, optimizer: Any) -> None:
    def triple(*_: Any) -> None:
        net[0].weight.grad.mul_(3)

    optimizer.register_step_pre_hook(triple)


def _state_loaded(net: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})


PATTERNS: dict[str, Callable[[], Made]] = {
    "int argument": _argument(lambda loss, n: loss * n, 1, 3),
    "float argument": _argument(lambda loss, w: loss * w, 1.0, 3.0),
    "bool argument": _argument(lambda loss, flag: loss * 3 if flag else loss, False, True),
    "str argument": _argument(lambda loss, s: loss * 3 if s == "three" else loss, "one", "three"),
    "None argument": _argument(lambda loss, w: loss if w is None else loss * w, None, 3.0),
    "tuple argument": _argument(lambda loss, pair: loss * pair[0], (1.0, 2), (3.0, 2)),
    "scalar tensor": _argument(lambda loss, w: loss * w, torch.tensor(1.0), torch.tensor(3.0)),
    "dropout.p": _net(nn.Dropout(0.2), _set("p", 0.7)),
    "bn.momentum": _net(nn.BatchNorm1d(8), _set("momentum", 0.7)),
    "bn.eps": _net(nn.BatchNorm1d(8), _set("eps", 0.1)),
    "leaky_relu.negative_slope": _net(nn.LeakyReLU(0.1), _set("negative_slope", 0.7)),
    "layer_norm.eps": _net(nn.LayerNorm(8), _set("eps", 0.5)),
    "criterion.label_smoothing": _criterion(
        nn.CrossEntropyLoss(label_smoothing=0.0), lambda c: setattr(c, "label_smoothing", 0.3)
    ),
    "criterion.reduction": _criterion(
        nn.CrossEntropyLoss(), lambda c: setattr(c, "reduction", "sum")
    ),
    "criterion.weight": _criterion(
        nn.CrossEntropyLoss(weight=torch.ones(8)), lambda c: c.weight.copy_(torch.arange(8.0) + 1)
    ),
    ".eval() of dropout": _net(nn.Dropout(0.5), lambda net, optimizer: net.eval()),
    ".eval() of batch norm": _net(nn.BatchNorm1d(8), lambda net, optimizer: net.eval()),
    "layer replaced": _net(None, _layer_replaced),
    "weight written": _net(None, _written_weight),
    "load_state_dict": _net(None, _loaded),
    "hook added": _net(None, _hook_added),
    "parameter hook added": _net(
        None, lambda net, optimizer: net[0].weight.register_hook(lambda gradient: gradient * 3)
    ),
    "optimizer hook added": _net(None, _optimizer_hook_added),
    "forward replaced": _net(None, _forward_replaced),
    "parameter rebound": _net(
        None, lambda net, optimizer: setattr(net[0], "bias", nn.Parameter(torch.ones(8)))
    ),
    "module tensor rebound": _net(Scaled(), _set("factor", torch.tensor(3.0))),
    "optimizer.load_state_dict": _net(None, _state_loaded),
    "requires_grad_(False)": _net(None, lambda net, optimizer: net[0].requires_grad_(False)),
    "lr": _net(None, _group("lr", 0.5)),
    "weight_decay from zero": _net(None, _group("weight_decay", 0.5)),
    "momentum": _net(None, _group("momentum", 0.1)),
    "nesterov": _net(None, _group("nesterov", True)),
    "optimizer.state.clear()": _net(None, _state_cleared),
    "scheduler.step()": _scheduler_between,
    "add_param_group": _added_group,
    "leftover .grad": _leftover_gradient,
    "kept .grad zeroed": _leftover_gradient_zeroed,
    "config object": _config_object,
    "flag of a config object": _config_flag,
    "config dict": _config_dict,
    "model.config": _config_of_model,
    "held container rebound": _held_container_rebound,
    "closure cell": _closure_cell,
    "closure list": _closure_list,
    "closure tensor written": _closure_tensor_written,
    "closure tensor rebound": _closure_tensor_rebound,
    "class attribute": _class_attribute,
    "global number": _global_number,
    "global dict": _global_dict,
    "default argument": _default_argument,
    "function replaced": _function_replaced,
    "batch written in place": _batch_written,
    "batch replaced": _batch_replaced,
    "batch dict entry": _batch_dict_entry,
    "batch container rebound": _batch_rebound_container,
    "batch of one tensor twice": _batch_aliased,
}
