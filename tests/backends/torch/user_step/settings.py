"""Settings that steps of `test_guards` import in their own bodies."""

from types import SimpleNamespace
from typing import Any

FACTOR = 1.0
OPTIONS = SimpleNamespace(special=1.0)


def weighed(total: Any) -> Any:
    return total * OPTIONS.special
