"""Names of pieces."""

from pardnn.plan.pieces import first_piece, piece_number, piece_of


def test_the_first_piece_of_what_a_name_is_a_piece_of() -> None:
    for name, number, first in (
        ("w@3", 3, "w@0"), ("w@0", 0, "w@0"), ("a@b@12", 12, "a@b@0"), ("w", -1, "w"),
        ("w@x", -1, "w@x"), ("w@", -1, "w@"), ("@1", 1, "@0"), ("w@123456", -1, "w@123456"),
    ):  # fmt: skip
        assert (piece_number(name), first_piece(name)) == (number, first)
    assert piece_of("a@b", 12) == "a@b@12"
