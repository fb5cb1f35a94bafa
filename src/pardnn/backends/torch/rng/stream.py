"""One rank's random ops of a step, with the numbers that one device would draw.

Problem: a rank runs some of the random ops of a step, and each must draw the same numbers as if all
of them ran on one device.

Idea: before each of its ops, the rank moves its generator past the draws of all earlier ops of the
unplaced step. How far each moves a generator is measured (`generator.measure`), and successive
skips are joined into one.

A plan may run the ops of independent branches in a different order than the step. So the rank keeps
the state of the generator at each of its ops that it passes before the plan runs it, and the
position from which it turned back to one.

Complexity: O(random ops) per step; draws of other ranks are passed once, and those that this rank
makes early or late once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from pardnn.backends.torch.rng.generator import Draws, read_state, skip_calls, write_state
from pardnn.errors import MismatchError


class RandomStream:
    """One rank's generator, which has the state of a single device's at each random op.

    Args:
        order: Names of all random ops of the step that draw from this generator, in its order.
        calls: What each of them does to the generator, same length.
        mine: The ops that this rank runs, as often as it runs them, in any order.
        generator: The generator they draw from.

    Raises:
        MismatchError: E515, if these do not fit together.

    Example:
        >>> once = fixed(1)
        >>> stream = RandomStream(["a", "b"], [once, once], ["b"], torch.default_generator)
        >>> stream.before("b")  # skips the draw of a; then the rank runs b, and last
        >>> stream.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        order: Sequence[str],
        calls: Sequence[Draws],
        mine: Sequence[str],
        generator: torch.Generator,
    ) -> None:
        self._calls = tuple(calls)
        self._positions = {name: index for index, name in enumerate(order)}
        if len(self._positions) != len(order) or len(order) != len(calls):
            self._fail(len(order), len(calls), 0)
        if unknown := set(mine) - self._positions.keys():
            self._fail(len(order), len(calls), len(unknown))
        self._runs = Counter(self._positions[name] for name in mine)
        self._generator = generator
        self._begin()

    def _fail(self, ordered: int, measured: int, unknown: int) -> None:
        raise MismatchError(
            f"the random ops of a step do not fit together: {ordered} in order, "
            f"{len(self._positions)} different names, {measured} measured, "
            f"{unknown} on this rank that are not in the order.\n"
            "Measure and plan the same graph.",
            code="E515",
        )

    def _begin(self) -> None:
        self._left = self._runs.copy()
        # All calls before the front are passed. Its state; None if the generator is there.
        self._front = 0
        self._front_state: bytes | None = None
        self._passed: dict[int, bytes] = {}

    def before(self, op: str) -> None:
        """Move the generator to where `op`, which this rank runs next, begins to draw.

        Raises:
            MismatchError: E516, if this rank does not run `op`, or not again in this step.
        """
        at = self._positions.get(op, -1)
        if not self._left[at]:
            raise MismatchError(
                f"this rank has no run of random op {op!r} left in this step: it would draw "
                f"another op's numbers.\n{self._left.total()} of its {self._runs.total()} runs of "
                "random ops are left. Parallelize again, with a plan of this step.",
                code="E516",
                details={"op": op},
            )
        self._left[at] -= 1
        if at < self._front:
            if self._front_state is None:
                self._front_state = read_state(self._generator)
            write_state(self._generator, self._passed[at])
            return
        self._walk(at)
        if self._left[at]:
            self._passed[at] = read_state(self._generator)
        self._front = at + 1  # where its draw will leave the generator

    def _walk(self, end: int) -> None:
        """Move the front, keeping the states at this rank's ops that have yet to run."""
        if self._front_state is not None:
            write_state(self._generator, self._front_state)
            self._front_state = None
        for own in [at for at in range(self._front, end) if self._left[at]]:
            skip_calls(self._generator, self._calls[self._front : own], is_repeated=True)
            self._front, self._passed[own] = own, read_state(self._generator)
        skip_calls(self._generator, self._calls[self._front : end], is_repeated=True)
        self._front = end

    def finish(self) -> None:
        """Move the generator to the end of the step and start over for the next step.

        Raises:
            MismatchError: E516, if some of this rank's random ops have not run.
        """
        if self._left.total():
            raise MismatchError(
                f"the step ended with {self._left.total()} random ops of this rank not run: the "
                "generator would not be where one device leaves it.",
                code="E516",
            )
        self._walk(len(self._calls))
        self._begin()
