"""Random ops: how each one advances the generator, measured once by the rank that runs it.

Ranks exchange the measurements, so that each can skip the draws of the others (`rng/generator.py`).
An op is measured on placeholders of its real shapes, types and strides; equal calls are measured
once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from pardnn.backends.torch.comm.wire_format import HOST_TYPES
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import empty_tensor
from pardnn.backends.torch.ops.codec import bind, find_call
from pardnn.backends.torch.ops.schema import signature
from pardnn.backends.torch.rng.generator import (
    Draws,
    Effect,
    default_generator,
    has_fixed_draws,
    measure,
)
from pardnn.backends.torch.rng.stream import RandomStream
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import FileError, UnsupportedError, shown
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.partitioned_graph import DRAW
from pardnn.plan.rewritten.recompute import first_call


def random_ops(graph: Graph) -> list[Op]:
    """Return the ops that draw from a generator, in the order of the graph."""
    return [op for op in graph.ops if is_random(op)]


def is_random(op: Op) -> bool:
    """Whether the op draws from a generator."""
    if op.kind == DRAW:
        return True
    if op.is_source or op.kind.startswith(("scalar.", "pardnn.")):
        return False
    function = find_call(op.kind)
    return isinstance(function, torch._ops.OpOverload) and signature(function).random


def drawn_once(op: Op, whole: Mapping[str, Op]) -> str:
    """Return the op of the whole graph whose draws an op of a planned graph makes.

    Copies of a random op, one per device, are one draw of the generator; so are its replay and its
    second call.

    Args:
        op: A random op of the planned graph.
        whole: Ops of the whole graph by name.

    Raises:
        FileError: E401, if it replays an op that does not draw.
    """
    of = (op.arguments or {}).get("of")
    copies = (op.name, *_copied(op.name), first_call(op.name))
    name = next((name for name in copies if name in whole), op.name)
    name = name if of is None else str(of)
    again = replayed_op(whole[name]) if name in whole else None
    if again is None:
        return name
    if again not in whole or not is_random(whole[again]) or replayed_op(whole[again]) is not None:
        raise FileError(f"op {shown(name)} draws the numbers of {shown(again)}, which draws none")
    return again


def random_stream(
    program: Program, world: World, draws: Mapping[str, Draws]
) -> tuple[RandomStream | None, Mapping[str, str]]:
    """Return this rank's generator for a step, and for each random op the op whose draws it makes.

    Args:
        program: The program of the step.
        world: This rank's connections.
        draws: How each random op of the whole graph advances the generator.

    Returns:
        None and no ops for a step that draws nothing.

    Raises:
        MismatchError: E515, if ops and draws do not fit together.
    """
    drawing = random_ops(program.graph)
    if not drawing:
        return None, {}
    whole = {op.name: op for op in random_ops(program.whole)}
    drawn = {op.name: drawn_once(op, whole) for op in drawing}
    order = [name for name, op in whole.items() if replayed_op(op) is None]
    mine = [drawn[name] for name in program.plan.order[world.rank] if name in drawn]
    generator = default_generator(world.device)
    return RandomStream(order, [draws[name] for name in order], mine, generator), drawn


def _copied(name: str) -> Iterator[str]:
    """Yield the names that a name may copy: "h@2@1", on a device, the piece "h@2" of "h"."""
    while "@" in name:
        name = name.rpartition("@")[0]
        yield name


def replayed_op(op: Op) -> str | None:
    """Return the op whose draw this op of the whole graph replays; None if it has its own.

    Both occur in a step of which `torch.utils.checkpoint` recomputes a part.
    """
    again = (op.arguments or {}).get("redraws")
    return None if again is None else str(again)


def check_one_draw(op: Op, whole: Op, draws: Draws) -> None:
    """Check that no op that draws by itself is partitioned: its numbers would differ.

    Args:
        op: A random op of the planned graph.
        whole: The op of the whole graph that it is a part of.
        draws: How it advances the generator.

    Raises:
        UnsupportedError: E822, naming the op.
    """
    shapes = [[tensor.shape for tensor in each.outputs] for each in (op, whole)]
    if draws.without_spare.count and op.kind != DRAW and shapes[0] != shapes[1]:
        raise UnsupportedError(
            f"op {shown(whole.name)} ({whole.kind}, {whole.source or 'no source'}) draws random "
            "numbers, and this plan cuts it: they would differ from those of one device.\nPlan "
            "again with a placement (--algorithm pardnn), or without dropout in this op.",
            code="E822",
            details={"op": whole.name},
        )


def _drawing(op: Op) -> Any:
    """Return the random function that the op calls."""
    return find_call((op.arguments or {})["args"][0] if op.kind == DRAW else op.kind)


def check_fixed_draws(ops: Iterable[Op]) -> None:
    """Check that no op's draws depend on values, which other ranks cannot know.

    Raises:
        UnsupportedError: E822, naming the op.
    """
    for op in ops:
        if not has_fixed_draws(_drawing(op)):
            raise UnsupportedError(
                f"op {shown(op.name)} ({op.kind}, {op.source or 'no source'}) draws a number of "
                "random values that depends on its input, so other devices cannot follow.\n"
                "Run this step on one device, or draw before the step and pass the numbers in.",
                code="E822",
                details={"op": op.name},
            )


def _placeholder(tensor: Tensor, device: torch.device) -> Any:
    if tensor.dtype in HOST_TYPES:
        return HOST_TYPES[tensor.dtype][1](1)
    made = empty_tensor(tensor, device)
    # 0.5 is valid as a probability, a standard deviation and a weight.
    return made.fill_(0.5 if made.is_floating_point() else 1)


def measure_draws(
    ops: Iterable[Op], tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Draws]:
    """Measure how each op advances the generator.

    Args:
        ops: Random ops.
        tensors: The graph's tensors by name.
        device: Where the ops run.

    Returns:
        By the op's name.
    """
    by_call: dict[str, Draws] = {}
    found: dict[str, Draws] = {}
    for op in ops:
        key = _key(op, tensors)
        if key not in by_call:
            env = {name: _placeholder(tensors[name], device) for name in op.inputs}
            sizes = [math.prod(tensors[n].shape or ()) for n in op.inputs]
            sizes += [math.prod(output.shape or ()) for output in op.outputs]
            run = _runner(bind(op, device), env)
            by_call[key] = measure(run, device, num_elements=sum(sizes) + 1024)
        found[op.name] = by_call[key]
    return found


def _runner(call: Callable[[dict[str, Any]], None], env: dict[str, Any]) -> Callable[[], None]:
    return lambda: call(dict(env))


def _key(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """Return what determines the draws of a call: everything but the names of its tensors."""
    position = {name: i for i, name in enumerate(op.inputs)}

    def renamed(data: Any) -> Any:
        if isinstance(data, list):
            return [renamed(item) for item in data]
        if isinstance(data, dict) and set(data) == {"tensor"}:
            return {"tensor": position[data["tensor"]]}
        return data

    arguments = op.arguments or {}
    call = [renamed(arguments.get("args", [])),
            {k: renamed(v) for k, v in arguments.get("kwargs", {}).items()}]  # fmt: skip
    layouts = [(t.shape, t.dtype, t.strides) for t in (tensors[name] for name in op.inputs)]
    return json.dumps([op.kind, call, layouts], sort_keys=True)


def draws_to_data(draws: Mapping[str, Draws]) -> dict[str, Any]:
    """Return measured draws by op name as JSON types."""
    return {name: [list(each.without_spare), list(each.with_spare)] for name, each in draws.items()}


def draws_from_data(data: Mapping[str, Any]) -> dict[str, Draws]:
    """Return the draws that `draws_to_data` wrote."""
    return {name: Draws(Effect(*a), Effect(*b)) for name, (a, b) in data.items()}
