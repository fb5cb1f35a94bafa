"""Descriptions of ATen's operators, one file per family. Importing this registers them all."""

from pardnn.shard.describe import (
    attention,
    conv,
    elementwise,
    factory,
    index,
    matmul,
    norm,
    pool,
    random,
    reduce,
    view,
)
from pardnn.shard.describe.without import WITHOUT, reason_without

__all__ = [
    "WITHOUT",
    "attention",
    "conv",
    "elementwise",
    "factory",
    "index",
    "matmul",
    "norm",
    "pool",
    "random",
    "reason_without",
    "reduce",
    "view",
]
