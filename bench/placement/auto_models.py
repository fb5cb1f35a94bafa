"""Models of many kinds in a middle size, captured for `bench auto`; most never run here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.sweep.steps import Entry, Factory, class_step
from bench.sweep.transformers_models import CLASSES, LABELS, LM, MLM, SEQ2SEQ, Batch, Model

#: Samples of a batch, tokens of a sample, words, side of an image.
BATCH, TOKENS, WORDS, IMAGE = 16, 128, 4096, 64
TEXT = {
    "vocab_size": WORDS, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 1024, "max_position_embeddings": 256, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 64}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
T5 = {
    "vocab_size": WORDS, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 2,
}  # fmt: skip
BART = TEXT | {
    "d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024,
    "decoder_start_token_id": 1, "forced_eos_token_id": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024,
    "image_size": IMAGE, "patch_size": 8,
}  # fmt: skip
LAYERED = {"image_size": IMAGE, "num_labels": 100}
SPEECH = TEXT | {
    "conv_dim": (128, 128, 128), "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 4),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip


def _tokens() -> Batch:
    ids = torch.randint(3, WORDS, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids.clone()}


def _images() -> Batch:
    pictures = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return {"pixel_values": pictures, "labels": torch.randint(3, (BATCH,))}


def _waves() -> Batch:
    return {"input_values": torch.randn(BATCH, 8000), "labels": torch.randint(2, (BATCH,))}


def _pairs() -> dict[str, Any]:
    pictures = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return {"input_ids": _tokens()["input_ids"], "pixel_values": pictures, "return_loss": True}


TRANSFORMERS: dict[str, Model] = {
    "gpt_neox": Model("GPTNeoX", LM, TEXT, _tokens),
    "bloom": Model("Bloom", LM, TEXT | {"n_layer": 2, "n_head": 4}, _tokens),
    "opt": Model("OPT", LM, TEXT | {"ffn_dim": 1024, "word_embed_proj_dim": 256}, _tokens),
    "llama": Model("Llama", LM, GROUPED, _tokens),
    "mixtral": Model("Mixtral", LM, EXPERTS, _tokens),
    "gemma2": Model("Gemma2", LM, GROUPED | {"sliding_window": 64}, _tokens),
    "bert": Model("Bert", MLM, TEXT, _tokens),
    "albert": Model("Albert", MLM, TEXT | {"embedding_size": 64}, _tokens),
    "deberta": Model("Deberta", MLM, TEXT, _tokens),
    "fnet": Model("FNet", MLM, TEXT, _tokens),
    "t5": Model("T5", SEQ2SEQ, T5, _tokens),
    "bart": Model("Bart", SEQ2SEQ, BART, _tokens),
    "vit": Model("ViT", LABELS, VISION | {"num_labels": 100}, _images),
    "swin": Model("Swin", LABELS, LAYERED | {
        "embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4},
        _images),
    "convnext": Model("ConvNext", LABELS, LAYERED | {
        "hidden_sizes": [64, 128, 256], "depths": [1, 1, 2], "num_stages": 3}, _images),
    "resnet": Model("ResNet", LABELS, LAYERED | {
        "embedding_size": 64, "hidden_sizes": [128, 256, 512], "depths": [2, 2, 2]}, _images),
    "wav2vec2": Model("Wav2Vec2", CLASSES, SPEECH | {"classifier_proj_size": 64}, _waves),
    "clip": Model("CLIP", "Model", {
        "text_config": TEXT, "vision_config": VISION, "projection_dim": 128}, _pairs),
}  # fmt: skip


class _Recommender(nn.Module):
    """Recommends by a table per category, their products in pairs, and two perceptrons."""

    def __init__(self, tables: int = 12, words: int = 20_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(words, width) for _ in range(tables))
        self.below = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 2))
        self.pairs = torch.triu_indices(tables + 1, tables + 1, 1).tolist()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = self.below(x[:, :13])
        found = [table(x[:, 13 + i].long()) for i, table in enumerate(self.tables)]
        rows = torch.stack([dense, *found], 1)
        products = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.above(torch.cat([dense, products], 1))


class _UNet(nn.Module):
    """A U-Net: convolutions at four scales, each joined to that of its size on the way up."""

    def __init__(self, width: int = 32, scales: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(scales)]
        inputs = [3, *widths]
        self.down = nn.ModuleList(map(_block, inputs, widths))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in itertools.pairwise(widths))
        self.last = nn.Conv2d(width, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for block, beside in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), beside], 1))
        return self.last(x)


def _block(inputs: int, outputs: int) -> nn.Module:
    first, second = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
    return nn.Sequential(first, nn.GroupNorm(8, outputs), nn.ReLU(), second, nn.ReLU())


class _Tagger(nn.Module):
    """Words through a recurrent layer that reads both ways."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layer = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.last = nn.Linear(2 * width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.words(x))[0]).transpose(1, 2)


class _Branches(nn.Module):
    """Eight towers of unlike depth on one input, added up."""

    def __init__(self, width: int = 1024, towers: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(n)))
            for n in range(1, towers + 1)
        )
        self.last = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.last(torch.stack([tower(x) for tower in self.towers]).sum(0))


def _trained(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Entry:
    torch.manual_seed(0)
    model = make()
    return class_step, (model, torch.optim.Adam(model.parameters()), x, y)


def _of_torch() -> dict[str, Factory]:
    side = (BATCH, IMAGE, IMAGE)
    return {
        "recommender": lambda: _trained(
            _Recommender,
            torch.cat([torch.rand(4096, 13), torch.randint(20_000, (4096, 12)).float()], 1),
            torch.randint(2, (4096,)),
        ),
        "unet": lambda: _trained(
            _UNet, torch.randn(BATCH, 3, IMAGE, IMAGE), torch.randint(10, side)
        ),
        "tagger": lambda: _trained(
            _Tagger, torch.randint(WORDS, (64, 32)), torch.randint(32, (64, 32))
        ),
        "branches": lambda: _trained(
            _Branches, torch.randn(1024, 1024), torch.randint(100, (1024,))
        ),
    }


MODELS: dict[str, Factory] = {name: model.make for name, model in TRANSFORMERS.items()}
MODELS |= _of_torch()
