"""Random numbers: each element is drawn separately, but the plan decides which draw it gets.

A worker advances its generator past the draws of the others, or draws all and keeps its shard.
"""

from __future__ import annotations

from typing import Any

from pardnn.shard.aten.elementwise import same_index
from pardnn.shard.tdl.language import Apply, Local, Opaque, Tensor
from pardnn.shard.tdl.registry import describe_aten

draw = Opaque("draw")


def number(*_: Any) -> Apply:
    """Return the value of an element that reads nothing."""
    return draw()


@describe_aten(
    "aten.bernoulli", "aten.normal_", "aten.uniform_", "aten.exponential_", "aten.random_",
    "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.dropout",
    "aten.log_normal_", "aten.geometric_", "aten.cauchy_", is_random=True,
)  # fmt: skip
def drawn_like(self: Any, *attributes: Any, **more: Any) -> Any:
    """One draw for each element of a tensor."""
    return same_index(self, *attributes, **more)


@describe_aten("aten.native_dropout", is_random=True)
def native_dropout(input: Tensor, p: float, train: bool | None) -> Any:
    """Elements dropped, and which ones were kept."""
    return same_index(input), same_index(input)


@describe_aten("aten.rand", "aten.randn", is_random=True)
def drawn(size: list[int], **more: Any) -> Any:
    """A new tensor of draws."""
    return Local(lambda *i: number(*i), size=lambda local: list(local.outputs[0]))


@describe_aten("aten.randint", is_random=True)
def randint(high: int, size: list[int], **more: Any) -> Any:
    """A new tensor of whole numbers."""
    return Local(lambda *i: number(*i), size=lambda local: list(local.outputs[0]))


@describe_aten("aten.randint.low", is_random=True)
def randint_low(low: int, high: int, size: list[int], **more: Any) -> Any:
    """A new tensor of whole numbers."""
    return Local(lambda *i: number(*i), size=lambda local: list(local.outputs[0]))


@describe_aten("aten.randperm", is_random=True)
def randperm(n: int, **more: Any) -> Any:
    """A permutation is one draw."""
    return lambda i: number()[i]
