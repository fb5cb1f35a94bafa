"""Messages over the ranks' own sockets: whatever their size and order, and when a peer is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pardnn.backends.torch.comm import unix_sockets
from pardnn.backends.torch.comm.channel import Channel
from pardnn.backends.torch.comm.unix_sockets import LocalLinks
from pardnn.backends.torch.comm.wire_format import MessageSpec, memory_of
from tests.backends.torch.ranks import connect, run_ranks

Pair = tuple[LocalLinks, LocalLinks]


@pytest.fixture
def pair() -> Iterator[tuple[LocalLinks, LocalLinks]]:
    ends = socket.socketpair()
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    here, there = LocalLinks({1: ends[0]}, 1 << 30), LocalLinks({0: ends[1]}, 1 << 30)
    yield here, there
    here.close()
    there.close()


def filled(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def spec_of(number: int, source: int, size: int) -> MessageSpec:
    shape, strides = (size,), (1,)
    return MessageSpec(
        number, "x", source, 1 - source, size, "uint8", shape, strides, "producer", "consumer"
    )


def posted(channel: Channel, specs: list[MessageSpec], rank: int) -> None:
    """Post this rank's end of each message, whose bytes all are its number."""
    for spec in specs:
        if rank == spec.source:
            channel.send(spec, filled(spec.bytes, spec.number))
        else:
            channel.allocate(spec)
            channel.receive(spec)


def test_messages_arrive_in_the_order_of_their_posts(pair: Pair) -> None:
    here, there = pair
    sent = [filled(size, size % 251) for size in (1, 1000, 7, 40_000)]
    leaving = [here.send(1, memory_of(each, each.nbytes)) for each in sent]
    got = [torch.zeros_like(each) for each in sent]
    coming = [there.receive(0, memory_of(each, each.nbytes)) for each in got]
    there.wait(coming[-1], 1.0)
    assert all(here.move(each) for each in leaving)
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_more_than_the_buffers_hold_goes_both_ways_at_once() -> None:
    """Each rank waits for its own message while the other's is still in its way."""

    def body(rank: int, store: str) -> bool:
        channel = connect(rank, 2, store, 20.0).channel
        assert channel is not None
        assert channel.local is not None
        size, count = channel.local.limit_bytes, 9
        specs = [spec_of(i, i % 2, size) for i in range(2 * count)]
        posted(channel, specs, rank)
        for spec in specs:
            if spec.source == rank:
                channel.wait(spec)
        got = [channel.wait(spec) for spec in specs if spec.target == rank]
        return all(bool((each == 2 * i + 1 - rank).all()) for i, each in enumerate(got))

    for outcome in run_ranks(2, body):
        assert outcome.value is True, outcome.error


@pytest.mark.parametrize("late", ["push", "pull"])
def test_messages_move_while_a_rank_waits_for_the_process_group(late: str) -> None:
    """What is still leaving or coming must not wait for a longer message, nor that one for it."""

    def body(rank: int, store: str) -> bool:
        channel = connect(rank, 2, store, 5.0).channel
        assert channel is not None
        assert channel.local is not None
        small, large = channel.local.limit_bytes, channel.local.limit_bytes + 1
        specs = [spec_of(i, 0, small) for i in range(9)]
        source = 1 if late == "push" else 0
        last = spec_of(9, source, large)
        posted(channel, specs, rank)
        time.sleep(0.3 * rank)  # all that fits into the buffers is in them
        values = []
        for spec in [last, *specs] if rank != source else [*specs, last]:
            if spec is last:
                posted(channel, [last], rank)
            values.append((spec.number, channel.wait(spec)))
        return all(value is None or bool((value == number).all()) for number, value in values)

    for outcome in run_ranks(2, body):
        assert outcome.value is True, outcome.error


def test_messages_move_beside_a_long_op() -> None:
    """A sender that must let go of its tensors does not wait until the receiver's op ends."""

    def body(rank: int, store: str) -> bool:
        channel, left = connect(rank, 2, store, 5.0).channel, Path(store).with_name("left")
        assert channel is not None
        assert channel.local is not None
        size = channel.local.limit_bytes
        specs = [spec_of(i, 0, size) for i in range(9)]  # more than the buffers hold
        posted(channel, specs, rank)

        def op(_env: object) -> None:
            end = time.monotonic() + 4.0
            while not left.exists() and time.monotonic() < end:
                time.sleep(0.01)

        if rank == 1:
            channel.moving_beside(op)({})
            return left.exists() and all(bool((channel.wait(s) == s.number).all()) for s in specs)
        for spec in specs:
            channel.wait(spec)
        left.touch()
        return True

    for outcome in run_ranks(2, body):
        assert outcome.value is True, outcome.error


def test_a_wait_ends_in_time(pair: Pair) -> None:
    here, _ = pair
    buffer = filled(10, 0)
    coming = here.receive(1, memory_of(buffer, 10))
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        here.wait(coming, 0.05)
    assert 0.05 <= time.monotonic() - start < 2.0


@pytest.mark.parametrize("sending", [False, True])
def test_a_lost_peer_ends_the_wait(sending: bool, pair: Pair) -> None:
    here, there = pair
    buffer = filled(1 << 20, 0)
    transfer = (here.send if sending else here.receive)(1, memory_of(buffer, 1 << 20))
    there.close()
    with pytest.raises(ConnectionError):
        here.wait(transfer, 5.0)


def test_what_a_peer_sent_before_it_ended_still_arrives(pair: Pair) -> None:
    here, there = pair
    sent, got = filled(1000, 5), filled(1000, 0)
    there.send(0, memory_of(sent, 1000))
    there.close()
    here.wait(here.receive(1, memory_of(got, 1000)), 5.0)
    assert torch.equal(sent, got)


@pytest.mark.parametrize("why", ["another machine", "no sockets"])
def test_ranks_that_cannot_be_reached_are_left_to_the_process_group(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int, store: str) -> list[Any]:
        if why == "no sockets" and rank == 1:
            monkeypatch.setattr(unix_sockets, "_listening", lambda _: (None, None))
            monkeypatch.setattr(unix_sockets, "_connected", lambda *_: iter(()))
        elif rank == 1:
            monkeypatch.setattr(unix_sockets, "machine_id", lambda: "elsewhere")
        channel = connect(rank, 2, store, 10.0).channel
        assert channel is not None
        spec = MessageSpec(0, "x", 0, 1, 12, "float32", (3,), (1,), "producer", "consumer")
        if rank == 0:
            channel.send(spec, torch.arange(3.0))
        else:
            channel.allocate(spec)
            channel.receive(spec)
        value = channel.wait(spec)
        return [channel.local is None, None if value is None else value.tolist()]

    found = [outcome.value for outcome in run_ranks(2, body)]
    assert found == [[True, None], [True, [0.0, 1.0, 2.0]]]
