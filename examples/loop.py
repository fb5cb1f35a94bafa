"""A complete loop: warm-up, accumulation, clipping, validation, best model, stop and resume.

Run it with `torchrun --nproc-per-node 2 examples/loop.py`; run it again to resume.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import pardnn


def step(model, optimizer, batches):
    """Make one update from several batches."""
    optimizer.zero_grad()
    total = 0.0
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y) / len(batches)
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def validate(model, x, y):
    """Return loss and accuracy."""
    logits = model(x)
    right = (logits.argmax(1) == y).float().mean()
    return nn.functional.cross_entropy(logits, y), right.item()


def batches_of(epoch):
    """Return an epoch's updates, two batches each: the same each time the epoch starts."""
    generator = torch.Generator().manual_seed(epoch)
    x = torch.randn(6, 2, 16, 8, generator=generator)
    return [list(zip(each, (each.sum(-1) > 0).long(), strict=True)) for each in x]


def trained(directory, epochs=3):
    """Return the losses of all updates made in this run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    fast_step = pardnn.parallelize(step, model, optimizer, batches_of(0)[0])
    at = {"epoch": 0, "update": 0, "best": 1e9, "schedule": warm_up.state_dict()}
    if (directory / "latest").exists():
        at = fast_step.load(directory)
        warm_up.load_state_dict(at["schedule"])
    losses = []
    for epoch in range(at["epoch"], epochs):
        for update, batches in list(enumerate(batches_of(epoch)))[at["update"] :]:
            losses.append(fast_step(batches).item())
            warm_up.step()
            at |= {"epoch": epoch, "update": update + 1, "schedule": warm_up.state_dict()}
            if fast_step.steps % 4 == 0:
                fast_step.save(directory, extra=at, keep=2)
        at["update"] = 0
        score, _right = fast_step.evaluate(validate, *batches_of(99)[0][0])
        if score.item() < at["best"]:
            at["best"] = score.item()
            fast_step.export(directory / "best.safetensors")
    return losses


if __name__ == "__main__":
    epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    losses = trained(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/loop"), epochs)
    if os.environ.get("RANK", "0") == "0":
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
