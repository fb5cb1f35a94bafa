"""Parts of a recorded model are bitwise those of the model that the factory builds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pardnn.backends.torch.deferred_init import counted_draws
from pardnn.backends.torch.deferred_init.initialise import Recording, record, replay
from pardnn.backends.torch.rng import generator as rng

OUTSIDE = torch.arange(6.0).reshape(2, 3)
GENERATOR = torch.default_generator


def tensors(result: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a factory's result by a name."""
    found: dict[str, torch.Tensor] = {}
    for index, leaf in enumerate(pytree.tree_leaves(result)):
        if isinstance(leaf, nn.Module):
            for kind in (leaf.named_parameters, leaf.named_buffers):
                found |= {f"{index}.{name}": t for name, t in kind(remove_duplicate=False)}
        elif isinstance(leaf, torch.Tensor):
            found[str(index)] = leaf
    return found


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, layout included."""
    layouts = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (left, right)]
    if layouts[0] != layouts[1] or left.numel() == 0:
        return layouts[0] == layouts[1]
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*raw)


def check(factory: Callable[..., Any], num_ranks: int = 3, **kwargs: Any) -> Recording:
    """Replay a factory on virtual ranks, and compare with what it builds for real."""
    torch.manual_seed(123)
    start = rng.read_state(GENERATOR)
    expected = tensors(factory(**kwargs))
    end = rng.read_state(GENERATOR)
    torch.manual_seed(123)
    result, recording = record(factory, **kwargs)
    assert rng.read_state(GENERATOR) == start
    recorded = tensors(result)
    assert recorded.keys() == expected.keys()
    names = sorted(recorded)
    for rank in range(num_ranks):
        torch.manual_seed(9)
        mine = names[rank::num_ranks]
        for name, real in zip(mine, replay(recording, [recorded[n] for n in mine]), strict=True):
            assert type(real) is torch.Tensor
            assert same(real, expected[name]), name
        assert rng.read_state(GENERATOR) == end
    return recording


def _sizes(**more: int) -> dict[str, int]:
    return {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | more


def _hugging_face(name: str) -> Callable[[], nn.Module]:
    import transformers as hf

    small = _sizes(intermediate_size=100, vocab_size=333)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    llama = hf.LlamaConfig(**small, **ids)
    return {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500, **ids)
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=64, num_layers=2, d_ff=100, vocab_size=333, d_kv=16, num_heads=4)
        ),
        "llama": lambda: hf.LlamaForCausalLM(llama),
        "llama bfloat16": lambda: hf.LlamaForCausalLM._from_config(llama, dtype=torch.bfloat16),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(**_sizes(intermediate_size=100), image_size=32, patch_size=8)
        ),
        "swin": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2]
            )
        ),
    }[name]


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "llama bfloat16", "vit", "swin"])
def test_hugging_face_models(name: str, seeded: bool) -> None:
    model = _hugging_face(name)

    def factory() -> tuple[Any, ...]:
        if seeded:
            torch.manual_seed(5)
        batch = torch.randint(0, 300, (2, 8))
        built = model()
        return built, torch.optim.AdamW(built.parameters()), batch, torch.rand(3)

    check(factory)


class _LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=2)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.1)
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embedding.weight


def test_tied_weights_stay_one_storage() -> None:
    recording = check(_LanguageModel)
    assert not recording.fallback
    model, recording = record(_LanguageModel)
    one, two = replay(recording, [model.embedding.weight, model.head.weight])
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _residual_network() -> tuple[Any, ...]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
    )
    model[0].weight.requires_grad_(False)
    # A forward pass while building moves the running statistics, which the schema hides.
    model(torch.randn(4, 3, 8, 8))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model[3].weight.data.mul_(3).add_(1)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _converted() -> Any:
    linear = nn.Sequential(nn.Linear(30, 5), nn.BatchNorm1d(5)).half()
    return linear, nn.LSTM(5, 6).to(torch.float64), nn.Linear(3, 3).bfloat16()


def _copied() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    twin = nn.Linear(4, 4)
    twin.load_state_dict(nn.Linear(4, 4).state_dict())
    counted = copy.deepcopy(norm := nn.BatchNorm1d(4))
    counted.num_batches_tracked.add_(1)
    more = copy.deepcopy(layer), nn.TransformerEncoder(layer, 2), twin, nn.MultiheadAttention(8, 2)
    return norm, counted, *more


def _with_gradients() -> Any:
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4)).sum().backward()
    return model, model.weight.grad


def _reparametrised() -> Any:
    wrap = nn.utils.parametrizations
    return wrap.weight_norm(nn.Linear(5, 6)), wrap.orthogonal(nn.Linear(5, 5))


def _initialisers() -> Any:
    plain = [torch.empty(17, 19) for _ in range(9)]
    names = "uniform_ normal_ trunc_normal_ eye_ xavier_uniform_ xavier_normal_ kaiming_uniform_"
    for name, tensor in zip([*names.split(), "kaiming_normal_", "orthogonal_"], plain, strict=True):
        getattr(nn.init, name)(tensor)
    nn.init.sparse_(sparse := torch.empty(17, 19), 0.2)
    nn.init.dirac_(dirac := torch.empty(3, 3, 3))
    nn.init.orthogonal_(wide := torch.empty(19, 3, 9))
    nn.init.trunc_normal_(tail := torch.empty(30, 40), 0, 1, 1, 2)
    nn.init.trunc_normal_(narrow := torch.empty(30, 40, dtype=torch.bfloat16), std=0.02)
    nn.init.trunc_normal_(own := torch.empty(9, 9), generator=torch.Generator().manual_seed(3))
    return plain, sparse, dirac, wide, tail, narrow, own, torch.rand(2)


def _draws() -> Any:
    return [
        torch.poisson(torch.rand(20) * 5),
        torch.normal(torch.zeros(20), torch.ones(20)),
        torch.bernoulli(torch.rand(30)),
        torch.multinomial(torch.rand(30), 5),
        torch.randn(3),
        nn.functional.dropout(torch.ones(30), 0.5),
        torch.empty(30).exponential_(),
        torch.empty(10, 12).t().normal_(),
        torch.randn(3),
        torch.rand(3, dtype=torch.float64),
        torch.randn(30, dtype=torch.float64),
        torch.randn(3, dtype=torch.complex64),
        torch.distributions.Gamma(torch.ones(4), torch.ones(4)).sample(),
        torch.randperm(9),
        torch.empty(8, 20).bernoulli_(torch.rand(8, 20)),
    ]


def _reseeds() -> Any:
    torch.manual_seed(0)
    first = torch.rand(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        inside = torch.rand(30)
    after = torch.rand(3)
    saved = torch.get_rng_state()
    odd = torch.randn(5)
    torch.set_rng_state(saved)
    again = torch.randn(5)
    other = torch.Generator()
    other.set_state(saved)
    copied = torch.rand(2, generator=other)
    torch.manual_seed(7)
    return first, inside, after, odd, again, copied


def _generators() -> Any:
    own = torch.Generator().manual_seed(4)
    first = torch.rand(4, generator=own)
    clone = own.clone_state()
    later = torch.rand(3, generator=clone), torch.rand(5, generator=own), torch.rand(2)
    return first, later, torch.randperm(10, generator=own)


def _host_values() -> Any:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 5)]
    order = torch.randperm(20).tolist()
    noise = torch.rand(10)
    chosen = noise[noise > 0.5]
    branch = torch.rand(4) if chosen.numel() > 3 and torch.equal(noise, noise) else torch.rand(5)
    values = torch.unique(torch.randint(0, 5, (20,)))
    return torch.tensor(rates), torch.tensor(order), chosen, branch, noise.nonzero(), values


def _host_arrays() -> Any:
    np.random.seed(4)  # noqa: NPY002
    table = torch.from_numpy(np.random.rand(3, 4))  # noqa: NPY002
    position = 1.0 / (10000 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
    model = nn.Linear(4, 3, dtype=torch.float64)
    model.weight.data.copy_(table)
    return table, nn.Parameter(table), position, model, torch.tensor([[1, 2], [3, 4]]), OUTSIDE.t()


def _loader() -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(50, 3))
    return next(iter(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))), torch.rand(3)


def _default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.rand(3), nn.Linear(3, 3)
    finally:
        torch.set_default_dtype(torch.float32)


def _meta_first() -> Any:
    model = nn.Linear(6, 6, device="meta").to_empty(device="cpu")
    model.reset_parameters()
    return model, torch.rand(2)


FACTORIES = (
    _residual_network, _converted, _copied, _with_gradients, _reparametrised, _initialisers,
    _draws, _reseeds, _generators, _host_values, _host_arrays, _loader, _default_dtype, _meta_first,
)  # fmt: skip


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__.strip("_"))
def test_what_factories_do(factory: Callable[[], Any]) -> None:
    check(factory)


def test_factories_of_random_calls_with_odd_sizes() -> None:
    def factory(seed: int) -> list[torch.Tensor]:
        sizes = np.random.default_rng(seed).integers(1, 60, 30).tolist()
        fills = ("uniform_", "normal_", "exponential_", "bernoulli_", "random_", "log_normal_")
        return [getattr(torch.empty(n), fills[n % 6])() for n in sizes]

    for seed in range(10):
        check(factory, seed=seed)


def test_keywords_reach_the_factory_and_shapes_are_static() -> None:
    batch, recording = record(lambda batch_size: torch.rand(batch_size, 3), batch_size=7)
    assert isinstance(batch, FakeTensor)
    assert batch.fake_mode is recording.fake_mode
    assert batch.shape == (7, 3)
    assert all(type(size) is int for size in batch.shape)


def test_replay_twice_gives_the_same() -> None:
    result, recording = record(lambda: (torch.tensor([1.0, 2.0]).mul_(3), torch.rand(4)))
    first, second = replay(recording, result), replay(recording, result)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    first[0].zero_()
    assert replay(recording, result)[0].tolist() == [3.0, 6.0]


def test_numbers_in_tensors_are_no_constants_for_capture() -> None:
    rate, _ = record(lambda: torch.tensor(0.1))
    assert rate.constant is None


def test_five_billion_parameters_are_recorded_and_one_made_real() -> None:
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=4096, num_hidden_layers=24, num_attention_heads=32, intermediate_size=11008
    )
    model, recording = record(lambda: hf.LlamaForCausalLM(config))
    assert sum(parameter.numel() for parameter in model.parameters()) > 5e9
    (norm,) = replay(recording, [model.model.layers[20].input_layernorm.weight])
    assert norm.tolist() == [1.0] * 4096


RATE = torch.tensor(1e-3)


def test_a_number_of_a_tensor_made_outside_does_not_hang() -> None:
    """Adam asks for the number of `lr` while samplers are recorded: measuring them must draw."""
    counted_draws._normal_counts.cache_clear()

    def factory() -> Any:
        model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 5))
        return model, torch.optim.Adam(model.parameters(), lr=RATE)

    check(factory)
