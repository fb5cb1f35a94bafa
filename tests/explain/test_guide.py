"""The guides' commands print what the guides show."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from pardnn.cli import main

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
pytestmark = pytest.mark.jit


@pytest.mark.parametrize(("guide", "count"), [("asking-a-plan.md", 6), ("steering.md", 7)])
def test_commands_print_what_the_guide_shows(guide, count, monkeypatch, tmp_path, capsys):
    text = (GUIDES / guide).read_text(encoding="utf-8")
    blocks = re.findall(r"^\$ ([^\n]*)\n(.*?)(?=^\$|^```)", text, flags=re.S | re.M)
    assert len(blocks) == count
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    (tmp_path / "testbed").symlink_to(ROOT / "testbed")
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for command, shown in blocks:
        with pytest.raises(SystemExit) as end:
            main.main(shlex.split(command)[1:])
        is_refused = shown.startswith("E3")
        output = capsys.readouterr()
        found = output.err if is_refused else output.out
        assert end.value.code == (3 if is_refused else 0), command
        assert checker.check_output(shown, found, flags), f"{command}\n{found}"
