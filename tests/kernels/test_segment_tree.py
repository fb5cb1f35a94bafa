"""Range maxima against slices of an array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.kernels.segment_tree import add_range, first_fitting, last_fitting, max_range, range_max


@given(
    values=st.lists(st.integers(-50, 50), min_size=1, max_size=20),
    changes=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(-9, 9)), max_size=8
    ),
    limit=st.integers(-60, 60),
)
def test_range_max(values: list[int], changes: list[tuple[int, int, int]], limit: int) -> None:
    array = np.array(values, dtype=np.int64)
    tree = range_max(array)
    n = len(values)
    for begin, end, amount in changes:
        begin, end = min(begin, n), min(end, n)
        add_range(tree, begin, end, amount)
        array[begin:end] += amount
        fitting = [p for p in range(begin, end + 1) if (array[p:end] <= limit).all()]
        assert first_fitting(tree, begin, max(begin, end), limit) == min(fitting, default=begin)
        fitting = [p for p in range(begin, end + 1) if (array[begin:p] <= limit).all()]
        assert last_fitting(tree, begin, max(begin, end), limit) == max(
            fitting, default=max(begin, end)
        )
    for begin in range(n):
        for end in range(begin + 1, n + 1):
            assert max_range(tree, begin, end) == array[begin:end].max()
