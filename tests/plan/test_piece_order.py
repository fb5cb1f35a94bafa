"""One piece after the other: what all wait for comes first, what waits for all comes soon."""

import numpy as np

from pardnn.plan.piece_order import piece_by_piece

#: Two pieces of a forward op, of labels that are joined, and of a gradient; a sum, an update.
FORWARD, LABELS, JOIN, BACKWARD, SUM, UPDATE = (0, 1), (2, 3), 4, (5, 6), 7, 8
PIECE = np.array([0, 1, 0, 1, -1, 0, 1, -1, -1])
PAIRS = np.array([(2, 4), (3, 4), (0, 5), (1, 6), (4, 5), (4, 6), (5, 7), (6, 7), (7, 8)])


def test_labels_of_all_pieces_come_with_the_first() -> None:
    found = piece_by_piece(PAIRS, PIECE, np.arange(9)).tolist()
    first = [FORWARD[0], *LABELS, JOIN, BACKWARD[0]]
    assert found == [*first, FORWARD[1], BACKWARD[1], SUM, UPDATE]


def test_the_order_is_settled_by_the_one_given() -> None:
    given = np.array([3, 2, 4, 1, 0, 6, 5, 7, 8])
    found = piece_by_piece(PAIRS, PIECE, given).tolist()
    assert found == [3, 2, 4, 0, 5, 1, 6, 7, 8]


def test_without_pieces_the_given_order_stays() -> None:
    found = piece_by_piece(PAIRS, np.full(9, -1), np.arange(9))
    assert found.tolist() == list(range(9))
