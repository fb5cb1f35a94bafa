"""Which random calls of a step draw numbers that an earlier call has drawn already.

`torch.utils.checkpoint` computes its forward pass a second time from the generator state that the
first began with, so that dropout drops the same elements; `fork_rng` and `set_rng_state` do as
much by hand. While a step is traced nothing is drawn, so every random call moves the real
generator by one number instead: the states that this makes tell calls apart, whoever put one back
and however. A call that begins in a known state is a redraw of the call that began there. It must
be the same call on tensors of the same shapes, else nobody can tell which numbers come out.

Ranks make a redraw from the state in which its original begins; see `draws.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from pardnn.backends.torch.capture import unsupported
from pardnn.backends.torch.capture.trace_ir import Call, Value
from pardnn.backends.torch.rng.generator import default_generator, read_state

_CPU = torch.device("cpu")


class Redraws:
    """The random calls of one trace, and where the generators stand.

    Use one per trace, made before the step runs. O(1) for a call, and 5 KB of state compared.
    """

    def __init__(self) -> None:
        self._streams = {"cpu": _Stream(torch.default_generator)}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._streams["cuda"] = _Stream(default_generator(torch.device("cuda")))

    def note(self, call: Call, device: str, where: str | None) -> None:
        """Note a random call; set its `redraws` if its numbers have been drawn before.

        Args:
            call: With its arguments, before it is recorded.
            device: Type of the device that it draws on.
            where: Its line, for the error.

        Raises:
            UnsupportedError: E801, if the generator's state tells nothing about the numbers.
        """
        stream = self._streams.get(device) or self._streams["cpu"]
        place = stream.place()
        if place is None:
            raise unsupported.reseeded(where)
        if place == len(stream.calls):
            stream.calls.append(call)
        elif _is_same(stream.calls[place], call):
            call.redraws = stream.calls[place]
        else:
            raise unsupported.reseeded(where)
        stream.move(place + 1)

    def finish(self) -> None:
        """Check that the step leaves the generators after its last number.

        Raises:
            UnsupportedError: E801, if it leaves them elsewhere: the next step would begin there.
        """
        for stream in self._streams.values():
            if stream.calls and stream.place() != len(stream.calls):
                raise unsupported.reseeded(None)


class _Stream:
    """One generator: its states by the number of calls that have drawn before."""

    def __init__(self, generator: torch.Generator) -> None:
        self.calls: list[Call] = []
        self._generator = generator
        self._places = {read_state(generator): 0}

    def place(self) -> int | None:
        return self._places.get(read_state(self._generator))

    def move(self, place: int) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            torch.rand(1, generator=self._generator, device=self._generator.device)
        self._places.setdefault(read_state(self._generator), place)


def _is_same(one: Call, other: Call) -> bool:
    return one.kind == other.kind and _shapes([one.args, one.kwargs]) == _shapes(
        [other.args, other.kwargs]
    )


def _shapes(data: Any) -> Any:
    """Return arguments with tensors replaced by how they lie in memory."""
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
