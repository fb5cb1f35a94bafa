"""All devices of a sharded plan in one process: the interpreter that certifies SPMD partitioning.

It knows the table of `plan.partitioned_graph` and nothing of `pardnn.shard`: ops run in the order
of each device, messages carry copies, and every shard is compared with the one-device run.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import bind, constant_value, decode, find_call, flatten_result
from pardnn.backends.torch.user_step.sources import sources
from pardnn.graph.ir import LOSS_KIND, Graph, Op
from pardnn.plan.partitioned_graph import DRAW, FETCH, JOIN, REDUCE, SLICE, UPDATE
from pardnn.plan.plan import Plan

CPU = torch.device("cpu")
RANDOM = ("bernoulli", "dropout", "rand", "normal", "uniform", "exponential", "multinomial")


def source_values(step: Any, args: Any, graph: Graph) -> dict[str, Any]:
    """Values of all sources of a captured step."""
    live = {source.name: source for source in sources(step, args, graph)}
    values: dict[str, Any] = {}
    for op in graph.ops:
        if not op.is_source:
            continue
        (output,) = op.outputs
        if op.kind == "constant":
            values[op.name] = constant_value(op)
        elif (op.arguments or {}).get("initial") is not None:
            dtype = getattr(torch, output.dtype or "float64")
            values[op.name] = torch.full(output.shape or (), op.arguments["initial"], dtype=dtype)
        else:
            value = live[op.name].get()
            values[op.name] = value.detach() if isinstance(value, torch.Tensor) else value
    return values


def is_random(kind: str) -> bool:
    return any(word in kind for word in RANDOM)


def seed(name: str) -> None:
    torch.manual_seed(zlib.crc32(name.encode()))


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def run_whole(graph: Graph, values: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of the graph, as it was when its op had run."""
    env = {name: copied(value) for name, value in values.items()}
    seen = {name: copied(value) for name, value in values.items()}
    with torch.no_grad():
        for number in graph.arrays.topological.tolist():
            op = graph.ops[number]
            if op.is_source or op.kind == LOSS_KIND:
                continue
            if is_random(op.kind):
                seed(op.name)
            bind(op, CPU)(env)
            seen |= {t.name: copied(env[t.name]) for t in op.outputs}
    return seen


def narrowed(value: Any, box: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    for dim, (begin, end) in enumerate(box):
        assert 0 <= begin <= end <= value.shape[dim], (box, value.shape)
        value = value.narrow(dim, begin, end - begin)
    return value


def _number(data: Any) -> float:
    return decode(data, CPU)


def _fetch(op: Op, env: dict[str, Any]) -> None:
    shape, fill, parts = op.arguments["args"]
    (output,) = op.outputs
    dtype = getattr(torch, output.dtype)
    strides = output.strides or torch.empty(shape, device="meta").stride()
    made = torch.empty_strided(shape, strides, dtype=dtype)
    # What no part covers and nothing fills must never be read.
    made.fill_((float("nan") if dtype.is_floating_point else 77) if fill is None else _number(fill))
    if dtype == torch.bool and fill is None:
        made.fill_(True)
    for reference, box in parts:
        value = env[reference["tensor"]]
        target = narrowed(made, box)
        assert target.shape == value.shape
        target.copy_(value)
    env[output.name] = made


def _reduce(op: Op, env: dict[str, Any]) -> None:
    name, parts, weights = op.arguments["args"]
    values = [env[part["tensor"]] for part in parts]
    if name == "mean":
        values = [value * weight for value, weight in zip(values, weights, strict=True)]
    add = {
        "sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum,
        "prod": torch.mul, "quotient": torch.div,
    }[name]  # fmt: skip
    total = values[0].clone()
    for value in values[1:]:
        if total.dtype == torch.bool:
            total = total | value if name in ("sum", "max") else total & value
        else:
            total = add(total, value)
    env[op.outputs[0].name] = total


def _draw(op: Op, env: dict[str, Any]) -> None:
    kind, args, kwargs, boxes = op.arguments["args"]

    def filled(data: Any) -> Any:
        if isinstance(data, list):
            return [filled(item) for item in data]
        if isinstance(data, dict) and "ones" in data:
            shape, dtype, strides = data["ones"]
            strides = strides or torch.empty(shape, device="meta").stride()
            return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype)).fill_(1)
        if isinstance(data, dict) and "tensor" in data:
            return env[data["tensor"]]
        return decode(data, CPU)

    seed(op.arguments["of"])
    results = find_call(kind)(*map(filled, args), **{k: filled(v) for k, v in kwargs.items()})
    for name, box, value in zip(
        op.arguments["returns"], boxes, flatten_result(results), strict=True
    ):
        if name is not None:
            env[name] = narrowed(value, box).clone()


def step_of(op: Op, env: dict[str, Any]) -> None:
    """Run one op of a partitioned graph."""
    if op.kind == SLICE:
        reference, box = op.arguments["args"]
        env[op.outputs[0].name] = narrowed(env[reference["tensor"]], box)
    elif op.kind == FETCH:
        _fetch(op, env)
    elif op.kind == REDUCE:
        _reduce(op, env)
    elif op.kind == UPDATE:
        target, box, source = op.arguments["args"]
        narrowed(env[target["tensor"]], box).copy_(env[source["tensor"]])
        env[op.outputs[0].name] = env[target["tensor"]]
    elif op.kind == JOIN:
        target, parts = op.arguments["args"]
        for reference, box in parts:
            narrowed(env[target["tensor"]], box).copy_(env[reference["tensor"]])
        env[op.outputs[0].name] = env[target["tensor"]]
    elif op.kind == DRAW:
        _draw(op, env)
    elif op.kind != LOSS_KIND:
        bind(op, CPU)(env)


def run_partitioned(
    graph: Graph, plan: Plan, values: dict[str, Any], expected: dict[str, Any]
) -> list[str]:
    """Run a sharded plan; return what differs from the one-device run."""
    envs: list[dict[str, Any]] = [{} for _ in plan.order]
    carried: dict[str, list[int]] = {}
    for message in plan.messages:
        carried.setdefault(message.tensor, []).append(message.target)
    tensors = {t.name for op in graph.ops for t in op.outputs}
    problems: list[str] = []
    copies: dict[Any, Any] = {}
    assert plan.partition is not None
    with torch.no_grad():
        for device, op in in_order(plan, envs):
            env = envs[device]
            if op.kind == "constant":
                env[op.outputs[0].name] = constant_value(op)
            elif op.is_source:
                shard = op.arguments["shard"]
                env[op.outputs[0].name] = copied(narrowed(values[shard["of"]], shard["box"]))
            else:
                step_of(op, env)
            for tensor in op.outputs:
                value = env[tensor.name]
                if isinstance(value, torch.Tensor) and tuple(value.shape) != tensor.shape:
                    problems.append(f"{tensor.name}: {tuple(value.shape)}, not {tensor.shape}")
                for target in carried.get(tensor.name, []):
                    envs[target][tensor.name] = copied(value)
                name, _, at = tensor.name.rpartition("@")
                if name in tensors and at == str(device):
                    problems += compared(tensor.name, value, expected[name], plan, name, device)
                    problems += unequal(copies, tensor.name, value, plan, device)
            if len(problems) > 5:
                break
    return problems


def in_order(plan: Plan, envs: list[dict[str, Any]]) -> Iterator[tuple[int, Op]]:
    """Yield devices and ops, each device in its own order, as soon as what an op reads is there."""
    ops = {op.name: op for op in plan.partition.ops}
    at = [0] * len(plan.order)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(plan.order):
            while at[device] < len(row) and all(
                name in envs[device] for name in ops[row[at[device]]].inputs
            ):
                yield device, ops[row[at[device]]]
                at[device] += 1
                moved = True
    assert at == [len(row) for row in plan.order], "some device waits for ever"


def unequal(copies: dict[Any, Any], name: str, value: Any, plan: Plan, device: int) -> list[str]:
    """All devices that own the same block hold the same bits."""
    if not isinstance(value, torch.Tensor) or "empty" in name:
        return []
    of = name.rpartition("@")[0]
    here = plan.partition.mesh.coordinates(device)
    words = zip(here, plan.partition.sharding[of], strict=True)
    key = (of, tuple(at for at, word in words if word != "Replicate()"))
    other = copies.setdefault(key, value.clone())
    return [] if other.equal(value) or value.isnan().any() else [f"{name}: copies differ"]


def compared(what: str, value: Any, whole: Any, plan: Plan, name: str, device: int) -> list[str]:
    """Compare a device's block with that of the whole tensor."""
    if not isinstance(whole, torch.Tensor):
        return [] if value == whole else [f"{what}: {value} and not {whole}"]
    block = narrowed(whole, block_of(whole.shape, plan.partition.sharding[name], plan, device))
    if block.shape != value.shape or block.dtype != value.dtype:
        return [f"{what}: {value.dtype}{value.shape} and not {block.dtype}{block.shape}"]
    if block.is_complex():
        parts = (torch.view_as_real(each.resolve_conj()) for each in (block, value, whole))
        block, value, whole = parts
    if not block.is_floating_point():
        return [] if torch.equal(block, value) else [f"{what}: other values"]
    if not block.numel() or "empty" in what:
        return []
    regular = torch.isfinite(block)
    if not torch.equal(regular, torch.isfinite(value)):
        return [f"{what}: other infinities"]
    scale = torch.where(torch.isfinite(whole), whole, 0.0).abs().max().clamp(min=1.0)
    error = float(torch.where(regular, block - value, 0.0).abs().max() / scale)
    limit = 1e-10 if block.dtype == torch.float64 else 1e-4
    return [] if error <= limit else [f"{what}: off by {error:.2g}"]


def block_of(shape: Any, words: Any, plan: Plan, device: int) -> list[tuple[int, int]]:
    """A device's block, from the layout in DTensor's words: written anew for this test."""
    box = [(0, size) for size in shape]
    sizes, at = plan.partition.mesh.shape, device
    shares = plan.partition.mesh.shares or [[1] * size for size in sizes]
    coordinates = []
    for size in reversed(sizes):
        coordinates.insert(0, at % size)
        at //= size
    for word, row, here in zip(words, shares, coordinates, strict=True):
        if word.startswith("Shard("):
            dim = int(word[6:-1])
            begin, end = box[dim]
            cuts = [0]
            for n in range(1, len(row) + 1):  # rounded down, with at least one for each
                cut = max((end - begin) * sum(row[:n]) // sum(row), cuts[-1] + 1)
                cuts.append(min(cut, end - begin - (len(row) - n)))
            box[dim] = (begin + cuts[here], begin + cuts[here + 1])
    return box
