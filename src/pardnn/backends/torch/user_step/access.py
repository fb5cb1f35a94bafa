"""Access to models and optimizers whose state is spread over ranks.

Problem: between steps a user's object holds only this rank's share: the rest of a placed model
reads as NaN, and a cut parameter has the shape of its shard. `torch.save(model.state_dict())` would
silently lose the model, and `model(x)` return NaN.
Idea: hooks on each module and optimizer that is spread over ranks refuse both, and loading, by
name.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pardnn.errors import MismatchError, shown

#: Depth of `access_allowed`; a capture runs in one thread, and nothing else runs the step.
_allowed = [0]


@contextlib.contextmanager
def access_allowed() -> Iterator[None]:
    """Allow models to be called and read: for a capture, and for code that knows the shards."""
    _allowed[0] += 1
    try:
        yield
    finally:
        _allowed[0] -= 1


class SpreadObjects:
    """The models and optimizers of steps that are spread over ranks.

    Attributes:
        is_whole: Whether this rank holds the models whole at present.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._guarded: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        spread: frozenset[int],
    ) -> None:
        """Make the objects of a step refuse to be read.

        Args:
            models: The models by name.
            optimizers: The optimizers by name.
            spread: Ids of the tensors that some rank does not hold whole.
        """
        for name, model in models.items():
            for path, module in model.named_modules():
                tensors: Iterable[Any] = (*module.parameters(), *module.buffers())
                is_spread = any(id(tensor) in spread for tensor in tensors)
                if is_spread and module not in self._guarded:
                    self._guarded.add(module)
                    self._guard_module(f"{name}.{path}" if path else name, module)
        for name, optimizer in optimizers.items():
            held = [p for group in optimizer.param_groups for p in group["params"]]
            held += tree_leaves(list(optimizer.state.values()))
            if any(id(value) in spread for value in held) and optimizer not in self._guarded:
                self._guarded.add(optimizer)
                self._guard_optimizer(name, optimizer)

    def _guard_module(self, name: str, module: torch.nn.Module) -> None:
        reading = _Refusal(self, name, "its state_dict() would lack the rest", "fast.state_dict()")
        calling = _Refusal(
            self,
            name,
            "a call would compute with NaN or shards",
            "fast.evaluate(function, *args)",
        )
        module.register_state_dict_pre_hook(reading)
        module.register_forward_pre_hook(calling)
        module.register_load_state_dict_pre_hook(_refusal_to_load(self, name))

    def _guard_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            return  # a wrapper, such as accelerate's, reads the optimizer inside, which is guarded
        # An optimizer stays spread while a model is whole for a time.
        always = SpreadObjects()
        reading = _Refusal(
            always, name, "its state_dict() would lack the rest", "fast.state_dict()"
        )
        optimizer.register_state_dict_pre_hook(reading)
        optimizer.register_load_state_dict_pre_hook(_refusal_to_load(always, name))


class _Refusal:
    """A hook that raises E523 while its object is spread.

    Args:
        spread: Knows whether models are whole.
        name: The name of the object.
        why: Why it cannot be read.
        instead: What to call instead.
        if_whole: Raise also while the models are whole.
    """

    def __init__(
        self, spread: SpreadObjects, name: str, why: str, instead: str, *, if_whole: bool = False
    ) -> None:
        self._spread, self._name, self._why, self._instead = spread, name, why, instead
        self._if_whole = if_whole

    def __call__(self, *_args: Any) -> None:
        if _allowed[0] or (self._spread.is_whole and not self._if_whole):
            return
        raise MismatchError(
            f"{shown(self._name)} is spread over the ranks, and this one holds its share: "
            f"{self._why}.\nCall {self._instead} on every rank. fast.save(directory) and "
            "fast.export(file) write the whole without gathering it; fast.sync_model() fills the "
            "model on rank 0 until the next step.",
            code="E523",
            details={"object": self._name},
        )

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        # A copy of a whole model stays whole; one of a spread model has lost the rest.
        return _nothing if self._spread.is_whole else self


def _refusal_to_load(spread: SpreadObjects, name: str) -> _Refusal:
    why, instead = "load_state_dict() cannot fill it", "fast.load_state_dict(...)"
    return _Refusal(spread, name, why, instead, if_whole=True)


def _nothing(*_args: Any) -> None:
    """Do nothing, as the hook of a copy."""
