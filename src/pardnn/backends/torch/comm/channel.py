"""Point-to-point messages: the isend, irecv and wait of one rank, over torch.distributed.

Every wait ends: with the tensor, with the peer's failure, or after `timeout_s`; an error names the
op, tensor, peer and step. Tags are the messages' numbers. Gloo completes a send only when the
receive is posted, so the action lists alone decide how much memory messages take. CPU ranks of one
machine exchange all but the longest messages over Unix sockets (`unix_sockets.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pardnn.backends.torch.comm.failure_detector import LostError
from pardnn.backends.torch.comm.unix_sockets import LocalLinks, Transfer
from pardnn.backends.torch.comm.wire_format import (
    MessageSpec,
    byte_view,
    memory_of,
    payload_of,
    receive_buffer,
    received,
    spec_text,
)
from pardnn.errors import RankError, StuckError, shown

HEADER_BYTES = 16
#: Tags of headers, and of the payloads after them, follow the messages' numbers.
_HEADER_TAG = 1 << 24
_PAYLOAD_TAG = 1 << 25
MESSAGES_KEPT = 16


class _Pending(NamedTuple):
    """A posted message for which no wait has ended."""

    work: Any
    spec: MessageSpec
    sending: bool
    held: tuple[torch.Tensor, ...]  # payload and header: kept alive while they are moved
    header: Any


class Note(NamedTuple):
    """An event of a message, reported when a rank fails."""

    step: int
    event: str
    spec: MessageSpec


class WaitSoFar(NamedTuple):
    """An unfinished wait: for which rank, for how long, and at what, in words."""

    peer: int
    seconds: float
    text: str


class Channel:
    """One rank's end of all messages.

    Args:
        group: The process group, private to this back end.
        rank: This rank, which is also its number in the group.
        timeout_s: Longest wait for one message, seconds.
        device: Where tensors are.
        headers: Send a 16-byte digest of its spec ahead of every message. Ranks that have
            compared their specs in the handshake need none.

    Attributes:
        backend: "gloo" or "nccl".
        local: Connections to the ranks of this machine; None without any.
        step: Number of the step, for reports.
        waiting: The message that the rank waits for, and since when (`time.monotonic`); None if
            none.
        waited_s: Seconds waited in this step, by peer.
        notes: The last `MESSAGES_KEPT` events.
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
        self.local: LocalLinks | None = None
        self.step = 0
        self.waiting: tuple[MessageSpec, float] | None = None
        self.waited_s = [0.0] * group.size()
        self.notes: deque[Note] = deque(maxlen=MESSAGES_KEPT)
        self._pending: dict[int, _Pending] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        # Gloo reads host memory only.
        self.backend = dist.get_backend(group)
        staged = device.type == "cuda" and self.backend == "gloo"
        self._staged = staged
        self._transport_device = torch.device("cpu") if staged else device
        self._timeout = timedelta(seconds=timeout_s)

    def allocate(self, spec: MessageSpec, place: torch.Tensor | None = None) -> Any:
        """Make the buffer of a receive; return the tensor that will arrive, None for a scalar.

        Args:
            spec: The message.
            place: A dense tensor to receive into, instead of a new buffer.
        """
        device = self._transport_device if spec.is_scalar else self.device
        buffer = receive_buffer(spec, device) if place is None else place
        self._buffers[spec.number] = buffer
        return None if spec.is_scalar else buffer

    def send(self, spec: MessageSpec, value: Any, memory: memoryview | None = None) -> None:
        """Post the send; the value must not change until `wait` returns.

        Args:
            spec: The message.
            value: The value that the spec describes.
            memory: The value's bytes, if on the host and known to match the spec.

        Raises:
            RankError: E604, if the value does not match the spec.
            LostError: E602, if the peer's connection closed.
        """
        is_known = memory is not None
        payload = value if is_known else payload_of(spec, value, self._transport_device)
        if self._is_local(spec, spec.target):
            assert self.local is not None
            work = self.local.send(
                spec.target, memory or memory_of(payload, spec.bytes, spec.misaligned_bytes)
            )
            self._posted(_Pending(work if work.left else None, spec, True, (payload,), None))
            return
        payload = byte_view(payload, spec.misaligned_bytes)
        if self._staged:
            payload = payload.to(self._transport_device)
        self._post(spec, payload, sending=True)

    def receive(self, spec: MessageSpec, memory: memoryview | None = None) -> None:
        """Post the receive into the buffer of `allocate`.

        Args:
            spec: The message.
            memory: The buffer's bytes, if they are known.

        Raises:
            LostError: E602, if the peer's connection closed.
        """
        if self._is_local(spec, spec.source):
            assert self.local is not None
            buffer = self._buffers[spec.number]
            memory = memory or memory_of(buffer, spec.bytes, spec.misaligned_bytes)
            work = self.local.receive(spec.source, memory)
            self._posted(_Pending(work, spec, False, (buffer,), None))
            return
        self._post(spec, self._receive_bytes(spec), sending=False)

    def _is_local(self, spec: MessageSpec, peer: int) -> bool:
        """Whether the message goes over a Unix socket."""
        local = self.local
        return local is not None and spec.bytes > 0 and local.carries(peer, spec.bytes)

    def _posted(self, pending: _Pending) -> None:
        spec = pending.spec
        self._pending[spec.number] = pending
        event = "send posted" if pending.sending else "receive posted"
        self.notes.append(Note(self.step, event, spec))

    def _receive_bytes(self, spec: MessageSpec) -> torch.Tensor:
        buffer = byte_view(self._buffers[spec.number], spec.misaligned_bytes)
        return torch.empty_like(buffer, device=self._transport_device) if self._staged else buffer

    def _post(self, spec: MessageSpec, payload: torch.Tensor, *, sending: bool) -> None:
        peer = spec.target if sending else spec.source
        work, held, header = None, (payload,), None
        if spec.bytes > 0:  # an empty tensor is not sent: both ends know it
            function = dist.isend if sending else dist.irecv
            tag = spec.number
            if self.headers:
                # A payload with another spec has another tag, so it never enters this buffer.
                tag = _PAYLOAD_TAG + int.from_bytes(_digest(spec)[:3], "big")
                header = _header(spec) if sending else torch.empty(HEADER_BYTES, dtype=torch.uint8)
                header = header.to(self._transport_device)
                held = (payload, header)
                header = self._call(spec, function, header, peer, _HEADER_TAG + spec.number)
            work = self._call(spec, function, payload, peer, tag)
        self._posted(_Pending(work, spec, sending, held, header))

    def _call(
        self, spec: MessageSpec, function: Any, payload: torch.Tensor, peer: int, tag: int
    ) -> Any:
        end = {"group_dst" if function is dist.isend else "group_src": peer}
        try:
            return function(payload, group=self.group, tag=tag, **end)
        except RuntimeError as error:
            raise self._lost(spec, peer, error) from error

    def wait(self, spec: MessageSpec) -> Any:
        """Wait until a message has left or arrived; return what arrived, None for a send.

        Raises:
            StuckError: E701, after `timeout_s`.
            LostError: E602, if the peer's connection closed.
            RankError: E604, if the header is of another message.
        """
        pending = self._pending.pop(spec.number)
        if pending.header is not None:
            self._finish(spec, pending.sending, pending.header)
            if not pending.sending:
                self._check_header(spec, pending.held[1])
        work = pending.work
        if work is not None and not (isinstance(work, Transfer) and self._moved(work)):
            self._finish(spec, pending.sending, work)
        if pending.sending:
            return None
        buffer = self._buffers.pop(spec.number)
        if self._staged and not spec.is_scalar:
            byte_view(buffer, spec.misaligned_bytes).copy_(pending.held[0])
        elif self._staged:
            buffer.view(-1).view(torch.uint8).copy_(pending.held[0])
        return received(spec, buffer)

    def moving_beside(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a call during which this rank's messages move on: peers may wait for them."""
        local = self.local
        if local is None:
            return call

        def beside(env: Any) -> None:
            with local.moving():
                call(env)

        return beside

    def waits(self) -> WaitSoFar | None:
        """Return what this rank waits for now; other threads may ask."""
        if (waiting := self.waiting) is None:
            return None
        spec, since = waiting
        is_receiver = spec.target == self.rank
        peer, op = (spec.source, spec.consumer) if is_receiver else (spec.target, spec.producer)
        seconds, verb = time.monotonic() - since, "for" if is_receiver else "to hand over"
        text = f"waiting {verb} {spec_text(spec)} since {seconds:.1f} s, at op {shown(op)}"
        return WaitSoFar(peer, seconds, text)

    def _moved(self, work: Transfer) -> bool:
        """Move what can be moved without waiting; return whether the message is done."""
        return self.local is not None and self.local.move(work)

    def _finish(self, spec: MessageSpec, sending: bool, work: Any) -> None:
        peer = spec.target if sending else spec.source
        start = time.perf_counter()
        self.waiting = (spec, time.monotonic())
        try:
            if isinstance(work, Transfer):
                assert self.local is not None
                self.local.wait(work, self.timeout_s)
            else:
                with self.local.moving() if self.local else contextlib.nullcontext():
                    work.wait(self._timeout)
        except (RuntimeError, OSError) as error:
            if time.perf_counter() - start >= 0.98 * self.timeout_s:
                raise self._stuck(spec, peer) from error
            raise self._lost(spec, peer, error) from error
        self.waiting = None
        self.waited_s[peer] += time.perf_counter() - start
        self.notes.append(Note(self.step, "sent" if sending else "arrived", spec))

    def _check_header(self, spec: MessageSpec, header: torch.Tensor) -> None:
        if torch.equal(header.cpu(), _header(spec)):
            return
        raise RankError(
            f"rank {spec.source} sent something else than {spec_text(spec)}, "
            f"which op {shown(spec.consumer)} of rank {self.rank} reads in step {self.step}.\n"
            "The two ranks hold different plans; distribute one plan to all of them.",
            code="E604",
            details={"tensor": spec.tensor, "peer": spec.source, "step": self.step},
        )

    def _details(self, spec: MessageSpec, peer: int) -> dict[str, Any]:
        op = spec.consumer if peer == spec.source else spec.producer
        return {
            "op": op, "tensor": spec.tensor, "peer": peer, "rank": self.rank, "step": self.step,
            "message": spec.number,
        }  # fmt: skip

    def _stuck(self, spec: MessageSpec, peer: int) -> StuckError:
        details = self._details(spec, peer)
        verb = "for" if peer == spec.source else "to hand over"
        return StuckError(
            f"rank {self.rank} waited {self.timeout_s:g} s {verb} tensor {shown(spec.tensor)}, "
            f"{'from' if peer == spec.source else 'to'} rank {peer}, at op {shown(details['op'])} "
            f"in step {self.step}.\nIf an op, or what one rank does alone between steps, may take "
            "longer, raise the timeout (--timeout, timeout=).",
            details=details,
        )

    def _lost(self, spec: MessageSpec, peer: int, error: Exception) -> LostError:
        details = self._details(spec, peer) | {"first_failing_rank": peer}
        return LostError(
            f"rank {peer} ended before its work was done: rank {self.rank} lost it at op "
            f"{shown(details['op'])} in step {self.step}, with tensor {shown(spec.tensor)} on "
            f"its way.\nLook at what rank {peer} printed last; a signal (out of memory, "
            "kill) leaves no message of its own.",
            details=details | {"transport": str(error)[:200]},
        )

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


def _digest(spec: MessageSpec) -> bytes:
    """Return 16 bytes of a hash of the fields that both ends must agree on."""
    text = repr((spec.tensor, spec.source, spec.target, spec.bytes, spec.dtype, spec.shape,
                 spec.strides))  # fmt: skip
    return hashlib.sha256(text.encode()).digest()[:HEADER_BYTES]


def _header(spec: MessageSpec) -> torch.Tensor:
    return torch.frombuffer(bytearray(_digest(spec)), dtype=torch.uint8)
