"""Mutants: what is changed, what is left alone, and what they are called."""

import ast
from pathlib import Path

from bench.mutants.mutations import mutants_of, mutated
from bench.mutants.nearest import Nearest

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


def test_the_nearest_tests_are_asked_first_one_case_of_each_before_the_next(
    tmp_path: Path,
) -> None:
    """By name, by what is imported, by folder; what has nothing to do with a file is not asked."""
    files = {
        "tests/sim/test_levels.py": "",
        "tests/sim/test_engine.py": "from pardnn.sim.levels import top_levels\n",
        "tests/place/test_order.py": "from pardnn.sim import levels, peak\n",
        "tests/sim/test_bounds.py": "from pardnn.sim.bounds import lower_bound\n",
        "tests/plan/test_mesh.py": "from pardnn.plan.mesh import Mesh\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    tests = [f"{path}::test" for path in reversed(files)]
    near = Nearest(tmp_path, [*tests, "tests/sim/test_levels.py::a[0]",
                              "tests/sim/test_levels.py::a[1]"])  # fmt: skip
    assert near.tests("src/pardnn/sim/levels.py") == [
        "tests/sim/test_levels.py::test",
        "tests/sim/test_levels.py::a[0]",
        "tests/sim/test_levels.py::a[1]",
        *[f"{path}::test" for path in list(files)[1:4]],
    ]
    ordering = Nearest(tmp_path, ["tests/sim/test_levels.py::a[1]",
                                  "tests/sim/test_levels.py::a[0]",
                                  "tests/sim/test_levels.py::b[0]"])  # fmt: skip
    assert ordering.tests("src/pardnn/sim/levels.py")[2].endswith("a[0]")
