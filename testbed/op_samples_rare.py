"""Samples of operators that few training steps call: factorisations, shuffles, rare losses."""

from typing import Any

import torch

from testbed.op_draw import Draw, named, sample

UNARY = """alias_copy angle conj_physical rad2deg special_entr special_erfcx special_i0e special_i1
special_i1e special_log_ndtr special_bessel_j0 special_bessel_j1 special_modified_bessel_i0
special_modified_bessel_k0 special_spherical_bessel_j0 isneginf isposinf i0"""
sample(*named(UNARY))(lambda d: (d.f(*d.sizes(2)),))
sample("aten.special_ndtri.default")(lambda d: (d.p(6, 7).clamp(max=0.9),))
sample("aten.mvlgamma.default")(lambda d: (d.p(6, 7) + 3, 2))
sample("aten.frexp.Tensor")(lambda d: (d.f(6, 7),))
sample("aten.polygamma.default")(lambda d: (2, d.p(6, 7)))
sample(*named("igamma igammac special_xlog1py special_zeta"))(lambda d: (d.p(6, 7), d.p(7) + 1))
sample(*named("gcd lcm"))(lambda d: (d.i(30, 6, 7) + 1, d.i(30, 7) + 1))
sample(*named("bitwise_left_shift bitwise_right_shift ldexp", "Tensor"))(
    lambda d: (d.i(30, 6, 7), d.i(4, 7))
)
POLYNOMIALS = """special_chebyshev_polynomial_t special_hermite_polynomial_h
special_laguerre_polynomial_l special_legendre_polynomial_p"""
sample(*named(POLYNOMIALS))(lambda d: (d.f(6, 7), d.i(4, 7).double()))
sample("aten.isin.Tensor_Tensor")(lambda d: (d.i(9, 6, 7), d.i(9, 5)))
sample("aten.bucketize.Tensor")(lambda d: (d.f(6, 7), torch.linspace(-1, 1, 5).double()))
sample("aten.searchsorted.Tensor")(
    lambda d: (d.f(6, 7).sort(-1).values, d.f(6, 5), {"right": d.one(True, False)})
)
sample("aten.searchsorted.Tensor")(lambda d: (d.f(7).sort(-1).values, d.f(6, 5)))
sample("aten.rrelu_with_noise_backward.default")(
    lambda d: (d.f(6, 7), d.f(6, 7), d.p(6, 7), 0.1, 0.3, True, False)
)
sample("aten.log_sigmoid_backward.default")(lambda d: (d.f(6, 7), d.f(6, 7), d.p(6, 7)))

sample("aten.binary_cross_entropy_backward.default")(
    lambda d: (d.f(6, 7), d.p(6, 7).clamp(max=0.9), d.p(6, 7), d.one(None, d.p(7)), d.one(0, 2))
)
sample("aten.soft_margin_loss.default")(lambda d: (d.f(6, 7), d.f(6, 7).sign(), d.one(0, 1, 2)))
sample("aten.soft_margin_loss_backward.default")(
    lambda d: (d.f(6, 7), d.f(6, 7), d.f(6, 7).sign(), d.one(0, 2))
)


@sample("aten.multi_margin_loss.default")
def multi_margin(d: Draw) -> tuple[Any, ...]:
    return d.f(6, 7), d.i(7, 6), 1, 1.0, d.one(None, d.p(7)), d.one(0, 1, 2)


@sample("aten.multi_margin_loss_backward.default")
def multi_margin_backward(d: Draw) -> tuple[Any, ...]:
    reduction = d.one(0, 2)
    return (d.f() if reduction else d.f(6), *multi_margin(d)[:5], reduction)


@sample("aten.multilabel_margin_loss_forward.default")
def multilabel(d: Draw) -> tuple[Any, ...]:
    return d.f(6, 5), d.i(5, 6, 5), d.one(0, 1, 2)


@sample("aten.multilabel_margin_loss_backward.default")
def multilabel_backward(d: Draw) -> tuple[Any, ...]:
    scores, target, _ = multilabel(d)
    reduction = d.one(0, 2)
    _, is_target = torch.ops.aten.multilabel_margin_loss_forward(scores, target, reduction)
    return d.f() if reduction else d.f(6), scores, target, reduction, is_target


sample("aten.addbmm.default")(lambda d: (d.f(6, 7), d.f(5, 6, 8), d.f(5, 8, 7), {"alpha": 2.0}))
sample("aten.addr.default")(lambda d: (d.f(7), d.f(6), d.f(7), {"beta": 0.5}))
sample("aten.trace.default")(lambda d: (d.f(7, 7),))
sample("aten._cdist_backward.default")(
    lambda d: (lambda a, b: (d.f(3, 6, 7), a, b, 2.0, torch.cdist(a, b)))(
        d.f(3, 6, 5), d.f(3, 7, 5)
    )
)


sample(*named("_fft_c2c"))(
    lambda d: (torch.complex(d.f(6, 5, 7), d.f(6, 5, 7)), d.one([1], [0, 2]), 0, True)
)
sample(*named("_fft_r2c"))(lambda d: (d.f(6, 5, 8), d.one([1], [0, 2]), 0, True))
sample(*named("_fft_c2r"))(lambda d: (torch.complex(d.f(6, 7, 5), d.f(6, 7, 5)), [2], 0, 8))
sample("aten.renorm.default")(lambda d: (d.f(6, 7, 5), 2, d.one(0, 1, -1), 0.5))
sample("aten.kthvalue.default")(lambda d: (d.f(6, 7), 3, d.one(0, -1), d.one(True, False)))
sample("aten.nanmedian.dim")(lambda d: (d.f(6, 7), d.one(0, -1), d.one(True, False)))
sample("aten.count_nonzero.default")(lambda d: (d.i(2, 6, 7),))
sample("aten.count_nonzero.dim_IntList")(lambda d: (d.i(2, 6, 7), d.one([0], [0, 1])))
sample("aten.aminmax.default")(
    lambda d: (d.f(6, 7), {"dim": d.one(None, 0, -1), "keepdim": d.one(True, False)})
)
sample("aten.histc.default")(lambda d: (d.f(6, 7), 5, -1, 1))

sample("aten.pixel_shuffle.default")(lambda d: (d.f(5, 2 * 4, 6, 5), 2))
sample("aten.pixel_unshuffle.default")(lambda d: (d.f(*d.one((), (3,)), 5, 12, 9), 3))
sample("aten.channel_shuffle.default")(lambda d: (d.f(5, 6, 7), 3))
sample("aten.rot90.default")(lambda d: (d.f(6, 7, 5), d.one(1, 2, 3), d.one([0, 1], [2, 0])))
sample("aten.view_as_real.default")(lambda d: (torch.complex(d.f(6, 7), d.f(6, 7)),))
sample("aten.view_as_complex.default")(lambda d: (d.f(6, 7, 2),))
sample("aten.diag_embed.default")(lambda d: (d.f(6, 7), d.one(0, 1), *d.one((-2, -1), (0, 2))))
sample("aten.diagonal_backward.default")(lambda d: (d.f(5, 6), [6, 5, 7], 0, 0, 2))
sample("aten.diagonal_backward.default")(lambda d: (d.f(6, 5), [6, 5, 6], 1, 1, 2))
sample("aten.diagonal_scatter.default")(lambda d: (d.f(6, 5, 7), d.f(5, 6), 1, 0, 2))
sample("aten.unfold_backward.default")(lambda d: (d.f(6, 4, 3), [6, 9], 1, 3, 2))
sample("aten.expand_copy.default")(lambda d: (d.f(6, 1), [6, 5]))
sample("aten.permute_copy.default")(lambda d: (d.f(6, 5, 7), [2, 0, 1]))
sample("aten.transpose_copy.int")(lambda d: (d.f(6, 5, 7), 0, -1))
sample("aten.narrow_copy.default")(lambda d: (d.f(6, 7), d.one(0, -1), 1, 4))
sample("aten.view_copy.default")(lambda d: (d.f(6, 5, 7), [6, 35]))
sample("aten.unfold_copy.default")(lambda d: (d.f(6, 9), 1, 3, 2))

sample("aten.take.default")(lambda d: (d.f(6, 7), d.i(42, 5, 6)))
sample("aten.index_fill.int_Scalar")(lambda d: (d.f(6, 7), d.one(0, -1), d.i(6, 4), 2.0))
sample("aten.index_copy.default")(lambda d: (d.f(6, 7), 0, torch.randperm(6)[:5], d.f(5, 7)))
sample("aten.index_reduce.default")(lambda d: (d.f(6, 7), 0, d.i(6, 5), d.f(5, 7), "amax"))
sample("aten.segment_reduce.default")(
    lambda d: (d.f(9, 6), "sum", {"lengths": torch.tensor([2, 3, 4]), "unsafe": True})
)


def _square(d: Draw) -> torch.Tensor:
    made = d.f(5, 4, 4)
    return made @ made.mT + torch.eye(4, dtype=torch.float64)


sample(*named("cholesky cholesky_inverse linalg_matrix_exp linalg_cholesky_ex linalg_inv_ex"))(
    lambda d: (_square(d),)
)
sample(*named("_linalg_det _linalg_slogdet linalg_lu_factor_ex linalg_ldl_factor_ex geqrf"))(
    lambda d: (_square(d),)
)
sample(*named("linalg_qr _linalg_svd linalg_lu"))(lambda d: (d.f(6, 5, 4),))
sample("aten._linalg_eigh.default", "aten.linalg_eig.default")(lambda d: (_square(d),))
sample("aten._linalg_solve_ex.default")(lambda d: (_square(d), d.one(d.f(5, 4, 3), d.f(5, 4))))
sample("aten.linalg_solve_triangular.default")(
    lambda d: (_square(d).tril(), d.f(5, 4, 3), {"upper": False})
)
sample("aten.cholesky_solve.default")(lambda d: (d.f(5, 4, 3), _square(d).tril()))
sample("aten.triangular_solve.default")(lambda d: (d.f(5, 4, 3), _square(d)))
sample("aten.linalg_householder_product.default")(lambda d: torch.geqrf(d.f(5, 6, 4)))
sample("aten.ormqr.default")(lambda d: (*torch.geqrf(d.f(5, 6, 4)), d.f(5, 6, 3)))
sample("aten.linalg_cross.default")(lambda d: (d.f(6, 3, 5), d.f(1, 3, 5), {"dim": 1}))


@sample("aten.linalg_lu_solve.default")
def lu_solve(d: Draw) -> tuple[Any, ...]:
    return (*torch.linalg.lu_factor(_square(d)), d.f(5, 4, 3))


@sample("aten.linalg_ldl_solve.default")
def ldl_solve(d: Draw) -> tuple[Any, ...]:
    return (*torch.linalg.ldl_factor(_square(d)), d.f(5, 4, 3))


@sample("aten.lu_unpack.default")
def lu_unpack(d: Draw) -> tuple[Any, ...]:
    return (*torch.linalg.lu_factor(_square(d)), *d.one((True, True), (True, False)))


for _n in (2, 3):
    sample(f"aten.adaptive_max_pool{_n}d.default")(lambda d, n=_n: (d.f(5, 6, *[8] * n), [3] * n))
    sample(f"aten.fractional_max_pool{_n}d.default")(
        lambda d, n=_n: (d.f(5, 6, *[7] * n), [2] * n, [4] * n, d.p(5, 6, n).clamp(max=0.9))
    )
for _n in (1, 2, 3):
    for _kind in ("reflection", "replication"):
        sample(f"aten.{_kind}_pad{_n}d_backward.default")(
            lambda d, n=_n: (d.f(5, 6, *[9] * n), d.f(5, 6, *[6] * n), [1, 2] * n)
        )
    sample(f"aten._upsample_nearest_exact{_n}d.default")(
        lambda d, n=_n: (d.f(5, 6, *[4] * n), [7] * n)
    )
    sample(f"aten._upsample_nearest_exact{_n}d_backward.default")(
        lambda d, n=_n: (d.f(5, 6, *[7] * n), [7] * n, [5, 6, *[4] * n])
    )


@sample("aten.adaptive_max_pool2d_backward.default")
def adaptive_max_pool_backward(d: Draw) -> tuple[Any, ...]:
    data = d.f(5, 6, 8, 8)
    return d.f(5, 6, 3, 3), data, torch.ops.aten.adaptive_max_pool2d(data, [3, 3])[1]


@sample("aten.max_unpool2d.default")
def max_unpool(d: Draw) -> tuple[Any, ...]:
    values, places = torch.ops.aten.max_pool2d_with_indices(d.f(5, 6, 8, 8), [2, 2])
    return values, places, [8, 8]


sample("aten.grid_sampler_3d.default")(
    lambda d: (d.f(5, 6, 4, 4, 4), d.f(5, 6, 5, 7, 3).clamp(-1, 1), 0, 0, False)
)


def _sampled(d: Draw, space: int) -> tuple[Any, ...]:
    """Gradient, planes or volumes, places: nearest corners, zeros outside."""
    grid = d.f(5, *[7] * space, space).clamp(-0.9, 0.9)
    return d.f(5, 6, *[7] * space), d.f(5, 6, *[4] * space), grid, 0, 0, False, [True, True]


sample("aten.grid_sampler_2d_backward.default")(lambda d: _sampled(d, 2))
sample("aten.grid_sampler_3d_backward.default")(lambda d: _sampled(d, 3))

sample("aten._pdist_backward.default")(
    lambda d: (lambda rows: (d.f(15), rows, 2.0, torch.pdist(rows)))(d.f(6, 5))
)
sample("aten._trilinear.default")(
    lambda d: (d.f(6, 5), d.f(7, 5, 8), d.f(6, 8), [1, 3], [0], [1, 2], [2, 3], d.one(0, 1))
)
sample("aten._histogramdd_from_bin_cts.default")(
    lambda d: (d.f(9, 2), [4, 5], {"range": [-2.0, 2.0, -1.0, 1.0], "weight": d.one(None, d.p(9))})
)
EDGES = torch.linspace(-2, 2, 6, dtype=torch.float64)
sample("aten._histogramdd_from_bin_tensors.default")(
    lambda d: (d.f(9, 2), [EDGES, EDGES], {"weight": d.one(None, d.p(9))})
)
sample("aten.histogram.bins_tensor")(
    lambda d: (d.f(6, 7), EDGES, {"weight": d.one(None, d.p(6, 7))})
)
sample("aten.histogram.bin_ct")(lambda d: (d.f(6, 7), 5, {"range": [-2.0, 2.0]}))


def _table(d: Draw) -> tuple[torch.Tensor, ...]:
    """Rows of a table, positions in it and where bags begin."""
    return d.f(9, 6), d.i(9, 12), torch.tensor([0, 3, 4, 9])


@sample("aten._embedding_bag_backward.default")
def bag_backward(d: Draw) -> tuple[Any, ...]:
    table, places, offsets = _table(d)
    mode = d.one(0, 1, 2)
    weights = d.p(12) if mode == 0 else None
    forward = torch.ops.aten._embedding_bag(
        table, places, offsets, False, mode, False, weights, False
    )
    return (d.f(4, 6), places, offsets, *forward[1:], 9, False, mode, False, weights)


@sample("aten._embedding_bag_dense_backward.default")
def bag_dense_backward(d: Draw) -> tuple[Any, ...]:
    grad, places, _, *rest, mode, _, weights = bag_backward(d)
    bags = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 1, 5, 3]))
    return grad, places, bags, *rest[1:], mode, weights


@sample("aten._embedding_bag_per_sample_weights_backward.default")
def bag_weights_backward(d: Draw) -> tuple[Any, ...]:
    table, places, offsets = _table(d)
    forward = torch.ops.aten._embedding_bag(table, places, offsets, False, 0, False, d.p(12), False)
    return d.f(4, 6), table, places, offsets, forward[1], 0


sample("aten._unsafe_masked_index.default")(
    lambda d: (d.f(6, 7, 5), d.b(8, 5), [d.i(6, 8), d.i(7, 8)], 0.5)
)
sample("aten._unsafe_masked_index.default")(
    lambda d: (d.f(6, 7, 5), d.b(6, 8, 5), [None, d.i(7, 8)], 0.5)
)
sample("aten._unsafe_masked_index_put_accumulate.default")(
    lambda d: (d.f(6, 7, 5), d.b(8, 5), [d.i(6, 8), d.i(7, 8)], d.f(8, 5))
)
