"""Hugging Face's `Trainer` with the updates and checkpoints of all ranks.

The loop, its schedule, callbacks, logs and evaluations are those of `Trainer`. The work between two
updates is one pardnn step, the loop's own `optimizer.step()` does nothing, and checkpoints are
pardnn's, so any number of ranks can resume; the loop's position and log are saved next to them.
transformers is not imported here: the class comes from the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pardnn.errors import UsageError


def _loss_of(model: Any, inputs: Any, count: Any) -> Any:
    """Return the loss of a batch as `Trainer.compute_loss` does."""
    return model(**inputs, **({} if count is None else {"num_items_in_batch": count})).loss


def _update(model: Any, optimizer: Any, batches: Any, count: Any, max_norm: Any) -> Any:
    """Do what `Trainer` does from one update to the next."""
    total = 0
    for inputs in batches:
        loss = _loss_of(model, inputs, count)
        loss = loss / len(batches) if count is None else loss
        loss.backward()
        total = total + loss.detach()
    if max_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _check(base: Any) -> None:
    """Refuse a class whose update differs from the one above."""
    for name in ("training_step", "compute_loss"):
        owner = next((each for each in base.__mro__ if name in vars(each)), None)
        if owner is None or not owner.__module__.startswith("transformers."):
            raise UsageError(
                f"{base.__name__} has {name} of its own, which pardnn.trainer would leave out.\n"
                "Write the update as a function and give it to pardnn.parallelize in an override "
                "of training_step."
            )


def _check_settings(trainer: Any) -> None:
    """Refuse settings with which `Trainer` computes a different loss than the one above."""
    args = trainer.args
    wanted = {
        "compute_loss_func": trainer.compute_loss_func is not None,
        "label_smoothing_factor": bool(args.label_smoothing_factor),
        "fp16": args.fp16, "bf16": args.bf16, "use_liger_kernel": args.use_liger_kernel,
        "torch_compile": args.torch_compile,
    }  # fmt: skip
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise UsageError(
                f"pardnn.trainer does not follow {name}.\nLeave it out, or write the update as a "
                "function and give it to pardnn.parallelize in an override of training_step."
            )


def trainer_class(base: Any, parallelize: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return a subclass of `Trainer` that trains on all ranks.

    Args:
        base: `transformers.Trainer`, or a subclass with the same update.
        parallelize: Called with a step and its arguments; spreads it over the ranks.
        options: Its keyword arguments.

    Raises:
        UsageError: E201, if the class has an update of its own.
    """
    _check(base)

    class DistributedTrainer(base):
        fast_step, resumed, batches = None, None, ()

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            """Keep the batch, or update with all batches kept so far."""
            self.batches += (dict(inputs),)
            model.train()  # after an evaluation
            if len(self.batches) < self.current_gradient_accumulation_steps:
                return torch.zeros(())
            count = num_items_in_batch if self.model_accepts_loss_kwargs else None
            args = (self.batches, count, self.args.max_grad_norm)
            self.batches = ()
            if self.fast_step is None:
                _check_settings(self)
                optimizer, self.optimizer.step = self.optimizer.optimizer, lambda: None
                self.fast_step = parallelize(_update, model, optimizer, *args, **options)
                if self.resumed is not None:
                    self.lr_scheduler.load_state_dict(self.fast_step.load(self.resumed))
            return self.fast_step(*args)

        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
        ) -> tuple[Any, None, None]:
            """Return the loss of a validation batch, and no predictions."""
            count = self._get_num_items_in_batch([inputs], self.args.device)
            return self.fast_step.evaluate(_loss_of, dict(inputs), count), None, None

        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            """Write model, optimizer and random state; any number of ranks can resume from it."""
            self.fast_step.save(output_dir, extra=self.lr_scheduler.state_dict())

        def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
            """Write nothing, as the checkpoint holds it."""

        def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
            self.resumed = resume_from_checkpoint

    return DistributedTrainer
