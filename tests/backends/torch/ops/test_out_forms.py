"""Calls that write into memory that they are given have the bits of the plain calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pardnn.backends.torch.ops.codec import find_call
from pardnn.backends.torch.ops.out_forms import LEAST_BYTES, may_have_place, out_form
from pardnn.graph.ir import Op, Tensor

A, B, C, D = (torch.linspace(low, 2.0, 60).reshape(5, 12) for low in (-2.0, 0.1, -1.0, 0.5))
SQUARE, BATCH = torch.rand(5, 5), torch.rand(2, 5, 5)
LABELS, WEIGHT = torch.tensor([1, 4, 0, 11, 3]), torch.tensor(5.0)
UNARY = (
    "abs", "cos", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "silu", "sin",
    "sqrt", "tanh", "gelu",
)  # fmt: skip
BINARY = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "eq.Tensor", "ne.Tensor",
    "ge.Tensor", "gt.Tensor", "le.Tensor", "lt.Tensor", "maximum.default", "minimum.default",
    "pow.Tensor_Tensor", "clamp_min.Tensor", "clamp_max.Tensor", "sigmoid_backward.default",
    "tanh_backward.default", "silu_backward.default", "gelu_backward.default",
)  # fmt: skip
NUMBER = (
    "mul.Scalar", "div.Scalar", "eq.Scalar", "ne.Scalar", "ge.Scalar", "gt.Scalar", "le.Scalar",
    "lt.Scalar", "pow.Tensor_Scalar", "clamp_min.default", "clamp_max.default",
)  # fmt: skip
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{name}.default": (B,) for name in UNARY},
    **dict.fromkeys(BINARY, (B, C)),
    **dict.fromkeys(NUMBER, (B, 0.7)),
    "pow.Scalar": (2.0, A),
    "clamp.default": (A, -0.5, 0.5),
    "clamp.Tensor": (A, C, D),
    "where.self": (A > 0, B, C),
    "lerp.Scalar": (A, B, 0.3),
    "lerp.Tensor": (A, B, C),
    "addcmul.default": (A, B, C),
    "addcdiv.default": (A, B, D),
    "div.Tensor_mode": (A, B),
    "threshold_backward.default": (A, B, 0.5),
    "cat.default": ([A, B],),
    "mm.default": (SQUARE, A),
    "addmm.default": (A[0], SQUARE, A),
    "bmm.default": (BATCH, BATCH),
    "baddbmm.default": (BATCH, BATCH, BATCH),
    "sum.dim_IntList": (A, [1], True),
    "mean.dim": (A, [0]),
    "_softmax.default": (A, 1, False),
    "_log_softmax.default": (A, 1, False),
    "_softmax_backward_data.default": (A, B, 1, torch.float32),
    "_log_softmax_backward_data.default": (A, B, 1, torch.float32),
    "nll_loss_backward.default": (WEIGHT / 5, A, LABELS, None, 1, -100, WEIGHT),
    "clone.default": (A.t(),),
    "_to_copy.default": (A,),
    "zeros.default": ([5, 12],),
    "zeros_like.default": (A,),
    "bernoulli.p": (A, 0.3),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "div.Tensor_mode": {"rounding_mode": "floor"},
    "_to_copy.default": {"dtype": torch.float64},
    "add.Tensor": {"alpha": 0.3},
    "gelu.default": {"approximate": "tanh"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_place_gets_the_bits_of_the_plain_call(name: str) -> None:
    kind, args, keywords = f"aten.{name}", CASES[name], KEYWORDS.get(name, {})
    form = out_form(kind)
    assert form is not None
    torch.manual_seed(0)
    plain = find_call(kind)(*args, **keywords)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    place = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype).fill_(True)
    assert form(*args, **keywords, out=place) is place
    assert torch.equal(place, plain)
    assert place.stride() == plain.stride()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_empty_tensor_is_its_place() -> None:
    for kind, given in (("aten.empty.memory_format", [60]), ("aten.empty_like.default", A)):
        form = out_form(kind)
        assert form is not None
        assert form(given, out=B) is B


@pytest.mark.parametrize(
    "kind",
    ["aten.convolution.default", "aten.embedding.default", "aten.add_.Tensor", "aten.view.default",
     "aten.max.dim", "aten.sum.default", "scalar.add", "pardnn.join"],
)  # fmt: skip
def test_other_calls_have_no_such_form(kind: str) -> None:
    assert out_form(kind) is None


@pytest.mark.parametrize(
    ("changed", "may"),
    [({}, True), ({"misaligned_bytes": 8}, False), ({"alias_of": "x"}, False),
     ({"bytes": LEAST_BYTES - 4}, False)],
)  # fmt: skip
def test_a_place_is_for_aligned_results_that_own_enough_memory(
    changed: dict[str, Any], may: bool
) -> None:
    result = Tensor(name="y", bytes=LEAST_BYTES, shape=(LEAST_BYTES // 4,), dtype="float32")
    result = dataclasses.replace(result, **changed)
    op = Op(name="y", kind="aten.exp.default", inputs=("x",), outputs=(result,))
    assert may_have_place(op) == may
    assert not may_have_place(dataclasses.replace(op, memory="residual"))
