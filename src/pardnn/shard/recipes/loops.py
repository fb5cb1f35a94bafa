"""The loop of an op that moves least, given the layouts of all tensors.

Problem: a recipe says which dim of each tensor is cut; ops have to follow.
Idea: a loop that reads all cut tensors as they are cut comes first, since the recipe cut them for
it. Otherwise count the bytes that have to move per device, for each loop and k devices. A cut input
costs its bytes if the loop does not cut it, and a k-th of them if it cuts another dim; a result
costs its bytes if it is made in parts and held whole, a k-th of them if it is cut along another
dim, and the same again if the parts are partial results.
Complexity: O(loops x tensors) per op.
Deviations: halos are not counted. `search.communication_bytes` counts boxes, and takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping

from pardnn.graph.ir import Graph
from pardnn.shard.partition.interning import strategies_of
from pardnn.shard.partition.strategy import Cut, Reduce, Strategy, Whole
from pardnn.shard.search.alignment import Place
from pardnn.shard.search.coarsening import OpCall


def bytes_of_tensors(graph: Graph) -> dict[str, int]:
    """Return the bytes of each tensor, by name."""
    return {tensor.name: tensor.bytes for op in graph.ops for tensor in op.outputs}


def cheapest_loop(
    call: OpCall, dims: Mapping[str, int], sizes: Mapping[str, int], count: int
) -> str | None:
    """Return the loop of a call to cut; None if all devices should run it whole.

    Args:
        call: The call.
        dims: The cut dim of each tensor that is not whole, by name.
        sizes: Bytes of tensors, by name.
        count: Number of devices.
    """
    cut = {p: dims[n] for p, n in call.places.items() if n in dims}
    if not cut:
        return None  # all of it is whole
    read = {n for p, n in call.places.items() if isinstance(p, str) and n in dims}
    least, best = (bool(read), float(sum(sizes[name] for name in read))), None
    for loop, strategy in strategies_of(call.number).items():
        if strategy.extent < count:
            continue
        suits = all(_reads(strategy, place, dim) for place, dim in cut.items())
        cost = not suits, _moved(call, strategy, dims, sizes, count)
        if cost < least or (cost == least and best is None):
            least, best = cost, loop
    return best


def _reads(strategy: Strategy, place: Place, dim: int) -> bool:
    """Whether a strategy reads a tensor as it is cut; results do not count."""
    layout = strategy.inputs.get(str(place))
    return (
        isinstance(place, int)
        or not isinstance(layout, Cut | Whole)
        or (isinstance(layout, Cut) and layout.dim == dim)
    )


def _moved(
    call: OpCall,
    strategy: Strategy,
    dims: Mapping[str, int],
    sizes: Mapping[str, int],
    count: int,
) -> float:
    """Return about how many bytes a device receives if a loop is cut."""
    moved = 0.0
    for place, name in call.places.items():
        is_result = isinstance(place, int)
        layout = strategy.outputs[place] if is_result else strategy.inputs.get(str(place))
        held, size = dims.get(name), sizes[name]
        if isinstance(layout, Reduce):
            moved += size if held is not None else 2 * size
        elif isinstance(layout, Cut):
            if held is None:
                moved += size if is_result else 0
            elif held != layout.dim:
                moved += size / count
        elif held is not None and isinstance(layout, Whole) and not is_result:
            moved += size
    return moved
