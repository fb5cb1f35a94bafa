"""Three changed lines make a training script run on several ranks.

Run it with `torchrun --nproc-per-node 2 examples/train.py`.
"""

import os

import torch
from torch import nn

import pardnn  # 1


def step(model, optimizer, x, y):
    """One training step, unchanged."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
x, y = torch.randn(32, 64), torch.randn(32, 1)

fast_step = pardnn.parallelize(step, model, optimizer, x, y)  # 2

for i in range(6):
    loss = fast_step(x, y)  # 3: step(model, optimizer, x, y) before
    schedule.step()
    if os.environ.get("RANK", "0") == "0":
        print(f"step {i}: loss {loss.item():.6f}")
