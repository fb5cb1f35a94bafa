"""The bytes of a message, whatever the layout of its tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardnn.backends.torch.comm.wire_format import (
    byte_view,
    laid_out,
    message_specs,
    payload_of,
    receive_buffer,
)
from pardnn.errors import RankError, UnsupportedError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import ALIGNMENT, Op, Tensor
from pardnn.plan.plan import Message
from tests.backends.torch.messages import delivered, spec_of, values

CPU = torch.device("cpu")


def test_a_tensor_is_sent_without_a_copy() -> None:
    for name, value in values().items():
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            continue
        spec = spec_of(0, name, value)
        payload = byte_view(payload_of(spec, value, CPU), spec.misaligned_bytes)
        is_shared = payload.untyped_storage()._cdata == value.untyped_storage()._cdata
        assert is_shared == (not value.is_conj()), name
        assert payload.dtype == torch.uint8
        assert payload.numel() == spec.bytes


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_any_view_arrives_as_it_was(shape: list[int], random: Any) -> None:
    base = torch.arange(4 ** len(shape), dtype=torch.float32).reshape([4] * len(shape))
    view = base[tuple(slice(random.randint(0, 4 - size), None) for size in shape)]
    view = view[tuple(slice(0, size) for size in shape)]
    view = view.permute(random.sample(range(view.dim()), view.dim()))
    view = view.unsqueeze(1).expand(-1, random.randint(1, 3), *[-1] * (view.dim() - 1))
    found = delivered(view)
    assert torch.equal(found, view)
    assert found.stride() == view.stride()
    assert (found.data_ptr() - view.data_ptr()) % ALIGNMENT == 0


@pytest.mark.parametrize("made", ["fresh", "conjugated"])
def test_a_tensor_that_is_aligned_otherwise_than_captured_arrives_as_captured(made: str) -> None:
    captured = torch.arange(9).to(torch.complex64)[3:]
    value = captured.clone() if made == "fresh" else captured.clone().conj()
    spec = spec_of(0, "x", captured)
    assert spec.misaligned_bytes == 24
    payload = byte_view(payload_of(spec, value, CPU), spec.misaligned_bytes)
    buffer = receive_buffer(spec, CPU)
    byte_view(buffer, spec.misaligned_bytes).copy_(payload)
    assert torch.equal(buffer, value)
    assert buffer.storage_offset() == 3


def test_a_tensor_that_begins_within_an_element_is_refused() -> None:
    tensor = Tensor(name="x", bytes=8, shape=(2,), dtype="float32", misaligned_bytes=3)
    graph = build_graph("g", [Op(name="p", kind="input", outputs=(tensor,))])
    message = Message(tensor="x", source=0, target=1, post_before="c")
    with pytest.raises(UnsupportedError, match="begin 3 bytes behind an aligned one"):
        message_specs(graph, [message], ["c"])


def test_a_tensor_of_other_strides_is_not_sent_but_can_be_copied_to_those_of_its_spec() -> None:
    x = torch.randn(4, 6)
    for wanted, value in ((x[:, :1].expand(4, 6), x[:, :1].expand(4, 6).contiguous()),
                          (x, x.t().contiguous().t()), (x[:, ::2], x[:, :3])):  # fmt: skip
        spec = spec_of(0, "x", wanted)
        with pytest.raises(RankError, match="made 'x' as strides .* captured:") as caught:
            payload_of(spec, value, CPU)
        assert caught.value.code == "E604"
        sent = payload_of(spec, laid_out(value, spec.strides), CPU)
        assert sent.stride() == wanted.stride()
        assert torch.equal(sent, value)
    assert payload_of(spec_of(0, "x", x[:1]), x[:1].as_strided((1, 6), (1, 1)), CPU).numel() == 6
    # Of no element, kernels and their fakes may differ: `expand` of an empty list of memories.
    empty = torch.empty_strided((2, 0, 6), (0, 6, 1))
    assert payload_of(spec_of(0, "x", torch.empty(2, 0, 6)), empty, CPU).numel() == 0


def test_a_message_carries_what_its_tensor_spans() -> None:
    x = torch.zeros(4, 6)
    assert spec_of(0, "x", x).bytes == spec_of(0, "x", x.t()).bytes == 96
    assert spec_of(0, "x", x[:, :2]).bytes == 4 * (3 * 6 + 2)
    assert spec_of(0, "x", x[0].expand(9, 6)).bytes == 24
    assert spec_of(0, "x", x.view(-1).unfold(0, 6, 1)).bytes == 96
    assert spec_of(0, "x", x[:0]).bytes == 0


def test_a_value_that_is_not_what_was_announced_is_not_sent() -> None:
    spec = spec_of(0, "x", torch.zeros(2, 3))
    for value in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(RankError, match=r"captured: float32 \[2, 3\]") as caught:
            payload_of(spec, value, CPU)
        assert caught.value.code == "E604"


def test_a_whole_number_beyond_64_bits_is_refused_by_name() -> None:
    spec = spec_of(0, "host.int", 1)._replace(tensor="state.n")
    for value in (-(1 << 63), (1 << 63) - 1):
        assert payload_of(spec, value, CPU).item() == value
    for value in (-(1 << 63) - 1, 1 << 63):
        with pytest.raises(RankError, match="whole number 'state.n' has 64 bits") as caught:
            payload_of(spec, value, CPU)
        assert caught.value.code == "E604"


def test_a_tensor_of_unknown_shape_cannot_be_sent() -> None:
    ops = [
        Op(name="a", kind="input", outputs=(Tensor(name="x", bytes=4),)),
        Op(name="b", kind="aten.relu.default", inputs=("x",), outputs=(Tensor(name="y", bytes=4),)),
    ]
    message = Message(tensor="x", source=0, target=1, post_before="b")
    with pytest.raises(UnsupportedError, match="does not say its shape"):
        message_specs(build_graph("g", ops), [message], ["b"])
