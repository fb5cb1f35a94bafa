"""Range sums against slices of an array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pardnn.kernels.fenwick import fenwick_add, fenwick_sums


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1), st.integers(0, 9)), max_size=20))
def test_fenwick(updates: list[tuple[int, int, int]]) -> None:
    tree, values, sums = np.zeros((11, 2)), np.zeros((10, 2)), np.empty(2)
    for index, column, amount in updates:
        fenwick_add(tree, index, column, float(amount))
        values[index, column] += amount
    for begin in range(11):
        for end in range(11):
            fenwick_sums(tree, begin, end, sums)
            expected = values[begin:end].sum(axis=0) if begin < end else 0
            assert begin > end or (sums == expected).all()
