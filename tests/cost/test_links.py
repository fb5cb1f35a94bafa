"""Links: the alpha-beta forms, and a fit that survives stray measurements."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from pardnn.cost import links
from pardnn.errors import UsageError

SIZES = [2.0**power for power in range(8, 27, 2)]


def test_one_message():
    assert links.message_seconds(1000, bandwidth=1e6, latency=0.5) == pytest.approx(0.501)


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12))
def test_exact_measurements_are_recovered(latency, bandwidth):
    seconds = [links.message_seconds(s, bandwidth=bandwidth, latency=latency) for s in SIZES]
    fit = links.fit_link(SIZES, seconds)
    predicted = [
        links.message_seconds(s, bandwidth=fit.bandwidth, latency=fit.latency) for s in SIZES
    ]
    assert predicted == pytest.approx(seconds, rel=1e-4)
    assert fit.error < 1e-4


@given(st.integers(0, 2**32 - 1))
def test_noise_and_strays_hardly_move_the_fit(seed):
    rng = np.random.default_rng(seed)
    sizes = np.repeat(SIZES, 5)
    seconds = (1e-4 + sizes / 2e9) * rng.uniform(0.97, 1.03, len(sizes))
    strays = rng.choice(len(sizes), len(sizes) // 6, replace=False)
    seconds[strays] *= rng.uniform(3, 50, len(strays))
    fit = links.fit_link(sizes.tolist(), seconds.tolist())
    assert fit.latency == pytest.approx(1e-4, rel=0.1)
    assert fit.bandwidth == pytest.approx(2e9, rel=0.1)


def test_latency_is_never_negative():
    fit = links.fit_link([1e3, 2e3, 4e3], [0.5e-3, 2e-3, 5e-3])
    assert fit.latency == 0
    assert fit.bandwidth > 0


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [([], []), ([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [2.0]),
     ([1.0, 2.0], [0.0, 1.0]), ([1.0, 2.0], [float("nan"), 1.0]), ([1.0, 1e6], [2.0, 1.0])],
)  # fmt: skip
def test_measurements_that_determine_no_link_are_refused(sizes, seconds):
    with pytest.raises(UsageError) as caught:
        links.fit_link(sizes, seconds)
    assert caught.value.code == "E232"
