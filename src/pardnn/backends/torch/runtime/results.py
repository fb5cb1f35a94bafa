"""The results of a step for its caller: the loss, and the batch tensors that it wrote.

An eager step that writes into its batch (`h.copy_(new.detach())` of truncated backpropagation
through time) changes the caller's tensor. Here the rank that runs the write works on the storage of
its caller's tensor, and after the step sends it to the others. They receive it in place where the
strides are equal, so all ranks go on with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import MismatchError, shown


def check_written(program: Program, inputs: Mapping[str, Any], device: torch.device) -> None:
    """Check that every batch tensor which the step writes can be written in place.

    Args:
        program: Names them.
        inputs: This step's inputs by name.
        device: This rank's.

    Raises:
        MismatchError: E512, if one is on another device than the rank.
    """
    for name in program.written:
        if inputs[name].device.type != device.type:
            raise MismatchError(
                f"input {shown(name)} is on {inputs[name].device}, and the step writes into it on "
                f"{device}.\nPass it on the device of the ranks.",
                code="E512",
                details={"input": name},
            )


def share_results(program: Program, world: World, loss: Any, inputs: Mapping[str, Any]) -> Any:
    """Exchange the step's results; every rank calls it after its last action.

    Args:
        program: What ran.
        world: This rank's connections.
        loss: On the rank that computed it; None elsewhere.
        inputs: This step's inputs by name; those that the step writes are brought up to date.

    Returns:
        The loss.
    """
    channel, rank = world.channel, world.rank
    if channel is None:
        return loss
    mine = [spec for spec in program.result_specs if rank in (spec.source, spec.target)]
    written = {name: inputs[name].detach() for name in program.written}
    for spec in mine:
        value = written.get(spec.tensor)
        if spec.source == rank:
            channel.send(spec, loss if value is None else value)
        else:
            is_in_place = value is not None and value.stride() == spec.strides
            channel.allocate(spec, value if is_in_place else None)
            channel.receive(spec)
    for spec in mine:
        value, arrived = written.get(spec.tensor), channel.wait(spec)
        if spec.source == rank:
            continue
        if value is None:
            loss = arrived
        elif arrived is not value:
            value.copy_(arrived)
    return loss
