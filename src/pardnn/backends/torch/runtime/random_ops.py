"""What each random op of a step does to the generator, measured once by the rank that runs it.

Ranks tell each other, so that everyone can pass over the draws of the others (`random.py`). An op
is measured on stand-ins of its real shapes, types and strides; equal calls are measured once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pardnn.backends.torch.comm.wire_format import HOST_TYPES
from pardnn.backends.torch.ops.codec import bind, find_call
from pardnn.backends.torch.ops.schema import signature
from pardnn.backends.torch.rng.generator import (
    Draws,
    Effect,
    default_generator,
    has_fixed_draws,
    measure,
    read_state,
    skip_calls,
    write_state,
)
from pardnn.backends.torch.rng.stream import RandomStream
from pardnn.errors import FileError, UnsupportedError, shown
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.partitioned_graph import DRAW


def random_ops(graph: Graph) -> list[Op]:
    """Return the ops that draw from a generator, in the order of the unplaced step."""
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
    """Return the op of the whole graph whose numbers an op of a planned graph draws.

    The copies of one draw, one per device, are one draw of the generator, and so is what draws it
    once more.

    Raises:
        FileError: E401, if it is said to draw once more what no op draws.
    """
    of = (op.arguments or {}).get("of")
    copied = op.name.rpartition("@")[0]
    name = op.name if op.name in whole or copied not in whole else copied
    name = name if of is None else str(of)
    again = redrawn(whole[name]) if name in whole else None
    if again is None:
        return name
    if again not in whole or not is_random(whole[again]) or redrawn(whole[again]) is not None:
        raise FileError(f"op {shown(name)} draws the numbers of {shown(again)}, which draws none")
    return again


def redrawn(op: Op) -> str | None:
    """Return the op whose numbers this op of the whole graph draws once more; None if its own.

    In a step that `torch.utils.checkpoint` computes a second time both exist.
    """
    again = (op.arguments or {}).get("redraws")
    return None if again is None else str(again)


def check_one_draw(op: Op, whole: Op, draws: Draws) -> None:
    """Refuse a cut op that draws by itself: its numbers would not be those of one device.

    Raises:
        UnsupportedError: E822, naming the op.
    """
    shapes = [[tensor.shape for tensor in each.outputs] for each in (op, whole)]
    if draws.without_spare.count and op.kind != DRAW and shapes[0] != shapes[1]:
        raise UnsupportedError(
            f"op {shown(whole.name)} ({whole.kind}, {whole.source or 'no source'}) draws random "
            "numbers, and this plan cuts it: they would be others than on one device.\nPlan again "
            "with a placement (--algorithm pardnn), or without dropout in this op.",
            code="E822",
            details={"op": whole.name},
        )


def _drawing(op: Op) -> Any:
    """Return the function that draws."""
    return find_call((op.arguments or {})["args"][0] if op.kind == DRAW else op.kind)


def check_fixed_draws(ops: Iterable[Op]) -> None:
    """Refuse random ops whose draws depend on values, which other ranks cannot know.

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


def _stand_in(tensor: Tensor, device: torch.device) -> Any:
    if tensor.dtype in HOST_TYPES:
        return HOST_TYPES[tensor.dtype][1](1)
    dtype = getattr(torch, tensor.dtype or "float32")
    shape = tensor.shape or ()
    strides = tensor.strides or torch.empty(shape, device="meta").stride()
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    # Half is a probability, a standard deviation and a weight.
    return made.fill_(0.5) if dtype.is_floating_point else made.fill_(1)


def measure_draws(
    ops: Iterable[Op], tensors: Mapping[str, Tensor], device: torch.device
) -> dict[str, Draws]:
    """Measure how each op moves the generator.

    Args:
        ops: Random ops.
        tensors: The graph's tensors by name.
        device: Where they run.
    """
    known: dict[str, Draws] = {}
    found: dict[str, Draws] = {}
    for op in ops:
        key = _key(op, tensors)
        if key not in known:
            env = {name: _stand_in(tensors[name], device) for name in op.inputs}
            known[key] = measure(_runner(bind(op, device), env), device)
        found[op.name] = known[key]
    return found


def _runner(call: Callable[[dict[str, Any]], None], env: dict[str, Any]) -> Callable[[], None]:
    return lambda: call(dict(env))


def _key(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """Return what decides the draws of a call: everything but the names of its tensors."""
    number = {name: i for i, name in enumerate(op.inputs)}

    def renamed(data: Any) -> Any:
        if isinstance(data, list):
            return [renamed(item) for item in data]
        if isinstance(data, dict) and set(data) == {"tensor"}:
            return {"tensor": number[data["tensor"]]}
        return data

    arguments = op.arguments or {}
    call = [renamed(arguments.get("args", [])),
            {k: renamed(v) for k, v in arguments.get("kwargs", {}).items()}]  # fmt: skip
    geometry = [(t.shape, t.dtype, t.strides) for t in (tensors[name] for name in op.inputs)]
    return json.dumps([op.kind, call, geometry], sort_keys=True)


def draws_to_data(draws: Mapping[str, Draws]) -> dict[str, Any]:
    """Return measured draws as JSON types."""
    return {name: [list(each.without_spare), list(each.with_spare)] for name, each in draws.items()}


def draws_from_data(data: Mapping[str, Any]) -> dict[str, Draws]:
    """Return what `draws_to_data` wrote."""
    return {name: Draws(Effect(*a), Effect(*b)) for name, (a, b) in data.items()}


class SteppedStates:
    """As `RandomStream`, for a rank whose plan does not run random ops in the step's order.

    The step is walked once ahead, and the generator's state noted where each own op begins. Costs
    one pass over all draws of the step.
    """

    def __init__(
        self, order: Sequence[str], calls: Sequence[Draws], mine: set[str], generator: Any
    ) -> None:
        self._order = tuple(order)
        self._calls = tuple(calls)
        self._mine = mine
        self._generator = generator
        self._states: dict[str, bytes] = {}
        self._end = b""

    def _look_ahead(self) -> None:
        skipped: list[Draws] = []
        for name, call in zip(self._order, self._calls, strict=True):
            if name in self._mine:
                skip_calls(self._generator, skipped)
                skipped = []
                self._states[name] = read_state(self._generator)
            skipped.append(call)
        skip_calls(self._generator, skipped)
        self._end = read_state(self._generator)

    def before(self, op: str) -> None:
        """Move the generator to where `op` begins to draw."""
        if not self._states:
            self._look_ahead()
        write_state(self._generator, self._states[op])

    def finish(self) -> None:
        """Move the generator to the end of the step."""
        if not self._states:
            self._look_ahead()
        write_state(self._generator, self._end)
        self._states = {}


def make_stream(
    order: Sequence[str], draws: Mapping[str, Draws], mine: Sequence[str], device: torch.device
) -> RandomStream | SteppedStates:
    """Return one rank's way through the random ops.

    Args:
        order: All random ops in the order of the unplaced step.
        draws: What each does to the generator.
        mine: Those of this rank, in the order of its plan.
        device: Whose generator they draw from.
    """
    place = {name: i for i, name in enumerate(order)}
    calls = [draws[name] for name in order]
    in_order = [place[name] for name in mine] == sorted(place[name] for name in mine)
    is_once = len(set(mine)) == len(mine)
    kind = RandomStream if in_order and is_once else SteppedStates
    return kind(list(order), calls, set(mine), default_generator(device))
