"""Eight models of real widths, of two layers or more, each with the step that users write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

Entry = tuple[Callable[..., Any], tuple[Any, ...]]

#: Samples of a batch, tokens of a sample, width, heads, words.
BATCH, TOKENS, WIDTH, HEADS, WORDS = 32, 256, 512, 8, 4096


def _step(model: Any, optimizer: Any, *batch: torch.Tensor) -> torch.Tensor:
    *inputs, labels = batch
    optimizer.zero_grad()
    made = model(*inputs)
    scores = getattr(made, "logits", made)
    loss = nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss


def _entry(model: nn.Module, *batch: torch.Tensor, is_fused: bool = True) -> Entry:
    fused = True if is_fused else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    return _step, (model.train(), optimizer, *batch)


def _tokens(count: int = 2) -> list[torch.Tensor]:
    return [torch.randint(WORDS, (BATCH, TOKENS)) for _ in range(count)]


def gpt2(num_layers: int = 2, *, is_fused: bool = True) -> Entry:
    """Queries, keys and values by one product; the output weight is the embedding's.

    Args:
        num_layers: Of the model.
        is_fused: Whether AdamW updates a tensor in one call.
    """
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=WIDTH, n_head=HEADS, vocab_size=WORDS, n_positions=TOKENS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _entry(transformers.GPT2LMHeadModel(config), *_tokens(), is_fused=is_fused)


def llama(num_layers: int = 2) -> Entry:
    """Gated units, and an output weight of its own."""
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, vocab_size=WORDS,
    )  # fmt: skip
    return _entry(transformers.LlamaForCausalLM(config), *_tokens())


def bert(num_layers: int = 2) -> Entry:
    """Masked language modelling."""
    config = transformers.BertConfig(
        num_hidden_layers=num_layers, hidden_size=WIDTH, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, vocab_size=WORDS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _entry(transformers.BertForMaskedLM(config), *_tokens())


class _Translator(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        config = transformers.T5Config(
            num_layers=num_layers, d_model=WIDTH, d_kv=WIDTH // HEADS, num_heads=HEADS,
            d_ff=4 * WIDTH, vocab_size=WORDS, dropout_rate=0.0,
        )  # fmt: skip
        self.inner = transformers.T5ForConditionalGeneration(config)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=source, decoder_input_ids=target).logits


def t5(num_layers: int = 2) -> Entry:
    """An encoder and a decoder of so many layers each, and biases of positions."""
    return _entry(_Translator(num_layers), *_tokens(3))


def vit(num_layers: int = 2) -> Entry:
    """Pictures of 224 x 224 in patches of 16 x 16."""
    config = transformers.ViTConfig(
        num_hidden_layers=num_layers, hidden_size=WIDTH, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
    )  # fmt: skip
    config.num_labels = 1000
    model = transformers.ViTForImageClassification(config)
    return _entry(model, torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,)))


class _Experts(nn.Module):
    """Four experts, of which each token takes two; all compute, and gates weigh what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gate = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        dense = torch.zeros(len(x), 4).scatter(1, chosen, weights)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return self.out(x + (dense.unsqueeze(-1) * made).sum(1))


def experts() -> Entry:
    """A mixture of experts."""
    return _entry(_Experts(), *_tokens())


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs),
            nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.short(x)).relu()


def resnet() -> Entry:
    """Three blocks with batch norm, which sees the whole batch."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        _Block(64, 64, 1), _Block(64, 128, 2), _Block(128, 256, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(256, 1000),
    )  # fmt: skip
    return _entry(model, torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,)))


class _Unrolled(nn.Module):
    """Two layers of LSTM cells, eight time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 2 * WIDTH)
        self.cells = nn.ModuleList(nn.LSTMCell(2 * WIDTH, 2 * WIDTH) for _ in range(2))
        self.out = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states: list[Any] = [None] * len(self.cells)
        made = []
        for time in range(tokens.shape[1]):
            x = self.embedding(tokens[:, time])
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            made.append(x)
        return self.out(torch.stack(made, 1))


def lstm() -> Entry:
    """Weights that every time step reads."""
    return _entry(_Unrolled(), *(torch.randint(WORDS, (256, 8)) for _ in range(2)))


MODELS: Mapping[str, Callable[[], Entry]] = {
    "GPT-2": gpt2, "Llama": llama, "BERT": bert, "T5": t5, "ViT": vit, "experts": experts,
    "ResNet": resnet, "LSTM": lstm,
}  # fmt: skip
