"""Messages between ranks over torch.distributed, point to point.

Every wait ends: with the tensor, with the peer's failure, or after `timeout` seconds, and then
says which op, tensor, peer and step. Tags are the messages' numbers. Gloo completes a send only
when the receive is posted, so the action lists alone decide how much memory messages take. CPU
ranks of one machine exchange all but the longest messages directly (`local.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.failure_detector import LostError
from pardnn.backends.torch.comm.unix_sockets import LocalLinks, Transfer
from pardnn.backends.torch.comm.wire_format import (
    Wire,
    byte_view,
    dense,
    empty_like_sent,
    memory_of,
    received,
    wire_text,
)
from pardnn.errors import RankError, StuckError, shown

HEADER_BYTES = 16
#: Tags of headers, and of the payloads behind them, follow the messages' numbers.
_HEADER_TAG = 1 << 24
_PAYLOAD_TAG = 1 << 25
MESSAGES_KEPT = 16


class _Pending(NamedTuple):
    work: Any
    wire: Wire
    sending: bool
    held: tuple[torch.Tensor, ...]  # what the works read or write: payload, header
    header: Any


class Note(NamedTuple):
    """Something that happened to a message, for the account of a failure."""

    step: int
    event: str
    wire: Wire


class Channel:
    """One rank's end of all messages.

    Args:
        group: The process group, of this back end's own.
        rank: This rank, which is also its number in the group.
        timeout_s: Longest wait for one message, seconds.
        device: Where tensors are.
        headers: Send 16 bytes ahead of every message that tell what it is. Ranks that have
            compared their tables (`agree`) need none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        *,
        timeout_s: float,
        device: torch.device,
        headers: bool = False,
    ) -> None:
        self.group: dist.ProcessGroup | None = group
        self.rank = rank
        self.timeout_s = timeout_s
        self.device = device
        self.headers = headers
        self.local: LocalLinks | None = None  # to the ranks of this machine
        self.step = 0
        self.waiting: tuple[Wire, float] | None = None
        self.waited_s = [0.0] * group.size()
        self.notes: deque[Note] = deque(maxlen=MESSAGES_KEPT)
        self._pending: dict[int, _Pending] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        # Gloo reads the memory of the host alone.
        staged = device.type == "cuda" and dist.get_backend(group) == "gloo"
        self._staged = staged
        self._wire_device = torch.device("cpu") if staged else device
        self._timeout = timedelta(seconds=timeout_s)

    def allocate(self, wire: Wire, place: torch.Tensor | None = None) -> Any:
        """Make the buffer of a receive; return the tensor that will be in it, or None (scalar).

        Args:
            wire: The message.
            place: Receive into this, one run of memory, instead of a new buffer.
        """
        device = self._wire_device if wire.is_scalar else self.device
        buffer = empty_like_sent(wire, device) if place is None else place
        self._buffers[wire.number] = buffer
        return None if wire.is_scalar else buffer

    def send(self, wire: Wire, value: Any) -> None:
        """Start sending; the value must stay as it is until `wait` returns."""
        payload = dense(wire, value, self._wire_device)
        if self._goes_near(wire, wire.target):
            assert self.local is not None
            work = self.local.send(wire.target, memory_of(payload, wire.bytes))
            self._posted(_Pending(work if work.left else None, wire, True, (payload,), None))
            return
        payload = byte_view(payload)
        if self._staged:
            payload = payload.to(self._wire_device)
        self._post(wire, payload, sending=True)

    def receive(self, wire: Wire) -> None:
        """Post the receive into the buffer of `allocate`."""
        if self._goes_near(wire, wire.source):
            assert self.local is not None
            buffer = self._buffers[wire.number]
            work = self.local.receive(wire.source, memory_of(buffer, wire.bytes))
            self._posted(_Pending(work, wire, False, (buffer,), None))
            return
        self._post(wire, self._landing(wire), sending=False)

    def _goes_near(self, wire: Wire, peer: int) -> bool:
        local = self.local
        return local is not None and wire.bytes > 0 and local.carries(peer, wire.bytes)

    def _posted(self, pending: _Pending) -> None:
        wire = pending.wire
        self._pending[wire.number] = pending
        event = "send posted" if pending.sending else "receive posted"
        self.notes.append(Note(self.step, event, wire))

    def _landing(self, wire: Wire) -> torch.Tensor:
        buffer = byte_view(self._buffers[wire.number])
        return torch.empty_like(buffer, device=self._wire_device) if self._staged else buffer

    def _post(self, wire: Wire, payload: torch.Tensor, *, sending: bool) -> None:
        peer = wire.target if sending else wire.source
        work, held, header = None, (payload,), None
        if wire.bytes > 0:  # both sides know that there is nothing to send
            function = dist.isend if sending else dist.irecv
            tag = wire.number
            if self.headers:
                # A payload of another kind has another tag: it never gets into this buffer.
                tag = _PAYLOAD_TAG + int.from_bytes(_digest(wire)[:3], "big")
                header = _header(wire) if sending else torch.empty(HEADER_BYTES, dtype=torch.uint8)
                header = header.to(self._wire_device)
                held = (payload, header)
                header = self._call(wire, function, header, peer, _HEADER_TAG + wire.number)
            work = self._call(wire, function, payload, peer, tag)
        self._posted(_Pending(work, wire, sending, held, header))

    def _call(self, wire: Wire, function: Any, payload: torch.Tensor, peer: int, tag: int) -> Any:
        end = {"group_dst" if function is dist.isend else "group_src": peer}
        try:
            return function(payload, group=self.group, tag=tag, **end)
        except RuntimeError as error:
            raise self._lost(wire, peer, error) from error

    def wait(self, wire: Wire) -> Any:
        """Wait until a message has left or arrived; return the value that arrived.

        Raises:
            StuckError: E701, after `timeout_s`.
            LostError: E602, if the peer's connection closed.
            RankError: E604, if the header tells of another message.
        """
        pending = self._pending.pop(wire.number)
        if pending.header is not None:
            self._finish(wire, pending.sending, pending.header)
            if not pending.sending:
                self._check_header(wire, pending.held[1])
        work = pending.work
        if work is not None and not (isinstance(work, Transfer) and self._moved(work)):
            self._finish(wire, pending.sending, work)
        if pending.sending:
            return None
        buffer = self._buffers.pop(wire.number)
        if self._staged and not wire.is_scalar:
            byte_view(buffer).copy_(pending.held[0])
        elif self._staged:
            buffer.view(-1).view(torch.uint8).copy_(pending.held[0])
        return received(wire, buffer)

    def _moved(self, work: Transfer) -> bool:
        """Move what can move without a wait; return whether that was all of it."""
        return self.local is not None and self.local.move(work)

    def _finish(self, wire: Wire, sending: bool, work: Any) -> None:
        peer = wire.target if sending else wire.source
        start = time.perf_counter()
        self.waiting = (wire, time.monotonic())
        try:
            if isinstance(work, Transfer):
                assert self.local is not None
                self.local.wait(work, self.timeout_s)
            else:
                with self.local.moving() if self.local else contextlib.nullcontext():
                    work.wait(self._timeout)
        except (RuntimeError, OSError) as error:
            if time.perf_counter() - start >= 0.98 * self.timeout_s:
                raise self._stuck(wire, peer) from error
            raise self._lost(wire, peer, error) from error
        self.waiting = None
        self.waited_s[peer] += time.perf_counter() - start
        self.notes.append(Note(self.step, "sent" if sending else "arrived", wire))

    def _check_header(self, wire: Wire, header: torch.Tensor) -> None:
        if torch.equal(header.cpu(), _header(wire)):
            return
        raise RankError(
            f"rank {wire.source} sent something else than {wire_text(wire)}, "
            f"which op {shown(wire.reader)} of rank {self.rank} reads in step {self.step}.\n"
            "The two ranks hold different plans; distribute one plan to all of them.",
            code="E604",
            details={"tensor": wire.tensor, "peer": wire.source, "step": self.step},
        )

    def _details(self, wire: Wire, peer: int) -> dict[str, Any]:
        op = wire.reader if peer == wire.source else wire.op
        return {
            "op": op, "tensor": wire.tensor, "peer": peer, "rank": self.rank, "step": self.step,
            "message": wire.number,
        }  # fmt: skip

    def _stuck(self, wire: Wire, peer: int) -> StuckError:
        details = self._details(wire, peer)
        verb = "for" if peer == wire.source else "to hand over"
        return StuckError(
            f"rank {self.rank} waited {self.timeout_s:g} s {verb} tensor {shown(wire.tensor)}, "
            f"{'from' if peer == wire.source else 'to'} rank {peer}, at op "
            f"{shown(details['op'])} in step {self.step}.\n"
            "If an op may take longer, raise --timeout.",
            details=details,
        )

    def _lost(self, wire: Wire, peer: int, error: Exception) -> LostError:
        details = self._details(wire, peer) | {"first_failing_rank": peer}
        return LostError(
            f"rank {peer} ended before its work was done: rank {self.rank} lost it at op "
            f"{shown(details['op'])} in step {self.step}, with tensor {shown(wire.tensor)} on "
            f"its way.\nLook at what rank {peer} printed last; a signal (out of memory, "
            "kill) leaves no message of its own.",
            details=details | {"transport": str(error)[:200]},
        )

    def in_flight(self) -> list[Wire]:
        """Return the messages that have been posted and not yet waited for."""
        return [pending.wire for pending in list(self._pending.values())]

    def close(self) -> None:
        """Close the connections: peers that wait for this rank stop waiting."""
        self._pending.clear()
        self._buffers.clear()
        if self.local is not None:
            self.local.close()
        group, self.group = self.group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(group)


def _digest(wire: Wire) -> bytes:
    """Return 16 bytes that stand for everything both ends must agree on."""
    text = repr((wire.tensor, wire.source, wire.target, wire.bytes, wire.dtype, wire.shape,
                 wire.strides))  # fmt: skip
    return hashlib.sha256(text.encode()).digest()[:HEADER_BYTES]


def _header(wire: Wire) -> torch.Tensor:
    return torch.frombuffer(bytearray(_digest(wire)), dtype=torch.uint8)
