"""A jump of the Mersenne twister is a walk of as many draws."""

from __future__ import annotations

import numpy as np

from pardnn.backends.torch.rng import mt19937


def test_a_repeated_jump_is_a_walk() -> None:
    start = mt19937.Twister(np.arange(1, 625, dtype=np.uint32), 624)
    for count in (mt19937.REPEATED_JUMP_FROM, mt19937.REPEATED_JUMP_FROM + 1000):
        for position in (1, 300, 623, 624):
            here = start._replace(position=position)
            jumped = mt19937.skip(here, count, is_repeated=True)
            walked = mt19937.skip(here, count)
            assert jumped.position == walked.position
            assert np.array_equal(jumped.key, walked.key)


def test_jumps_add_up() -> None:
    start = mt19937.Twister(np.arange(1, 625, dtype=np.uint32), 17)
    whole = mt19937.skip(start, 30_000_000_000)
    parts = mt19937.skip(mt19937.skip(start, 20_000_000_017), 9_999_999_983)
    assert whole.position == parts.position
    assert np.array_equal(whole.key, parts.key)


def test_characteristic_polynomial_by_berlekamp_massey() -> None:
    degree = mt19937.DEGREE
    bits = (np.random.MT19937(7).random_raw(2 * degree + 64) & 1).tolist()
    current, previous, length, shift, window = 1, 1, 0, 1, 0
    for n, bit in enumerate(bits):
        window = ((window << 1) | bit) & ((1 << (degree + 2)) - 1)
        if (current & window).bit_count() % 2 == 0:
            shift += 1
            continue
        kept, current = current, current ^ (previous << shift)
        if 2 * length <= n:
            length, previous, shift = n + 1 - length, kept, 1
        else:
            shift += 1
    found = {length - i for i in range(current.bit_length()) if current >> i & 1}
    assert length == degree
    assert found == {degree, *mt19937.EXPONENTS}
