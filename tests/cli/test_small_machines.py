"""Commands that plan, check and simulate work where little is allowed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
from pardnn.cli import main
graph, plan = sys.argv[1:]
for words in (
    ["plan", graph, "--devices", "2", "--algorithm", "heft", "-o", plan],
    ["check", plan, "--graph", graph],
    ["simulate", plan, "--graph", graph],
):
    try:
        main.main(words)
    except SystemExit as end:
        assert end.code in (None, 0), words
"""


@pytest.mark.long
def test_a_gigabyte_of_addresses_and_24_files_are_enough(tiny: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", CODE, str(tiny / "graph.json"), str(tmp_path / "plan.json")]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "valid" in done.stdout
