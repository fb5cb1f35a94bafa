"""A naive twin of the units of memory packing: inputs by rank, units in chains of lists."""

from collections.abc import Sequence

from pardnn.graph.csr import RESIDUAL, GraphArrays


def attributed_units(
    a: GraphArrays, order: Sequence[int], live: Sequence[float], parts: int
) -> list[int]:
    """Return for each op the unit (a group) that it should be near.

    Args:
        a: The graph; its groups are closed.
        order: All ops, in a topological order.
        live: Bytes of each tensor at the peak; zeros where units are never full.
        parts: A unit is full with this part of what is held beside parameters.
    """
    group, made = a.group.tolist(), a.tensor_op.tolist()
    reads = [a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]].tolist() for op in order]
    inputs = dict(zip(order, reads, strict=True))
    stays = {group[made[t]] for t in range(len(made)) if a.memory[made[t]] == RESIDUAL}
    moving = [0.0] * (max(group) + 1)
    for t, op in enumerate(made):
        moving[group[op]] += live[t] * (a.memory[op] != RESIDUAL)
    share = sum(moving) / parts
    unit_of: dict[int, int] = {}  # of a group; those that no input decides are left out
    chain: dict[int, int] = {}
    held = dict.fromkeys(range(len(moving)), 0.0)
    for op in order:
        g = group[op]
        if g in stays or not stays:
            unit_of[g] = g
        known = [t for t in inputs[op] if group[made[t]] in unit_of and made[t] != op]
        if g in unit_of or not known:
            continue
        weights = [a.tensor_bytes[t] * (1 + (group[made[t]] in stays)) for t in known]
        ranks = [(live[t] > 0, w, -i) for i, (t, w) in enumerate(zip(known, weights, strict=True))]
        unit = unit_of[group[made[known[-max(ranks)[2]]]]]
        if moving[g] > 0:
            while held[unit] + moving[g] > share and unit in chain:
                unit = chain[unit]
            if held[unit] > 0 and held[unit] + moving[g] > share:
                chain[unit] = unit = g
            held[unit] += moving[g]
        unit_of[g] = unit
    for op in reversed(order):
        if group[op] in unit_of:
            continue
        readers = [
            int(reader)
            for t in range(a.output_ptr[op], a.output_ptr[op + 1])
            for reader in a.consumer_op[a.consumer_ptr[t] : a.consumer_ptr[t + 1]]
        ]
        units = [unit_of[group[reader]] for reader in readers if group[reader] in unit_of]
        unit_of[group[op]] = units[-1] if units else group[op]
    return [unit_of[g] for g in group]


def live_at_peak(a: GraphArrays, position: Sequence[int]) -> list[float]:
    """Return the bytes of each tensor that one device holds when it holds most; no views."""
    n, ranges = a.num_ops, list[tuple[int, int]]()
    for t, op in enumerate(a.tensor_op.tolist()):
        readers = a.consumer_op[a.consumer_ptr[t] : a.consumer_ptr[t + 1]]
        stays = a.memory[op] == RESIDUAL
        last = max([position[op], *(position[reader] for reader in readers)])
        ranges.append((0, n - 1) if stays else (position[op], last))
    held = [0] * n
    for op in range(n):
        held[position[op]] += int(a.workspace[op])
    for size, (first, last) in zip(a.tensor_bytes.tolist(), ranges, strict=True):
        for p in range(first, last + 1):
            held[p] += size
    peak = held.index(max(held))
    return [
        float(size) if first <= peak <= last else 0.0
        for size, (first, last) in zip(a.tensor_bytes.tolist(), ranges, strict=True)
    ]


def packed_devices(
    a: GraphArrays, unit: Sequence[int], works: Sequence[bool], position: Sequence[int],
    capacity: Sequence[int],
) -> dict[int, int]:  # fmt: skip
    """Return the device of each unit: stretches of their order of use, in parts like the room.

    Args:
        a: The graph.
        unit: Of each op.
        works: Whether an op takes time.
        position: Of each op.
        capacity: Of each device.
    """
    live, made = live_at_peak(a, position), a.tensor_op.tolist()
    used: dict[int, list[int]] = {u: [a.num_ops] for u in unit}
    for op in range(a.num_ops):
        if works[op]:
            read = a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]].tolist()
            stays = [made[t] for t in read if a.memory[made[t]] == RESIDUAL]
            for each in [op, *stays]:
                used[unit[each]].append(position[op])
    first = {u: min(position[op] for op in range(a.num_ops) if unit[op] == u) for u in used}
    weight = dict.fromkeys(used, 0.0)
    for size, op in zip(live, made, strict=True):
        weight[unit[op]] += size + 1e-9
    total, before, device = sum(weight.values()), 0.0, dict[int, int]()
    for u in sorted(used, key=lambda u: (min(used[u]), first[u])):
        part = (before + weight[u] / 2) / total * sum(capacity)
        ends = [sum(capacity[: d + 1]) for d in range(len(capacity))]
        device[u] = next((d for d, end in enumerate(ends) if part <= end), len(ends) - 1)
        before += weight[u]
    return device
