"""Parameters created in place of those without data: deferred models, the meta device.

Another object replaces each of them, and everything in users' objects and sources that refers to
the old one has to follow: optimizer state, which has the parameter as its key, and gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from pardnn.backends.torch.runtime.binding import Binding


@contextlib.contextmanager
def following_parameters(binding: Binding) -> Iterator[None]:
    """Make state and gradients follow parameters that are replaced while the context is open.

    Args:
        binding: The binding of the sources that are set.
    """
    sources = binding.sources
    before = {name: s.get() for name, s in sources.items() if s.kind == "parameter"}
    yield
    made = {id(old): sources[name].get() for name, old in before.items()}
    if all(made[id(old)] is old for old in before.values()):
        return
    for name, source in sources.items():
        new = made.get(id(source.parameter))
        if new is not None and new is not source.parameter:
            sources[name] = dataclasses.replace(source, parameter=new)
            sources[name].set(source.get())
    for entry in binding.stateful():
        if isinstance(entry.value, torch.optim.Optimizer):
            state = entry.value.state
            held = {made.get(id(key), key): value for key, value in state.items()}
            state.clear()
            state.update(held)
