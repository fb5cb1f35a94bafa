"""Several pieces are read side by side, each once; the first error ends the reading."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pardnn.checkpoint.pieces import READERS, PieceReader, read_side_by_side


def test_two_pieces_are_read_at_the_same_time(tmp_path: Path) -> None:
    both = threading.Barrier(READERS)
    done: list[int] = []

    def read(_: PieceReader, piece: int) -> None:
        both.wait(10)
        done.append(piece)

    read_side_by_side(tmp_path, list(range(3 * READERS)), read)
    assert sorted(done) == list(range(3 * READERS))


@pytest.mark.parametrize("number", [0, 1])
def test_no_piece_is_begun_after_an_error_on_either_thread(number: int, tmp_path: Path) -> None:
    begun: list[int] = []
    failing = threading.Event()

    def read(_: PieceReader, piece: int) -> None:
        begun.append(piece)
        if piece == number:
            failing.set()
            raise OSError("gone")
        assert failing.wait(10)
        threading.Event().wait(0.1)

    with pytest.raises(OSError, match="gone"):
        read_side_by_side(tmp_path, list(range(20)), read)
    assert number in begun
    assert set(begun) <= {0, 1}


def test_a_single_piece_takes_one_reader_and_none_nothing(tmp_path: Path) -> None:
    read_side_by_side(tmp_path, [], lambda _, piece: pytest.fail(str(piece)))
    done: list[str] = []
    read_side_by_side(tmp_path, ["only"], lambda _, piece: done.append(piece))
    assert done == ["only"]
