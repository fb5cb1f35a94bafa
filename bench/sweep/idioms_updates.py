"""Idioms of the update: accumulation, clipping, mixed precision, averages, several optimizers."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from bench.sweep.steps import Entry, Factory, adam, classes, mlp, sgd, small


def accumulation() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        total = 0.0
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.mse_loss(model(part), target) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step, (model, adam(model), x, y)


def accumulation_by_index() -> Entry:
    model, x, y = small()
    x, y = torch.stack([x, x * 2]), torch.stack([y, y])

    def step(model, optimizer, x, y):
        optimizer.zero_grad(set_to_none=False)
        losses = []
        for i in range(len(x)):
            losses.append(F.mse_loss(model(x[i]), y[i]))
            losses[-1].backward()
        optimizer.step()
        return torch.stack(losses).mean()

    return step, (model, sgd(model, momentum=0.9), x, y)


def zero_grad_after() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss

    return step, (model, adam(model), x, y)


def never_zeroed() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, sgd(model), x, y)


def _clipped(clip) -> Factory:
    def factory() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            clip(model)
            optimizer.step()
            return loss

        return step, (model, adam(model), x, y)

    return factory


def _by_hand(model):
    total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    for parameter in model.parameters():
        parameter.grad.mul_(torch.clamp(1.0 / (total + 1e-6), max=1.0))


def _noisy(model):
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


def _centred(model):
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.dim() > 1:
            parameter.grad = parameter.grad - parameter.grad.mean(1, keepdim=True)


def returned_norm() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss, "norm": norm}

    return step, (model, adam(model), x, y)


def skipped_when_not_finite() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def autocast() -> Entry:
    model, x, y = classes()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def _scaler(enabled: bool) -> Factory:
    def factory() -> Entry:
        model, x, y = classes()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)

        def step(model, optimizer, x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step, (model, adam(model), x, y)

    return factory


def bfloat16_model() -> Entry:
    model, x, y = classes()
    model = model.bfloat16()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def master_weights() -> Entry:
    model, x, y = classes()
    master = copy.deepcopy(model)
    model = model.bfloat16()

    def step(model, master, optimizer, x, y):
        model.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward()
        for slow, fast in zip(master.parameters(), model.parameters(), strict=True):
            slow.grad = fast.grad.float()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(master.parameters(), model.parameters(), strict=True):
                fast.copy_(slow)
        return loss

    return step, (model, master, adam(master), x, y)


def moving_average() -> Entry:
    model, x, y = small()
    average = copy.deepcopy(model).requires_grad_(False)

    def step(model, average, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return loss

    return step, (model, average, adam(model), x, y)


def averaged_model() -> Entry:
    model, x, y = small()
    average = torch.optim.swa_utils.AveragedModel(model)

    def step(model, average, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss

    return step, (model, average, adam(model), x, y)


def gan() -> Entry:
    torch.manual_seed(0)
    generator, critic = mlp(4, 16, 16), mlp(16, 16, 1)

    def step(generator, critic, g_optimizer, c_optimizer, real):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 4))
        c_optimizer.zero_grad()
        c_loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        c_loss = c_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        c_loss.backward()
        c_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        g_loss.backward()
        g_optimizer.step()
        return c_loss.detach() + g_loss.detach()

    return step, (generator, critic, adam(generator), adam(critic), torch.randn(4, 16))


def gradient_penalty() -> Entry:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def step(critic, optimizer, real, fake):
        optimizer.zero_grad()
        mixed = (real * 0.5 + fake * 0.5).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
        return loss

    return step, (critic, adam(critic), torch.randn(4, 16), torch.randn(4, 16))


def sharpness_aware() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
            moved = [p.grad * (0.05 / norm) for p in model.parameters()]
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.add_(by)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.sub_(by)
        optimizer.step()
        return loss

    return step, (model, sgd(model), x, y)


def lookahead() -> Entry:
    model, x, y = small()
    slow = copy.deepcopy(model)

    def step(model, slow, optimizer, x, y):
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for anchor, fast in zip(slow.parameters(), model.parameters(), strict=True):
                anchor.lerp_(fast, 0.5)
                fast.copy_(anchor)
        return loss

    return step, (model, slow, adam(model), x, y)


def update_by_hand() -> Entry:
    model, x, y = small()

    def step(model, x, y):
        gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
            return F.mse_loss(model(x), y)

    return step, (model, x, y)


def two_optimizers_chained() -> Entry:
    model, x, y = small()
    first, last = sgd(model[0]), adam(model[2])

    def step(model, optimizers, x, y):
        for each in optimizers:
            each.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for each in optimizers:
            each.step()
        return loss

    return step, (model, [first, last], x, y)


def optimizer_in_backward() -> Entry:
    model, x, y = small()
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def apply(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)

    def step(model, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return step, (model, x, y)


CASES: dict[str, Factory] = {
    each.__name__: each
    for each in (
        accumulation, accumulation_by_index, zero_grad_after, never_zeroed, returned_norm,
        skipped_when_not_finite, autocast, bfloat16_model, master_weights, moving_average,
        averaged_model, gan, gradient_penalty, sharpness_aware, lookahead, update_by_hand,
        two_optimizers_chained, optimizer_in_backward,
    )
} | {
    "clip_norm": _clipped(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
    "clip_norm_foreach": _clipped(
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    ),
    "clip_norm_inf": _clipped(
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))
    ),
    "clip_value": _clipped(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    "clip_by_hand": _clipped(_by_hand),
    "gradient_noise": _clipped(_noisy),
    "gradient_centred": _clipped(_centred),
    "grad_scaler": _scaler(True),
    "grad_scaler_disabled": _scaler(False),
}  # fmt: skip
