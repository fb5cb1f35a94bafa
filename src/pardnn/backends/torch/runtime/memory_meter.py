"""Which storages a rank holds, and how many bytes they take: the measured side of a peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


class Ledger:
    """Tensor storage bytes of an environment, kept up to date name by name.

    Attributes:
        live: Bytes held now.
        peak: Largest `live` so far.
    """

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self._storage_of: dict[str, int] = {}
        self._held: dict[int, tuple[int, int]] = {}  # storage -> (names, bytes)

    def hold(self, env: Mapping[str, Any], names: Iterable[str]) -> None:
        """Count the values of these names; a storage that is already held costs nothing."""
        for name in names:
            if name in self._storage_of:
                self.drop((name,))
            value = env.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            count, size = self._held.get(key, (0, storage.nbytes()))
            self._held[key] = (count + 1, size)
            self._storage_of[name] = key
            if count == 0:
                self.live += size
        self.peak = max(self.peak, self.live)

    def drop(self, names: Iterable[str]) -> None:
        """Forget these names; a storage goes with its last one."""
        for name in names:
            key = self._storage_of.pop(name, None)
            if key is None:
                continue
            count, size = self._held.pop(key)
            if count > 1:
                self._held[key] = (count - 1, size)
            else:
                self.live -= size


def live_bytes(env: Mapping[str, Any]) -> int:
    """Return the storage bytes of all tensors of an environment, each storage once."""
    ledger = Ledger()
    ledger.hold(env, list(env))
    return ledger.live
