"""One small model of each kind that `tofu` is compared on, as its user would train it.

Sizes divide among 2, 3, 4 and 6 ranks in some dims and not in others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from testbed.zoo import rnn, wresnet

Entry = tuple[Callable[..., Any], tuple[Any, ...]]


def language_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss


def gpt2() -> Entry:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=48, vocab_size=96, n_positions=32,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return language_step, (model, optimizer, torch.randint(96, (8, 24)))


def llama() -> Entry:
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                      num_attention_heads=6, num_key_value_heads=6, vocab_size=96,
                                      max_position_embeddings=32)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    # The library's own norms compute in single precision whatever the model's: 1e-7 of difference.
    for layer in (model.model, *model.model.layers):
        for name, norm in list(layer.named_children()):
            if name.endswith("norm"):
                setattr(layer, name, nn.RMSNorm(48, eps=norm.variance_epsilon))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return language_step, (model, optimizer, torch.randint(96, (8, 24)))


def classify_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


class Block(nn.Module):
    """Two convolutions with batch norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs),
            nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations [batch, outputs, height, width]."""
        return (self.convolutions(x) + self.shortcut(x)).relu()


def resnet() -> Entry:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        Block(12, 12, 1), Block(12, 24, 2), Block(24, 48, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 12),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return classify_step, (model, optimizer, torch.randn(12, 3, 16, 16), torch.randint(12, (12,)))


class Unrolled(nn.Module):
    """A language model of LSTM cells, ten time steps in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 24)
        self.cells = nn.ModuleList(nn.LSTMCell(24, 24) for _ in range(2))
        self.decoder = nn.Linear(24, 60)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch * steps, words] of tokens [batch, steps]."""
        states: list[Any] = [None] * len(self.cells)
        outputs = []
        for step in range(tokens.shape[1]):
            x = self.embedding(tokens[:, step])
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            outputs.append(self.decoder(x))
        return torch.stack(outputs, 1).flatten(0, 1)


def lstm() -> Entry:
    torch.manual_seed(3)
    model = Unrolled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(60, (12, 10))
    return classify_step, (model, optimizer, tokens, torch.randint(60, (120,)))


class Mixture(nn.Module):
    """Four experts around a shortcut, of which each sample takes the best two, by their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4)
        )
        self.norm = nn.LayerNorm(48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations [batch, 48], as `x` has."""
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        dense = weights.new_zeros(len(x), 4).scatter(1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return self.norm(x + (dense.unsqueeze(-1) * outputs).sum(1))


def moe() -> Entry:
    torch.manual_seed(7)
    model = nn.Sequential(Mixture(), Mixture(), nn.Linear(48, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return classify_step, (model, optimizer, torch.randn(12, 48), torch.randint(12, (12,)))


def gan_step(
    generator: Any, critic: Any, for_generator: Any, for_critic: Any, real: torch.Tensor
) -> torch.Tensor:
    judged = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
    fake = generator(torch.randn_like(real[:, :12]))
    for_critic.zero_grad()
    critic_loss = judged(critic(real), ones) + judged(critic(fake.detach()), zeros)
    critic_loss.backward()
    for_critic.step()
    for_generator.zero_grad()
    loss = judged(critic(fake), ones)
    loss.backward()
    for_generator.step()
    return loss + critic_loss.detach()


def gan() -> Entry:
    torch.manual_seed(10)
    # No bias before a norm: its gradient is 0 but for rounding, of which Adam makes whole steps.
    layers = nn.Linear(12, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 24)
    generator = nn.Sequential(*layers)
    critic = nn.Sequential(
        nn.Linear(24, 48), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(48, 1)
    )  # fmt: skip
    return gan_step, (
        generator, critic, torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9), torch.randn(12, 24),
    )  # fmt: skip


MODELS: dict[str, Callable[[], Entry]] = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet": resnet,
    "lstm": lstm,
    "wresnet": lambda: wresnet.small(12),
    "rnn": lambda: rnn.small(12),
}
