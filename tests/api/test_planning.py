"""Planning behind the public door."""

import pytest

from pardnn.api import planning
from pardnn.place.pardnn import algorithm

pytestmark = pytest.mark.jit


def test_the_warm_up_reaches_the_memory_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    fit_memory = algorithm.fit_memory

    def seen(*arguments: object) -> object:
        decision = fit_memory(*arguments)  # pyright: ignore[reportArgumentType]
        found.append(decision is not None)
        return decision

    monkeypatch.setattr(algorithm, "fit_memory", seen)
    planning.warm_up(["pardnn"], limited=False)
    assert found == []
    planning.warm_up(["pardnn"])
    assert found == [True]
