"""Every optimizer of `torch.optim` with its main options, and schedulers around the step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import lr_scheduler

from bench.sweep.steps import Entry, Factory, class_step, classes, loss_step, sgd, small
from testbed.counting_optimizers import OPTIMIZERS, Lookahead

#: Name of the optimizer, then options of each case by a word for them.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "SGD": {
        "plain": {},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "momentum": {"momentum": 0.9},
        "fused_momentum": {"momentum": 0.9, "fused": True},
        "dampening": {"momentum": 0.9, "dampening": 0.5},
        "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        "maximize": {"maximize": True},
    },
    "Adam": {
        "plain": {},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "amsgrad": {"amsgrad": True},
        "weight_decay": {"weight_decay": 0.01},
        "maximize": {"maximize": True},
        "tensor_lr": {"lr": torch.tensor(1e-3), "foreach": False},
    },
    "AdamW": {
        "plain": {},
        "foreach": {"foreach": True},
        "fused_amsgrad": {"fused": True, "amsgrad": True},
        "betas": {"betas": (0.8, 0.95), "eps": 1e-6},
    },
    "Adadelta": {"plain": {}, "foreach": {"foreach": True}, "weight_decay": {"weight_decay": 0.01}},
    "Adafactor": {"plain": {}, "foreach": {"foreach": True}},
    "Adagrad": {
        "plain": {},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "decay": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    },
    "Adamax": {"plain": {}, "foreach": {"foreach": True}, "weight_decay": {"weight_decay": 0.01}},
    "ASGD": {"plain": {}, "foreach": {"foreach": True}},
    "NAdam": {
        "plain": {},
        "foreach": {"foreach": True},
        "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.01},
    },
    "RAdam": {
        "plain": {},
        "foreach": {"foreach": True},
        "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.01},
    },
    "RMSprop": {
        "plain": {},
        "foreach": {"foreach": True},
        "centered": {"centered": True},
        "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    },
    "Rprop": {"plain": {}, "foreach": {"foreach": True}},
    "Muon": {"plain": {}, "weight_decay": {"weight_decay": 0.1, "nesterov": False}},
    "LBFGS": {"plain": {"max_iter": 4}},
    "SparseAdam": {"plain": {}},
}


def _optimizer(name: str, options: dict[str, Any]) -> Factory:
    def factory() -> Entry:
        model, x, y = small()
        make = getattr(torch.optim, name)
        if name == "SparseAdam":
            model = torch.nn.Sequential(torch.nn.Embedding(20, 8, sparse=True))
            x = torch.randint(20, (4,))
        parameters = list(model.parameters())
        if name == "Muon":  # for matrices only
            parameters = [each for each in parameters if each.dim() == 2]
        optimizer = make(parameters, **{"lr": 0.01} | options)
        return (_closure_step if name == "LBFGS" else loss_step), (model, optimizer, x, y)

    return factory


def _closure_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)


def _closure() -> Entry:
    model, x, y = small()
    return _closure_step, (model, sgd(model), x, y)


def _scheduler_inside(name: str, *options: Any, given: Any = lambda _loss: ()) -> Factory:
    def factory() -> Entry:
        model, x, y = classes()
        optimizer = sgd(model)
        scheduler = getattr(lr_scheduler, name)(optimizer, *options)

        def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = class_step(model, optimizer, x, y)
            scheduler.step(*given(loss))
            return loss

        return step, (model, optimizer, x, y)

    return factory


def _scheduler_beside() -> Entry:
    model, x, y = classes()
    optimizer = sgd(model)
    lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    return class_step, (model, optimizer, x, y)


def _groups() -> Entry:
    model, x, y = classes()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.1},
    ]
    return class_step, (model, torch.optim.AdamW(groups, lr=1e-3), x, y)


class Anchored(torch.optim.SGD):
    """Pulls weights back to the first ones, and keeps an average of them in double precision."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update, then pull back."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if "first" not in self.state[parameter]:
                    self.state[parameter]["first"] = parameter.clone()
                    self.state[parameter]["slow"] = parameter.detach().double()
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                parameter.lerp_(state["first"], 0.1)
                state["slow"].lerp_(parameter.double(), 0.5)


def _anchored() -> Entry:
    model, x, y = small()
    return loss_step, (model, Anchored(model.parameters(), lr=0.1), x, y)


def _counting(name: str, taken: int = 0) -> Factory:
    def factory() -> Entry:
        model, x, y = small()
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(taken):
            loss_step(model, optimizer, x, y)
        optimizer.zero_grad()
        return loss_step, (model, optimizer, x, y)

    return factory


def _lookahead() -> Entry:
    model, x, y = small()
    return loss_step, (model, Lookahead(OPTIMIZERS["adabelief"](model.parameters()), k=5), x, y)


CASES: dict[str, Factory] = {
    **{
        f"{name.lower()}_{word}": _optimizer(name, options)
        for name, cases in OPTIONS.items()
        for word, options in cases.items()
        if hasattr(torch.optim, name)
    },
    "anchored": _anchored,
    "sgd_closure": _closure,
    "scheduler_inside": _scheduler_inside("StepLR", 1, 0.5),
    "scheduler_by_loss": _scheduler_inside(
        "ReduceLROnPlateau", "min", 0.5, 0, 10.0, given=lambda loss: (loss.item(),)
    ),
    "scheduler_by_epoch": _scheduler_inside(
        "CosineAnnealingWarmRestarts", 4, given=lambda _loss: (1.5,)
    ),
    "adabelief": _counting("adabelief"),
    "yogi": _counting("yogi"),
    "lamb": _counting("lamb"),
    "rectified_adam": _counting("rectified_adam", taken=6),
    "lookahead": _lookahead,
    "scheduler_beside": _scheduler_beside,
    "param_groups": _groups,
}
