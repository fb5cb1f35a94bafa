"""RNG replays: random calls of a step that repeat the draws of an earlier call.

Problem: `torch.utils.checkpoint` computes its forward pass a second time from the generator state
that the first began with, so that dropout drops the same elements; `fork_rng` and `set_rng_state`
do the same by hand. The graph must say so, or the ranks would draw new numbers.

Idea: while a step is traced nothing is drawn, so every random call advances the real generator by
one number instead. The state then identifies the position in the sequence of random calls, however
it was restored. A call that begins in a known state replays the call that began there. It must be
the same call on tensors of the same shapes; otherwise its numbers are unknown.

Ranks run a replay from the state in which its original begins: `runtime.random_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.random_states import left_reseeded
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.rng.generator import DATA_DEPENDENT, default_generator, read_state


class RngReplays:
    """The random calls of one trace, and the states of the generators between them.

    Use one per trace, created before the step runs. O(1) for a call, and 5 KB of state compared.
    """

    def __init__(self) -> None:
        self._streams = {"cpu": _Stream(torch.default_generator)}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._streams["cuda"] = _Stream(default_generator(torch.device("cuda")))

    def note(self, call: Call, device: str, where: str | None) -> None:
        """Note a random call; set `replays` if its numbers have been drawn before.

        Args:
            call: The call with its arguments, before it is recorded.
            device: Type of the device that it draws on.
            where: Its line, for the error.

        Raises:
            UnsupportedError: E801, if the generator's state says nothing about the numbers; E822,
                if the number of draws depends on values, which other ranks cannot follow.
        """
        if call.kind.removeprefix("aten.").partition(".")[0].rstrip("_") in DATA_DEPENDENT:
            raise unsupported.data_dependent_draws(call.kind, where)
        stream = self._streams.get(device) or self._streams["cpu"]
        position = stream.position()
        if position is None:
            raise unsupported.reseeded(where)
        if position == len(stream.calls):
            stream.calls.append(call)
        elif _is_same(stream.calls[position], call):
            call.replays = stream.calls[position]
        else:
            raise unsupported.reseeded(where)
        stream.advance(position + 1)

    def finish(self) -> None:
        """Check that the step leaves the generators just after its last number.

        Raises:
            UnsupportedError: E801, if it leaves them elsewhere: the next step would begin there.
        """
        for stream in self._streams.values():
            if stream.position() != len(stream.calls):
                raise left_reseeded()


class _Stream:
    """One generator, and the position in its random calls that each of its states belongs to."""

    def __init__(self, generator: torch.Generator) -> None:
        self.calls: list[Call] = []
        self._generator = generator
        self._positions = {read_state(generator): 0}

    def position(self) -> int | None:
        return self._positions.get(read_state(self._generator))

    def advance(self, position: int) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            torch.rand(1, generator=self._generator, device=self._generator.device)
        self._positions.setdefault(read_state(self._generator), position)


def _is_same(one: Call, other: Call) -> bool:
    return one.kind == other.kind and _shapes([one.args, one.kwargs]) == _shapes(
        [other.args, other.kwargs]
    )


def _shapes(data: Any) -> Any:
    """Return arguments with tensors replaced by their shapes, strides and dtypes."""
    if isinstance(data, Value):
        if data.geometry is None:
            return "number", id(data)
        shape, strides, _, dtype = data.geometry
        return "tensor", shape, strides, dtype
    if isinstance(data, dict):
        return {key: _shapes(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_shapes(item) for item in data]
    return repr(data)
