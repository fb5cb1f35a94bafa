"""Forked ranks: what a crash on purpose says is kept for the test that asked for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import faulthandler, os
from tests.backends.torch.ranks import run_ranks
faulthandler.enable()  # as pytest does
(outcome,) = run_ranks(1, lambda rank, store: os.abort())
print(outcome.status, "Fatal Python error: Aborted" in outcome.crash)
"""


@pytest.mark.long
def test_a_crash_is_kept_from_the_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("-6 True", "")
