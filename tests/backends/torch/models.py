"""Small models with the training steps that their users would write.

Each factory returns `(step, args)` like an entry point of the command line, and seeds itself.
`BATCHES` of later steps come from `next_batch`, which keeps shapes and ranges.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Entry = tuple[Callable[..., Any], tuple[Any, ...]]


class NormNet(nn.Module):
    """Batch norm and dropout between two layers, of 6 and 8 features."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x))))


def language_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss


def double_language_step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of the library's own language models is of single precision, whatever they are."""
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return train(model, optimizer, loss)


def classify_step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def gpt2(optimizer: Callable[..., Any] = torch.optim.AdamW, **settings: Any) -> Entry:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(64, (2, 8))
    return language_step, (model, optimizer(model.parameters(), **{"lr": 1e-3} | settings), tokens)


def bert() -> Entry:
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        vocab_size=64, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).train()
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        return out

    tokens = torch.randint(64, (2, 8))
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}
    return step, (model, torch.optim.Adam(model.parameters(), lr=1e-3), batch)


def t5() -> Entry:
    import transformers

    torch.manual_seed(2)
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    return language_step, (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
        torch.randint(1, 64, (2, 6)),
    )


def llama() -> Entry:
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, amsgrad=True)
    return language_step, (model, optimizer, torch.randint(64, (2, 8)))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.short = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.short(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )  # fmt: skip
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet(**settings: Any) -> Entry:
    torch.manual_seed(4)
    model = ResNet()
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4} | settings
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    return classify_step, (model, optimizer, torch.randn(4, 3, 8, 8), torch.randint(10, (4,)))


class LSTMLanguageModel(nn.Module):
    """Two layers, unrolled by hand, output weights tied to the embedding."""

    def __init__(self, vocabulary: int = 32, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList([nn.LSTMCell(width, width), nn.LSTMCell(width, width)])
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(width, vocabulary)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.dropout(self.embedding(tokens))
        zeros = x.new_zeros(x.shape[0], x.shape[2])
        state = [(zeros, zeros), (zeros, zeros)]
        outputs = []
        for t in range(x.shape[1]):
            h = x[:, t]
            for i, cell in enumerate(self.cells):
                state[i] = cell(h, state[i])
                h = self.dropout(state[i][0])
            outputs.append(h)
        return self.out(torch.stack(outputs, 1))


def lstm() -> Entry:
    torch.manual_seed(5)
    model = LSTMLanguageModel()

    def step(model, optimizer, tokens):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return {"loss": loss, "logits": logits}

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, nesterov=True)
    return step, (model, optimizer, torch.randint(32, (3, 6)))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 2, 1))
        self.norm = nn.GroupNorm(3, 12)
        self.fc = nn.Linear(12 * 16, 10)

    def forward(self, x):
        x = F.silu(self.stem(x))
        x = torch.cat([self.one(x), self.three(x), self.pool(x)], 1)
        return self.fc(F.gelu(self.norm(x)).flatten(1))


def inception() -> Entry:
    torch.manual_seed(6)
    model = Inception()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True)
    return classify_step, (model, optimizer, torch.randn(4, 3, 4, 4), torch.randint(10, (4,)))


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)]
        )
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        dense = torch.zeros(x.shape[0], 4).scatter(1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return self.out(x + (dense.unsqueeze(-1) * outputs).sum(1))


def mixture() -> Entry:
    torch.manual_seed(7)
    model = MixtureOfExperts()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    return classify_step, (model, optimizer, torch.randn(6, 8), torch.randint(3, (6,)))


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        self.items = nn.Sequential(nn.EmbeddingBag(30, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Linear(3, 3)

    def forward(self, users, items):
        u, i = F.normalize(self.users(users), dim=-1), F.normalize(self.items(items), dim=-1)
        return u @ i.T * self.scale.exp()


def two_tower() -> Entry:
    torch.manual_seed(8)
    model = TwoTower()

    def step(model, optimizer, batch):
        logits = model(batch["users"], batch["items"])
        target = torch.arange(logits.shape[0])
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss.detach(), logits

    batch = {"users": torch.randint(20, (5, 3)), "items": torch.randint(30, (5, 2))}
    return step, (model, torch.optim.Adagrad(model.parameters(), lr=0.1), batch)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Dropout2d(0.2), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        resized = F.interpolate(second, scale_factor=2, mode="bilinear")[:, :4]
        return self.last(torch.cat([self.up(second) + resized, first], 1))


def unet() -> Entry:
    torch.manual_seed(9)
    model = UNet()

    def step(model, optimizer, batch):
        loss = F.binary_cross_entropy_with_logits(model(batch.image), batch.mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    import dataclasses

    @dataclasses.dataclass
    class Images:
        image: torch.Tensor
        mask: torch.Tensor

    batch = Images(torch.randn(2, 1, 8, 8), torch.rand(2, 1, 8, 8))
    return step, (model, torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True), batch)


def gan() -> Entry:
    torch.manual_seed(10)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
    critic = nn.Sequential(
        nn.Linear(6, 16), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3), nn.Linear(16, 1)
    )

    def step(generator, critic, for_generator, for_critic, real):
        dtype, size = real.dtype, (len(real), 1)
        ones, zeros = torch.ones(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        fake = generator(torch.randn(len(real), 4, dtype=dtype))
        for_critic.zero_grad()
        critic_loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        critic_loss = critic_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        critic_loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        loss.backward()
        for_generator.step()
        return loss, critic_loss

    return step, (
        generator,
        critic,
        torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
        torch.optim.SGD(critic.parameters(), lr=1e-2),
        torch.randn(8, 6),
    )


def accumulation() -> Entry:
    """Two micro-batches, clipped by their common norm, then one update."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batches):
        total = torch.zeros(())
        for x, y in batches:
            loss = F.cross_entropy(model(x), y) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return total

    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(2)]
    return step, (batches,)


def small(make_optimizer: Callable[..., Any] = torch.optim.Adam) -> Entry:
    """Two linear layers: for what depends on the step and not on the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make_optimizer(list(model.parameters()))
    return classify_step, (model, optimizer, torch.randn(5, 6), torch.randint(3, (5,)))


def train(model: Any, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
    """The end of most steps."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


MODELS: dict[str, Callable[[], Entry]] = {
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "llama": llama,
    "resnet": resnet,
    "lstm": lstm,
    "inception": inception,
    "mixture": mixture,
    "two_tower": two_tower,
    "unet": unet,
    "gan": gan,
    "accumulation": accumulation,
}


def next_batch(arg: Any, seed: int) -> Any:
    """Return an argument with new values: integers permuted, floats moved."""
    torch.manual_seed(seed)
    if isinstance(arg, torch.Tensor):
        if arg.dtype.is_floating_point:
            new = arg.roll(seed, 0) * (1 - 0.01 * seed)
        else:
            new = arg.flatten()[torch.randperm(arg.numel())].reshape(arg.shape)
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype).copy_(new)
    if isinstance(arg, dict):
        return {key: next_batch(value, seed + i) for i, (key, value) in enumerate(arg.items())}
    if isinstance(arg, list | tuple):
        return type(arg)(next_batch(value, seed + i) for i, value in enumerate(arg))
    if hasattr(arg, "__dataclass_fields__"):
        return type(arg)(**next_batch(dict(arg.__dict__), seed))
    return arg
