"""Samples of calls: for each operator, a function that draws arguments of random sizes."""

from typing import Any

import torch

from testbed import op_samples_foreach, op_samples_layers, op_samples_rare
from testbed.op_draw import SAMPLES, Draw, named, sample, with_keywords

__all__ = [
    "SAMPLES",
    "Draw",
    "op_samples_foreach",
    "op_samples_layers",
    "op_samples_rare",
    "with_keywords",
]


UNARY = """abs acos acosh alias asin asinh atan atanh ceil clone cos cosh detach elu erf exp expm1
floor gelu hardtanh isinf isnan leaky_relu log log10 log1p log2 logical_not neg reciprocal relu
round rsqrt sigmoid sign silu sin sinh sqrt tan tanh trunc ones_like empty_like"""
sample(*named(UNARY))(lambda d: (d.f(*d.sizes(d.one(1, 2, 3))),))
sample("aten.bitwise_not.default")(lambda d: (d.i(9, d.size(), d.size()),))
sample("aten._to_copy.default")(lambda d: (d.f(d.size(), d.size()), {"dtype": torch.float32}))
sample("aten.full_like.default", "aten.fill.Scalar")(lambda d: (d.f(d.size(), d.size()), 2.0))
sample("aten.copy.default")(lambda d: (d.f(6, 7), d.f(7)))

BINARY = "add sub mul div pow eq ne lt le gt ge fmod remainder"
sample(*named(BINARY.replace("pow ", ""), "Tensor"))(lambda d: d.pair())
sample(*named("maximum minimum atan2 logical_and logical_or logical_xor"))(lambda d: d.pair())
sample("aten.add_.Tensor")(lambda d: (d.f(6, 5), d.f(5), {"alpha": 2}))
sample("aten.pow.Tensor_Tensor")(lambda d: (d.p(6, 5), d.f(5)))
sample("aten.div.Tensor_mode")(lambda d: (*d.pair(), {"rounding_mode": d.one("floor", "trunc")}))
sample("aten.div.Scalar_mode")(lambda d: (d.f(6, 5), 0.7, {"rounding_mode": "floor"}))
SCALAR = "add sub mul div eq ne lt le gt ge fmod remainder"
sample(*named(SCALAR, "Scalar"), "aten.pow.Tensor_Scalar", "aten.div_.Scalar")(
    lambda d: (d.f(d.size(), d.size()), 1.5 if d.size() % 2 else 2)
)
sample("aten.pow.Scalar")(lambda d: (1.5, d.f(d.size(), 6)))
sample(*named("bitwise_and bitwise_or bitwise_xor", "Tensor"))(lambda d: (d.b(6, 5), d.b(5)))
sample(*named("bitwise_and bitwise_or bitwise_xor", "Scalar"))(lambda d: (d.i(9, 6, 5), 3))
sample("aten.clamp.default")(lambda d: (d.f(6, 5), -0.5, d.one(None, 0.5)))
sample("aten.clamp.Tensor")(lambda d: (d.f(6, 5), d.f(5), None))
sample("aten.where.self")(lambda d: (d.b(6, 5), d.f(5), d.f(6, 1)))
sample(*named("sigmoid_backward silu_backward tanh_backward"))(lambda d: (d.f(6, 7), d.f(6, 7)))
sample("aten.threshold_backward.default")(lambda d: (d.f(6, 7), d.f(6, 7), 0))

sample("aten.mm.default")(lambda d: (lambda m, k, n: (d.f(m, k), d.f(k, n)))(*d.sizes(3)))
sample("aten.bmm.default")(lambda d: (lambda b, m, k, n: (d.f(b, m, k), d.f(b, k, n)))(*d.sizes(4)))


@sample("aten.addmm.default")
def addmm(d: Draw) -> tuple[Any, ...]:
    m, k, n = d.sizes(3)
    bias = d.one((n,), (m, n), (m, 1), ())
    return d.f(*bias), d.f(m, k), d.f(k, n), d.one({}, {"beta": 0.5, "alpha": 2.0})


@sample("aten._cdist_forward.default")
def cdist(d: Draw) -> tuple[Any, ...]:
    return d.f(3, 6, 5), d.f(3, 7, 5), 2.0, None


DIMS = "sum.dim_IntList mean.dim amax.default amin.default any.dims"
for _kind in DIMS.split():
    sample(f"aten.{_kind}")(
        lambda d: (d.f(*d.sizes(3)), d.one([0], [1, 2], [-1]), d.one(True, False))
    )
sample("aten.var.correction")(lambda d: (d.f(6, 7), d.one([0], [1]), {"correction": 0}))
sample("aten.var.dim")(lambda d: (d.f(*d.sizes(3)), [1], True, d.one(True, False)))
sample("aten.mean.default", "aten.prod.default", "aten.any.default", "aten.sum.default")(
    lambda d: (d.f(*d.sizes(2)),)
)
for _kind in ("prod.dim_int", "any.dim", "argmax.default", "argmin.default", "max.dim", "min.dim"):
    sample(f"aten.{_kind}")(lambda d: (d.f(*d.sizes(3)), d.one(0, 1, -1), d.one(True, False)))
sample("aten.cumsum.default")(lambda d: (d.f(*d.sizes(3)), d.one(0, 1, -1)))
sample(*named("_softmax _log_softmax"))(lambda d: (d.f(*d.sizes(3)), d.one(0, 1, -1), False))
sample("aten._safe_softmax.default")(lambda d: (d.f(*d.sizes(3)), d.one(0, 1, -1)))
sample(*named("_softmax_backward_data _log_softmax_backward_data"))(
    lambda d: (d.f(6, 7, 5), d.f(6, 7, 5), d.one(0, 1, -1), torch.float64)
)
sample("aten.sort.default")(lambda d: (d.f(*d.sizes(2)), d.one(0, -1), d.one(True, False)))
sample("aten.topk.default")(lambda d: (d.f(*d.sizes(2)), 3, d.one(0, -1)))


def _reshape(d: Draw) -> tuple[Any, ...]:
    a, b, c = d.sizes(3)
    return d.one(
        (d.f(a, b, c), [a, b * c]), (d.f(a, b, c), [a * b, -1]), (d.f(a * b, c), [a, b, c]),
        (d.f(a, b * c), [a, 1, b, c]), (d.f(6, 4), [8, 3]), (d.f(a, b, c), [a * b * c]),
    )  # fmt: skip


sample("aten.view.default", "aten._unsafe_view.default")(_reshape)
sample("aten.expand.default")(
    lambda d: (lambda n: (d.f(n, 1), d.one([n, 6], [5, n, 6], [-1, 6])))(d.size())
)
sample("aten.permute.default")(
    lambda d: (d.f(*d.sizes(3)), d.one([2, 0, 1], [0, 2, 1], [-1, 0, 1]))
)
sample("aten.transpose.int")(lambda d: (d.f(*d.sizes(3)), *d.one((0, 1), (1, -1), (-2, 0))))
sample("aten.t.default")(lambda d: (d.f(*d.sizes(2)),))
sample("aten.unsqueeze.default")(lambda d: (d.f(*d.sizes(2)), d.one(0, 1, -1)))
sample("aten.squeeze.dim")(lambda d: (d.f(d.size(), 1, d.size()), d.one(1, 0)))
sample("aten.squeeze.dims")(lambda d: (d.f(d.size(), 1, d.size(), 1), d.one([1], [1, 3], [0, 1])))
sample("aten.slice.Tensor")(
    lambda d: (
        d.f(12, d.size()),
        d.one(0, -1),
        *d.one((None, None, 1), (1, 9, 1), (2, -1, 2), (-4, 99, 1)),
    )
)
sample("aten.slice.Tensor")(lambda d: (d.f(14, 6), 0, d.size(0, 2), 14, d.size(2, 3)))
sample("aten.slice_backward.default")(
    lambda d: d.one(
        (d.f(6, 5), [9, 5], 0, 2, 8, 1),
        (d.f(5, 3), [5, 6], 1, 0, 6, 2),
        (d.f(5, 6), [5, 9], 1, 0, 6, 1),
    )
)
sample("aten.slice_scatter.default")(lambda d: (d.f(9, 6), d.f(4, 6), 0, 2, 6))
sample("aten.select.int")(lambda d: (d.f(*d.sizes(3)), d.one(0, 1, -1), d.one(0, 2, -1)))
sample("aten.select_scatter.default")(lambda d: (d.f(6, 7), d.f(6), 1, d.one(0, -1)))
sample("aten.split.Tensor")(lambda d: (d.f(d.size(), 9), d.one(3, 4), -1))
sample("aten.split_with_sizes.default")(lambda d: (d.f(9, d.size()), [2, 4, 3], 0))
sample("aten.cat.default")(
    lambda d: ([d.f(d.size(2), 6), d.f(d.size(1), 6), d.f(3, 6)], d.one(0, -2))
)
sample("aten.stack.default")(lambda d: ([d.f(6, 7), d.f(6, 7)], d.one(0, 1, -1)))
sample("aten.flip.default")(lambda d: (d.f(*d.sizes(3)), d.one([0], [1, 2], [-1])))
sample("aten.repeat.default")(lambda d: (d.f(*d.sizes(2)), d.one([2, 1], [1, 3], [2, 1, 1])))
sample("aten.diagonal.default")(
    lambda d: (d.f(8, 6, 9), d.one(0, 1, -2), *d.one((0, 1), (0, 2), (-1, 1)))
)

sample("aten.embedding.default")(lambda d: (d.f(9, d.size()), d.i(9, d.size(), d.size())))
sample("aten.embedding_dense_backward.default")(
    lambda d: (d.f(5, 6, 7), d.i(9, 5, 6), 9, d.one(-1, 2), d.one(False, True))
)
sample("aten._embedding_bag.default")(
    lambda d: (d.f(9, d.size()), d.i(9, 12), torch.tensor([0, 3, 7]), False, d.one(0, 1, 2))
)
sample("aten.gather.default")(lambda d: (d.f(7, 9), d.one(0, 1), d.i(7, 5, 6)))
sample("aten.scatter.src", "aten.scatter_add.default")(
    lambda d: (d.f(7, 9), 0, d.i(7, 5, 8), d.f(6, 9))
)
sample("aten.scatter.value")(lambda d: (d.f(7, 9), d.one(0, 1), d.i(7, 5, 8), 2.0))
sample("aten.scatter_reduce.two")(
    lambda d: (d.f(7, 9), 1, d.i(9, 5, 8), d.f(5, 8), d.one("sum", "amax"))
)
sample("aten.index_select.default")(lambda d: (d.f(7, 9), d.one(0, 1), d.i(7, d.size())))


@sample("aten.index.Tensor")
def index(d: Draw) -> tuple[Any, ...]:
    data = d.f(7, 8, 6)
    return d.one(
        (data, [d.i(7, 5)]), (data, [None, d.i(8, 5, 6)]), (data, [d.i(7, 5, 1), d.i(8, 6)]),
        (data, [d.i(7, 5), None, d.i(6, 5)]), (d.f(7, 6), [d.b(7)]),
    )  # fmt: skip


@sample("aten.index_put.default")
def index_put(d: Draw) -> tuple[Any, ...]:
    data = d.f(7, 8, 6)
    return d.one(
        (data, [d.i(7, 5)], d.f(5, 8, 6), True), (data, [None, d.i(8, 5)], d.f(6), True),
        (data, [torch.randperm(7)[:4], None, torch.randperm(6)[:4]], d.f(4, 8)),
        (data, [d.b(7, 8, 6)], d.f()), (data, [d.b(7)], d.f(8, 1)), (data, [d.b(7, 8)], d.f(6)),
    )  # fmt: skip
