"""What another process sees of a run: no port of it but on loopback."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pardnn
from tests.backends.torch import entry_points
from tests.backends.torch.listening import family, listening

ROOT = Path(pardnn.__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ss") is None, reason="ss lists the ports")
def test_another_process_finds_ports_of_a_run_on_loopback_alone() -> None:
    target = f"{Path(entry_points.__file__).resolve()}:training"
    words = (sys.executable, "-m", "pardnn", "run", target, "--devices", "2", "--steps", "20")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found: set[str] = set()
    told: set[str] = set()
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE) as run:
        while run.poll() is None:
            members = {f"pid={pid}," for pid in family(run.pid)}
            found |= listening(run.pid)
            for protocol in ("-ltnpH", "-lunpH"):
                text = subprocess.run(
                    ("ss", protocol), capture_output=True, text=True, check=True
                ).stdout
                lines = [line for line in text.splitlines() if any(m in line for m in members)]
                told |= {line.split()[3].rpartition(":")[0] for line in lines}
            time.sleep(0.05)
        assert run.returncode == 0
    assert told == found == {"127.0.0.1"}
