"""Use pardnn with Hugging Face's Trainer, accelerate and Lightning."""

from __future__ import annotations

from typing import Any

from pardnn import backends
from pardnn.api.parallelize import parallelize


def connect() -> int:
    """Connect the ranks of torchrun, and hide its environment variables from other tools.

    Trainer, accelerate and Lightning split the data and wrap the model in DDP if they find
    `WORLD_SIZE`. With pardnn, each rank has to see all the data and one device. Call this before
    anything else.

    Returns:
        The number of this rank. Without torchrun it is 0, and nothing else happens.
    """
    return backends.connect()


def trainer(base: Any, **options: Any) -> Any:
    """Return Hugging Face's `Trainer` as a class that trains on all ranks.

    Its loop, schedule, callbacks, logs and `gradient_accumulation_steps` work as before. Its
    checkpoints are pardnn's, and `resume_from_checkpoint` reads them on any number of ranks. Call
    `evaluate()` after the first update; it returns losses but no predictions. Updates are those of
    `Trainer.training_step`: changes that a subclass makes to loss, update or clipping are not
    followed.

    Args:
        base: `transformers.Trainer`.
        **options: Options of `parallelize`, such as `algorithm` or `cluster`.

    Raises:
        UsageError: E201, if the class has a `training_step` or `compute_loss` of its own.
    """
    return backends.trainer_class(base, parallelize, options)


def lightning_strategy(base: Any, step: Any) -> Any:
    """Return a strategy for Lightning's `Trainer` that saves and restores all ranks' state.

    `ModelCheckpoint`, `trainer.save_checkpoint` and `fit(ckpt_path=...)` work as before, and any
    number of ranks can resume. A checkpoint is a directory; what the loop, callbacks and schedulers
    hold is stored in it as `extra`.

    Args:
        base: `SingleDeviceStrategy` from the Lightning package that the script uses.
        step: What `parallelize` returned for the module's `training_step`.
    """
    return backends.lightning_strategy(base, step)
