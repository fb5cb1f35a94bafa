"""Messages arrive bit by bit, with their strides, whatever the layout; peers agree or refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.torch.messages import spec_of, values
from tests.backends.torch.ranks import connect, run_ranks

CPU = torch.device("cpu")


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
    resolved = sent.resolve_conj()
    equal = torch.equal(resolved.nan_to_num(7.0), value.nan_to_num(7.0))
    return equal and value.dtype == sent.dtype and value.stride() == sent.stride()
