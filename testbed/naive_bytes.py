"""The bytes that a sharding moves, counted element by element: sets instead of boxes."""

import itertools

import numpy as np

from pardnn.plan.mesh import owned_boxes
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.per_device import input_names, local_ops
from pardnn.shard.partition.strategy import strategies
from pardnn.shard.search.communication_bytes import is_call
from pardnn.shard.sharding import Sharding


def indices(box, shape):
    """All elements of a box that lie in a tensor."""
    return set(
        itertools.product(
            *(range(max(a, 0), min(b, n)) for (a, b), n in zip(box, shape, strict=True))
        )
    )


def naive_bytes(graph, sharding):
    """The objective `bytes`, device by device and element by element."""
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    return sum(_of_op(op, tensors, sharding) for op in graph.ops if is_call(op))


def _item(tensor):
    count = 1
    for size in tensor.shape:
        count *= size
    return tensor.bytes // count


def _of_op(op, tensors, sharding):
    call = call_of(op, tensors)
    found = local_ops(call, sharding.axes[op.name], sharding.mesh)
    names = dict.fromkeys([*op.inputs, *(tensor.name for tensor in op.outputs)])
    return sum(_of_tensor(op, call, found, tensors[name], sharding) for name in names)


def _of_tensor(op, call, found, tensor, sharding):
    """What one op moves of one tensor."""
    slots = [slot for slot, name in input_names(call).items() if name == tensor.name]
    boxes = owned_boxes(tensor.shape, sharding.layouts[tensor.name], sharding.mesh)
    owned = [indices(box, tensor.shape) for box in boxes]
    total = 0
    for device, local in enumerate(found):
        regions = [local.regions[slot] for slot in slots]
        for box in {region.box for region in regions if region.content}:
            total += len(indices(box, tensor.shape) - owned[device])
    for number, output in enumerate(op.outputs):
        if output.name == tensor.name:
            results = [local.results[number] for local in found]
            total += _partial(owned, results, tensor, sharding.mesh)
    return total * _item(tensor)


def _partial(owned, results, tensor, mesh):
    """Elements that arrive: from each group of partial results, those the device has not."""
    if results[0] is None:
        return 0
    computed = [indices(result.box, tensor.shape) for result in results]
    reduced = [reducer is not None for reducer in results[0].reducers]
    group = [
        tuple(c for c, flag in zip(mesh.coordinates(d), reduced, strict=True) if flag)
        for d in range(mesh.size)
    ]
    total = 0
    for device in range(mesh.size):
        for other in set(group):
            theirs = set().union(*(computed[d] for d in range(mesh.size) if group[d] == other))
            mine = computed[device] if other == group[device] else set()
            wanted = owned[device] & theirs if any(reduced) else owned[device]
            total += len(wanted - mine)
    return total


def least_bytes(graph, mesh, class_of=lambda name: name):
    """The least traffic over all layouts that cut every tensor at every axis, by trying all.

    `class_of` names the class of a tensor: those of one class are cut alike; "w'" means transposed.
    """
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    names = {name: class_of(name) for name in tensors}
    roots = sorted({name.removesuffix("'") for name in names.values()})
    cuts = list(itertools.product(range(2), repeat=len(mesh.shape)))
    total = np.zeros([1] * len(roots))
    for op in graph.ops:
        if not is_call(op):
            continue
        mine = list(dict.fromkeys([*op.inputs, *(t.name for t in op.outputs)]))
        costs_of_tensors = [0]
        for name in mine:
            costs = _of_cuts(op, tensors, tensors[name], cuts, mesh)
            if names[name].endswith("'"):
                costs = costs[:, [cuts.index(tuple(1 - d for d in cut)) for cut in cuts]]
            shape = [len(costs)] + [1] * len(roots)
            shape[1 + roots.index(names[name].removesuffix("'"))] = len(cuts)
            costs_of_tensors.append(costs.reshape(shape))
        total = total + sum(costs_of_tensors).min(axis=0)
    return total.min()


_COSTS = {}


def _of_cuts(op, tensors, tensor, cuts, mesh):
    """What an op moves of a tensor, for each strategy of the op and layout of the tensor."""
    call = call_of(op, tensors)
    position = [*op.inputs, *(t.name for t in op.outputs)].index(tensor.name)
    key = op.kind, str([tensors[name].shape for name in op.inputs]), position, mesh.shape
    if key not in _COSTS:
        loops = [strategy.loop for strategy in strategies(call)]
        found = [
            local_ops(call, axes, mesh) for axes in itertools.product(loops, repeat=len(mesh.shape))
        ]
        _COSTS[key] = np.array(
            [
                [
                    _of_tensor(op, call, strategy, tensor, Sharding(mesh, {tensor.name: cut}, {}))
                    for cut in cuts
                ]
                for strategy in found
                if strategy is not None
            ]
        )
    return _COSTS[key]
