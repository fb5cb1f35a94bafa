"""The numbers of value numbering: equal for equal contents, of tensors and of calls.

See `value_numbers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: Tensors up to so many elements are computed if everything they depend on is known.
MAX_KNOWN = 16


class Numbering:
    """The numbers of two or more traces."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._zeros: set[int] = set()
        self._alike: dict[tuple[int, int], int] = {}

    def of(self, *key: Any) -> int:
        """Return the number for a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of_known(self, tensor: torch.Tensor) -> int:
        """Return the number of a small tensor whose content is known."""
        number = self.of("known", tensor.dtype, tensor.shape, repr(tensor.tolist()))
        if number not in self._known:
            self._known[number] = tensor
            if not tensor.any():
                self._zeros.add(number)
        return number

    def of_fill(self, filled: float, dtype: torch.dtype, shape: torch.Size) -> int:
        """Return the number of a tensor that is filled with one number."""
        if shape.numel() <= MAX_KNOWN:
            with _disable_current_modes():
                return self.of_known(torch.full(shape, filled, dtype=dtype))
        number = self.of("fill", repr(float(filled)), dtype, shape)
        if filled == 0:
            self._zeros.add(number)
        return number

    def of_output(self, call: int, index: int, alike: int) -> int:
        """Return the number of an output of a call.

        Args:
            call: Number of the call.
            index: The index of the output.
            alike: Number of an earlier output that is the same tensor; fake kernels show it only
                once.
        """
        alike = self._alike.setdefault((call, index), alike)
        return self.of("output", call, alike)

    def known(self, number: int) -> torch.Tensor | None:
        """Return the content of a small tensor; None if it is not known."""
        return self._known.get(number)

    def is_zero(self, number: int) -> bool:
        """Whether all elements of a tensor are known to be 0 or -0."""
        return number in self._zeros


def is_zero(value: Any) -> bool:
    """Whether a value is the number 0 of Python, to which a tensor may be added."""
    return type(value) in (int, float) and repr(value) in ("0", "0.0")
