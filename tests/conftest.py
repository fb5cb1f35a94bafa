"""Fixtures of tests in several packages.

pytest loads this file before the job `shapes` has its hook on imports, so nothing of pardnn is
imported here but when a fixture runs.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a test describe operators that no other test knows."""
    from pardnn.shard.cache import forget
    from pardnn.shard.tdl import registry

    monkeypatch.setattr(registry, "USERS", {})
    registry.find.cache_clear()
    forget()
    yield
    registry.find.cache_clear()
    forget()
