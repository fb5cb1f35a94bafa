"""Steps of torch's own that branch on data: the graph gives the bits of both branches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.rewrites import patches
from pardnn.backends.torch.ops.host_scalars import choose
from pardnn.errors import UnsupportedError
from tests.backends.torch import beside_eager, executors, models
from tests.backends.torch.capture import test_capture_equal
from tests.backends.torch.capture.test_capture_equal import assert_equal
from tests.backends.torch.models import small
from tests.backends.torch.plans import random_plan
from tests.long_cases import long_but

RADAM = functools.partial(torch.optim.RAdam, lr=0.01)


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps as RAdam takes to rectify, and a scaler to find its scale."""
    monkeypatch.setattr(test_capture_equal, "STEPS", 10)


OPTIMIZERS: dict[str, Any] = {
    "radam": RADAM,
    "radam-foreach": functools.partial(RADAM, foreach=True, weight_decay=0.1),
    "radam-decoupled": functools.partial(RADAM, weight_decay=0.1, decoupled_weight_decay=True),
    "radam-never-rectified": functools.partial(RADAM, betas=(0.9, 0.6)),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.1),
    "adafactor-foreach": functools.partial(torch.optim.Adafactor, foreach=True),
}


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_branch(name):
    assert_equal(lambda: small(OPTIMIZERS[name]))


class Lars(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(p.norm().item() / (p.grad.norm().item() + 1e-6))
        super().step(closure)


def test_an_optimizer_reads_norms_as_numbers() -> None:
    assert_equal(lambda: small(functools.partial(Lars, lr=0.01)))


def scaled(make: Any, unscaled: bool = False) -> models.Entry:
    """A step of which the first gradients overflow, until the scale is small enough."""
    _, (model, optimizer, x, y) = small(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)

    def step(model, optimizer, scaler, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * 100).backward()
        if unscaled:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step, (model, optimizer, scaler, 50 * x, y)


SCALED: dict[str, Any] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "radam": RADAM,
}


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize(
    ("name", "unscaled"),
    long_but(
        [("adam", True), ("foreach", False), ("fused", True), ("momentum", False), ("radam", True)],
        itertools.product(SCALED, [False, True]),
    ),
)
def test_a_scaler_leaves_out_steps_that_overflow(name, unscaled):
    factory = functools.partial(scaled, SCALED[name], unscaled)
    assert_equal(factory)
    step, (model, *rest) = factory()
    first = [p.detach().clone() for p in model.parameters()]
    step(model, *rest)
    assert all(torch.equal(a, b) for a, b in zip(first, model.parameters(), strict=True))


def test_what_may_be_put_back_is_copied_one_tensor_at_a_time():
    step, args = scaled(SCALED["adam"])
    graph = capture(step, *args)
    kinds = [op.kind for op in graph.ops]
    copies = [i for i, kind in enumerate(kinds) if kind == "aten.clone.default"]
    chosen = [i for i, kind in enumerate(kinds) if kind == "aten.where.self"]
    assert len(copies) == len(chosen) == 4 * 4  # weights, two averages and a count for each
    held = 0
    for i in sorted([*copies, *chosen]):
        held += 1 if i in copies else -1
        assert held <= 4


SCALED_ADAM = functools.partial(scaled, SCALED["adam"])


def test_scaled_steps_on_ranks():
    executors.assert_equal(SCALED_ADAM, random_plan(executors.captured(SCALED_ADAM), 2, seed=4))


def averaged(**settings: Any) -> models.Entry:
    _, (model, optimizer, x, y) = small(SCALED["adam"])
    average = torch.optim.swa_utils.AveragedModel(model, **settings)

    def step(model, average, optimizer, x, y):
        loss = models.classify_step(model, optimizer, x, y)
        average.update_parameters(model)
        return loss

    return step, (model, average, optimizer, x, y)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)},
        {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
    ],
)
def test_the_first_average_is_the_model(settings):
    assert_equal(functools.partial(averaged, **settings))


def test_a_choice_between_numbers_is_made_at_once():
    assert choose(True, 1, 2) == 1
    assert choose(2 > 3, 1, 2) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("item", [1.0, math.nan, math.inf, -math.inf])
def test_gradients_are_unscaled_bit_by_bit(dtype: torch.dtype, item: float) -> None:
    torch.manual_seed(0)
    scale = torch.tensor(1 / 3)
    ours = [torch.randn(3, 5).to(dtype), torch.randn(7).to(dtype), torch.empty(0, dtype=dtype)]
    ours[0][1, 2] = item
    theirs, flags = [x.clone() for x in ours], [torch.zeros(1), torch.zeros(1)]
    patches._unscale_each(None, None, ours, flags[0], scale)  # type: ignore[arg-type]
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(theirs, flags[1], scale)
    assert flags[0] == flags[1]
    for mine, eager in zip(ours, theirs, strict=True):
        assert torch.equal(mine.nan_to_num(9.0), eager.nan_to_num(9.0))


def packable(has_positions: bool) -> models.Entry:
    """A model of transformers, of queries that share keys; positions may say what is packed."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)

    def step(model: Any, optimizer: Any, ids: Any, *positions: Any) -> Any:
        given = dict(zip(["position_ids"], positions, strict=False))
        return models.train(model, optimizer, model(input_ids=ids, labels=ids, **given).loss)

    positions = torch.arange(16).remainder(8).expand(2, 16).contiguous()
    batch = (torch.randint(64, (2, 16)), *[positions][: int(has_positions)])
    return step, (model, torch.optim.SGD(model.parameters(), lr=0.01), *batch)


@pytest.mark.parametrize("has_positions", [False, True])
def test_only_positions_of_the_batch_make_a_mask(has_positions: bool) -> None:
    graph = assert_equal(lambda: packable(has_positions))
    calls = [op for op in graph.ops if "flash_attention_for_cpu.default" in op.kind]
    found = [bool((op.arguments or {})["kwargs"].get("attn_mask")) for op in calls]
    assert found == [has_positions] * 2


@pytest.mark.parametrize("is_tensor", [True, False])
def test_gradients_clipped_by_a_limit_that_the_step_makes(is_tensor: bool) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        limit = norm * 0.5 if is_tensor else 0.1 + 0.5 * norm.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        torch.nn.utils.clip_grad_value_(model.parameters(), limit / 9)
        optimizer.step()
        return loss

    def make() -> models.Entry:
        _, (model, optimizer, x, y) = small(functools.partial(torch.optim.SGD, lr=0.5))
        return step, (model, optimizer, x, y)

    beside_eager.assert_equal(make)


def _signs(loss: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Zeros of a gradient have a sign, which losses alone do not show."""
    (gradient,) = torch.autograd.grad(-loss, h, retain_graph=True)
    return loss + gradient.signbit().sum()


def _twice(loss: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, h, create_graph=True)[0].square().sum()


def _less_its_item(h: torch.Tensor, *items: int) -> torch.Tensor:
    """Zero where the items are, which move from step to step."""
    for i in items:
        h = h * (h - h.flatten()[i].detach())
    return h


#: Losses of a hidden layer, of which torch chooses derivatives, or values, by looking.
LOOKED_AT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "prod": lambda h: (1 + h / 9).prod(),
    "prod-dim": lambda h: h.prod(-1).sum() + h.t().prod(1, keepdim=True).sum(),
    "prod-dtype": lambda h: h.prod(0, dtype=torch.float64).sum().float(),
    "prod-one-zero": lambda h: (h[0].relu() * _less_its_item(h, 3)).prod(1).sum(),
    "prod-whole-one-zero": lambda h: _less_its_item(h[0], 3).prod() * 50,
    "prod-several": lambda h: _signs(_less_its_item(h, 1, 3).prod() + h.relu().prod(0).sum(), h),
    "prod-twice": lambda h: _twice((1 + h / 9).prod(0).square().sum() + (1 + h / 9).prod(), h),
    "prod-vmap": lambda h: torch.vmap(lambda row: row.prod() + row.max())(h).sum(),
    "prod-func": lambda h: torch.func.grad(lambda x: x.prod(0).sum())(h).square().sum(),
    "max": lambda h: _signs(h.max(), h),
    "median": lambda h: _signs(h.nanmedian(), h),
    "svdvals": lambda h: h.sum() * torch.linalg.matrix_norm(h.detach() / 99, "nuc"),
    "eigvalsh": lambda h: h.sum() * torch.linalg.eigvalsh((h @ h.T).detach() / 999).sum(),
}  # fmt: skip


def _of_layer(loss: Callable[[torch.Tensor], torch.Tensor]) -> models.Entry:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 6)

    def step(layer: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        h = layer(x)
        return models.train(layer, optimizer, loss(h) + layer(x).square().mean())

    return step, (layer, torch.optim.SGD(layer.parameters(), lr=0.02), torch.randn(6, 6))


@pytest.mark.parametrize("name", LOOKED_AT)
def test_derivatives_that_torch_chooses_by_data(name: str) -> None:
    assert_equal(lambda: _of_layer(LOOKED_AT[name]))


def _product_so_far(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(itertools.accumulate(x.unbind(0), torch.mul)), 0)


def _determinant(a: torch.Tensor) -> torch.Tensor:
    sign, log = torch.linalg.slogdet(a)
    return sign * log.exp()


#: What is refused, and what its message advises.
ADVISED: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
    "value of masked_fill": [
        lambda h: h.masked_fill(h > 0, h.mean()).square().sum(),
        lambda h: torch.where(h > 0, h.mean(), h).square().sum(),
    ],
    "gradient of cumprod": [
        lambda h: _twice(h.sigmoid().cumprod(0).square().sum(), h),
        lambda h: _twice(_product_so_far(h.sigmoid()).square().sum(), h),
    ],
    "gradient of det": [
        lambda h: _twice(torch.linalg.det(h), h),
        lambda h: _twice(_determinant(h), h),
    ],
}


@pytest.mark.parametrize("what", ADVISED)
def test_derivatives_that_are_refused_and_what_to_write(what: str) -> None:
    step, args = _of_layer(ADVISED[what][0])
    with pytest.raises(UnsupportedError, match=rf"{what} \(.*test_rewrites.py:\d+\)"):
        capture(step, *args)
    assert_equal(lambda: _of_layer(ADVISED[what][1]))
