"""An `accelerate` loop on several ranks: its objects, its clipping and accumulation; our step.

Run it with `torchrun --nproc-per-node 2 examples/accelerate_loop.py`.
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import pardnn

ACCUMULATE = 2


def update(accelerator, model, optimizer, batches):
    """One update from several batches; before, each was a turn of the loop under `accumulate`."""
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        losses.append(loss.detach())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses), losses


def trained(parallelize, epochs=2):
    """Return the losses of all batches."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.utils.data.TensorDataset(torch.randn(96, 16), torch.randint(4, (96,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    fast_step, losses = None, []
    for _ in range(epochs):
        batches = iter(loader)
        for group in zip(*[batches] * ACCUMULATE, strict=True):
            if fast_step is None:
                fast_step = parallelize(update, accelerator, model, optimizer, group)
            losses += [loss.item() for loss in fast_step(group)[1]]
            schedule.step()
    return losses


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        # Ranks find each other here; accelerate itself shall not spread the data.
        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    losses = trained(pardnn.parallelize)
    if rank == 0:
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
