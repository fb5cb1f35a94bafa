"""What an import loads, seen in a process of its own."""

import json
import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "jax", "tensorflow"}
HEAVY = FRAMEWORKS | {"numba", "llvmlite", "numpy", "pydantic", "typer", "rich", "networkx"}


def loaded(code: str) -> set[str]:
    """Top-level modules in memory after `code`, which may exit."""
    code = (
        f"import sys, json\ntry:\n    {code}\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('\\n' + json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_nothing_heavy() -> None:
    found = loaded("import pardnn")
    assert "pardnn" in found
    assert not found & HEAVY


@pytest.mark.parametrize("room", ["files", "units", "graph.file", "cluster", "plan.plan"])
def test_what_ranks_read_loads_no_compiler(room: str) -> None:
    assert not loaded(f"import pardnn.{room}") & (FRAMEWORKS | {"numba"})


def test_help_loads_no_framework_and_no_compiler() -> None:
    found = loaded(
        "sys.argv = ['pardnn', '--help']; import pardnn.cli.main; pardnn.cli.main.main()"
    )
    assert not found & (FRAMEWORKS | {"numba", "pydantic"})


def test_planning_loads_no_framework() -> None:
    names = ("api", "sim", "place", "report")
    code = "; ".join(f"import pardnn.{name}" for name in names)
    assert not loaded(code) & FRAMEWORKS
