"""The pending loss: sent at the end of the step, waited for when it is read.

If ranks waited for the loss at the end of the step, they would wait for the whole step of the rank
that computes it, and steps could not overlap. So if a step returns only its loss, the message is
posted and every rank continues. The other ranks return a tensor that waits as soon as anything but
its shape and type is read, and is a plain tensor from then on, like torch's
`AsyncCollectiveTensor`. If it is not read, ranks wait for it at the end of the next step: no rank
is more than one step ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pardnn.backends.torch.comm.wire_format import MessageSpec, laid_out
from pardnn.backends.torch.comm.world import World
from pardnn.errors import PardnnError, RankError

#: Numbers of these messages: above those of any graph and of agreements, below the channel's tags.
_FIRST_NUMBER = 3 << 22


class PendingLoss(torch.Tensor):
    """A loss that may not have arrived yet; reading it waits."""

    _buffer: torch.Tensor
    _messages: PendingMessages

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for all losses that are read, and continue with plain tensors."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_DATA:
                return func(*args, **kwargs)
            if func is torch.Tensor.detach:
                return pending(args[0]._buffer, args[0]._messages)
            _settle_all([*args, *kwargs.values()])
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for losses that torch's own code reads: `torch.tensor(loss)`."""
        args, kwargs = tree_map_only(PendingLoss, _arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


#: Attributes that are known before the value has arrived.
_WITHOUT_DATA = {
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__,
    torch.Tensor.requires_grad.__get__, torch.Tensor.grad_fn.__get__, torch.Tensor.ndim.__get__,
    torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel,
}  # fmt: skip


def _settle_all(values: Sequence[Any]) -> None:
    for value in values:
        if type(value) is PendingLoss:
            torch._C._swap_tensor_impl(value, _arrived(value).detach())
            vars(value).clear()  # which `copy.deepcopy` and `torch.save` would include
            value.__class__ = torch.Tensor
        elif isinstance(value, list | tuple):
            _settle_all(value)


def _arrived(value: PendingLoss) -> torch.Tensor:
    value._messages.settle()
    return value._buffer


def pending(buffer: torch.Tensor, messages: PendingMessages) -> torch.Tensor:
    """Return a tensor whose reading waits for its messages; it shares the storage."""
    found = torch.Tensor._make_subclass(PendingLoss, buffer)
    found._buffer, found._messages = buffer, messages
    return found


class PendingMessages:
    """Messages that this rank has posted and not yet waited for: the loss, sent or received.

    Args:
        world: This rank's connections.
        specs: The messages.
    """

    def __init__(self, world: World, specs: Sequence[MessageSpec]) -> None:
        self._world, self._specs = world, list(specs)

    def settle(self) -> None:
        """Wait until all have left or arrived; a second call does nothing.

        Raises:
            RankError: E6xx, if a rank failed meanwhile.
            StuckError: E701, if a wait timed out.
        """
        channel = self._world.channel
        assert channel is not None
        with self._world.lock:
            if not self._specs:
                return
            if channel.group is None:
                raise self._world.reported or RankError(
                    "the loss had not arrived when the connections were closed.\n"
                    "Read it (`loss.item()`) before `close`."
                )
            try:
                while self._specs:
                    channel.wait(self._specs[-1])
                    self._specs.pop()
            except PardnnError as error:
                raise self._world.report_failure(error) from error.__cause__


def post_loss(world: World, specs: Sequence[MessageSpec], loss: Any) -> Any:
    """Send the loss to all ranks, or post its receive, and return it; the last one is settled.

    Args:
        world: This rank's connections; several ranks.
        specs: The specs of the messages that bring it to every other rank.
        loss: The loss on the rank that computed it; None elsewhere.
    """
    channel, rank = world.channel, world.rank
    assert channel is not None
    specs = [
        spec._replace(number=_FIRST_NUMBER + spec.target)
        for spec in specs
        if rank in (spec.source, spec.target)
    ]
    messages = world.pending = PendingMessages(world, specs)
    if rank == specs[0].source:
        sent = laid_out(loss, specs[0].strides).clone()  # the caller may change its loss
        for spec in specs:
            channel.send(spec, sent)
        return loss
    (spec,) = specs
    buffer = channel.allocate(spec)
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
    channel.receive(spec)
    return pending(buffer, messages)


def settle_loss(world: World) -> None:
    """Wait for the loss that this rank posted last, if there is one."""
    messages, world.pending = world.pending, None
    if messages is not None and world.reported is None:
        messages.settle()
