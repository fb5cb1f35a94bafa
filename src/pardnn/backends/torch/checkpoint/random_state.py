"""The random state of a run: a single one, since a step draws the numbers of one device.

It has the torch generators that ops draw from, and those of Python and NumPy, for data loaders.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pardnn.errors import FileError


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's generators, as JSON types.

    Args:
        device: The device of the rank.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    found: dict[str, Any] = {
        "torch": _hex(torch.get_rng_state()),
        "python": [version, np.array(words, "<u4").tobytes().hex(), gauss],
        "numpy": [name, keys.astype("<u4").tobytes().hex(), position, has_gauss, cached],
    }
    if device.type == "cuda":
        found["cuda"] = _hex(torch.cuda.get_rng_state(device))
    return found


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set this rank's generators; those without a state in the checkpoint stay as they are.

    Args:
        state: The result of `random_state`.
        device: The device of the rank.

    Raises:
        FileError: E435, if a state is damaged.
    """
    try:
        if "torch" in state:
            torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
        if "python" in state:
            version, words, gauss = state["python"]
            random.setstate((version, tuple(_words(words).tolist()), gauss))
        if "numpy" in state:
            name, keys, *rest = state["numpy"]
            np.random.set_state((name, _words(keys), *rest))  # noqa: NPY002
    except (TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"the random state is damaged: {error}", code="E435") from error


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _words(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), "<u4")
