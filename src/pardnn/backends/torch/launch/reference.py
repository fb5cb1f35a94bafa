"""The reference of `pardnn run --verify`: the user's own step, eager, on one device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pardnn.backends.entry_point import load_factory
from pardnn.backends.torch.capture.result import loss_of, roots_noted
from pardnn.backends.torch.launch.compare_state import compared_state
from pardnn.backends.torch.launch.job import STATE_FOLDER, Job


def seed_generators(seed: int) -> None:
    """Seed the generators, so that ranks and reference draw alike if FUNCTION seeds nothing."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  the user's code may draw from it
    random.seed(seed)


def _loss_of_one(step: Callable[..., Any], args: Sequence[Any]) -> float:
    with roots_noted() as roots:
        result = step(*args)
    return loss_of(result, roots).item()


def run_reference(job: Job, directory: Path) -> dict[str, Any]:
    """Run the user's own step; return its losses, seconds, and how the ranks' state differs.

    Args:
        job: The job of the ranks.
        directory: The directory of the run.

    Raises:
        UserCodeError: The user's file ended the program.
    """
    torch.set_num_threads(job.threads)
    # Ranks run the ATen calls of the step: a compiled step would round differently.
    torch.compiler.set_stance("force_eager")
    seed_generators(job.seed)
    step, args = load_factory(job.target, job.batch_size)()
    start = time.perf_counter()
    # This includes the steps before a checkpoint: a resumed run is compared with one that never
    # stopped.
    before = (job.saving.first_step or 0) if job.saving is not None else 0
    losses = [_loss_of_one(step, args) for _ in range(before + job.steps)][before:]
    seconds = time.perf_counter() - start
    state, notes = compared_state(step, args, directory / STATE_FOLDER)
    return {"losses": losses, "seconds": seconds, "state": state, "notes": notes}
