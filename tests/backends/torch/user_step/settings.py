"""Settings that steps of tests import, in their own bodies too."""

from types import SimpleNamespace
from typing import Any

FACTOR, TIMES = 1.0, 1
OPTIONS = SimpleNamespace(special=1.0)


def weighed(total: Any) -> Any:
    return total * OPTIONS.special
