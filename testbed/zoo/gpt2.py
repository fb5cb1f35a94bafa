"""GPT-2 (Radford et al., 2019), 12 layers, 124 million parameters, as `transformers` has it."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def step(model, optimizer, tokens):
    """One training step."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss


def network(**sizes):
    """Return the model; `sizes` are fields of its configuration, 12 layers of 768 without any."""
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    model.loss_type = "ForCausalLM"  # what it would choose, after a warning
    return model


def _training(batch_size, length, **sizes):
    torch.manual_seed(0)
    model = network(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(model.config.vocab_size, (batch_size, length))
    return step, (model, optimizer, tokens)


def gpt2(batch_size=8):
    """The model of 124 million parameters on texts of 1,024 tokens."""
    return _training(batch_size, 1024)


def small(batch_size=2):
    """Two layers of 16, 8 of 50 tokens."""
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 50}
    return _training(batch_size, 8, **sizes, **ends)
