"""Fake results that are cached are those that the fake kernels would return again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pardnn.backends.torch.capture import fake_cache
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.fake_cache import _are_equal_fakes
from pardnn.backends.torch.capture.placeholders import placeholder
from pardnn.backends.torch.capture.trace_ir import geometry_of
from pardnn.backends.torch.ops.codec import flatten_result
from pardnn.backends.torch.ops.schema import fake_result
from pardnn.graph.file import graph_to_json
from tests.backends.torch.models import MODELS, train
from tests.backends.torch.stepping import assert_leaves_as_eager, weighed


def _described(result: Any, tensors: Any) -> list[Any]:
    """Each output: which argument it is, which argument's storage it shares, how it lies."""
    described: list[Any] = []
    for output in flatten_result(result):
        if not isinstance(output, torch.Tensor):
            described.append(output)
            continue
        storage = output.untyped_storage()
        shared = [t.untyped_storage()._cdata == storage._cdata for t in tensors]
        same = [t is output for t in tensors]
        size = 0 if any(shared) else storage.nbytes()
        described.append((same, shared, size, geometry_of(output), output.device))
    return described


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has each cached result compared with the kernel's; the list names what was compared."""
    real, compared = fake_cache.FakeCache.result, []

    def result(self: Any, func: Any, args: Any, kwargs: Any, tensors: Any, key: Any) -> Any:
        found = real(self, func, args, kwargs, tensors, key)
        if key is not None:
            again = fake_result(func, args, kwargs)
            assert _described(found, tensors) == _described(again, tensors), func
            compared.append(str(func))
        return found

    monkeypatch.setattr(fake_cache.FakeCache, "result", result)
    return compared


@pytest.mark.parametrize("name", ["unet", "gan"])
def test_cached_results_are_those_of_the_kernels(name: str, checked: list[str]) -> None:
    step, args = MODELS[name]()
    capture(step, *args)
    assert len(checked) > 100


def mixed_views_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """Aliased and distinct arguments, views of views, lists, complex and negated numbers."""
    h = model(x)
    with torch.no_grad():
        cacheable = torch.zeros_like(h)
        for other in (h, torch.ones_like(h), h):
            torch.add(h, other, out=cacheable)
            cacheable.mul_(cacheable)
            cacheable.mul_(other)
            cacheable.add_(
                cacheable.t()[:, :4].t() if cacheable.shape[0] == cacheable.shape[1] else other
            )
    total = cacheable.sum()
    for part in (*h.unbind(0), *h.split(2), *h.chunk(2, 1), h.as_strided((2, 2), (1, 2))):
        total = total + part.sum() + part.expand(3, *part.shape).mean()
    for _ in range(2):
        wave = torch.fft.rfft(h).conj()
        total = total + wave.real.sum() + wave.imag.sum() + torch.view_as_real(wave * 2).sum()
        total = total + torch.where(h > 0, h, 0.0).sum() + torch.where(h > 0, h, 1).sum()
        total = total + h.to(torch.float64).sum() + h.to(torch.float64, copy=True).sum()
        total = total + torch.tensor([1.0, 2.0])[1] * h.flatten()[:1].squeeze()
    return train(model, optimizer, total)


def test_graphs_do_not_depend_on_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    args = (model, torch.optim.Adam(model.parameters()), torch.randn(4, 3))
    cached = graph_to_json(capture(mixed_views_step, *args))
    monkeypatch.setattr(fake_cache.FakeCache, "tensor_key", lambda *_: None)
    assert graph_to_json(capture(mixed_views_step, *args)) == cached


def _kernels_run(steps: int, monkeypatch: pytest.MonkeyPatch) -> int:
    runs = []

    def counted(*call: Any) -> Any:
        runs.append(call[0])
        return fake_result(*call)

    cell = nn.LSTMCell(4, 4)

    def step(cell: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(2, 4)
        for _ in range(steps):
            h, c = cell(x, (h, c))
        return train(cell, optimizer, F.mse_loss(h, x))

    with monkeypatch.context() as patch:
        patch.setattr(fake_cache, "fake_result", counted)
        capture(step, cell, torch.optim.SGD(cell.parameters(), lr=0.1), torch.randn(2, 4))
    return len(runs)


def test_time_steps_run_no_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _kernels_run(8, monkeypatch) == _kernels_run(3, monkeypatch)


def test_a_custom_op_is_asked_each_time(checked: list[str]) -> None:
    @torch.library.custom_op("pardnn_fakes::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda _context, gradient: 2 * gradient)
    model = nn.Linear(3, 3)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return train(model, optimizer, twice(model(x)).sum())

    graph = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3))
    assert any(op.kind == "pardnn_fakes::twice.default" for op in graph.ops)
    assert not any("pardnn_fakes" in name for name in checked)


GRAD, OTHER = torch.randn(4, 3, 9), torch.randn(4, 3, 9)
LAYOUTS = [(GRAD.transpose(0, 1), OTHER.transpose(0, 1).contiguous()),
           (GRAD.transpose(0, 1).contiguous(), OTHER.transpose(0, 1)),
           (GRAD.transpose(0, 1), OTHER.transpose(0, 1))]  # fmt: skip
#: Arguments after the gradient and the value.
LAID_OUT: dict[str, tuple[Any, ...]] = {
    "_log_softmax_backward_data": (-1, torch.float32),
    "_softmax_backward_data": (-1, torch.float32),
    "hardtanh_backward": (-1.0, 1.0),
    "hardswish_backward": (),
    "logit_backward": (),
    "softplus_backward": (1.0, 20.0),
    "mse_loss_backward": (GRAD.transpose(0, 1), 0),
    "smooth_l1_loss_backward": (GRAD.transpose(0, 1), 0, 1.0),
    "huber_loss_backward": (GRAD.transpose(0, 1), 0, 1.0),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_results_lie_as_the_real_ones_do(name: str) -> None:
    """A rank lays a message out as the graph says, and strides decide bits."""
    op = getattr(torch.ops.aten, name).default
    for given in LAYOUTS:
        args = [*given, *LAID_OUT[name]]
        mode = FakeTensorMode()
        with mode:
            fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
            found = fake_result(op, fake, {})
        assert found.stride() == op(*args).stride()


def test_both_results_of_log_sigmoid_lie_in_order() -> None:
    for given, _ in LAYOUTS:
        mode = FakeTensorMode()
        with mode:
            found = fake_result(
                torch.ops.aten.log_sigmoid_forward.default, [mode.from_tensor(given)], {}
            )
        real = torch.ops.aten.log_sigmoid_forward(given)
        assert [x.stride() for x in found] == [x.stride() for x in real]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_norms_of_autocast_are_of_the_types_of_real_ones(weights: torch.dtype) -> None:
    """Under autocast, products in bfloat16 meet the float32 weights of a norm."""
    aten, x, w = torch.ops.aten, torch.randn(3, 4, 4, dtype=torch.bfloat16), torch.ones(4)
    w = w.to(weights)
    forward: dict[Any, tuple[Any, ...]] = {
        aten.native_layer_norm.default: (x, [4], w, w, 1e-5),
        aten.native_group_norm.default: (x, w, w, 3, 4, 4, 2, 1e-5),
        aten.native_batch_norm.default: (x, w, w, None, None, True, 0.1, 1e-5),
    }
    calls = list(forward.items())
    _, mean, rstd = aten.native_group_norm.default(*forward[aten.native_group_norm.default])
    backward = (x, x, mean, rstd, w, 3, 4, 4, 2, [True] * 3)
    calls.append((aten.native_group_norm_backward.default, backward))
    for op, args in calls:
        real = flatten_result(op(*args))
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            found = flatten_result(fake_result(op, fake, {}))
        assert [(t.dtype, t.stride()) for t in found] == [(t.dtype, t.stride()) for t in real], op


TYPED: dict[str, tuple[Any, ...]] = {
    "huber_loss.default": ("x", "y"),
    "mse_loss_backward.default": ("y", "x", "y", 1),
    "normal.Tensor_Tensor": ("x", "y"),
    "smooth_l1_loss_backward.default": ("y", "x", "y", 1, 1.0),
    "soft_margin_loss.default": ("x", "y"),
    "soft_margin_loss_backward.default": ("y", "x", "y", 1),
}


@pytest.mark.parametrize("name", TYPED)
def test_results_of_mixed_types_are_of_the_types_of_real_ones(name: str) -> None:
    """`mse_loss` of float32 and float64, as of a target from NumPy."""
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    for kinds in ((torch.float32, torch.float64), (torch.bfloat16, torch.float32)):
        tensors = dict(zip("xy", (torch.rand(2, 3).to(kind) for kind in kinds), strict=True))
        args = [tensors.get(each, each) for each in TYPED[name]]
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            found = fake_result(op, fake, {})
        assert found.dtype == op(*args).dtype == kinds[0]


ORDERS = [
    (0, 1, 2),
    (0, 2, 1),
    (1, 0),
    (0, 2, 3, 1),
    (0, 3, 1, 2),
    (4, 3, 2, 1, 0),
    (0, 2, 3, 4, 1),
]


def in_order(order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose dims lie in memory in this order."""
    shape = [2, 4, 6, 8, 10]
    return torch.randn([shape[i] for i in order]).permute(*map(order.index, range(len(order))))


def assert_lies_as_real(op: Any, *args: Any) -> None:
    real = flatten_result(op.default(*args))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        found = flatten_result(fake_result(op.default, fake, {}))
    assert [t.stride() for t in found] == [t.stride() for t in real], op


@pytest.mark.parametrize("order", ORDERS)
def test_batch_norm_and_padding_lie_as_on_the_cpu(order: tuple[int, ...]) -> None:
    """A view of what a transposed batch norm gives, as PatchTST's, failed on ranks alone."""
    aten, x = torch.ops.aten, in_order(order)
    w, y = torch.ones(4), torch.randn(x.shape)
    assert_lies_as_real(aten.native_batch_norm, x, w, w, None, None, True, 0.1, 1e-5)
    backward = (y, x, w, None, None, w, w, True, 1e-5, [True] * 3)
    assert_lies_as_real(aten.native_batch_norm_backward, *backward)
    if len(order) > 3:
        for kind in ("reflection", "replication"):
            name, pad = f"{kind}_pad{len(order) - 2}d", [1] * (2 * len(order) - 4)
            padded = getattr(aten, name)(x, pad)
            assert_lies_as_real(getattr(aten, name), x, pad)
            assert_lies_as_real(getattr(aten, f"{name}_backward"), padded.contiguous(), x, pad)
    if len(order) == 4:
        assert_lies_as_real(aten.channel_shuffle, x, 2)


@pytest.mark.parametrize("order", ORDERS)
def test_elementwise_results_lie_as_the_real_ones_do(order: tuple[int, ...]) -> None:
    aten, x = torch.ops.aten, in_order(order)
    others = (x, torch.randn(x.shape), x[:1].contiguous(), torch.tensor(2.0))
    for name in ("floor_divide", "heaviside", "logaddexp", "logical_and", "logical_or"):
        for other in others:
            assert_lies_as_real(getattr(aten, name), x, other)
        assert_lies_as_real(getattr(aten, name), x[:, :1], x[0])
    assert_lies_as_real(aten.native_dropout_backward, torch.randn(x.shape), x > 0, 0.5)
    for overload, args in ((aten.pow.Scalar, (2.0, x)), (aten.xlogy.Tensor, (x, others[3]))):
        assert_lies_as_real(SimpleNamespace(default=overload), *args)


def test_a_call_that_fails_says_what_it_says_in_an_eager_step() -> None:
    """Programs look for words in what they catch."""

    def make() -> Any:
        texts: list[str] = []

        def weigh(loss: torch.Tensor) -> torch.Tensor:
            x = torch.ones(3, 4)
            for wrong in (lambda: x @ x, lambda: torch.cat([x, x.t()]), lambda: x.view(5, 5)):
                try:
                    wrong()
                except RuntimeError as error:
                    texts.append(str(error))
            return loss

        return weighed(weigh, texts)

    assert_leaves_as_eager(make)


def test_placeholders_are_what_torch_makes_under_the_mode() -> None:
    mode, buffer = FakeTensorMode(), torch.zeros(4, 3, dtype=torch.complex64).t()
    frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    leaf = torch.ones(2, 0, requires_grad=True)
    for live in (nn.Parameter(torch.ones(3, 2).t()), frozen, buffer, leaf, torch.tensor(True)):
        with mode:
            made = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype, device="cpu")
            if isinstance(live, nn.Parameter):
                made = nn.Parameter(made)
            made.requires_grad_(live.requires_grad)
        found = placeholder(live, mode, None)
        assert isinstance(found, nn.Parameter) == isinstance(live, nn.Parameter)
        assert found.requires_grad == live.requires_grad
        with torch.no_grad():
            assert _are_equal_fakes(made.requires_grad_(False), found.requires_grad_(False))
