"""The state of a step between two steps: loaded, exported, gathered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pardnn.backends.torch.checkpoint.training_state import TrainingState
from pardnn.backends.torch.checkpoint.weights import LoadedKeys


class Checkpointed(ABC):
    """The collective calls of a step on its state."""

    @abstractmethod
    def _training_state(self) -> TrainingState:
        """Return the state where the last call left it."""

    def load(self, path: str | Path, step: int | None = None) -> Any:
        """Read a checkpoint: parameters, optimizers, step counts and random state.

        Every rank must call it, and reads its own share. If no op is cut, losses continue as in
        the uninterrupted run, bit for bit.

        Args:
            path: As given to `save`.
            step: Number of trained steps; None takes the latest.

        Returns:
            The `extra` that was saved.

        Raises:
            FileError: E430 (no such step), E431 (torn), E432 (damaged, naming the tensor), E434.
            MismatchError: E520, if it is of another model or optimizer, naming the tensor.
        """
        return self._training_state().load(path, step)

    def export(self, path: str | Path, *, optimizer: bool = False) -> None:
        """Write the whole model into one safetensors file, for use elsewhere.

        Every rank must call it; rank 0 writes, holding a few rows at a time. Names are
        the keys of `model.state_dict()`, prefixed with the model's own name if there are
        several; tied tensors are written once, so that `safetensors.torch.load_model` reads it.

        Args:
            path: The path of the file.
            optimizer: Add optimizer states, as "optimizer.state.model.weight.exp_avg".

        Raises:
            FileError: E433, on all ranks, if it cannot be written; an old file stays.
        """
        self._training_state().export(path, optimizer=optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dicts of the step's objects, whole and on the host, on rank 0.

        Every rank must call it; all but rank 0 get an empty dict. Rank 0 needs memory for the
        whole state; `save` and `export` do not.

        Returns:
            By argument name: `{"model": model.state_dict(), "optimizer": ...}`, schedulers too.
        """
        return self._training_state().state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        """Take torch's state dicts of the step's objects and give each rank its share.

        Every rank must call it; only rank 0's argument counts. Objects that are left out stay as
        they are, and so do the run's step count and the random state.

        Args:
            state: As `state_dict` returns it.

        Raises:
            MismatchError: E520, on all ranks, naming the key that is missing, superfluous, or of
                another shape or type. Nothing is changed then.
        """
        self._training_state().load_state_dict(state)

    def load_weights(
        self, path: str | Path, model: str | None = None, *, strict: bool = True
    ) -> LoadedKeys:
        """Read published weights into the models, each rank its own share, some rows at a time.

        Every rank must call it. Optimizer states, step counts and random state stay.

        Args:
            path: A safetensors file, `model.safetensors.index.json` of several, or the directory
                of either. Names are the keys of `model.state_dict()`, as `export` writes them; of
                tied tensors one is enough.
            model: Name of the argument that the file holds, where the step has several models;
                None: names begin with the model's own.
            strict: Refuse missing and unexpected keys.

        Returns:
            The keys that only one side has: `missing_keys` and `unexpected_keys`.

        Raises:
            FileError: E434 or E436, if a file cannot be read or is none.
            MismatchError: E520, on all ranks, naming missing and unexpected keys, or a tensor of
                another shape or type. Nothing is changed then.
        """
        return self._training_state().load_weights(path, model, strict=strict)

    def sync_model(self) -> None:
        """Fill the user's models on rank 0 with whole tensors until the next step.

        Every rank must call it. Then rank 0 may call the model (in `eval()` and `no_grad`) and
        read its state dict; changes are refused at the next step.
        """
        self._training_state().sync_model()
