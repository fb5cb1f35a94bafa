"""Samples of calls of layers: convolution, pooling, resampling, normalisation, loss, attention."""

from typing import Any

import torch

from testbed.op_draw import Draw, sample


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
