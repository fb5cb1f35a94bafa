"""One rank's random ops of a step, with the numbers that one device would draw.

Problem: a rank runs some of the random ops of a step, and each must draw the numbers that it draws
where all of them run on one device.

Idea: before each of its ops, the rank moves its generator past the draws of all ops that come
before it in the order of the unplaced step. How far each moves a generator is measured
(`generator.measure`), and successive skips are joined into one.

A plan may run the ops of independent branches in another order than the step. Then one pass over
all draws saves the generator's state at the start of each own op ahead of the step.

Complexity: O(random ops) a step, and one `generator.advance` for each op of the rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pardnn.backends.torch.rng.generator import (
    Draws,
    default_generator,
    read_state,
    skip_calls,
    write_state,
)
from pardnn.errors import MismatchError


class RandomStream:
    """The generator of one rank, advanced through the random ops of a step in their order.

    Args:
        order: Names of all random ops of the step that draw from this generator.
        calls: What each of them does to the generator, same length.
        mine: Names of those that this rank runs.
        generator: The generator they draw from.

    Example:
        >>> once = fixed(1)
        >>> stream = RandomStream(["a", "b"], [once, once], {"b"}, torch.default_generator)
        >>> stream.before("b")  # skips the draw of a; then the rank runs b, and last
        >>> stream.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        order: Sequence[str],
        calls: Sequence[Draws],
        mine: frozenset[str] | set[str],
        generator: torch.Generator,
    ) -> None:
        self._calls = tuple(calls)
        self._positions = {name: index for index, name in enumerate(order)}
        self._mine = tuple(index for index, name in enumerate(order) if name in mine)
        self._generator = generator
        self._num_passed = 0
        self._num_run = 0
        if (
            not len(self._positions) == len(order) == len(calls)
            or not mine <= self._positions.keys()
        ):
            raise MismatchError(
                f"the random ops of a step do not fit together: {len(order)} in order, "
                f"{len(self._positions)} different names, {len(calls)} measured, "
                f"{len(mine - self._positions.keys())} on this rank that are not in the order.\n"
                "Measure and plan the same graph.",
                code="E515",
            )

    def before(self, op: str) -> None:
        """Move the generator to where `op`, which this rank runs next, begins to draw.

        Raises:
            MismatchError: E516, this rank does not run `op`, or runs it out of order.
        """
        position = self._positions.get(op)
        if self._num_run == len(self._mine) or position != self._mine[self._num_run]:
            raise MismatchError(
                f"random op {op!r} is not the next one of this rank: it would draw another op's "
                f"numbers.\nA plan runs random ops in the order of the step; this is number "
                f"{position} of it, {self._num_run} of this rank's {len(self._mine)} are done.",
                code="E516",
                details={"op": op},
            )
        self.ahead()
        self._num_passed = self._mine[self._num_run] + 1
        self._num_run += 1

    def ahead(self) -> None:
        """Move the generator to this rank's next random op in advance, while the rank waits.

        `before` then has nothing left to skip. After the last op this does nothing.
        """
        if self._num_run == len(self._mine):
            return
        position = self._mine[self._num_run]
        skip_calls(self._generator, self._calls[self._num_passed : position], is_repeated=True)
        self._num_passed = position

    def finish(self) -> None:
        """Move the generator to the end of the step and start over for the next step.

        Raises:
            MismatchError: E516, some of this rank's random ops have not run.
        """
        if self._num_run != len(self._mine):
            raise MismatchError(
                f"the step ended with {len(self._mine) - self._num_run} random ops of this rank "
                "not run: the generator would not be where one device leaves it.",
                code="E516",
            )
        skip_calls(self._generator, self._calls[self._num_passed :], is_repeated=True)
        self._num_passed = self._num_run = 0


class UnorderedStream:
    """The random stream of a rank that does not run its random ops in the order of the step.

    Has the methods of `RandomStream`. Before the first own draw, one pass over all draws of the
    step saves the generator's state at the start of each own op.

    Args:
        order: All random ops in the order of the whole step.
        calls: How each of them advances the generator.
        mine: Those that this rank runs.
        generator: That they draw from.
    """

    def __init__(
        self,
        order: Sequence[str],
        calls: Sequence[Draws],
        mine: set[str],
        generator: torch.Generator,
    ) -> None:
        self._order = tuple(order)
        self._calls = tuple(calls)
        self._mine = mine
        self._generator = generator
        self._states: dict[str, bytes] = {}
        self._end = b""

    def _look_ahead(self) -> None:
        skipped: list[Draws] = []
        for name, call in zip(self._order, self._calls, strict=True):
            if name in self._mine:
                skip_calls(self._generator, skipped)
                skipped = []
                self._states[name] = read_state(self._generator)
            skipped.append(call)
        skip_calls(self._generator, skipped)
        self._end = read_state(self._generator)

    def before(self, op: str) -> None:
        """Set the generator to the state at the start of `op`."""
        if not self._states:
            self._look_ahead()
        write_state(self._generator, self._states[op])

    def finish(self) -> None:
        """Set the generator to the state at the end of the step."""
        if not self._states:
            self._look_ahead()
        write_state(self._generator, self._end)
        self._states = {}


def make_stream(
    order: Sequence[str], draws: Mapping[str, Draws], mine: Sequence[str], device: torch.device
) -> RandomStream | UnorderedStream:
    """Return what keeps one rank's generator where the step on one device would have it.

    Args:
        order: All random ops in the order of the whole step.
        draws: How each advances the generator.
        mine: Those that this rank runs, in the order of its plan.
        device: Whose generator they draw from.
    """
    position = {name: i for i, name in enumerate(order)}
    calls = [draws[name] for name in order]
    positions = [position[name] for name in mine]
    in_order = positions == sorted(positions)
    is_once = len(set(mine)) == len(mine)
    kind = RandomStream if in_order and is_once else UnorderedStream
    return kind(list(order), calls, set(mine), default_generator(device))
