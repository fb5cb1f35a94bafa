"""Scripts of Hugging Face's Trainer, accelerate and Lightning on ranks."""

from __future__ import annotations

from typing import Any

from pardnn import backends
from pardnn.api.parallelize import parallelize


def connect() -> int:
    """Connect the ranks of torchrun, and hide its variables from tools that would read them.

    Trainer, accelerate and Lightning spread the data and wrap the model in DDP when they find
    `WORLD_SIZE`; here each rank sees all the data and one device. Call it first of all.

    Returns:
        The number of this rank; 0 without torchrun, where nothing else is done.
    """
    return backends.connect()


def trainer(base: Any, **options: Any) -> Any:
    """Return Hugging Face's `Trainer` as a class that trains on all ranks.

    Its loop, schedule, callbacks, logs and `gradient_accumulation_steps` stay; its checkpoints are
    ours, and `resume_from_checkpoint` takes them on any number of ranks. `evaluate()` comes after
    the first update, and returns losses without predictions. Updates are those of
    `training_step` as it stands in `Trainer`: what a subclass changes about loss, update or
    clipping is not followed.

    Args:
        base: `transformers.Trainer`.
        **options: Of `parallelize`, such as `algorithm` or `cluster`.

    Raises:
        UsageError: E201, if the class has a `training_step` or `compute_loss` of its own.
    """
    return backends.trainer_class(base, parallelize, options)


def lightning_strategy(base: Any, step: Any) -> Any:
    """Return a strategy for Lightning's `Trainer`, whose checkpoints are those of all ranks.

    `ModelCheckpoint`, `trainer.save_checkpoint` and `fit(ckpt_path=...)` work as before, and any
    number of ranks goes on from what one number has saved. A checkpoint is a directory, with what
    the loop, callbacks and schedulers hold as `extra`.

    Args:
        base: `SingleDeviceStrategy`, of the Lightning package that the script uses.
        step: The step of the module's `training_step`, from `parallelize`.
    """
    return backends.lightning_strategy(base, step)
