"""How samples of calls are drawn, and the table of them."""

import random
from collections.abc import Callable
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Draws tensors and sizes from one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def size(self, low: int = 5, high: int = 8) -> int:
        return self.dice.randint(low, high)

    def sizes(self, count: int, low: int = 5, high: int = 8) -> list[int]:
        return [self.size(low, high) for _ in range(count)]

    def one(self, *options: Any) -> Any:
        return self.dice.choice(options)

    def f(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def p(self, *shape: int) -> torch.Tensor:
        return self.f(*shape).abs() + 0.1

    def i(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def b(self, *shape: int) -> torch.Tensor:
        return self.i(2, *shape).bool()

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors that broadcast against each other, in one of several ways."""
        a, b, c = self.sizes(3, 4, 7)
        shapes = self.one(
            ((a, b, c), (a, b, c)), ((a, b, c), (c,)), ((a, 1, c), (b, 1)), ((a, b), ()),
            ((b,), (a, b)),
        )  # fmt: skip
        return self.f(*shapes[0]), self.f(*shapes[1])


Sampler = Callable[[Draw], tuple[Any, ...]]
SAMPLES: dict[str, list[Sampler]] = {}


def sample(*kinds: str) -> Callable[[Sampler], Sampler]:
    def register(function: Sampler) -> Sampler:
        for kind in kinds:
            SAMPLES.setdefault(kind, []).append(function)
        return function

    return register


def named(names: str, overload: str = "default") -> list[str]:
    return [f"aten.{name}.{overload}" for name in names.split()]


def with_keywords(drawn: tuple[Any, ...]) -> Arguments:
    """A dictionary at the end holds keyword arguments."""
    if drawn and isinstance(drawn[-1], dict):
        return drawn[:-1], drawn[-1]
    return drawn, {}
