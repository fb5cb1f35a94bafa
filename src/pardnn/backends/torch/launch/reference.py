"""The reference of `pardnn run --verify`: the user's own step, eager, on one device."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch

from pardnn.backends.entry_point import load_factory
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.launch.job import Job


def seed_generators(seed: int) -> None:
    """Give a FUNCTION that seeds nothing the same numbers on every rank and in the reference."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the user's code may draw from it
    random.seed(seed)


def run_reference(job: Job) -> dict[str, Any]:
    """Run the user's own step and return its losses and the seconds that the steps took.

    Raises:
        UserCodeError: The user's file ended the program.
    """
    torch.set_num_threads(job.threads)
    # Ranks run the ATen calls of the step: a compiled step would round in another way.
    torch.compiler.set_stance("force_eager")
    seed_generators(job.seed)
    step, args = load_factory(job.target, job.batch_size)()
    start = time.perf_counter()
    # The steps before a checkpoint too: a run that goes on is compared with one that never stopped.
    before = (job.saving.first_step or 0) if job.saving is not None else 0
    losses = [loss_of(step(*args)).item() for _ in range(before + job.steps)][before:]
    return {"losses": losses, "seconds": time.perf_counter() - start}
