"""Messages arrive bit by bit, with their strides, whatever the layout; peers agree or refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardnn.backends.torch.comm.handshake import check_agreement
from pardnn.backends.torch.comm.wire_format import (
    MessageSpec,
    byte_view,
    dense_strides,
    message_specs,
    payload_of,
)
from pardnn.backends.torch.runtime.memory_meter import MemoryMeter, live_bytes
from pardnn.errors import MismatchError, RankError, UnsupportedError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.plan import Message
from tests.backends.torch.ranks import connect, run_ranks

CPU = torch.device("cpu")


def values() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5)
    return {
        "contiguous": x,
        "offset": x[1],
        "transposed": x.transpose(1, 3),
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "gaps": x[:, :, ::2, 1:3],
        "transposed gaps": x[:, 1:, :, ::2].permute(2, 0, 3, 1),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "expanded front": torch.randn(4).expand(3, 4),
        "scalar tensor": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "bool": x > 0,
        "bfloat16": x.bfloat16(),
        "int64": torch.arange(12).reshape(3, 4).t(),
        "float64": x.double(),
        "complex conj": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "ones between": x.reshape(2, 1, 60, 1),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "host.int": 2**60 + 1,
        "host.float": 0.1,
        "host.bool": True,
    }


def spec_of(number: int, name: str, value: Any) -> MessageSpec:
    if not isinstance(value, torch.Tensor):
        return MessageSpec(number, name, 0, 1, 8, name, (), (), "producer", "consumer")
    strides = dense_strides(value.shape, value.stride())
    dtype = str(value.dtype).removeprefix("torch.")
    shape = tuple(value.shape)
    return MessageSpec(
        number, name, 0, 1, value.nbytes, dtype, shape, strides, "producer", "consumer"
    )


@pytest.mark.parametrize("headers", [False, True])
def test_every_layout_and_type_arrives(headers: bool) -> None:
    def body(rank: int, store: str) -> list[Any]:
        channel = connect(rank, 2, store, 5.0, headers=headers).channel
        assert channel is not None
        sent = values()
        specs = [spec_of(i, name, value) for i, (name, value) in enumerate(sent.items())]
        for spec in specs:
            if rank == 0:
                channel.send(spec, sent[spec.tensor])
            else:
                channel.allocate(spec)
                channel.receive(spec)
        arrived = {spec.tensor: channel.wait(spec) for spec in reversed(specs)}
        channel.close()
        return [
            name for name, value in arrived.items() if rank == 1 and not same(sent[name], value)
        ]

    for outcome in run_ranks(2, body):
        assert outcome.value == [], outcome.error


def same(sent: Any, value: Any) -> bool:
    if not isinstance(sent, torch.Tensor):
        return type(value) is type(sent) and value == sent
    as_clone = sent.resolve_conj().clone()
    equal = torch.equal(as_clone.nan_to_num(7.0), value.nan_to_num(7.0))
    return equal and value.dtype == sent.dtype and value.stride() == as_clone.stride()


def test_only_what_is_not_dense_is_copied() -> None:
    for name, value in values().items():
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            continue
        payload = byte_view(payload_of(spec_of(0, name, value), value, CPU))
        is_shared = payload.untyped_storage()._cdata == value.untyped_storage()._cdata
        is_dense = dense_strides(value.shape, value.stride()) == value.stride()
        assert is_shared == (is_dense and not value.is_conj()), name
        assert payload.dtype == torch.uint8
        assert payload.numel() == value.nbytes


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_the_bytes_of_any_view_are_those_of_its_clone(shape: list[int], random: Any) -> None:
    base = torch.arange(4 ** len(shape), dtype=torch.float32).reshape([4] * len(shape))
    view = base[tuple(slice(random.randint(0, 4 - size), None) for size in shape)]
    view = view[tuple(slice(0, size) for size in shape)]
    view = view.permute(random.sample(range(view.dim()), view.dim()))
    payload = byte_view(payload_of(spec_of(0, "x", view), view, CPU))
    assert torch.equal(payload, byte_view(view.clone()))


def test_a_value_that_is_not_what_was_announced_is_not_sent() -> None:
    spec = spec_of(0, "x", torch.zeros(2, 3))
    for value in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(RankError, match=r"captured was float32 \[2, 3\]") as caught:
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


def facts(**changes: Any) -> dict[str, Any]:
    spec = list(spec_of(0, "x", torch.zeros(2, 3)))
    base = {"torch version": "2", "world size": 2, "graph": "g", "plan": "p", "num_ops": 1,
            "messages": [spec], "posts": [[True, 0]]}  # fmt: skip
    return base | changes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch version": "3"}, "torch version is 2 on rank 0 and 3 on rank 1"),
        ({"world size": 3}, "world size is 2 on rank 0 and 3 on rank 1"),
        ({"graph": "h"}, "graph is g on rank 0 and h on rank 1"),
        ({"plan": "q"}, "plan is p on rank 0 and q on rank 1"),
        ({"messages": []}, "rank 0 has 1 messages and rank 1 has 0"),
        ({"posts": []}, "post 0 of rank 1 is nothing, but must be the receive of message 0"),
        ({"posts": [[False, 0], [False, 0]]}, "post 1 of rank 1 is the receive of message 0"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], says: str) -> None:
    theirs = facts(**({"posts": [[False, 0]]} | changes))
    with pytest.raises(MismatchError, match=says):
        check_agreement([facts(), theirs])


def test_each_field_of_a_message_is_compared() -> None:
    mine = spec_of(0, "x", torch.zeros(2, 3))
    for field, value in {"tensor": "y", "bytes": 8, "dtype": "int32", "shape": (3, 2),
                         "strides": (1, 2), "producer": "o"}.items():  # fmt: skip
        theirs = facts(messages=[list(mine._replace(**{field: value}))], posts=[[False, 0]])
        with pytest.raises(MismatchError, match=f"rank 0 and rank 1 differ.* {field} is"):
            check_agreement([facts(), theirs])
    check_agreement([facts(), facts(posts=[[False, 0]])])


def test_the_ledger_counts_each_storage_once() -> None:
    x = torch.zeros(10)
    env: dict[str, Any] = {"x": x, "view": x[2:], "y": torch.zeros(3), "n": 5}
    meter = MemoryMeter()
    meter.add(env, list(env))
    assert (meter.live, live_bytes(env)) == (52, 52)
    meter.remove(["x", "n"])
    assert meter.live == 52
    meter.remove(["view"])
    assert (meter.live, meter.peak) == (12, 52)
    env["y"] = torch.zeros(1)
    meter.add(env, ["y"])
    assert meter.live == 4
