"""Train a small GPT-2 with Hugging Face's `Trainer`.

torchrun --nproc-per-node 2 examples/trainer.py runs/a     # resumes if there is a checkpoint
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

directory = sys.argv[1] if len(sys.argv) > 1 else "runs/trainer"
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=128))
args = TrainingArguments(
    directory, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6,
    warmup_steps=2, logging_steps=1, save_steps=4, use_cpu=True, report_to=[],
    eval_strategy="steps", eval_steps=3,
)  # fmt: skip
data = [{"input_ids": row, "labels": row} for row in torch.randint(128, (64, 16))]
trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:10])
trainer.train(resume_from_checkpoint=checkpoint)
losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history]
print("losses", *(f"{loss:.6f}" for loss in losses if loss is not None))
