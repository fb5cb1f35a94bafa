"""A third-party GPT-2 with 51 million parameters, trained by an ordinary step."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def step(model, optimizer, tokens):
    """One training step, as anyone would write it."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss


def training(batch_size=4):
    """The entry point: returns the step and its arguments."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=8, n_embd=512, n_head=8, n_positions=256)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it would choose, after a warning
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(config.vocab_size, (batch_size, 256))
    return step, (model, optimizer, tokens)
