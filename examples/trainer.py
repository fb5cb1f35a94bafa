"""Hugging Face's `Trainer` on several ranks: its loop, schedule and callbacks; our step and files.

torchrun --nproc-per-node 2 examples/trainer.py runs/a     # started again, it goes on
"""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import pardnn


def update(model, optimizer, batches, count, max_norm):
    """What `Trainer` does from one update to the next."""
    total = 0
    for inputs in batches:
        loss = model(**inputs, num_items_in_batch=count).loss
        loss.backward()
        total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def loss_of(model, inputs, count):
    """What `Trainer` takes of a batch of validation."""
    return model(**inputs, num_items_in_batch=count).loss


class DistributedTrainer(Trainer):
    """A `Trainer` whose updates and checkpoints are those of all ranks."""

    fast_step, resumed, batches = None, None, ()

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Keep the batch, or update by all that were kept."""
        self.batches += (dict(inputs),)
        model.train()  # an evaluation came before
        if len(self.batches) < self.current_gradient_accumulation_steps:
            return torch.zeros(())
        args, self.batches = (self.batches, num_items_in_batch, self.args.max_grad_norm), ()
        if self.fast_step is None:
            optimizer, self.optimizer.step = self.optimizer.optimizer, lambda: None
            self.fast_step = pardnn.parallelize(update, model, optimizer, *args)
            if self.resumed is not None:
                self.lr_scheduler.load_state_dict(self.fast_step.load(self.resumed))
        return self.fast_step(*args)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Return the loss of a batch of validation; other outputs would be returned likewise."""
        count = self._get_num_items_in_batch([inputs], self.args.device)
        return self.fast_step.evaluate(loss_of, dict(inputs), count), None, None

    def save_model(self, output_dir=None, _internal_call=False):
        """Write model, optimizer and random state; any number of ranks can go on from it."""
        self.fast_step.save(output_dir, extra=self.lr_scheduler.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir): ...

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        self.resumed = resume_from_checkpoint


def trained(kind, directory="runs/trainer", checkpoint=None):
    """Return the losses that a `Trainer` of some kind logs."""
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=128))
    args = TrainingArguments(
        directory, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6,
        warmup_steps=2, logging_steps=1, save_steps=4, use_cpu=True, report_to=[],
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in torch.randint(128, (64, 16))]
    trainer = kind(model, args, train_dataset=data, eval_dataset=data[:10])
    trainer.train(resume_from_checkpoint=checkpoint)
    found = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
    return [loss for loss in found if loss is not None]


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")  # the Trainer shall not spread the data
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    losses = trained(DistributedTrainer, *sys.argv[1:])
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print("losses", " ".join(f"{loss:.6f}" for loss in losses))
