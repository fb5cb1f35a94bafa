"""The guide's commands print what the guide shows."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from pardnn.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "asking-a-plan.md"
pytestmark = pytest.mark.jit


def test_commands_print_what_the_guide_shows(monkeypatch, tmp_path, capsys):
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^\$ ([^\n]*)\n(.*?)(?=^\$|^```)", text, flags=re.S | re.M)
    assert len(blocks) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    (tmp_path / "testbed").symlink_to(ROOT / "testbed")
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for command, shown in blocks:
        with pytest.raises(SystemExit) as end:
            main.main(shlex.split(command)[1:])
        found = capsys.readouterr().out
        assert end.value.code == 0, command
        assert checker.check_output(shown, found, flags), f"{command}\n{found}"
