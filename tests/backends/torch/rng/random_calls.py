"""Random calls by name: what ops draw, on dense, strided and transposed tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

CPU = torch.device("cpu")
Make = Callable[[], torch.Tensor]


def _strided(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2 * size, dtype=dtype)[::2]


def random_calls(size: int, dtype: torch.dtype) -> dict[str, Make]:
    flat = torch.zeros(size, dtype=dtype)
    return {
        "uniform_": lambda: torch.empty(size, dtype=dtype).uniform_(),
        "normal_": lambda: torch.empty(size, dtype=dtype).normal_(),
        "normal_ strided": lambda: _strided(size, dtype).normal_(),
        "uniform_ strided": lambda: _strided(size, dtype).uniform_(),
        "bernoulli_": lambda: torch.empty(size, dtype=dtype).bernoulli_(0.3),
        "bernoulli_ strided": lambda: _strided(size, dtype).bernoulli_(0.3),
        "bernoulli tensor": lambda: torch.bernoulli(torch.full((size,), 0.4, dtype=dtype)),
        "dropout": lambda: torch.native_dropout(flat + 1, 0.3, True)[0],
        "rand": lambda: torch.rand(size, dtype=dtype),
        "randn": lambda: torch.randn(size, dtype=dtype),
        "randn transposed": lambda: torch.zeros(size, 3, dtype=dtype).t().normal_(),
        "rand_like": lambda: torch.rand_like(flat),
        "randint": lambda: torch.randint(0, 1000, (size,)),
        "randint wide": lambda: torch.randint(0, 1 << 40, (size,)),
        "randperm": lambda: torch.randperm(size),
        "multinomial": lambda: torch.multinomial(torch.ones(size + 1), size),
        "multinomial replaced": lambda: torch.multinomial(torch.ones(7), size, replacement=True),
        "exponential_": lambda: torch.empty(size, dtype=dtype).exponential_(),
        "log_normal_": lambda: torch.empty(size, dtype=dtype).log_normal_(),
        "cauchy_": lambda: torch.empty(size, dtype=dtype).cauchy_(),
        "geometric_": lambda: torch.empty(size, dtype=dtype).geometric_(0.3),
        "nothing": lambda: flat + 1,
    }


NAMES = sorted(random_calls(1, torch.float32))
