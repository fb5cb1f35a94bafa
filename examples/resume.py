"""Train, stop, resume: checkpoints with the position in the data, and the best model so far.

    torchrun --nproc-per-node 2 examples/resume.py runs/a 7     # stops after 7 steps
    torchrun --nproc-per-node 3 examples/resume.py runs/a       # resumes on three ranks

Losses match those of an uninterrupted run; no sample is repeated or left out.
"""

import itertools
import sys
from pathlib import Path

import torch
from torch import nn

import pardnn

BATCH, EVERY, STEPS = 8, 3, 14  # five batches per epoch


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


class Order(torch.utils.data.Sampler):
    """Batches of row numbers in a new order each epoch; its state is the position in them."""

    def __init__(self, rows):
        self.rows, self.epoch, self.batch = rows, 0, 0

    def __iter__(self):
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.epoch))
        for rows in order.split(BATCH)[self.batch :]:
            self.batch += 1
            yield rows.tolist()
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self):
        """Return what goes into `extra`."""
        return {"epoch": self.epoch, "batch": self.batch}


(directory := Path(sys.argv[1])).mkdir(parents=True, exist_ok=True)
stop, best = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS, float("inf")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
x, y = torch.randn(40, 16), torch.randn(40, 1)
fast = pardnn.parallelize(step, model, optimizer, x[:BATCH], y[:BATCH])
order = Order(len(x))
# Its own generator: a loader draws a seed at the start of each epoch, and the step has dropout.
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_sampler=order, generator=torch.Generator())
if (directory / "latest").exists():
    at = fast.load(directory)
    best = at["best"]
    schedule.load_state_dict(at["schedule"])
    order.__dict__.update(at["order"])
while fast.steps < stop:
    for batch in itertools.islice(loader, stop - fast.steps):
        loss = fast(*batch).item()
        schedule.step()
        if loss < best:
            best = loss
            fast.export(directory / "best.safetensors")
        if fast.rank == 0:
            print(f"step {fast.steps}: loss {loss!r}")
        if fast.steps % EVERY == 0 or fast.steps == stop:
            at = {"best": best, "schedule": schedule.state_dict(), "order": order.state_dict()}
            fast.save(directory, extra=at, keep=2)
