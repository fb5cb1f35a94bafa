"""Planning behind the public door."""

import pytest

from pardnn.api import planning
from pardnn.place import polish
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


def test_the_warm_up_loads_the_kernels_of_polish(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(polish, "search_kernel", lambda *arguments: called.append(arguments))
    planning.warm_up([], limited=False)
    assert called == []
    planning.warm_up([], limited=False, polished=True)
    assert len(called) == 1
