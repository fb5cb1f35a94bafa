"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pardnn.shard.tdl.language import At, Loops, Node, Once, Opaque, Sum, Tensor
from pardnn.shard.tdl.registry import describe_aten, describe_strided

distance = Opaque("distance")
grouped = Opaque("grouped")


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


@describe_strided("aten._cdist_backward")
def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Any:
    """Gradient by the first rows: each other row adds to it."""

    def value(*i: Any) -> Any:
        *b, n, d = i
        return Sum(
            lambda m: distance(
                grad.broadcast((*b, n, m)), x1.broadcast((*b, n, d)), x2.broadcast((*b, m, d)),
                cdist.broadcast((*b, n, m)),
            )
        )  # fmt: skip

    return value


@describe_strided("aten._pdist_backward")
def pdist_backward(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Any:
    """Gradient by rows whose pairwise distances were taken: a column needs only itself."""
    return lambda i, d: distance(grad[:], self[:, d], pdist[:])[i]


@describe_aten("aten._trilinear")
def trilinear(
    i1: Tensor, i2: Tensor, i3: Tensor, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Any:  # fmt: skip
    """Products of three tensors, each broadcast along some dims, summed over some (bilinear)."""
    ndim = i1.ndim + len(expand1)
    names = tuple(f"d{n}" for n in range(ndim))
    summed = tuple(name for n, name in enumerate(names) if n in {d % ndim for d in sumdim})
    kept = tuple(name for name in names if name not in summed)

    def product(index: dict[str, Any]) -> Node:
        read = []
        for tensor, expand in ((i1, expand1), (i2, expand2), (i3, expand3)):
            missing = {d % ndim for d in expand}
            read.append(tensor.broadcast(tuple(
                index[name] for n, name in enumerate(names) if n not in missing
            )))  # fmt: skip
        return read[0] * read[1] * read[2]

    def value(*o: Any) -> Node:
        at = dict(zip(kept, o, strict=True))
        if not summed:
            return product(at)
        inner = lambda *r: product(at | dict(zip(summed, r, strict=True)))  # noqa: E731
        return Sum(Loops(summed, inner))

    return Loops(kept, value)


@describe_strided("aten.addbmm")
def addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """The sum of products of matrices, and an addend."""
    return lambda i, j: (
        Sum(lambda b, k: batch1[b, i, k] * batch2[b, k, j]) * alpha
        + Once(self.broadcast((i, j)) * beta, {"beta": 0})
    )


@describe_strided("aten.addr")
def addr(self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """The outer product of two vectors, and an addend."""
    return lambda i, j: vec1[i] * vec2[j] + self.broadcast((i, j))


@describe_strided("aten.trace")
def trace(self: Tensor) -> Any:
    """The sum of the diagonal; a shard of it is the diagonal of a square block."""
    if self.shape[0] != self.shape[1]:
        return lambda: distance(self)
    return lambda: Sum(lambda i: self[i, i])


#: Elements that dims of `_grouped_mm` are cut by: its kernels want rows of whole 16 bytes.
BLOCK = 8


def _block(number: Any) -> slice:
    return slice(number * BLOCK, number * BLOCK + BLOCK)


@describe_aten("aten._grouped_mm")
def grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Products of matrices, one for each group; `offs` says where groups end.

    Which rows are multiplied with which matrix depends on `offs`, so the dim that it divides stays
    whole.
    """
    groups = [] if offs is None else [offs]
    (rows, inner), columns = self.shape[-2:], mat2.shape[-1]
    if any(size % BLOCK for size in (rows, inner, columns)):
        return lambda *i: grouped(self, mat2, *groups)[i]
    m, k, n = rows // BLOCK, inner // BLOCK, columns // BLOCK
    every = slice(None)
    if self.ndim == 3 and mat2.ndim == 3:

        def one_by_one(g: Any, m: Any, n: Any) -> At:
            product = Sum(
                lambda k=k: grouped(self[g, _block(m), _block(k)], mat2[g, _block(k), _block(n)])
            )
            return At((g, _block(m), _block(n)), product)

        return Loops(("g", "m", "n"), one_by_one, {"m": m, "n": n})
    if self.ndim == 2 and mat2.ndim == 3:

        def by_rows(n: Any) -> At:
            product = Sum(
                lambda k=k: grouped(self[:, _block(k)], mat2[:, _block(k), _block(n)], *groups)
            )
            return At((every, _block(n)), product)

        return Loops(("n",), by_rows, {"n": n})
    if self.ndim == 3:

        def by_columns(m: Any) -> At:
            product = Sum(
                lambda k=k: grouped(self[:, _block(m), _block(k)], mat2[_block(k), :], *groups)
            )
            return At((_block(m), every), product)

        return Loops(("m",), by_columns, {"m": m})

    def summed(m: Any, n: Any) -> At:
        product = grouped(self[_block(m), :], mat2[:, _block(n)], *groups)
        return At((every, _block(m), _block(n)), product)

    return Loops(("m", "n"), summed, {"m": m, "n": n})
