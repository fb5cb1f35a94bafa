"""Work of an op: FLOP, the parallelism in it, and the bytes it moves, from shapes alone.

A multiply and an add are two FLOP. Formulas exist for the families in which arithmetic can be the
bottleneck; every other op, custom ones too, is taken to read its inputs and write its outputs once.
Attention backward is five products where forward is two (Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, cast

from pardnn.cost.call import Call, bytes_touched, is_free, is_host, is_view, numel
from pardnn.graph.ir import Tensor

#: What does the arithmetic of an op, each with a rate of its own.
Unit = Literal["matmul", "conv", "vector"]


class Work(NamedTuple):
    """What one call has to do.

    Attributes:
        unit: Which rate its arithmetic runs at.
        dtype: Of its floating-point data.
        flop: Floating-point operations.
        depth: FLOP that one result needs: what cannot run in parallel except by splitting.
        bytes: Moved to and from memory.
    """

    unit: Unit
    dtype: str
    flop: float
    depth: float
    bytes: float


#: FLOP per element of element-wise functions on a vector unit; 1 if not listed. Counted as the
#: instructions of the usual polynomial implementations, so that they matter on a CPU.
_ELEMENT_FLOP: Mapping[str, int] = {
    "div": 4, "sqrt": 4, "rsqrt": 4, "reciprocal": 4, "addcdiv": 6,
    "exp": 12, "log": 16, "sin": 20, "cos": 20, "sigmoid": 16, "silu": 18, "tanh": 24,
    "erf": 24, "gelu": 28, "pow": 30, "softplus": 30,
    "gelu_backward": 40, "silu_backward": 20, "tanh_backward": 3, "sigmoid_backward": 3,
    "_softmax": 16, "_log_softmax": 16, "_softmax_backward_data": 4,
    "_log_softmax_backward_data": 14,
    "native_layer_norm": 8, "native_layer_norm_backward": 14,
    "native_group_norm": 8, "native_group_norm_backward": 14,
    "native_batch_norm": 8, "native_batch_norm_backward": 14,
    "native_dropout": 20, "bernoulli": 20, "uniform": 20, "normal": 40, "rand_like": 20,
    "randn_like": 40,
}  # fmt: skip

#: Ops that read their largest input once more, after a reduction over all of it.
_READ_TWICE = frozenset({
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "var_mean",
    "var", "std", "cudnn_batch_norm", "cudnn_batch_norm_backward", "batch_norm_backward",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update",
})  # fmt: skip

#: Ops that read at most as much of their first input as they write.
_GATHERING = frozenset({
    "embedding", "index_select", "gather", "index", "take", "constant_pad_nd", "slice", "select",
})  # fmt: skip

#: In-place ops that touch of their first argument only what the others address.
_SCATTERING = frozenset({
    "scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_put_", "index_copy_",
    "_index_put_impl_", "index_fill_", "masked_scatter_",
})  # fmt: skip

#: Ops that write their first argument without reading it.
_OVERWRITING = frozenset({
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
})  # fmt: skip

#: Ops that allocate and neither read nor write.
_EMPTY = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
})  # fmt: skip

#: Position of the query among the arguments of attention, and of `is_causal`.
_ATTENTION: Mapping[str, tuple[int, int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7),
    "_scaled_dot_product_flash_attention": (0, 4),
    "_scaled_dot_product_flash_attention_backward": (1, 11),
    "_scaled_dot_product_efficient_attention": (0, 6),
    "_scaled_dot_product_efficient_attention_backward": (1, 11),
    "_scaled_dot_product_cudnn_attention": (0, 6),
    "_scaled_dot_product_cudnn_attention_backward": (1, 14),
}

_NOTHING = Work("vector", "float32", 0.0, 0.0, 0.0)


def work_of(call: Call) -> Work | None:
    """Return what the call has to do; None if it is no work at all (source, view, host scalar)."""
    op = call.op
    if is_free(op) or is_host(op) or is_view(op):
        return None
    if call.name in _EMPTY:
        return _NOTHING
    formula = _FORMULAS.get(call.name)
    found = formula(call) if formula is not None else None
    return found if found is not None else _element_wise(call)


def _dtype(call: Call) -> str:
    for tensor in (*call.inputs, *call.op.outputs):
        if tensor.dtype is not None and tensor.dtype.startswith(("float", "bfloat", "complex")):
            return tensor.dtype
    return "float32"


def _element_wise(call: Call) -> Work:
    each = _ELEMENT_FLOP.get(call.name.removesuffix("_"), 1)
    elements = max(map(numel, (*call.inputs, *call.op.outputs)), default=0)
    return Work("vector", _dtype(call), float(each * elements), float(each), _bytes_moved(call))


def _bytes_moved(call: Call) -> float:
    written = sum(tensor.bytes for tensor in call.op.outputs)
    read = [bytes_touched(tensor) for tensor in call.inputs]
    if call.name in _SCATTERING:
        return 3.0 * sum(read[1:])  # the values, and the places they go to, read and written
    if call.name in _OVERWRITING:
        return float(sum(read[1:]) + written)
    if call.name in _GATHERING and read:
        read[0] = min(read[0], written)
    if call.name in _READ_TWICE and read:
        read.append(max(read))
    return float(sum(read) + written)


def _product(call: Call, flop: float, results: int) -> Work:
    return Work("matmul", _dtype(call), flop, flop / max(results, 1), _bytes_moved(call))


def _matmul(left: int, right: int) -> Callable[[Call], Work | None]:
    """Formula of a product of the arguments at these positions, batched or not."""

    def formula(call: Call) -> Work | None:
        a, b = call.tensor(left), call.tensor(right)
        if a is None or b is None or not a.shape or not b.shape:
            return None
        columns = b.shape[-1] if len(b.shape) > 1 else 1
        return _product(call, 2.0 * math.prod(a.shape) * columns, math.prod(a.shape[:-1]) * columns)

    return formula


def _linear(call: Call) -> Work | None:
    a, weight = call.tensor(0), call.tensor(1)
    if a is None or weight is None or not a.shape or not weight.shape:
        return None
    rows = weight.shape[0] if len(weight.shape) > 1 else 1
    return _product(call, 2.0 * math.prod(a.shape) * rows, math.prod(a.shape[:-1]) * rows)


def _convolution(call: Call) -> Work | None:
    weight, source = call.tensor(1), call.tensor(0)
    target = call.op.outputs[0] if call.op.outputs else None
    if weight is None or source is None or target is None or not weight.shape:
        return None
    swept = source if call.literal(6, "transposed", False) else target
    return _convolved(call, swept, weight, target, times=1)


def _convolution_backward(call: Call) -> Work | None:
    gradient, source, weight = call.tensor(0), call.tensor(1), call.tensor(2)
    if gradient is None or source is None or weight is None or not weight.shape:
        return None
    mask = call.literal(10, "output_mask", [True, True, True])
    swept = source if call.literal(7, "transposed", False) else gradient
    return _convolved(call, swept, weight, source, times=int(mask[0]) + int(mask[1]))


def _convolved(call: Call, swept: Tensor, weight: Tensor, target: Tensor, times: int) -> Work:
    # weight.shape[1:] has the channels of one group already, in both directions.
    flop = 2.0 * times * numel(swept) * math.prod((weight.shape or ())[1:])
    depth = flop / max(numel(target) * max(times, 1), 1)
    return Work("conv", _dtype(call), flop, depth, _bytes_moved(call))


def _attention(call: Call) -> Work | None:
    first, causal = _ATTENTION[call.name]
    query, key, value = (call.tensor(first + i) for i in range(3))
    if query is None or key is None or value is None:
        return None
    if not query.shape or not key.shape or not value.shape or len(key.shape) < 2:
        return None
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    products = 2.0 if first == 0 else 5.0
    flop = products * pairs * (query.shape[-1] + value.shape[-1])
    if call.literal(causal, "is_causal", False) is True:
        flop /= 2  # the kernels skip the blocks above the diagonal
    return _product(call, flop, numel(query))


def _pooling(call: Call) -> Work | None:
    kernel = call.literal(1, "kernel_size", None)
    if not isinstance(kernel, list) or not call.op.outputs:
        return None
    window = math.prod(cast(list[int], kernel))
    flop = float(numel(call.op.outputs[0]) * window)
    return Work("vector", _dtype(call), flop, float(window), _bytes_moved(call))


def _embedding_backward(call: Call) -> Work | None:
    if not call.inputs or not call.op.outputs:
        return None
    gradient, result = call.inputs[0], call.op.outputs[0]
    # The result is filled with zeros, then the addressed rows are read and written.
    moved = 3.0 * gradient.bytes + sum(t.bytes for t in call.inputs[1:]) + result.bytes
    return Work("vector", _dtype(call), float(numel(gradient)), 1.0, moved)


_FORMULAS: Mapping[str, Callable[[Call], Work | None]] = {
    "mm": _matmul(0, 1), "bmm": _matmul(0, 1), "mv": _matmul(0, 1), "dot": _matmul(0, 1),
    "matmul": _matmul(0, 1), "addmm": _matmul(1, 2), "addmm_": _matmul(1, 2),
    "addmv": _matmul(1, 2), "baddbmm": _matmul(1, 2), "addbmm": _matmul(1, 2),
    "_addmm_activation": _matmul(1, 2), "linear": _linear, "mkldnn_linear": _linear,
    "convolution": _convolution, "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _pooling, "avg_pool2d": _pooling,
    "max_pool3d_with_indices": _pooling,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(_ATTENTION, _attention),
}  # fmt: skip
