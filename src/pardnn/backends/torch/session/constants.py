"""Tensors that are constants of a graph: whether their content is still that at capture.

If no placeholder can be put in place of a tensor (an attribute of a class, a set, a bound method `f
= t.mul`), the step computes with the real tensor, and the graph contains its content; the same is
true of a flag in a buffer that the step branches on (`choices.flags`). `t.mul_(0.9)` between two
calls changes no object that the guards compare, and another step may move a flag to another rank.
Only rank 0 has traced the step and knows the tensor, so several ranks cannot capture again
together: there a change is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch

from pardnn.backends.torch.capture.refusals.unsupported import at
from pardnn.backends.torch.capture.trace_ir import Value
from pardnn.backends.torch.devices import bytes_of
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.backends.torch.user_step.sources import WholeOf, is_whole
from pardnn.errors import MismatchError

#: Bytes of a graph's constants that are compared at each call, 1 us a KiB. Of further ones only the
#: version is, which shows all writes except those through `.data` and NumPy.
_MAX_BYTES = 1 << 16


class Constants:
    """The constants of one graph that the user may change.

    Args:
        tensors: The tensors with their values in the trace.
        is_alone: Whether there is one rank.
        whole_of: Returns the whole of a tensor that ranks hold in parts, or that one rank holds.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[torch.Tensor, Value]] = (),
        *,
        is_alone: bool = True,
        whole_of: WholeOf = is_whole,
    ) -> None:
        self._is_alone, self._whole_of = is_alone, whole_of
        self._held: list[tuple[weakref.ref[torch.Tensor], int, bytes, str]] = []
        rest = _MAX_BYTES
        for tensor, value in tensors:
            is_compared = tensor.device.type == "cpu" and tensor.nbytes <= rest
            rest -= tensor.nbytes * is_compared
            content = _content(tensor) if is_compared else b""
            where = at(value.call.source)
            name = f"a tensor of shape {list(tensor.shape)} that the step computes with{where}"
            self._held.append((weakref.ref(tensor), _version(tensor), content, name))

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._held

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the graph contains the content of a tensor."""
        return any(ref() is tensor for ref, *_ in self._held)

    def changes(self) -> Iterator[Change]:
        """Yield the constants whose content has changed.

        Raises:
            MismatchError: E509, on several ranks.
        """
        for ref, version, content, name in self._held:
            tensor = ref()
            if tensor is None:
                continue
            same = _content(tensor) == content if content else _version(tensor) == version
            same &= self._is_alone or self._whole_of(tensor) is None
            if not (same or self._is_alone):
                raise MismatchError(
                    f"{name} was written since capture.\nCapture cannot replace it there (an "
                    "attribute of a class or module, a set,\na bound method), or the step takes "
                    "another way by it: the graph keeps what\nit held as a constant.\n"
                    "Keep it in an attribute of an object, in a list or a dictionary, or pass it\n"
                    "as an argument: there it is read at each call. Make a flag a bool of Python.",
                    code="E509",
                )
            if not same:
                yield Change(name, "what it was", "written")


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _content(tensor: torch.Tensor) -> bytes:
    return bytes_of(tensor).numpy().tobytes()
