"""Recipes train on two ranks as the unmodified tool does on one device: the same losses."""

from __future__ import annotations

import difflib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"

PLAIN = EXAMPLES / "plain"
#: Scripts of tools; below `plain`, the same without pardnn.
TOOLS = ("trainer", "accelerate_loop", "lightning_module")


def torchrun(*command: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", *command)


def started(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=EXAMPLES, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def losses(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    (line,) = [line for line in output.splitlines() if line.startswith("losses ")]
    return line.split()[1:]


def changed_lines(plain: str, ours: str) -> list[str]:
    """Lines of a script that its plain twin does not have, blank ones left out."""
    rows = difflib.ndiff(plain.splitlines(), ours.splitlines())
    return [row[2:] for row in rows if row.startswith("+ ") and row[2:].strip()]


@pytest.mark.parametrize("name", TOOLS)
def test_five_lines_of_a_tools_script_change_at_most(name: str) -> None:
    plain, ours = (path.read_text() for path in (PLAIN / f"{name}.py", EXAMPLES / f"{name}.py"))
    assert 0 < len(changed_lines(plain, ours)) <= 5
    assert "pardnn" not in plain.partition('"""\n\n')[2]
    # Nothing was taken away either: each line of the plain script is there, or changed.
    assert len(changed_lines(ours, plain)) <= 2


def on_one_device(name: str, *args: str) -> subprocess.Popen[str]:
    """Run the plain script of a tool."""
    return started(str(PLAIN / f"{name}.py"), *args)


def test_a_tools_script_has_the_losses_of_its_plain_twin() -> None:
    run = torchrun("--standalone", "--nproc-per-node", "2", "accelerate_loop.py")
    on_ranks, reference = started(*run), on_one_device("accelerate_loop")
    expected = losses(reference)
    assert losses(on_ranks) == expected
    assert len(expected) == 12


def test_lightning_saves_and_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    script, ours = "lightning_module.py", tmp_path / "ours"
    run = torchrun("--standalone", "--nproc-per-node", "2", script, str(ours))
    on_ranks = started(*run)
    reference = on_one_device("lightning_module", str(tmp_path / "alone"))
    expected = losses(reference)
    assert losses(on_ranks) == expected
    assert len(expected) == 12
    assert sorted(path.name for path in ours.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    # The second epoch again, on one rank.
    again = started(script, str(tmp_path / "again"), str(ours / "epoch=0.ckpt"))
    assert losses(again) == expected[6:]


def test_a_recipe_has_the_losses_of_one_device() -> None:
    alone = (
        "from functools import partial; from gan import *; torch.set_num_threads(1)\n"
        "found = trained(lambda step, a, b, optimizer, *_: partial(step, a, b, optimizer))\n"
        "print('losses', ' '.join(f'{loss:.6f}' for loss in found))"
    )
    on_ranks = started(*torchrun("--standalone", "--nproc-per-node", "2", "gan.py"))
    expected = losses(started("-c", alone))
    assert losses(on_ranks) == expected
    assert len(expected) >= 6


def test_a_trainer_accumulates_saves_and_goes_on_as_on_one_device(tmp_path: Path) -> None:
    run = torchrun("--standalone", "--nproc-per-node", "2", "trainer.py", str(tmp_path / "ours"))
    on_ranks, reference = started(*run), on_one_device("trainer", str(tmp_path / "alone"))
    expected = losses(reference)
    assert losses(on_ranks) == expected
    assert len(expected) == 8  # two of them of validations
    checkpoint = tmp_path / "ours" / "checkpoint-4"
    # The log of the first four comes from the checkpoint; two are trained again, on one rank.
    again = started("trainer.py", str(tmp_path / "again"), str(checkpoint))
    assert losses(again) == expected


#: What examples/loop.py trains, on one device.
LOOP = """
from loop import *
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
losses = []
for epoch in range(3):
    for batches in batches_of(epoch):
        losses.append(step(model, optimizer, batches).item())
        warm_up.step()
print("losses", *(f"{loss:.6f}" for loss in losses))
"""


def test_the_whole_loop_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    run = torchrun("--standalone", "--nproc-per-node", "2", "loop.py", str(tmp_path))
    stopped = started(*run, "1")  # one epoch of six updates; saved after four
    expected = losses(started("-c", LOOP))
    assert len(expected) == 18
    assert losses(stopped) == expected[:6]
    best = (tmp_path / "best.safetensors").read_bytes()
    assert losses(started("loop.py", str(tmp_path))) == expected[4:]
    assert (tmp_path / "best.safetensors").read_bytes() != best


WEIGHTS = """
import torch, transformers
config = transformers.GPT2Config(
    n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
torch.manual_seed(1)
model = transformers.GPT2LMHeadModel(config)
model.save_pretrained("{path}", max_shard_size="40KB")
"""


def test_published_weights_are_read_by_share(tmp_path: Path) -> None:
    made = started("-c", WEIGHTS.format(path=tmp_path))
    made.communicate(timeout=240)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 4
    run = torchrun("--standalone", "--nproc-per-node", "2", "from_weights.py", str(tmp_path))
    alone = (
        "from from_weights import *; torch.set_num_threads(1)\n"
        f"print('losses', ' '.join(f'{{loss:.6f}}' for loss in trained_alone({str(tmp_path)!r})))"
    )
    on_ranks, reference = started(*run), started("-c", alone)
    expected = losses(reference)
    assert losses(on_ranks) == expected
    assert len(expected) == 6


#: How a model without data is given its values on one device.
ALONE = {
    "deferred": "model = build(); x, y = torch.randn(6, 4, 512), torch.randn(6, 4, 1)",
    "meta": """
with torch.device("meta"):
    model = build()
x, y = torch.randn(6, 4, 512), torch.randn(6, 4, 1)
for module in model.to_empty(device="cpu"):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
""",
}


@pytest.mark.parametrize("how", ALONE)
def test_a_model_that_fits_no_rank_trains_as_on_one_device(how: str) -> None:
    alone = f"""
from large import *
torch.set_num_threads(1)
{ALONE[how]}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = [step(model, optimizer, *batch).item() for batch in zip(x, y)]
print("losses", *(f"{{loss:.6f}}" for loss in losses))
"""
    run = torchrun("--standalone", "--nproc-per-node", "2", "large.py", how)
    assert losses(started(*run)) == losses(started("-c", alone))


def steps(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    return [line for line in output.splitlines() if line.startswith("step ")]


def test_the_recipe_that_stops_goes_on_with_every_bit_on_other_ranks(tmp_path: Path) -> None:
    ranks = torchrun("--standalone", "--nproc-per-node", "2", "resume.py")
    first = started(*ranks, str(tmp_path / "a"), "7")
    whole = started("resume.py", str(tmp_path / "b"))
    found = steps(first)
    found += steps(started("resume.py", str(tmp_path / "a")))
    assert len(found) == 14
    assert found == steps(whole)
    best = [load_file(tmp_path / name / "best.safetensors") for name in "ab"]
    assert all(torch.equal(best[0][key], value) for key, value in best[1].items())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_nodes_train_with_the_losses_of_one_device() -> None:
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    run = torchrun("--nnodes", "2", "--nproc-per-node", "1", *meet, "train.py")
    nodes, alone = [started(*run) for _ in range(2)], started("train.py")
    found = [steps(node) for node in nodes]
    expected = steps(alone)
    assert sorted(found) == [[], expected]  # rank 0 prints
    assert len(expected) == 6


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_recipe_is_short(path: Path) -> None:
    if path.name not in ("demo.py", "gpt2.py"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(lines) <= 60
