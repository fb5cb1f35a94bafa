"""Arrays as a key of a cache, by their content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np

Arrays = TypeVar("Arrays", bound=Iterable[Any])


class ByContent(Generic[Arrays]):
    """Arrays that equal others with the same bytes, so that planning for another limit finds them.

    Attributes:
        arrays: A named tuple of arrays and numbers.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self._content = tuple(np.asarray(each).tobytes() for each in arrays)

    def __hash__(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByContent) and self._content == other._content
