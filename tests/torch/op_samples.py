"""Samples of calls: for each operator, a function that draws arguments of random sizes."""

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


def _conv(d: Draw, space: int) -> dict[str, Any]:
    groups = d.one(1, 1, 2, 5)
    ins, outs = groups * d.size(1, 5), groups * d.size(1, 5)
    kernel, dilation = d.sizes(space, 1, 3), d.sizes(space, 1, 2)
    stride, padding = d.sizes(space, 1, 3), d.sizes(space, 0, 2)
    extent = [12 + n for n in d.sizes(space, 0, 3)]
    batch = d.size(4, 6)
    return {
        "input": d.f(batch, ins, *extent), "weight": d.f(outs, ins // groups, *kernel),
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "outs": outs,
    }  # fmt: skip


@sample("aten.convolution.default")
def convolution(d: Draw) -> tuple[Any, ...]:
    c = _conv(d, d.one(1, 2, 2))
    bias = d.one(None, d.f(c["outs"]))
    zeros = [0] * len(c["stride"])
    window = (c["stride"], c["padding"], c["dilation"], False, zeros, c["groups"])
    return c["input"], c["weight"], bias, *window


@sample("aten.convolution.default")
def transposed_convolution(d: Draw) -> tuple[Any, ...]:
    ins, outs, groups = d.size(), d.size(), 1
    bias = d.one(None, d.f(outs))
    return (
        d.f(5, ins, 6, 6), d.f(ins, outs, 3, 3), bias, [2, 1], [1, 0], [1, 1], True, [1, 0], groups,
    )  # fmt: skip


@sample("aten.convolution_backward.default")
def convolution_backward(d: Draw) -> tuple[Any, ...]:
    c = _conv(d, d.one(1, 2, 2))
    zeros = [0] * len(c["stride"])
    window = (c["stride"], c["padding"], c["dilation"], False, zeros, c["groups"])
    out = torch.ops.aten.convolution(c["input"], c["weight"], None, *window)
    mask = d.one([True, True, True], [False, True, False], [True, False, False])
    return d.f(*out.shape), c["input"], c["weight"], [c["outs"]], *window, mask


@sample("aten.max_pool2d_with_indices.default")
def max_pool(d: Draw) -> tuple[Any, ...]:
    return d.f(*d.sizes(2), 9, 8), [3, 2], [2, 2], [1, 1]


@sample("aten.max_pool2d_with_indices_backward.default")
def max_pool_backward(d: Draw) -> tuple[Any, ...]:
    data, window = d.f(*d.sizes(2), 9, 8), ([3, 2], [2, 2], [1, 1], [1, 1], False)
    out, indices = torch.ops.aten.max_pool2d_with_indices(data, *window)
    return d.f(*out.shape), data, *window, indices


@sample("aten.max_pool3d_with_indices.default")
def max_pool3d(d: Draw) -> tuple[Any, ...]:
    return d.f(*d.sizes(2), 6, 5, 7), [2, 2, 3]


for _n in (1, 2, 3):

    def avg_pool(d: Draw, n: int = _n) -> tuple[Any, ...]:
        padding, counts = d.one(0, 1), d.one(True, True, False)
        return d.f(*d.sizes(2), *d.sizes(n, 9, 13)), [3] * n, [d.size(1, 3)] * n, [padding] * n, (
            d.one(False, False, True)
        ), counts  # fmt: skip

    sample(f"aten.avg_pool{_n}d.default")(avg_pool)


@sample("aten.avg_pool2d_backward.default")
def avg_pool2d_backward(d: Draw) -> tuple[Any, ...]:
    data = d.f(*d.sizes(2), 9, 8)
    window = ([3, 2], [2, 2], [1, 1], False, True, None)
    return d.f(*torch.ops.aten.avg_pool2d(data, *window).shape), data, *window


sample("aten._adaptive_avg_pool2d.default")(lambda d: (d.f(*d.sizes(2), 9, 8), [3, 5]))
sample("aten.adaptive_avg_pool1d.default")(lambda d: (d.f(*d.sizes(2), 9), [4]))
sample("aten._adaptive_avg_pool3d.default")(lambda d: (d.f(*d.sizes(2), 5, 6, 7), [3, 2, 4]))
sample("aten._adaptive_avg_pool2d_backward.default")(lambda d: (d.f(5, 6, 3, 5), d.f(5, 6, 9, 8)))
sample("aten.upsample_nearest2d_backward.default")(
    lambda d: (d.f(5, 6, 8, 10), [8, 10], [5, 6, 4, 5])
)
sample("aten.upsample_bilinear2d_backward.default")(
    lambda d: (d.f(5, 6, 7, 9), [7, 9], [5, 6, 4, 5], False)
)
sample("aten.upsample_nearest3d.vec")(lambda d: (d.f(*d.sizes(2), 3, 4, 5), None, [2.0, 1.5, 1.0]))
sample("aten.upsample_nearest3d_backward.default")(
    lambda d: (d.f(5, 6, 6, 4, 5), [6, 4, 5], [5, 6, 3, 4, 5])
)
sample("aten.avg_pool3d_backward.default")(
    lambda d: (d.f(5, 6, 2, 3, 2), d.f(5, 6, 4, 6, 5), [2, 2, 2], [], [0, 0, 0], False, True, None)
)


@sample("aten.max_pool3d_with_indices_backward.default")
def max_pool3d_backward(d: Draw) -> tuple[Any, ...]:
    data, window = d.f(5, 6, 4, 6, 5), ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)
    made, indices = torch.ops.aten.max_pool3d_with_indices(data, *window)
    return d.f(*made.shape), data, *window, indices


@sample("aten.glu.default")
def glu(d: Draw) -> tuple[Any, ...]:
    dim, sizes = d.one(0, 1, -1), d.sizes(3)
    sizes[dim] = 8
    return d.f(*sizes), dim


@sample("aten.glu_backward.default")
def glu_backward(d: Draw) -> tuple[Any, ...]:
    data, dim = glu(d)
    return d.f(*torch.ops.aten.glu(data, dim).shape), data, dim


sample("aten._prelu_kernel.default")(lambda d: (d.f(5, 6, 7), d.f(1, 6, 1)))
sample("aten._prelu_kernel_backward.default")(lambda d: (d.f(5, 6, 7), d.f(5, 6, 7), d.f(1, 6, 1)))
sample("aten.upsample_nearest2d.vec")(lambda d: (d.f(*d.sizes(2), 4, 5), None, [2.0, 1.5]))
sample("aten.upsample_bilinear2d.vec")(lambda d: (d.f(*d.sizes(2), 4, 5), [7, 9], False, None))
sample("aten.grid_sampler_2d.default")(
    lambda d: (d.f(5, 6, 7, 8), d.f(5, 6, 7, 2).tanh(), 0, d.one(0, 1), d.one(True, False))
)
sample("aten.col2im.default")(
    lambda d: (d.f(d.size(), 12, 20), [6, 5], [2, 2], [1, 1], [0, 0], [1, 1])
)
sample("aten.constant_pad_nd.default")(
    lambda d: (d.f(6, 7, 8), d.one([1, 2], [0, 3, 2, 0], [-1, 2, 1, -2]), d.one(0, 1.5))
)
for _n in (1, 2, 3):
    sample(f"aten.reflection_pad{_n}d.default", f"aten.replication_pad{_n}d.default")(
        lambda d, n=_n: (d.f(*d.sizes(2), *[6] * n), [1, 2] * n)
    )

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


def _affine(d: Draw, count: int) -> tuple[Any, Any]:
    return d.one((None, None), (d.f(count), d.f(count)))


@sample("aten.native_layer_norm.default")
def layer_norm(d: Draw) -> tuple[Any, ...]:
    *rows, width = d.sizes(d.one(2, 3))
    return d.f(*rows, width), [width], *_affine(d, width), 1e-5


@sample("aten.native_layer_norm_backward.default")
def layer_norm_backward(d: Draw) -> tuple[Any, ...]:
    *rows, width = d.sizes(d.one(2, 3))
    data, weight, bias = d.f(*rows, width), d.f(width), d.f(width)
    _, mean, rstd = torch.ops.aten.native_layer_norm(data, [width], weight, bias, 1e-5)
    mask = d.one([True] * 3, [False, True, True])
    return d.f(*rows, width), data, [width], mean, rstd, weight, bias, mask


@sample("aten.native_group_norm.default")
def group_norm(d: Draw) -> tuple[Any, ...]:
    n = d.size()
    return d.f(n, 6, 5, 4), *_affine(d, 6), n, 6, 20, d.one(1, 2, 3), 1e-5


@sample("aten.native_group_norm_backward.default")
def group_norm_backward(d: Draw) -> tuple[Any, ...]:
    n, groups = d.size(), d.one(1, 2, 3)
    data, weight = d.f(n, 6, 5, 4), d.f(6)
    _, mean, rstd = torch.ops.aten.native_group_norm(data, weight, None, n, 6, 20, groups, 1e-5)
    return d.f(n, 6, 5, 4), data, mean, rstd, weight, n, 6, 20, groups, [True] * 3


def _batch(d: Draw) -> tuple[Any, ...]:
    c = d.size()
    return d.f(d.size(), c, *d.one((), (5,), (4, 6))), *_affine(d, c), d.f(c), d.p(c)


sample("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")(
    lambda d: (*_batch(d), d.one(True, False), 0.1, 1e-5)
)
sample("aten._native_batch_norm_legit_no_training.default")(lambda d: (*_batch(d), 0.1, 1e-5))
sample("aten._native_batch_norm_legit.no_stats")(lambda d: (*_batch(d)[:3], True, 0.1, 1e-5))


@sample("aten.native_batch_norm_backward.default")
def batch_norm_backward(d: Draw) -> tuple[Any, ...]:
    data, weight, _, mean, var = _batch(d)
    train = d.one(True, False)
    _, saved, invstd = torch.ops.aten.native_batch_norm(
        data, weight, None, mean, var, train, 0.1, 1e-5
    )
    return d.f(*data.shape), data, weight, mean, var, saved, invstd, train, 1e-5, [True] * 3


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
    )  # fmt: skip


def _scores(d: Draw) -> tuple[torch.Tensor, torch.Tensor, Any]:
    n, c = d.size(), d.size()
    target = d.i(c, n)
    target[0] = -100
    return d.f(n, c), target, d.one(None, d.p(c))


sample("aten.nll_loss_forward.default")(lambda d: (*_scores(d), d.one(0, 1, 1, 2), -100))


@sample("aten.nll_loss_backward.default")
def nll_loss_backward(d: Draw) -> tuple[Any, ...]:
    scores, target, weight = _scores(d)
    reduction = d.one(0, 1, 2)
    _, total = torch.ops.aten.nll_loss_forward(scores, target, weight, reduction, -100)
    grad = d.f(len(scores)) if reduction == 0 else d.f()
    return grad, scores, target, weight, reduction, -100, total


def _attention(d: Draw) -> tuple[Any, ...]:
    heads = d.one((6, 6), (6, 3), (5, 5))
    causal = d.one(True, False)
    s = d.size()
    t = s if causal else d.size()
    b = d.size(4, 5)
    return d.f(b, heads[0], s, 4), d.f(b, heads[1], t, 4), d.f(b, heads[1], t, 4), 0.0, causal


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
sample(f"{ATTENTION}.default")(_attention)


@sample(f"{ATTENTION}_backward.default")
def attention_backward(d: Draw) -> tuple[Any, ...]:
    query, key, value, dropout, causal = _attention(d)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal
    )
    return d.f(*out.shape), query, key, value, out, lse, dropout, causal


sample("aten.zeros.default", "aten.rand.default", "aten.randn.default", "aten.empty.memory_format")(
    lambda d: (d.sizes(2),)
)
sample("aten.full.default")(lambda d: (d.sizes(2), 1.5))
sample("aten.new_zeros.default", "aten.new_ones.default")(lambda d: (d.f(3), d.sizes(2)))
sample("aten.arange.start_step")(lambda d: (d.size(), 20 + d.size(), d.one(1, 2)))
sample("aten.bernoulli_.float")(lambda d: (d.f(*d.sizes(2)), 0.3))
sample("aten.native_dropout.default")(lambda d: (d.f(*d.sizes(2)), 0.3, True))
