"""How many numbers a random fill draws, by its size, and whether it can be run in parts.

Every rule is checked against measurements of the installed library on first use: `uniform_` takes
one draw per element, two in double precision; `normal_` draws in groups of 16, and if the size is
no multiple of 16, it fills the last 16 elements once more. So filling consecutive parts that begin
at multiples of 16 and have at least 16 elements gives the numbers of one fill of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from pardnn.backends.torch.deferred_init import recording as rec
from pardnn.backends.torch.deferred_init.program_slice import call_name
from pardnn.backends.torch.rng import generator as rng

#: Elements that `normal_` draws together.
GROUP = 16
_TRUNCATED = "_no_grad_trunc_normal_"
# A recorder replaces it while a factory runs, but measurements must still draw.
_truncated_normal = torch.nn.init._no_grad_trunc_normal_
# Box-Muller from 53 random bits gives at most sqrt(2 * 53 * log(2)) = 8.6 standard deviations.
_LARGEST_SAMPLE = 9


def counted_draws(call: rec.Call) -> rng.Draws | None:
    """Return the draws of a random fill by its size; None if no rule is known to hold.

    It is also None for any other call, device or layout.
    """
    ref = call.outputs[0] if call.outputs else None
    return None if ref is None else draws_of_fill(call, ref)


def draws_of_fill(call: rec.Call, ref: rec.TensorRef) -> rng.Draws | None:
    """Return the draws of a random fill of another tensor, as `counted_draws` does."""
    if ref.device.type != "cpu":
        return None
    size, name = num_elements(ref), call_name(call)
    if name == "uniform_":
        count = size * _draws_per_element(ref.dtype)
        return rng.fixed(count) if _uniform_counts(ref.dtype) else None
    is_normal = name == "normal_" or (name == _TRUNCATED and _never_rejects(call.args))
    if is_normal and is_dense(ref) and size >= GROUP and _normal_counts(ref.dtype):
        return rng.fixed(_normal_draws(size, ref.dtype))
    return None


def is_fill_in_parts(call: rec.Call) -> bool:
    """Whether a random fill gives the same numbers if parts are filled one after the other."""
    ref, name = call.outputs[0] if call.outputs else None, call_name(call)
    return (
        ref is not None
        and name in _FILLS
        and counted_draws(call) is not None
        and _parts_agree(name, ref.dtype)
    )


def num_elements(ref: rec.TensorRef) -> int:
    """Elements of a tensor."""
    return math.prod(ref.size)


def is_dense(ref: rec.TensorRef) -> bool:
    """Whether a tensor's elements are contiguous in C order."""
    return torch.empty_strided(ref.size, ref.stride, device="meta").is_contiguous()


def _never_rejects(args: tuple[Any, ...]) -> bool:
    """Whether `trunc_normal_` keeps every sample, as with bounds of 100 standard deviations."""
    if len(args) != 5:
        return False
    _, mean, std, low, high = args
    return bool(min(mean - low, high - mean) > _LARGEST_SAMPLE * std)


def _draws_per_element(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float64 else 1


def _normal_draws(size: int, dtype: torch.dtype) -> int:
    return _draws_per_element(dtype) * (size if size % GROUP == 0 else size + GROUP)


@cache
def _uniform_counts(dtype: torch.dtype) -> bool:
    cpu = torch.device("cpu")
    return all(
        rng.measure(lambda size=size: torch.empty(size, dtype=dtype).uniform_(), cpu)
        == rng.measure(lambda size=size: torch.empty(2 * size, dtype=dtype)[::2].uniform_(), cpu)
        == rng.fixed(size * _draws_per_element(dtype))
        for size in (1, 7, 16, 100, 4097)
    )


def _truncate(tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    std = 2 / (_LARGEST_SAMPLE + 1)
    return _truncated_normal(tensor, 0.0, std, -2.0, 2.0, generator=generator)


@cache
def _normal_counts(dtype: torch.dtype) -> bool:
    cpu = torch.device("cpu")
    return all(
        rng.measure(lambda size=size: torch.empty(size, dtype=dtype).normal_(), cpu)
        == rng.measure(lambda size=size: _truncate(torch.empty(size, dtype=dtype)), cpu)
        == rng.fixed(_normal_draws(size, dtype))
        for size in (16, 17, 31, 32, 100, 4096, 4097)
    )


_Fill = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
_FILLS: dict[str, _Fill] = {
    "uniform_": lambda tensor, generator: tensor.uniform_(generator=generator),
    "normal_": lambda tensor, generator: tensor.normal_(generator=generator),
    _TRUNCATED: _truncate,
}


@cache
def _parts_agree(name: str, dtype: torch.dtype) -> bool:
    parts, fill = (1024, 16, 4096, 32, 53), _FILLS[name]
    one, other = (torch.Generator().manual_seed(1) for _ in range(2))
    whole = fill(torch.empty(sum(parts), dtype=dtype), one)
    made = torch.cat([fill(torch.empty(size, dtype=dtype), other) for size in parts])
    return torch.equal(whole, made) and torch.equal(one.get_state(), other.get_state())
