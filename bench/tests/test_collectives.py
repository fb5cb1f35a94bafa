"""Collectives against their closed forms."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from bench.thesis.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    broadcast_seconds,
    ring_all_reduce_seconds,
    tree_all_reduce_seconds,
)


@given(st.integers(1, 64), st.floats(1, 1e9), st.floats(1e6, 1e12), st.floats(0, 1e-3))
def test_collectives_against_their_closed_forms(k, num_bytes, bandwidth, latency):
    link = {"bandwidth": bandwidth, "latency": latency}
    rounds = int(np.ceil(np.log2(k)))
    ring = (k - 1) * latency + (k - 1) / k * num_bytes / bandwidth
    assert all_gather_seconds(num_bytes, k, **link) == pytest.approx(ring)
    assert ring_all_reduce_seconds(num_bytes, k, **link) == pytest.approx(2 * ring)
    tree = 2 * rounds * (latency + num_bytes / bandwidth)
    assert tree_all_reduce_seconds(num_bytes, k, **link) == pytest.approx(tree)
    assert all_reduce_seconds(num_bytes, k, **link) == pytest.approx(min(2 * ring, tree))


@given(st.integers(4, 64))  # below, both need the same number of rounds
def test_trees_win_for_short_messages_and_rings_for_long_ones(k):
    link = {"bandwidth": 1e9, "latency": 1e-4}
    long, short = 1e10, 1.0
    assert ring_all_reduce_seconds(long, k, **link) <= tree_all_reduce_seconds(long, k, **link)
    assert tree_all_reduce_seconds(short, k, **link) <= ring_all_reduce_seconds(
        short, k, **link
    ) * (1 + 1e-6)


def test_one_rank_sends_nothing():
    for collective in (
        all_gather_seconds,
        all_reduce_seconds,
        broadcast_seconds,
    ):
        assert collective(1e6, 1, bandwidth=1e9, latency=1e-3) == 0
