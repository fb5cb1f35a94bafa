"""Start from published weights: each rank reads its own share, and none ever holds the model.

    torchrun --nproc-per-node 2 examples/from_weights.py path/to/model

The path has `config.json` and `model.safetensors`, or `model.safetensors.index.json` and its parts.
"""

import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import pardnn


def step(model, optimizer, tokens):
    """One training step."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss


def trained(path, steps=6):
    """Return the losses on all ranks."""
    torch.manual_seed(0)
    with pardnn.deferred():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(64, (steps, 2, 8), generator=torch.Generator().manual_seed(0))
    fast_step = pardnn.parallelize(step, model, optimizer, tokens[0])
    fast_step.load_weights(path)
    torch.manual_seed(1)
    return [fast_step(each).item() for each in tokens]


def trained_alone(path, steps=6):
    """Return the losses of the original script."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(64, (steps, 2, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    return [step(model, optimizer, each).item() for each in tokens]


if __name__ == "__main__":
    losses = trained(sys.argv[1])
    if os.environ.get("RANK", "0") == "0":
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
