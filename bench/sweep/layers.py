"""Layers of `torch.nn`, each between two others that learn, and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.sweep.steps import Entry, Factory, adam, loss_step, mlp, sgd, small

C, N = 4, 3


class Around(nn.Module):
    """A layer over features that are learnt, its result weighed."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.rand(shape) + 0.5)
        self.layer = layer
        self.after = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        out = self.layer(x * self.before)
        out = out[0] if isinstance(out, tuple) else out
        return (self.after * out.float()).square().mean()


def around_step(model: Around, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    optimizer.step()
    return loss


def _around(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Factory:
    def factory() -> Entry:
        torch.manual_seed(0)
        model = Around(make(), shape)
        return around_step, (model, adam(model), torch.randn(N, *shape))

    return factory


FLAT, LINE, IMAGE, CUBE = (16,), (C, 10), (C, 8, 8), (C, 4, 4, 4)
#: Layers by name, and the shape of one sample.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 8), FLAT),
    "conv1d": (lambda: nn.Conv1d(C, 6, 3, padding=1), LINE),
    "conv2d": (lambda: nn.Conv2d(C, 6, 3, stride=2), IMAGE),
    "conv2d_grouped_dilated": (lambda: nn.Conv2d(C, 8, 3, groups=2, dilation=2), IMAGE),
    "conv2d_same_reflect": (lambda: nn.Conv2d(C, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv3d": (lambda: nn.Conv3d(C, 4, 3), CUBE),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(C, 4, 3, stride=2), LINE),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(C, 4, 3, stride=2, output_padding=1), IMAGE),
    "batch_norm1d": (lambda: nn.BatchNorm1d(C), LINE),
    "batch_norm2d_no_stats": (lambda: nn.BatchNorm2d(C, track_running_stats=False), IMAGE),
    "batch_norm2d": (lambda: nn.BatchNorm2d(C), IMAGE),
    "batch_norm2d_cumulative": (lambda: nn.BatchNorm2d(C, momentum=None), IMAGE),
    "group_norm": (lambda: nn.GroupNorm(2, C), IMAGE),
    "instance_norm": (lambda: nn.InstanceNorm2d(C, affine=True), IMAGE),
    "layer_norm": (lambda: nn.LayerNorm(8), IMAGE),
    "rms_norm": (lambda: nn.RMSNorm(16), FLAT),
    "local_response_norm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "max_pool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "max_pool2d_overlapping": (lambda: nn.MaxPool2d(3, stride=1, ceil_mode=True), IMAGE),
    "avg_pool2d": (lambda: nn.AvgPool2d(2, count_include_pad=False, padding=1), IMAGE),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d(3), IMAGE),
    "adaptive_max_pool2d": (lambda: nn.AdaptiveMaxPool2d(2), IMAGE),
    "lp_pool2d": (lambda: nn.LPPool2d(2, 2), IMAGE),
    "upsample_nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "upsample_bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "unfold": (lambda: nn.Unfold(3), IMAGE),
    "pad_reflect": (lambda: nn.ReflectionPad2d(1), IMAGE),
    "dropout": (lambda: nn.Dropout(0.3), FLAT),
    "dropout2d": (lambda: nn.Dropout2d(0.3), IMAGE),
    "alpha_dropout": (lambda: nn.AlphaDropout(0.3), FLAT),
    "rrelu": (lambda: nn.RReLU(), FLAT),
    "prelu": (lambda: nn.PReLU(C), IMAGE),
    "gelu_tanh": (lambda: nn.GELU(approximate="tanh"), FLAT),
    "glu": (lambda: nn.GLU(), FLAT),
    "relu_in_place": (lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True)), FLAT),
    "silu_in_place": (lambda: nn.Sequential(nn.Linear(16, 8), nn.SiLU(inplace=True)), FLAT),
    "softmax": (lambda: nn.Softmax(-1), FLAT),
    "rnn": (lambda: nn.RNN(10, 8, batch_first=True), LINE),
    "lstm": (lambda: nn.LSTM(10, 8, num_layers=2, batch_first=True), LINE),
    "lstm_dropout": (lambda: nn.LSTM(10, 8, num_layers=2, batch_first=True, dropout=0.2), LINE),
    "lstm_projection": (lambda: nn.LSTM(10, 8, proj_size=4, batch_first=True), LINE),
    "gru_bidirectional": (lambda: nn.GRU(10, 8, bidirectional=True, batch_first=True), LINE),
    "transformer_encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        ),
        (5, 16),
    ),
    "transformer_decoder_layer": (lambda: _Decoder(), (5, 16)),
    "attention": (lambda: _Attention(), (5, 16)),
    "bilinear": (lambda: _Bilinear(), FLAT),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), FLAT),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), FLAT),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(16, 8)), FLAT),
}  # fmt: skip


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=True)[0]


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x.flip(1), tgt_mask=mask)


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(16, 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


def _loss(make: Callable[[], nn.Module], target: Callable[[], torch.Tensor]) -> Factory:
    def factory() -> Entry:
        model, x, _ = small()
        criterion = make()

        def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, sgd(model), x, target())

    return factory


def _floats() -> torch.Tensor:
    return torch.randn(4, 8)


def _part() -> torch.Tensor:
    return torch.rand(4, 8)


def _class() -> torch.Tensor:
    return torch.randint(8, (4,))


def _sign() -> torch.Tensor:
    return torch.randint(2, (4, 8)).float() * 2 - 1


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mse": (nn.MSELoss, _floats),
    "l1": (nn.L1Loss, _floats),
    "smooth_l1": (nn.SmoothL1Loss, _floats),
    "huber": (lambda: nn.HuberLoss(delta=0.5), _floats),
    "cross_entropy_smooth": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), _class),
    "cross_entropy_weighted": (lambda: nn.CrossEntropyLoss(weight=torch.rand(8)), _class),
    "bce_logits": (lambda: nn.BCEWithLogitsLoss(pos_weight=torch.rand(8)), _part),
    "kl_div": (lambda: nn.KLDivLoss(reduction="batchmean"), _part),
    "poisson": (nn.PoissonNLLLoss, _part),
    "hinge_embedding": (nn.HingeEmbeddingLoss, _sign),
    "soft_margin": (nn.SoftMarginLoss, _sign),
    "multi_margin": (nn.MultiMarginLoss, _class),
    "multilabel_soft_margin": (nn.MultiLabelSoftMarginLoss, _part),
}


def _embedding(**options: Any) -> Factory:
    def factory() -> Entry:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 8, **options), nn.Flatten(), nn.Linear(32, 8))
        return loss_step, (model, sgd(model), torch.randint(20, (4, 4)), torch.randn(4, 8))

    return factory


def _bag() -> Entry:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 16, mode="mean"), mlp())
    return loss_step, (model, sgd(model), torch.randint(20, (4, 3)), torch.randn(4, 8))


def _ctc() -> Entry:
    torch.manual_seed(0)
    model = mlp(16, 32, 6)
    lengths = torch.full((2,), 10), torch.full((2,), 3)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.ctc_loss(model(x).log_softmax(-1), y, *lengths)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, sgd(model), torch.randn(10, 2, 16), torch.randint(1, 6, (2, 3)))


CASES: dict[str, Factory] = {
    **{name: _around(*each) for name, each in LAYERS.items()},
    "embedding": _embedding(),
    "embedding_padding": _embedding(padding_idx=0),
    "embedding_max_norm": _embedding(max_norm=1.0),
    "embedding_sparse": _embedding(sparse=True),
    "embedding_bag": _bag,
    **{f"loss_{name}": _loss(*each) for name, each in LOSSES.items()},
    "loss_ctc": _ctc,
}
