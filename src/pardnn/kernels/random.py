"""Random numbers within kernels: the same on every machine."""

# Kernels: an element of an array is a number, which pyright cannot see.
# pyright: reportReturnType=false

from __future__ import annotations

from jaxtyping import Int64
from numpy import ndarray

from pardnn.kernels.jit import helper


@helper
def random_number(state: Int64[ndarray, " 1"]) -> float:
    """Return a number in [0, 1) (Park and Miller's generator).

    Args:
        state: 1 to 2147483646 at first. Changed.
    """
    state[0] = state[0] * 48271 % 2147483647
    return state[0] / 2147483648.0
