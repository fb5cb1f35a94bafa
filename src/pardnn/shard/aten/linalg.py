"""Factorisations and solutions of batches of matrices, each computed separately."""

from __future__ import annotations

from typing import Any

from pardnn.shard.tdl.language import Node, Opaque, Tensor
from pardnn.shard.tdl.registry import describe_aten

solved = Opaque("solved")

ALL = slice(None)


def batched(rank: int, *operands: tuple[Tensor, int]) -> Any:
    """Return `out[b.., r..] = f(a[b.., :..])[r..]`, batches broadcast.

    Args:
        rank: Dims of one result.
        operands: Inputs, and the dims of one of a batch.
    """

    def value(*i: Any) -> Node:
        batch = i[: len(i) - rank]
        parts = (t.broadcast((*batch, *[ALL] * n)) for t, n in operands)
        return solved(*parts)[i[len(batch) :]]

    return value


def _matrices(ranks: tuple[int, ...], *operands: tuple[Tensor, int]) -> Any:
    found = [batched(rank, *operands) for rank in ranks]
    return tuple(found) if len(found) > 1 else found[0]


#: Operators of one matrix, by the dims of their results.
_OF_ONE = {
    (2,): ["cholesky", "cholesky_inverse", "linalg_matrix_exp"],
    (2, 0): ["linalg_cholesky_ex", "linalg_inv_ex"],
    (0, 2, 1): ["_linalg_det"],
    (0, 0, 2, 1): ["_linalg_slogdet"],
    (1, 2): ["linalg_eig", "_linalg_eigh"],
    (2, 1, 0): ["linalg_ldl_factor_ex", "linalg_lu_factor_ex"],
    (2, 2): ["linalg_qr"],
    (2, 1): ["geqrf"],
}


def _describe_of_one() -> None:
    def described(ranks: tuple[int, ...]) -> Any:
        def of_one(self: Tensor, *more: Any, **named: Any) -> Any:
            return _matrices(ranks, (self, 2))

        return of_one

    for ranks, names in _OF_ONE.items():
        describe_aten(*(f"aten.{name}" for name in names))(described(ranks))


_describe_of_one()


@describe_aten("aten._linalg_svd")
def svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> Any:
    """Singular values and vectors; without vectors these are empty."""
    vectors = batched(2, (A, 2)) if compute_uv else None
    return vectors, batched(1, (A, 2)), vectors


@describe_aten("aten.linalg_lu")
def lu(A: Tensor, *, pivot: bool = True) -> Any:
    """Permutation, lower and upper factor; without pivoting there is no permutation."""
    factor = batched(2, (A, 2))
    return factor if pivot else None, factor, factor


@describe_aten("aten.lu_unpack")
def lu_unpack(
    LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> Any:
    """Permutation, lower and upper factor of what a factorisation returned."""
    factor = batched(2, (LU_data, 2), (LU_pivots, 1))
    data = factor if unpack_data else None
    return factor if unpack_pivots else None, data, data


@describe_aten("aten.linalg_pinv.atol_rtol_tensor")
def pinv(self: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """Pseudo-inverses, with tolerances for each."""
    limits = [(t, 0) for t in (atol, rtol) if isinstance(t, Tensor)]
    return batched(2, (self, 2), *limits)


@describe_aten("aten._linalg_solve_ex")
def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """Solutions, factors, pivots and errors; a right side may be a vector."""
    rank = 1 if B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1]) else 2
    return (batched(rank, (A, 2), (B, rank)), *(batched(n, (A, 2)) for n in (2, 1, 0)))


@describe_aten("aten.linalg_solve_triangular", "aten.cholesky_solve")
def solve_triangular(self: Tensor, B: Tensor, *more: Any, **named: Any) -> Any:
    """Solutions by a factor."""
    return batched(2, (self, 2), (B, 2))


@describe_aten("aten.triangular_solve")
def triangular_solve(self: Tensor, A: Tensor, *more: Any) -> Any:
    """Solutions, and the factor once more."""
    return batched(2, (self, 2), (A, 2)), batched(2, (self, 2), (A, 2))


@describe_aten("aten.linalg_lu_solve", "aten.linalg_ldl_solve")
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, **named: Any) -> Any:
    """Solutions by factors and pivots."""
    return batched(2, (LU, 2), (pivots, 1), (B, 2))


@describe_aten("aten.linalg_householder_product")
def householder_product(input: Tensor, tau: Tensor) -> Any:
    """Products of reflections."""
    return batched(2, (input, 2), (tau, 1))


@describe_aten("aten.ormqr")
def ormqr(self: Tensor, input2: Tensor, input3: Tensor, *more: Any) -> Any:
    """Matrices times products of reflections."""
    return batched(2, (self, 2), (input2, 1), (input3, 2))


@describe_aten("aten.linalg_cross")
def cross(self: Tensor, other: Tensor, *, dim: int = -1) -> Any:
    """Vector products along a dim of size 3."""

    def value(*i: Any) -> Node:
        d = dim % len(i)
        index = (*i[:d], ALL, *i[d + 1 :])
        return solved(self.broadcast(index), other.broadcast(index))[i[d]]

    return value
