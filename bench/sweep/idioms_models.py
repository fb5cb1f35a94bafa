"""Idioms of models: sharing, freezing, hooks, recomputation, recurrence, control flow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bench.sweep.steps import Entry, Factory, adam, class_step, classes, loss_step, mlp, sgd, small


class Tied(nn.Module):
    """An embedding that is the last layer's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of all words."""
        return self.head(self.embedding(x).mean(1))


def weight_tying() -> Entry:
    torch.manual_seed(0)
    model = Tied()
    return class_step, (model, adam(model), torch.randint(20, (4, 5)), torch.randint(20, (4,)))


def shared_layer() -> Entry:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(16, 8))
    return loss_step, (model, sgd(model), torch.randn(4, 16), torch.randn(4, 8))


class Checkpointed(nn.Module):
    """A net that computes its activations again."""

    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(dropout))
        self.head, self.reentrant = nn.Linear(32, 8), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head of the recomputed net."""
        x = x.requires_grad_() if self.reentrant and not x.requires_grad else x
        return self.head(checkpoint(self.net, x * 1.0, use_reentrant=self.reentrant))


def _checkpointed(reentrant: bool, dropout: float) -> Factory:
    def factory() -> Entry:
        _, x, y = small()
        model = Checkpointed(reentrant, dropout)
        return loss_step, (model, adam(model), x, y)

    return factory


def checkpoint_of_layers() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(checkpoint_sequential(model, 2, x, use_reentrant=False), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def frozen_layers() -> Entry:
    model, x, y = small()
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return loss_step, (model, torch.optim.Adam(trained, lr=1e-3), x, y)


def frozen_under_no_grad() -> Entry:
    _, x, y = small()
    body, head = mlp(16, 16, 16), nn.Linear(16, 8)

    def step(body, head, optimizer, x, y):
        with torch.no_grad():
            features = body(x)
        optimizer.zero_grad()
        loss = F.mse_loss(head(features), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (body, head, adam(head), x, y)


def low_rank_adapter() -> Entry:
    _, x, y = small()
    base = nn.Linear(16, 8).requires_grad_(False)
    adapter = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 8, bias=False))

    def step(base, adapter, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(base(x) + 2.0 * adapter(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (base, adapter, adam(adapter), x, y)


def distillation() -> Entry:
    model, x, y = classes()
    teacher = mlp().eval().requires_grad_(False)

    def step(student, teacher, optimizer, x, y):
        optimizer.zero_grad()
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2.0, -1)
        out = student(x)
        loss = F.cross_entropy(out, y)
        loss = loss + F.kl_div(F.log_softmax(out / 2.0, -1), soft, reduction="batchmean")
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, teacher, adam(model), x, y)


def forward_hook() -> Entry:
    model, x, y = small()
    model[0].register_forward_hook(lambda module, args, out: out * 0.5)
    return loss_step, (model, adam(model), x, y)


def hook_keeps_features() -> Entry:
    model, x, y = small()
    features = {}
    model[0].register_forward_hook(lambda module, args, out: features.update(first=out))

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 0.01 * features["first"].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def tensor_hook() -> Entry:
    model, x, y = small()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return loss_step, (model, sgd(model), x, y)


def backward_hook() -> Entry:
    model, x, y = small()
    model[2].register_full_backward_hook(lambda module, grads, outs: tuple(g * 2 for g in grads))
    return loss_step, (model, sgd(model), x, y)


class Straight(torch.autograd.Function):
    """Rounds; its gradient passes through."""

    @staticmethod
    def forward(ctx, x):
        """Round."""
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        """Pass the gradient on."""
        return grad.clamp(-1, 1)


def custom_function() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(Straight.apply(model(x) * 4) / 4, y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def truncated_backpropagation() -> Entry:
    torch.manual_seed(0)
    cell, head = nn.LSTMCell(8, 16), nn.Linear(16, 4)
    model = nn.ModuleList([cell, head])

    def step(model, optimizer, x, y, h, c):
        optimizer.zero_grad()
        hidden, memory, loss = h, c, 0.0
        for t in range(x.shape[1]):
            hidden, memory = model[0](x[:, t], (hidden, memory))
            loss = loss + F.mse_loss(model[1](hidden), y[:, t])
        loss.backward()
        optimizer.step()
        h.copy_(hidden.detach())
        c.copy_(memory.detach())
        return loss

    batch = torch.randn(2, 4, 8), torch.randn(2, 4, 4), torch.zeros(2, 16), torch.zeros(2, 16)
    return step, (model, adam(model), *batch)


class Stateful(nn.Module):
    """Keeps its hidden state in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 16), nn.Linear(16, 8)
        self.register_buffer("hidden", torch.zeros(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head of the next state."""
        hidden = self.cell(x, self.hidden.clone())
        self.hidden.copy_(hidden.detach())
        return self.head(hidden)


def hidden_state_in_buffer() -> Entry:
    _, x, y = small()
    model = Stateful()
    return loss_step, (model, adam(model), x, y)


class Rebinding(Stateful):
    """Binds its state anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head of the next state."""
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.head(hidden)


def hidden_state_rebound() -> Entry:
    _, x, y = small()
    model = Rebinding()
    return loss_step, (model, adam(model), x, y)


class Branching(nn.Module):
    """Chooses by a value that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one of two layers."""
        return self.one(x) if x.sum() > 0 else self.two(x)


def branch_on_data() -> Entry:
    _, x, y = small()
    model = Branching()
    return loss_step, (model, adam(model), x, y)


def masked_selection() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        out = model(x)
        loss = (out - y)[y > 0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def contrastive() -> Entry:
    model, x, y = small()
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        one, two = F.normalize(model(x), dim=-1), F.normalize(model(x.flip(1)), dim=-1)
        loss = F.cross_entropy(model.scale.exp() * one @ two.T, torch.arange(len(x)))
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def variational_autoencoder() -> Entry:
    torch.manual_seed(0)
    encoder, decoder = mlp(16, 32, 8), mlp(4, 32, 16)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})

    def step(model, optimizer, x):
        optimizer.zero_grad()
        mean, log_variance = model["encoder"](x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        loss = F.mse_loss(model["decoder"](drawn), x)
        loss = loss - 0.01 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), torch.randn(4, 16))


def diffusion() -> Entry:
    torch.manual_seed(0)
    model = mlp(17, 32, 16)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        time = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        mixed = time.sqrt() * x + (1 - time).sqrt() * noise
        loss = F.mse_loss(model(torch.cat([mixed, time], -1)), noise)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), torch.randn(4, 16))


def functional_call() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        parameters = {name: p * 1.0 for name, p in model.named_parameters()}
        loss = F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, adam(model), x, y)


def per_sample_gradients() -> Entry:
    model, x, y = small()

    def step(model, optimizer, x, y):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(parameters, one, target):
            return F.mse_loss(torch.func.functional_call(model, parameters, (one,)), target)

        pair = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0, 0))
        gradients, losses = pair(parameters, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)
        optimizer.step()
        return losses.mean()

    return step, (model, sgd(model), x, y)


CASES: dict[str, Factory] = {
    each.__name__: each
    for each in (
        weight_tying, shared_layer, checkpoint_of_layers, frozen_layers, frozen_under_no_grad,
        low_rank_adapter, distillation, forward_hook, hook_keeps_features, tensor_hook,
        backward_hook, custom_function, truncated_backpropagation, hidden_state_in_buffer,
        hidden_state_rebound, branch_on_data, masked_selection, contrastive,
        variational_autoencoder, diffusion, functional_call, per_sample_gradients,
    )
} | {
    "checkpoint": _checkpointed(False, 0.0),
    "checkpoint_dropout": _checkpointed(False, 0.3),
    "checkpoint_reentrant": _checkpointed(True, 0.0),
}  # fmt: skip
