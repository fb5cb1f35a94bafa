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
