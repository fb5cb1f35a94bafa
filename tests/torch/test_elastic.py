"""`torchrun --max-restarts`: a rank is killed, and the run goes on from its latest checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pardnn

EVERY, STEPS, KILLED = 3, 12, 8
SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import pardnn

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = torch.randn({steps}, 8, 16), torch.randn({steps}, 8, 1)
    fast = pardnn.parallelize(step, model, optimizer, x[0], y[0], costs="cpu", timeout=60)
    root = Path(sys.argv[1])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (root / "latest").exists():
        fast.load(root)
    while fast.steps < {steps}:
        i = fast.steps
        loss = fast(x[i], y[i]).item()
        if fast.rank == 0:
            with (root.parent / "losses").open("a") as file:
                print(attempt, i, repr(loss), file=file)
        fast.save(root, every={every}, keep=2)
        if (attempt, fast.steps, os.environ.get("RANK")) == ("0", {killed}, "1"):
            os.kill(os.getpid(), signal.SIGKILL)
    fast.close()
"""


def test_a_killed_rank_costs_no_more_than_one_interval(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = textwrap.dedent(SCRIPT).format(steps=STEPS, every=EVERY, killed=KILLED)
    script.write_text(text)
    source = str(Path(pardnn.__file__).resolve().parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                "--max-restarts", "1"]  # fmt: skip
    for name, command in (("a", torchrun), ("b", [])):
        (tmp_path / name).mkdir()
        done = subprocess.run(
            [sys.executable, *command, str(script), str(tmp_path / name / "run")],
            env=environment, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in (tmp_path / "a" / "losses").read_text().splitlines()]
    again = [int(i) for attempt, i, _ in rows if attempt == "1"]
    last = max(int(i) for attempt, i, _ in rows if attempt == "0")
    assert again[0] == KILLED // EVERY * EVERY
    assert last + 1 - again[0] <= EVERY
    expected = [line.split()[2] for line in (tmp_path / "b" / "losses").read_text().splitlines()]
    assert len(expected) == STEPS
    assert all(loss == expected[int(i)] for _, i, loss in rows)
    assert {int(i) for _, i, _ in rows} == set(range(STEPS))
