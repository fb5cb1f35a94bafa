"""Idioms of Python numbers: counters, rates of their own, prints, and checks that raise."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from bench.sweep.steps import Entry, Factory, adam, small


def checked() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if torch.isnan(loss):
            raise ValueError("the loss is not a number")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        assert model[0].weight.isfinite().all(), "the weights are not finite"
        return loss

    return step, (model, adam(model), x, y)


def counted_rate() -> Entry:
    model, x, y = small()
    trainer = SimpleNamespace(calls=0)

    def step(model, optimizer, x, y):
        trainer.calls += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * trainer.calls / 100))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {trainer.calls}: loss {loss.item():.4f}")
        return loss

    return step, (model, adam(model), x, y)


def _collecting(tell) -> Entry:
    """Return a step that calls `tell(loss)` after its update."""
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        tell(loss)
        return loss

    return step, (model, adam(model), x, y)


def update_if_finite() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if not (torch.isnan(loss) or torch.isinf(loss)):
            optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def update_if_small() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm < 0.5:
            optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def returned_if_not_finite() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if not math.isfinite(loss.item()):
            return loss
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def loss_list() -> Entry:
    losses = []
    return _collecting(lambda loss: losses.append(loss.item()))


def history_of_lists() -> Entry:
    history = {"loss": [], "log": []}

    def tell(loss):
        history["loss"].append(loss.detach())
        history["log"].append(f"loss {loss.item():.3f}")

    return _collecting(tell)


def history_by_name() -> Entry:
    history, recent = defaultdict(list), deque(maxlen=2)

    def tell(loss):
        history["loss"].append(loss.item())
        recent.append(loss.item())

    return _collecting(tell)


def average_meter() -> Entry:
    meter = SimpleNamespace(sum=0.0, count=0, avg=0.0)

    def tell(loss):
        meter.sum += loss.item() * 4
        meter.count += 4
        meter.avg = meter.sum / meter.count

    return _collecting(tell)


def early_stopping() -> Entry:
    trainer = SimpleNamespace(best=math.inf, waited=0)

    def tell(loss):
        if loss.item() < trainer.best:
            trainer.best = loss.item()
            trainer.waited = 0
        else:
            trainer.waited += 1
        return trainer.waited > 3

    return _collecting(tell)


def best_tensor() -> Entry:
    trainer = SimpleNamespace(best=torch.tensor(math.inf))

    def tell(loss):
        if loss < trainer.best:
            trainer.best = loss.detach()

    return _collecting(tell)


def clipped_by_name() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient.norm() > 0.1:
                gradient = gradient / gradient.norm() * 0.1
            parameter.grad = gradient
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def logged_at_times() -> Entry:
    trainer = SimpleNamespace(calls=0, log=[])

    def tell(loss):
        trainer.calls += 1
        if trainer.calls % 2 == 0:
            trainer.log.append((trainer.calls, loss.item()))

    return _collecting(tell)


def hooked_activations() -> Entry:
    model, x, y = small()
    held: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, given, result: held.append(result))

    def step(model, optimizer, x, y):
        held.clear()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + held[0].abs().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


CASES: dict[str, Factory] = {each.__name__: each for each in (
    checked, counted_rate, loss_list, history_of_lists, history_by_name, average_meter,
    update_if_finite, update_if_small, returned_if_not_finite, early_stopping, best_tensor,
    clipped_by_name, logged_at_times, hooked_activations,
)}  # fmt: skip
