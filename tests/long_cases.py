"""Cases of a test that repeat what its quick ones show: for `make long`, not for `make test`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, marked as long unless they, or the names of functions, are `quick`."""
    cases = list(cases)
    names = [getattr(case, "__name__", case) for case in cases]
    assert all(name in names for name in quick), (quick, names)
    return [case if getattr(case, "__name__", case) in quick else _long(case) for case in cases]


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
