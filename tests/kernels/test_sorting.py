"""Sorting by integers gives what a stable sort by comparison gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.kernels.sorting import by_column, by_time, stable_order


@given(st.lists(st.integers(-5, 5), max_size=30))
def test_stable_order(values: list[int]) -> None:
    key = np.array(values, dtype=np.float64) * 0.25
    expected = np.argsort(key, kind="stable").tolist()
    with pytest.MonkeyPatch.context() as patch:
        for many in (0, 100):
            patch.setattr("pardnn.kernels.sorting.MANY_KEYS", many)
            assert stable_order(key).tolist() == expected


def test_infinite_and_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pardnn.kernels.sorting.MANY_KEYS", 1)
    assert stable_order(np.array([np.inf, 1.0, -np.inf])).tolist() == [2, 1, 0]
    assert stable_order(np.array([-0.0, 0.0, -0.0])).tolist() == [0, 1, 2]


@given(seed=st.integers(0, 20), most=st.sampled_from([1, 3, 40_000]))
def test_by_column(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    rank, column = rng.permutation(25), rng.integers(0, most, 25)
    assert by_column(rank, column).tolist() == np.lexsort((rank, column)).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30),
    st.sampled_from([0, 100]),
)
def test_by_time(messages: list[tuple[int, int]], many: int) -> None:
    start = np.array([row[0] for row in messages], dtype=np.float64)
    finish = np.array([row[1] for row in messages], dtype=np.float64)
    expected = sorted(range(len(messages)), key=lambda i: (*messages[i], i))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pardnn.kernels.sorting.MANY_KEYS", many)
        assert by_time(start, finish).tolist() == expected
