"""Mutants: what is changed, what is left alone, and what they are called."""

import ast

from bench.mutants.mutations import mutants_of, mutated

SOURCE = '''
LIMIT = 3


def least(values, most: int = 9):
    """Return 1."""
    if not values or values[0] < most:
        raise ValueError("no 2")
    total = 0
    total += max(values[0], most)
    return total - 1
'''


def test_each_mutant_is_one_change_inside_a_function() -> None:
    found = mutants_of("a.py", SOURCE)
    changes = {mutant.change for mutant in found}
    assert {
        "values[0] < most -> values[0] <= most", "not values -> values", "total - 1 -> total + 1",
        "max -> min", "total += max(values[0], most) -> pass", "1 -> 2",
    } <= changes  # fmt: skip
    assert not any(part in change for change in changes for part in ("LIMIT", "9", "Return"))
    assert "max(values[0], most) -> max(most, values[0])" not in changes, "the same value"
    assert len({mutant.key for mutant in found}) == len(found)
    for mutant in found:
        text = ast.unparse(mutated(SOURCE, mutant.number))
        assert text != ast.unparse(ast.parse(SOURCE))
        assert mutant.line in mutant.lines
