"""What an import loads, seen in a process of its own."""

import json
import subprocess
import sys
import time

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


def test_what_ranks_read_loads_no_compiler() -> None:
    modules = ("files", "units", "graph.file", "cluster", "plan.plan")
    code = "; ".join(f"import pardnn.{module}" for module in modules)
    assert not loaded(code) & (FRAMEWORKS | {"numba"})


def test_help_loads_no_framework_and_no_compiler() -> None:
    found = loaded(
        "sys.argv = ['pardnn', '--help']; import pardnn.cli.main; pardnn.cli.main.main()"
    )
    assert not found & (FRAMEWORKS | {"numba", "pydantic"})


def test_help_answers_at_once() -> None:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "pardnn", "--help"], capture_output=True, check=True)
    assert time.perf_counter() - started < 2.0  # 0.15 s where nothing else runs


def test_planning_loads_no_framework_and_no_report_for_people() -> None:
    names = ("capture", "plan", "estimate", "simulate", "parallelize", "describe")
    code = "import pardnn; " + "; ".join(f"pardnn.{name}" for name in names)
    assert not loaded(code) & (FRAMEWORKS | {"rich"})
    commands = ("advice", "convert", "doctor", "draw", "max_batch", "profile", "run", "schemas")
    code = "; ".join(f"import pardnn.api.{name}" for name in commands)
    assert not loaded(code) & FRAMEWORKS


def test_a_rank_loads_no_compiler_before_it_plans() -> None:
    assert not loaded("import pardnn; pardnn.parallelize; pardnn.capture") & {"numba", "rich"}


def test_what_needs_torch_says_so_where_it_is_not_installed() -> None:
    commands = [
        ("plan", "step.py:f", "--devices", "2"), ("run", "step.py:f", "--devices", "2"),
        ("plan", "tests/data/tiny/graph.json", "--devices", "2", "--costs", "measured"),
    ]  # fmt: skip
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pardnn.__main__ import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['pardnn', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('ended with', end.code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if line.startswith(("E", "ended"))]
    assert len(said) == 6, done.stderr
    for message, end in zip(said[::2], said[1::2], strict=True):
        assert message.startswith("E251 this needs PyTorch")
        assert end == "ended with 2"
