"""Lines on how far something is: now and then, and on a terminal alone."""

import sys

import pytest

from pardnn.report import progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_is_written_at_most_every_so_many_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    tell = progress.lines_of(5.0)
    for seconds in range(12):
        now[0] = 100.0 + seconds
        tell(f"after {seconds} s")
    expected = ["after 5 s", "after 10 s"] if is_terminal else []
    assert capsys.readouterr().err.splitlines() == expected
