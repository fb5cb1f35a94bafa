"""An `accelerate` loop with its own objects and clipping, and several batches per update.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn


def update(accelerator, model, optimizer, batches):
    """Make one update from several batches."""
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss / len(batches))
        losses.append(loss.detach())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses), losses


set_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
data = torch.utils.data.TensorDataset(torch.randn(96, 16), torch.randint(4, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
accelerator = Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for _ in range(2):
    batches = iter(loader)
    for group in zip(batches, batches, strict=True):
        losses += [loss.item() for loss in update(accelerator, model, optimizer, group)[1]]
        schedule.step()
print("losses", *(f"{loss:.6f}" for loss in losses if loss is not None))
