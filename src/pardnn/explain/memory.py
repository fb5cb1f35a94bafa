"""What holds a device's memory: storages with their live ranges, by layer and kind."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from pardnn.explain.case import Case
from pardnn.graph.csr import RESIDUAL
from pardnn.graph.layers import block_of
from pardnn.graph.storage_kinds import storage_kinds
from pardnn.plan.memory import Storage, device_storages, memory_profiles
from pardnn.plan.plan import order_rows
from pardnn.report.explained import DeviceMemory, Held, HeldBy

#: Storages that are listed of a device's peak.
LARGEST = 10


class Memory:
    """Storages of all devices, and what is live at each device's peak."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rows = order_rows(case.arrays)
        self.storages = device_storages(case.planned, case.arrays)
        profiles = memory_profiles(case.planned, case.arrays)
        self.peak_at = [row.index(max(row)) if row else -1 for row in profiles]

    @functools.cached_property
    def kinds(self) -> list[str]:
        """Kind of the storage that each tensor owns, where it is computed."""
        return storage_kinds(self.case.planned)

    def is_live(self, device: int, storage: Storage) -> bool:
        """Whether a storage is held at the device's peak."""
        at = self.peak_at[device]
        return storage.allocated <= at and not 0 <= storage.released < at

    def kind(self, storage: Storage) -> str:
        """Return what a storage is for."""
        return "transfers" if storage.message >= 0 else self.kinds[storage.tensor]

    def layer(self, storage: Storage) -> str:
        """Return the layer whose tensor it holds."""
        return self.case.layers[int(self.case.planned.arrays.tensor_op[storage.tensor])]

    def held(self, device: int, storage: Storage) -> Held:
        """Return a storage for the report."""
        case, row = self.case, self.rows[device]
        maker = case.planned.ops[int(case.planned.arrays.tensor_op[storage.tensor])]
        first = None if storage.allocated < 0 else case.planned.ops[row[storage.allocated]].name
        last = None if storage.released < 0 else case.planned.ops[row[storage.released]].name
        return Held(
            tensor=case.tensor_names[storage.tensor],
            device=case.devices[device],
            bytes=storage.bytes,
            kind=self.kind(storage),
            layer=self.layer(storage),
            from_op=first,
            last_reader=last,
            source=maker.source,
            at_peak=self.is_live(device, storage),
        )

    def of_tensors(self, tensors: Iterable[int]) -> tuple[Held, ...]:
        """Return the storages of some tensors, on every device."""
        owner = self.case.planned.arrays.tensor_owner
        wanted = {int(owner[tensor]) for tensor in tensors} | set(tensors)
        return tuple(
            self.held(device, storage)
            for device, storages in enumerate(self.storages)
            for storage in storages
            if storage.tensor in wanted
        )


def device_memory(memory: Memory, device: int) -> DeviceMemory:
    """Return what a device holds at its peak, by layer and kind."""
    case, at = memory.case, memory.peak_at[device]
    op = case.planned.ops[memory.rows[device][at]] if at >= 0 else None
    number = memory.rows[device][at] if at >= 0 else -1
    live = [s for s in memory.storages[device] if memory.is_live(device, s)] if op else []
    sums: dict[tuple[str, str], int] = {}
    for storage in live:
        key = block_of(memory.layer(storage)), memory.kind(storage)
        sums[key] = sums.get(key, 0) + storage.bytes
    if op and case.planned.arrays.workspace[number]:
        key = block_of(case.layers[number]), "workspace"
        sums[key] = sums.get(key, 0) + int(case.planned.arrays.workspace[number])
    by_size = sorted(sums.items(), key=lambda each: (-each[1], each[0]))
    live.sort(key=lambda storage: (-storage.bytes, storage.tensor))
    return DeviceMemory(
        device=case.devices[device],
        peak_bytes=case.peak_bytes[device],
        usable_bytes=case.usable[device],
        at_op=op and op.name,
        layer=case.layers[number] if op else "",
        source=op and op.source,
        held=tuple(HeldBy(layer=layer, kind=kind, bytes=n) for (layer, kind), n in by_size if n),
        largest=tuple(memory.held(device, storage) for storage in live[:LARGEST]),
    )


def state_bytes(case: Case, inside: Iterable[bool]) -> int:
    """Return the bytes that some ops keep across steps: parameters, buffers, optimizer states."""
    a = case.planned.arrays
    is_ours = list(inside)
    own = zip(a.tensor_op.tolist(), a.tensor_alias.tolist(), a.tensor_bytes.tolist(), strict=True)
    return sum(
        size for op, alias, size in own if alias < 0 and a.memory[op] == RESIDUAL and is_ours[op]
    )
