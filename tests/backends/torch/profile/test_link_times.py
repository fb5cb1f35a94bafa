"""Measuring messages again where another program disturbed it."""

import unittest.mock
from pathlib import Path

import pytest

from pardnn.backends.torch.profile import link_times
from pardnn.errors import UsageError

SOUND = {
    f"{kind}{size}": 1e-5 + size / 1e9
    for kind, sizes in link_times._SIZES.items()
    for size in sizes
}
DISTURBED = {text: 1.0 / (1.0 + 1e6 * seconds) for text, seconds in SOUND.items()}


def test_times_that_fall_with_the_size_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bounced = unittest.mock.Mock(side_effect=[DISTURBED, DISTURBED, SOUND])
    monkeypatch.setattr(link_times, "_bounced", bounced)
    found = link_times.measure_links(folder=tmp_path)
    assert found.taking.bandwidth == pytest.approx(1e9)
    assert link_times.cached_links(tmp_path) == found


def test_after_some_tries_the_error_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bounced = unittest.mock.Mock(return_value=DISTURBED)
    monkeypatch.setattr(link_times, "_bounced", bounced)
    with pytest.raises(UsageError, match="E232"):
        link_times.measure_links(folder=tmp_path)
    assert bounced.call_count == link_times.TRIES
    assert link_times.cached_links(tmp_path) is None
