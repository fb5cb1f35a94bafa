"""The description of an operator: a user's, or one of pardnn's for ATen."""

from __future__ import annotations

# Importing a family registers its descriptions.
from pardnn.shard.aten import (  # noqa: F401
    attention,
    conv,
    elementwise,
    factory,
    foreach,
    index,
    linalg,
    losses,
    matmul,
    norm,
    pool,
    random,
    rearrange,
    reduce,
    view,
)
from pardnn.shard.tdl import registry
from pardnn.shard.tdl.registry import Description


def description_of(kind: str) -> Description | None:
    """Return the description of an op's kind, None if there is none.

    The overload's own comes first, then the operator's, then that of the out-of-place form.

    Args:
        kind: Such as "aten.add.Tensor" or "mylib::op".
    """
    return registry.find(kind)


def described() -> dict[str, Description]:
    """Return all descriptions by name."""
    return registry.ATEN | registry.USERS
