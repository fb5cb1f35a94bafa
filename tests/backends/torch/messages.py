"""Messages for tests: values of every layout and type, and their specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pardnn.backends.torch.comm.wire_format import (
    MessageSpec,
    byte_view,
    message_specs,
    payload_of,
    receive_buffer,
)
from pardnn.graph.build import build_graph
from pardnn.graph.ir import ALIGNMENT, Op, Tensor
from pardnn.plan.plan import Message

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


def graph_tensor(name: str, value: torch.Tensor) -> Tensor:
    return Tensor(
        name=name, bytes=value.numel() * value.itemsize, shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."), strides=value.stride(),
        misaligned_bytes=int(value.storage_offset()) * value.itemsize % ALIGNMENT,
    )  # fmt: skip


def spec_of(number: int, name: str, value: Any) -> MessageSpec:
    """The spec of a message of a value, as a program makes it of its graph."""
    if not isinstance(value, torch.Tensor):
        return MessageSpec(number, name, 0, 1, 8, name, (), (), "producer", "consumer")
    ops = [Op(name="producer", kind="input", outputs=(graph_tensor(name, value),))]
    message = Message(tensor=name, source=0, target=1, post_before="consumer")
    (spec,) = message_specs(build_graph("g", ops), [message], ["consumer"])
    return spec._replace(number=number)


def delivered(value: torch.Tensor) -> torch.Tensor:
    """What arrives of a tensor: its bytes, moved as a channel moves them."""
    spec = spec_of(0, "x", value)
    buffer = receive_buffer(spec, CPU)
    sent = byte_view(payload_of(spec, value, CPU), spec.misaligned_bytes)
    assert sent.numel() == spec.bytes == buffer.untyped_storage().nbytes()
    if spec.bytes:
        byte_view(buffer, spec.misaligned_bytes).copy_(sent)
    return buffer


def _overlapping(value: torch.Tensor) -> torch.Tensor:
    strides = [1] * value.dim()
    flat = value.reshape(-1)
    return flat.as_strided(value.shape, strides) if value.numel() else value


def _padded(value: torch.Tensor, step: int, dims: slice) -> torch.Tensor:
    """The values with gaps: every `step`th element of a larger tensor along some dims."""
    sizes, cut = list(value.shape), [slice(None)] * value.dim()
    for dim in range(value.dim())[dims]:
        sizes[dim] = value.shape[dim] * step + 1
        cut[dim] = slice(1, sizes[dim], step)
    padded = torch.zeros(sizes, dtype=value.dtype)
    padded[tuple(cut)] = value
    return padded[tuple(cut)]


def _transposed(value: torch.Tensor) -> torch.Tensor:
    back = list(reversed(range(value.dim())))
    return value.permute(back).contiguous().permute(back)


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _shifted(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([value.new_zeros(4), value.reshape(-1)])[4:].view(value.shape)


#: Layouts of a tensor of the same shape and type; the last three have other values.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda value: value,
    "at an offset": _shifted,
    "transposed": _transposed,
    "channels last": _channels_last,
    "every second": lambda value: _padded(value, 2, slice(-1, None)),
    "slices of rows": lambda value: _padded(value, 1, slice(None)),
    "transposed slices": lambda value: (
        _padded(value.mT, 1, slice(None)).mT if value.dim() > 1 else value
    ),
    "expanded front": lambda value: value[:1].expand(value.shape) if value.dim() else value,
    "expanded back": lambda value: value[..., :1].expand(value.shape) if value.dim() else value,
    "overlapping": _overlapping,
}
