"""Agreement: all ranks run the same one of several captured graphs in each step.

Problem: each rank chooses a graph by the values that it sees, without asking the others. A rank
that sees another value would send and receive the messages of another graph.
Idea: in every step each rank tells its right neighbour which graph it runs, ahead of its other
messages, and before the step ends compares that with what its left neighbour said. If all
neighbours agree, all ranks do. A rank that is stuck or fails in the meantime checks there first.

Cost: two messages of 16 bytes a step, about 40 us over Unix sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pardnn.backends.torch.comm.wire_format import MessageSpec
from pardnn.backends.torch.comm.world import World
from pardnn.errors import MismatchError, PardnnError

#: Tags of these messages: above those of any graph, below the channel's own.
_FIRST_NUMBER = 1 << 23


class Agreement:
    """This rank's two neighbours in the ring of ranks.

    Args:
        world: This rank's connections; more than one rank.
        number: The number of the graph that this rank runs.
        describe: Describes what a graph holds for, by its number.

    Attributes:
        number: As given.
    """

    def __init__(self, world: World, number: int, describe: Callable[[int], str]) -> None:
        assert world.channel is not None
        self._channel, self._rank = world.channel, world.rank
        self._left = (world.rank - 1) % world.size
        self._out = _spec(world.rank, (world.rank + 1) % world.size)
        self._in = _spec(self._left, world.rank)
        self.number, self._describe = number, describe
        self._told: list[int] | None = None
        self._out_pair, self._in_pair = _Pair(self._channel.device), _Pair(self._channel.device)

    def post(self, step: int) -> None:
        """Tell the right neighbour what runs, ahead of all messages of the step."""
        self._told = [step, self.number]
        self._in_pair.write([-1, -1])
        self._channel.allocate(self._in, self._in_pair.tensor)
        self._out_pair.write(self._told)
        told = self._out_pair
        # Every rank keeps to one order of these messages: 0 to 1, 1 to 2, ...
        if self._rank == 0:
            self._channel.send(self._out, told.tensor, told.memory)
        self._channel.receive(self._in, self._in_pair.memory)
        if self._rank != 0:
            self._channel.send(self._out, told.tensor, told.memory)

    def check(self) -> None:
        """Compare with what the left neighbour said.

        Raises:
            MismatchError: E519, if it runs another graph.
        """
        self._channel.wait(self._in)
        found = self._in_pair.read()
        self._channel.wait(self._out)
        told, self._told = self._told, None
        if found != told:
            raise self._error(found)

    def explained(self, error: PardnnError) -> PardnnError:
        """Return the error that explains a failure within the step, if it is a disagreement."""
        if self._told is None:
            return error
        found = self._in_pair.read()
        if found == self._told or -1 in found:
            return error
        return self._error(found)

    def _error(self, found: list[int]) -> MismatchError:
        mine, theirs = self._describe(self.number), self._describe(found[1])
        return MismatchError(
            f"rank {self._rank} and rank {self._left} run different graphs of the step: rank "
            f"{self._rank} the one for {mine}, rank {self._left} the one for {theirs}.\nEvery "
            "rank has to make the same calls, with the same flags, modes and shapes.",
            code="E519",
            details={"rank": self._rank, "peer": self._left, "graphs": [self.number, found[1]]},
        )


class _Pair:
    """Two numbers in a tensor that is made once: making it at each step costs 60 us.

    Args:
        device: The device of the tensor.

    Attributes:
        tensor: What is sent or received.
        memory: The tensor's bytes; None if they are not on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.empty(2, dtype=torch.int64, device=device)
        self._host = self.tensor.cpu()  # the tensor itself if it is on the host
        self._words = memoryview(self._host.numpy())
        self.memory = self._words.cast("B") if self._host is self.tensor else None

    def write(self, numbers: Sequence[int]) -> None:
        self._words[0], self._words[1] = numbers
        if self._host is not self.tensor:
            self.tensor.copy_(self._host)

    def read(self) -> list[int]:
        if self._host is not self.tensor:
            self._host.copy_(self.tensor)
        return self._words.tolist()


def _spec(source: int, target: int) -> MessageSpec:
    return MessageSpec(
        number=_FIRST_NUMBER + source,
        tensor="which graph runs",
        source=source,
        target=target,
        bytes=16,
        dtype="int64",
        shape=(2,),
        strides=(1,),
        producer="the step's beginning",
        consumer="the step's end",
    )
