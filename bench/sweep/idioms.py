"""Ways in which people write training steps; the settings of each are those of `steps`."""

from __future__ import annotations

from bench.sweep.idioms_layers import CASES as OF_LAYERS
from bench.sweep.idioms_models import CASES as OF_MODELS
from bench.sweep.idioms_numbers import CASES as OF_NUMBERS
from bench.sweep.idioms_torch import CASES as OF_TORCH
from bench.sweep.idioms_updates import CASES as OF_UPDATES
from bench.sweep.idioms_values import CASES as OF_VALUES
from bench.sweep.steps import Factory

CASES: dict[str, Factory] = {
    **OF_UPDATES, **OF_MODELS, **OF_VALUES, **OF_NUMBERS, **OF_TORCH, **OF_LAYERS
}  # fmt: skip
