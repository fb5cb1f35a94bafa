"""Messages for tests: values of every layout and type, and their specs."""

from __future__ import annotations

from typing import Any

import torch

from pardnn.backends.torch.comm.wire_format import MessageSpec, dense_strides


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
