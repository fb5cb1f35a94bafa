"""Idioms of values: dicts, configs, flags, globals, writes into the batch and the weights."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from bench.sweep.steps import Entry, Factory, adam, classes, mlp, sgd, small

SCALE = 0.5
WEIGHTS = {"data": 1.0, "norm": 0.01}
Pair = namedtuple("Pair", "x y")


@dataclass
class Config:
    """Settings of a step."""

    scale: float = 0.5
    smoothing: float = 0.1
    use_norm: bool = True


def _with(extra, *more) -> Entry:
    """Return a step whose loss `extra(loss, model, *more)` changes."""
    model, x, y = small()

    def step(model, optimizer, x, y, *more):
        optimizer.zero_grad()
        loss = extra(F.mse_loss(model(x), y), model, *more)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y, *more)


def _norm(model):
    return sum(p.square().sum() for p in model.parameters())


def config_dataclass() -> Entry:
    return _with(
        lambda loss, model, c: loss * c.scale + (_norm(model) * 0.01 if c.use_norm else 0), Config()
    )


def config_dict() -> Entry:
    return _with(lambda loss, model, c: loss * c["scale"], {"scale": 0.5, "name": "run"})


def config_namespace() -> Entry:
    return _with(lambda loss, model, c: loss * c.scale, SimpleNamespace(scale=0.5))


def flag_argument() -> Entry:
    return _with(lambda loss, model, flag: loss + _norm(model) * 0.01 if flag else loss, True)


def string_argument() -> Entry:
    return _with(lambda loss, model, kind: loss.sqrt() if kind == "root" else loss, "root")


def int_argument() -> Entry:
    return _with(lambda loss, model, count: loss * count, 3)


def float_argument() -> Entry:
    return _with(lambda loss, model, weight: loss * weight, 0.3)


def none_argument() -> Entry:
    return _with(lambda loss, model, other: loss if other is None else loss * other, None)


def scalar_tensor_argument() -> Entry:
    return _with(lambda loss, model, weight: loss * weight, torch.tensor(0.3))


def global_number() -> Entry:
    return _with(lambda loss, model: loss * SCALE)


def global_dict() -> Entry:
    return _with(lambda loss, model: loss * WEIGHTS["data"] + _norm(model) * WEIGHTS["norm"])


def closure_number() -> Entry:
    weight = 0.25
    return _with(lambda loss, model: loss * weight)


def closure_model() -> Entry:
    model, x, y = small()
    optimizer = adam(model)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (x, y)


def closure_tensor() -> Entry:
    offset = torch.linspace(0, 1, 8)
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x) + offset, y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


class Trainer:
    """Holds everything, as trainers do."""

    def __init__(self) -> None:
        self.model, self.x, self.y = small()
        self.optimizer, self.weight = adam(self.model), 0.5

    def step(self, x, y):
        """Train once."""
        self.optimizer.zero_grad()
        loss = self.weight * F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def trainer_method() -> Entry:
    trainer = Trainer()
    return trainer.step, (trainer.x, trainer.y)


def trainer_counts() -> Entry:
    trainer = Trainer()
    trainer.calls = 0

    def step(trainer, x, y):
        trainer.calls += 1
        return trainer.step(x, y)

    return step, (trainer, trainer.x, trainer.y)


def partial_step() -> Entry:
    model, x, y = small()

    def step(weight, model, optimizer, x, y):
        optimizer.zero_grad()
        loss = weight * F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return partial(step, 0.5), (model, adam(model), x, y)


def dict_batch() -> Entry:
    model, x, y = classes()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        return {"loss": loss, "accuracy": (model(batch["x"]).argmax(-1) == batch["y"]).sum()}

    return step, (model, adam(model), {"x": x, "y": y})


def named_tuple_batch() -> Entry:
    model, x, y = small()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        return loss, batch.x.shape[0]

    return step, (model, adam(model), Pair(x, y))


def list_of_batches() -> Entry:
    model, x, y = small()

    def step(model, optimizer, batches):
        optimizer.zero_grad()
        loss = torch.stack([F.mse_loss(model(x), y) for x, y in batches]).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), [(x, y), (x * 2, y)])


def _written(write) -> Factory:
    def factory() -> Entry:
        model, x, y = small()

        def step(model, optimizer, x, y):
            write(x)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, adam(model), x, y)

    return factory


def numpy_of_loss() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss, float(loss.detach().numpy())

    return step, (model, adam(model), x, y)


def item_of_loss() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss, loss.item() * 2

    return step, (model, adam(model), x, y)


def printed_loss() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        print(f"loss {loss.item():.3f}")
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def mixup() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        order, weight = torch.randperm(len(x)), torch.rand(())
        optimizer.zero_grad()
        mixed = weight * x + (1 - weight) * x[order]
        loss = F.mse_loss(model(mixed), weight * y + (1 - weight) * y[order])
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, sgd(model), x, y)


def evaluated_in_between() -> Entry:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))

    def step(model, optimizer, x, y):
        model.eval()
        with torch.no_grad():
            target = model(x)
        model.train()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), 0.5 * (y + target))
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), torch.randn(4, 16), torch.randn(4, 8))


def python_randomness() -> Entry:
    import random

    random.seed(0)
    return _with(lambda loss, model: loss * random.random())


def local_generator() -> Entry:
    generator = torch.Generator().manual_seed(0)
    return _with(lambda loss, model: loss * torch.rand((), generator=generator))


def complex_numbers() -> Entry:
    model, x, y = mlp(), torch.randn(4, 16), torch.randn(4, 8)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = (torch.fft.rfft(model(x)) - torch.fft.rfft(y)).abs().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def update_of_data() -> Entry:
    model, x, y = small()

    def step(model, x, y):
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad.data, alpha=-0.05)
        return loss

    return step, (model, x, y)


def max_norm_constraint() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
        return loss

    return step, (model, adam(model), x, y)


CASES: dict[str, Factory] = {
    each.__name__: each
    for each in (
        config_dataclass, config_dict, config_namespace, flag_argument, string_argument,
        int_argument, float_argument, none_argument, scalar_tensor_argument, global_number,
        global_dict, closure_number, closure_model, closure_tensor, trainer_method, trainer_counts,
        partial_step, dict_batch, named_tuple_batch, list_of_batches, numpy_of_loss, item_of_loss,
        printed_loss, mixup, evaluated_in_between, python_randomness, local_generator,
        complex_numbers, update_of_data, max_norm_constraint,
    )
} | {
    "batch_divided": _written(lambda x: x.div_(2)),
    "batch_row_cleared": _written(lambda x: x[0].zero_()),
    "batch_clipped": _written(lambda x: torch.clamp_(x, -1, 1)),
}  # fmt: skip
