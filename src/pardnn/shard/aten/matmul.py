"""Products of matrices."""

from __future__ import annotations

from typing import Any

from pardnn.shard.tdl.language import Once, Opaque, Sum, Tensor
from pardnn.shard.tdl.registry import describe_strided

distance = Opaque("distance")


@describe_strided("aten.mm")
def mm(self: Tensor, mat2: Tensor) -> Any:
    """Matrix times matrix."""
    return lambda i, j: Sum(lambda k: self[i, k] * mat2[k, j])


@describe_strided("aten.bmm")
def bmm(self: Tensor, mat2: Tensor) -> Any:
    """Matrices times matrices, one by one."""
    return lambda b, i, j: Sum(lambda k: self[b, i, k] * mat2[b, k, j])


@describe_strided("aten.mv")
def mv(self: Tensor, vec: Tensor) -> Any:
    """Matrix times vector."""
    return lambda i: Sum(lambda k: self[i, k] * vec[k])


@describe_strided("aten.dot", "aten.vdot")
def dot(self: Tensor, tensor: Tensor) -> Any:
    """Vector times vector."""
    return lambda: Sum(lambda k: self[k] * tensor[k])


@describe_strided("aten.addmm")
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A matrix product, and an addend that is broadcast."""
    return lambda i, j: (
        Sum(lambda k: mat1[i, k] * mat2[k, j]) * alpha
        + Once(self.broadcast((i, j)) * beta, {"beta": 0})
    )


@describe_strided("aten.addmv")
def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Matrix times vector, and an addend."""
    return lambda i: (
        Sum(lambda k: mat[i, k] * vec[k]) * alpha + Once(self.broadcast((i,)) * beta, {"beta": 0})
    )


@describe_strided("aten.baddbmm")
def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Products of matrices one by one, and an addend that is broadcast."""
    return lambda b, i, j: (
        Sum(lambda k: batch1[b, i, k] * batch2[b, k, j]) * alpha
        + Once(self.broadcast((b, i, j)) * beta, {"beta": 0})
    )


@describe_strided("aten._cdist_forward")
def cdist(x1: Tensor, x2: Tensor, p: float, compute_mode: Any = None) -> Any:
    """Distances between the rows of two matrices."""
    return lambda *i: distance(
        x1.broadcast((*i[:-2], i[-2], slice(None))), x2.broadcast((*i[:-2], i[-1], slice(None)))
    )
