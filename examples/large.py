"""A model that fits on no rank: built without data, each rank initialises its own share.

    torchrun --nproc-per-node 2 examples/large.py

Weights, gradients and Adam's moments take 64 MiB here, and each rank has 40 MiB.
"""

import os
import sys

import torch
from torch import nn

import pardnn


def step(model, optimizer, x, y):
    """One training step."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def build():
    """Return the model, built as in any script."""
    torch.manual_seed(0)
    layers = [each for _ in range(16) for each in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 1))


def trained(how="deferred", steps=6):
    """Return the losses on all ranks.

    `deferred` records whatever a constructor computes; on the meta device the constructor's work is
    lost, and modules are initialised by their `reset_parameters`.
    """
    with torch.device("meta") if how == "meta" else pardnn.deferred():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(steps, 4, 512), torch.randn(steps, 4, 1)
    cluster = pardnn.Cluster.uniform(int(os.environ.get("WORLD_SIZE", "1")), memory="40MiB")
    fast_step = pardnn.parallelize(step, model, optimizer, x[0], y[0], cluster=cluster)
    losses = [fast_step(*batch).item() for batch in zip(x, y, strict=True)]
    print(f"rank {fast_step.rank} held at most {fast_step.peak_bytes / 2**20:.1f} MiB")
    return losses


if __name__ == "__main__":
    losses = trained(*sys.argv[1:])
    if os.environ.get("RANK", "0") == "0":
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
