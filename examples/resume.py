"""Train, stop, go on: checkpoints with the position in the data, and the best model on the way.

    torchrun --nproc-per-node 2 examples/resume.py runs/a 7     # stops after 7 steps
    torchrun --nproc-per-node 3 examples/resume.py runs/a       # goes on with other ranks

Losses are those of a run that never stopped; no sample is repeated or left out.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import pardnn

BATCH, EVERY, STEPS = 8, 3, 14  # five batches an epoch


def step(model, optimizer, x, y):
    """One training step."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def batches(x, y, epoch, first):
    """Yield the batches of an epoch from number `first` on; the epoch decides their order."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH)[first:]:
        yield x[rows], y[rows]


directory = Path(sys.argv[1])
directory.mkdir(parents=True, exist_ok=True)
stop = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
x, y = torch.randn(40, 16), torch.randn(40, 1)
fast = pardnn.parallelize(step, model, optimizer, x[:BATCH], y[:BATCH])
at = {"epoch": 0, "batch": 0, "best": float("inf"), "schedule": schedule.state_dict()}
if (directory / "latest").exists():
    at = fast.load(directory)
    schedule.load_state_dict(at["schedule"])
while True:
    for batch in batches(x, y, at["epoch"], at["batch"]):
        loss = fast(*batch).item()
        schedule.step()
        at |= {"batch": at["batch"] + 1, "schedule": schedule.state_dict()}
        if loss < at["best"]:
            at["best"] = loss
            fast.export(directory / "best.safetensors")
        if fast.rank == 0:
            print(f"step {fast.steps}: loss {loss!r}")
        if fast.steps % EVERY == 0 or fast.steps == stop:
            fast.save(directory, extra=at, keep=2)
        if fast.steps == stop:
            sys.exit()
    at |= {"epoch": at["epoch"] + 1, "batch": 0}
