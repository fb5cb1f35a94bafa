"""What losses are compared with: the user's own step, eager."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A step that counts how often it is compiled; in a process of its own, as `run_reference` is.
CODE = """
import pathlib, types, torch
from pardnn.backends.torch.launch import reference
compiled = []
def backend(module, example):
    compiled.append(1)
    return module.forward
def training():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    @torch.compile(backend=backend)
    def step(model, x):
        return model(x).sum()
    return step, (model, torch.ones(3, 2))
reference.load_factory = lambda target, batch_size: training
job = types.SimpleNamespace(threads=1, seed=0, target="", batch_size=None, steps=2, saving=None)
print(len(reference.run_reference(job, pathlib.Path("/nowhere"))["losses"]), len(compiled))
"""


@pytest.mark.long
def test_a_compiled_step_is_run_eagerly() -> None:
    """Ranks run its ATen calls; what a compiler fuses would round, and draw, in another way."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "2 0", done.stderr
