"""Hugging Face's `Trainer` on several ranks: its loop, schedule and callbacks; our step.

Run it with `torchrun --nproc-per-node 2 examples/trainer.py`.
"""

import os

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import pardnn


def step(model, optimizer, inputs, count, max_norm):
    """What `Trainer.training_step` and its loop do between two batches."""
    optimizer.zero_grad()
    loss = model(**inputs, num_items_in_batch=count).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss


class DistributedTrainer(Trainer):
    """A `Trainer` whose step runs on all ranks; `save` and `load` are those of the step."""

    fast_step = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Forward, backward, clipping and update; the loop's own update does nothing."""
        batch = (dict(inputs), num_items_in_batch, self.args.max_grad_norm)
        if self.fast_step is None:
            model.train()
            optimizer = self.optimizer.optimizer
            self.fast_step = pardnn.parallelize(step, model, optimizer, *batch)
            self.optimizer.step = lambda: None
        return self.fast_step(*batch)


def trained(kind):
    """Return the losses that a `Trainer` of some kind logs."""
    set_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=128, n_positions=16)
    args = TrainingArguments(
        output_dir="runs", per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-2,
        warmup_steps=2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    tokens = torch.randint(128, (64, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = kind(GPT2LMHeadModel(config), args, train_dataset=data)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        # Ranks find each other here; the Trainer itself shall not spread the data.
        dist.init_process_group("gloo")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    losses = trained(DistributedTrainer)
    if rank == 0:
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
