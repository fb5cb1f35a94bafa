"""Messages between ranks of one machine, moved by their own threads over Unix sockets.

Gloo moves a message with three wake-ups of its own threads (announce, answer, data). Where ranks
compute on all cores, those threads wait for a core each time, and a message of any size costs 0.3
to 0.6 ms; here it costs two copies and, if the receiver sleeps, one wake-up: 10 to 40 us. And no
hidden thread takes a core, so the time of a step can be predicted from its action lists.

Progress: a send copies what fits into the socket's buffer at once, the rest at this rank's next
message; a wait moves whatever can move, for all peers. During a wait for the process group, and
during a long op, a thread does the same: buffers fill up, and a sender that must free its tensor
would wait until the op ends (GPT-2 on 4 ranks: 6.1 s a step, 5.6 to 5.9 with the thread). So two
ranks that wait for each other's data cannot deadlock, and messages between two ranks arrive in the
order of their posts, which is one global order on all ranks (`plan/lower.py`). The system bounds
its buffers; a message longer than a quarter of one goes over the process group, which moves it
while both ranks compute.

The sockets are in a private directory until all have connected. The process group serves ranks on
other machines, and those that cannot be reached for any reason.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pardnn.backends.torch.comm.nodes import machine_id
from pardnn.backends.torch.comm.private_folder import private_folder
from pardnn.errors import RankError

#: Bytes asked for a socket's buffer; the system may give less (`net.core.wmem_max`).
BUFFER_BYTES = 4 << 20
#: How often a rank that waits for one peer moves the messages of others, seconds.
NAP_S = 0.02
#: Longest wait for a connection that its caller has announced, seconds.
ACCEPT_S = 20.0
AllGather = Callable[[str, Any], list[Any]]


class Transfer:
    """A message in flight: `left` is a view of the bytes not yet moved."""

    __slots__ = ("left", "peer", "sending")

    def __init__(self, peer: int, left: memoryview, *, sending: bool) -> None:
        self.peer = peer
        self.left = left
        self.sending = sending


class LocalLinks:
    """One rank's connections to the ranks of its machine.

    Args:
        sockets: Connected sockets by rank.
        limit_bytes: Size of the longest message; the same on all ranks.
    """

    def __init__(self, sockets: dict[int, socket.socket], limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._sockets = sockets
        self._out: dict[int, deque[Transfer]] = {peer: deque() for peer in sockets}
        self._in: dict[int, deque[Transfer]] = {peer: deque() for peer in sockets}
        self._broken: dict[int, OSError] = {}
        nap = struct.pack("ll", 0, int(1e6 * NAP_S))
        for each in sockets.values():
            each.setblocking(True)  # calls that must not wait pass a flag
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, nap)

    def carries(self, peer: int, num_bytes: int) -> bool:
        """Whether a message of this size to or from a rank goes over its socket."""
        return peer in self._sockets and num_bytes <= self.limit_bytes

    def send(self, peer: int, payload: memoryview) -> Transfer:
        """Start sending; the payload must not change until `wait` returns."""
        transfer = Transfer(peer, payload, sending=True)
        self._out[peer].append(transfer)
        self._push(peer)
        return transfer

    def receive(self, peer: int, buffer: memoryview) -> Transfer:
        """Post a receive of the peer's next message, which has the size of the buffer."""
        transfer = Transfer(peer, buffer, sending=False)
        self._in[peer].append(transfer)
        return transfer

    def move(self, transfer: Transfer) -> bool:
        """Move what can move without waiting; return whether this message has left or arrived."""
        if transfer.left:
            (self._push if transfer.sending else self._pull)(transfer.peer)
        return not transfer.left

    def wait(self, transfer: Transfer, timeout_s: float) -> None:
        """Move messages until this one has left or arrived.

        Args:
            transfer: The result of `send` or `receive`.
            timeout_s: Longest wait, seconds.

        Raises:
            TimeoutError: After `timeout_s`.
            OSError: If the peer's connection closed.
        """
        end = time.monotonic() + timeout_s
        while not self.move(transfer):
            if transfer.peer in self._broken:
                raise self._broken[transfer.peer]
            rest = end - time.monotonic()
            if rest <= 0.0:
                raise TimeoutError
            if transfer.sending or rest < NAP_S or any(self._out.values()):
                self._move_all(rest)
            else:
                self._nap(transfer.peer)

    def _nap(self, peer: int) -> None:
        """Wait briefly for the peer's next bytes, with a single system call."""
        head = self._in[peer][0]
        try:
            self._arrived(peer, head, self._sockets[peer].recv_into(head.left))
        except BlockingIOError:
            self._move_all(0.0)
        except OSError as error:
            self._broken.setdefault(peer, error)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Move messages during a wait for the process group, or during an op.

        The sender of the awaited message may itself wait for one of these.
        """
        if not (any(self._out.values()) or any(self._in.values())):
            yield
            return
        stop, stopped = socket.socketpair()
        beside = threading.Thread(target=self._move_until, args=(stopped,), daemon=True)
        beside.start()
        try:
            yield
        finally:
            stop.close()
            beside.join()
            stopped.close()

    def _move_until(self, stopped: socket.socket) -> None:
        while not select.select([stopped], [], [], 0.0)[0]:
            self._move_all(None, stopped)

    def _move_all(self, timeout_s: float | None, wake: socket.socket | None = None) -> None:
        """Wait until anything can move, and move it."""
        poll, peers = select.poll(), {}
        if wake is not None:
            poll.register(wake, select.POLLIN)
        for peer, connection in self._sockets.items():
            events = select.POLLIN if self._in[peer] else 0
            events |= select.POLLOUT if self._out[peer] else 0
            if events and peer not in self._broken:
                poll.register(connection, events)
                peers[connection.fileno()] = peer
        for number, events in poll.poll(None if timeout_s is None else 1e3 * timeout_s):
            if number in peers and events & ~select.POLLOUT:
                self._pull(peers[number])
            if number in peers and events & ~select.POLLIN:
                self._push(peers[number])

    def _push(self, peer: int) -> None:
        queue, send = self._out[peer], self._sockets[peer].send
        try:
            while queue:
                transfer = queue[0]
                transfer.left = transfer.left[send(transfer.left, socket.MSG_DONTWAIT) :]
                if not transfer.left:
                    queue.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken.setdefault(peer, error)

    def _pull(self, peer: int) -> None:
        queue, receive = self._in[peer], self._sockets[peer].recv_into
        try:
            while queue:
                self._arrived(peer, queue[0], receive(queue[0].left, 0, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken.setdefault(peer, error)

    def _arrived(self, peer: int, transfer: Transfer, count: int) -> None:
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        transfer.left = transfer.left[count:]
        if not transfer.left:
            self._in[peer].popleft()

    def closed(self) -> set[int]:
        """Return the ranks that have closed their connection, or whose process has ended."""
        found = {peer for peer, each in list(self._sockets.items()) if _is_closed(each)}
        return found | set(self._broken)

    def close(self) -> None:
        """Close all connections: peers that wait for this rank stop waiting."""
        for each in self._sockets.values():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets, self._in, self._out = {}, {}, {}


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def connect_local(rank: int, all_gather: AllGather) -> LocalLinks | None:
    """Connect to all ranks of this machine that can be reached; None if there are none.

    Args:
        rank: This rank.
        all_gather: See `World.all_gather`; all ranks call this function.

    Raises:
        RankError: E605, if the connection of a rank does not arrive.
    """
    with contextlib.ExitStack() as stack:
        listener, path = _listening(stack)
        offers = all_gather("local", {"machine": machine_id(), "path": path})
        near = [
            each["path"] if each["path"] and each["machine"] == offers[rank]["machine"] else None
            for each in offers
        ]
        sockets = dict(_connected(rank, near[:rank]))
        met = all_gather("reached", {"peers": list(sockets), "limit": _limit_bytes()})
        callers = [peer for peer, each in enumerate(met) if rank in each["peers"]]
        if listener is not None:
            sockets.update(_accepted(listener, callers))
    return LocalLinks(sockets, min(each["limit"] for each in met)) if sockets else None


def _listening(stack: contextlib.ExitStack) -> tuple[socket.socket | None, str | None]:
    try:
        path = str(stack.enter_context(private_folder()) / "s")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(4096)
    except (OSError, AttributeError):  # no Unix sockets here, or the path is too long
        return None, None
    return listener, path


def _sized(connection: socket.socket) -> socket.socket:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return connection


def _limit_bytes() -> int:
    """Return the longest message that fits a socket's buffer with room for a few others."""
    if not hasattr(socket, "AF_UNIX"):
        return 0
    with _sized(socket.socket(socket.AF_UNIX)) as probe:
        # Linux returns twice the size, to include its own bookkeeping.
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4


def _connected(rank: int, paths: list[str | None]) -> Iterator[tuple[int, socket.socket]]:
    """Connect to the listed ranks, and send each this rank's number."""
    for peer, path in enumerate(paths):
        if path is None:
            continue
        connection = _sized(socket.socket(socket.AF_UNIX))
        try:
            connection.settimeout(ACCEPT_S)
            connection.connect(path)
            connection.sendall(rank.to_bytes(4, "big"))
        except OSError:
            connection.close()
        else:
            yield peer, connection


def _accepted(listener: socket.socket, callers: list[int]) -> Iterator[tuple[int, socket.socket]]:
    listener.settimeout(ACCEPT_S)
    for _ in callers:
        try:
            connection = _sized(listener.accept()[0])
            connection.settimeout(ACCEPT_S)
            caller = connection.recv(4, socket.MSG_WAITALL)
        except OSError as error:
            raise RankError(
                f"ranks {callers} of this machine called, but their connections did not come: "
                f"{error}.\nOne of them may have ended; look at what it printed last.",
                code="E605",
                details={"missing": callers},
            ) from error
        yield int.from_bytes(caller, "big"), connection
