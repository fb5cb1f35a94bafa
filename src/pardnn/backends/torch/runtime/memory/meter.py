"""The memory meter: the live tensor storages of a rank and their bytes, to measure its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.devices import elements_of
from pardnn.backends.torch.ops.host_memory import is_on_host


class MemoryMeter:
    """Live bytes of an environment, with a reference count per storage.

    Attributes:
        live: Bytes of all storages that names refer to now.
        peak: Largest `live` so far, in bytes.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._storage_of: dict[str, int] = {}
        self._counted: dict[int, tuple[int, int]] = {}  # storage -> (names, bytes)

    def add(self, env: Mapping[str, Any], names: Iterable[str], *, of_caller: bool = False) -> None:
        """Count the values of these names; a storage already counted adds nothing.

        Args:
            env: Values by name.
            names: The names of values; names without a value are skipped.
            of_caller: Whether the storages are the caller's, who may hold more in them: a batch is
                often a slice of a data set. Then only what the tensors span is counted.
        """
        for name in names:
            if name in self._storage_of:
                self.remove((name,))
            value = env.get(name)
            if not isinstance(value, torch.Tensor) or is_on_host(value):
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            bytes_here = elements_of(value).nbytes if of_caller else storage.nbytes()
            count, size = self._counted.get(key, (0, bytes_here))
            self._counted[key] = (count + 1, size)
            self._storage_of[name] = key
            if count == 0:
                self.live += size
        self.peak = max(self.peak, self.live)

    def remove(self, names: Iterable[str]) -> None:
        """Stop counting these names; a storage is released with its last name."""
        for name in names:
            key = self._storage_of.pop(name, None)
            if key is None:
                continue
            count, size = self._counted.pop(key)
            if count > 1:
                self._counted[key] = (count - 1, size)
            else:
                self.live -= size


def live_bytes(env: Mapping[str, Any]) -> int:
    """Return the storage bytes of all tensors of an environment, each storage once."""
    meter = MemoryMeter()
    meter.add(env, list(env))
    return meter.live


def freeing(names: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """Return a function that drops these values from an environment."""
    if len(names) == 1:
        (only,) = names

        def free_one(env: dict[str, Any]) -> None:
            del env[only]

        return free_one

    def free(env: dict[str, Any]) -> None:
        for name in names:
            del env[name]

    return free
