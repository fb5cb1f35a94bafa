"""A graph run naively on one device: the oracle for capture, and for everything after it.

Values live in one dictionary; every op runs as soon as it stands first in a topological order.
What the graph says about each result (shape, dtype, strides, aliasing) is compared with what the
call really returned.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import bind, constant_value
from pardnn.backends.torch.user_step.object_graph import walk_value
from pardnn.backends.torch.user_step.root_names import argument_names
from pardnn.backends.torch.user_step.sources import batch_indices, sources
from pardnn.graph.ir import LOSS_KIND, Graph, Op, writes

PERSISTENT = ("parameter", "buffer", "state")


class Interpreter:
    """Runs a captured graph step by step.

    Args:
        graph: Captured from `step(*args)`.
        step: The user's step, which is not called.
        args: Its arguments, real tensors; they are read, never changed.
        order: Seed of a random topological order; None runs in the order of the file.
    """

    def __init__(
        self, graph: Graph, step: Callable[..., Any], args: Sequence[Any], order: int | None = None
    ) -> None:
        self.step, self.args = step, args
        self.live = {source.name: source for source in sources(step, args, graph)}
        self.ops = _ordered(graph, order)
        self.calls = [(op, bind(op, "cpu")) for op in self.ops if not op.is_source]
        self.sources = [op for op in self.ops if op.is_source]
        self.loss = next(op.inputs[0] for op in graph.ops if op.kind == LOSS_KIND)
        self.state = {op.name: self._first(op) for op in self.sources if op.kind in PERSISTENT}
        self.replayed = {replayed_op(op) for op in graph.ops}
        self.states_before: dict[str, torch.Tensor] = {}
        self.mutable = {t.name for op in graph.ops for t in op.outputs}

    def _first(self, op: Op) -> torch.Tensor:
        live = self.live[op.name].get()
        (output,) = op.outputs
        if live is not None:
            return _copy(live.detach())
        dtype = getattr(torch, output.dtype or "")
        strides = output.strides or torch.empty(output.shape or (), device="meta").stride()
        assert op.arguments is not None
        made = torch.empty_strided(output.shape or (), strides, dtype=dtype)
        initial = op.arguments["initial"]
        if isinstance(initial, dict):
            return made.copy_(self.live[initial["copy_of"]].get().detach())
        return made.fill_(initial)

    def run(self, *batch: Any, check: bool = False) -> torch.Tensor:
        """Run one step on new values of the arguments that are the batch; return the loss."""
        inputs = self._inputs(batch)
        env: dict[str, Any] = dict(self.state)
        for op in self.sources:
            if op.kind == "constant":
                env[op.outputs[0].name] = constant_value(op)
            elif op.kind == "input":
                found = inputs[op.name] if op.name in inputs else self.live[op.name].get()
                env[op.name] = _copy(found) if isinstance(found, torch.Tensor) else found
        with torch.no_grad():
            for op, call in self.calls:
                self._call(op, call, env)
                if check:
                    check_result(op, env)
        return env[self.loss].clone()

    def _inputs(self, batch: Sequence[Any]) -> dict[str, Any]:
        names, inputs = argument_names(self.step, len(self.args)), dict[str, Any]()
        for index, arg in zip(batch_indices(self.args), batch, strict=True):
            objects = walk_value(arg, names[index])
            inputs |= {entry.name: entry.value for entry in (*objects.tensors, *objects.numbers)}
        return inputs

    def _call(self, op: Op, call: Callable[[Any], None], env: dict[str, Any]) -> None:
        """Run one op; an RNG replay begins in the state in which its original began."""
        if op.name in self.replayed:
            self.states_before[op.name] = torch.get_rng_state()
        original = replayed_op(op)
        if original is None:
            call(env)
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self.states_before[original])
        call(env)
        torch.set_rng_state(now)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides, gaps included, as a clone would not."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def check_result(op: Op, env: dict[str, Any]) -> None:
    """Compare what an op returned with what the graph says about it."""
    for tensor in op.outputs:
        value = env[tensor.name]
        if not isinstance(value, torch.Tensor):
            assert tensor.dtype == f"host.{type(value).__name__}", op
            continue
        assert tuple(value.shape) == tensor.shape, op
        assert str(value.dtype) == f"torch.{tensor.dtype}", op
        assert value.numel() * value.element_size() == tensor.bytes, op
        expected = tensor.strides or torch.empty(value.shape, device="meta").stride()
        if value.numel() > 1:
            sizes = zip(value.shape, value.stride(), expected, strict=True)
            assert all(a == b for size, a, b in sizes if size > 1), (op, value.stride(), expected)
        storage = value.untyped_storage().data_ptr()
        if storage == 0 or value.numel() == 0:
            continue
        if tensor.alias_of is not None:
            assert storage == env[tensor.alias_of].untyped_storage().data_ptr(), op
        for name in op.inputs if tensor.alias_of is None else ():
            if isinstance(env[name], torch.Tensor):
                assert storage != env[name].untyped_storage().data_ptr(), (op, name)


def _ordered(graph: Graph, seed: int | None) -> list[Op]:
    """Return the ops in a topological order: the file's own, or any other."""
    if seed is None:
        return [graph.ops[i] for i in graph.arrays.topological]
    producer = {t.name: op.name for op in graph.ops for t in op.outputs}
    before = {op.name: {producer[t] for t in op.inputs} | set(op.after) for op in graph.ops}
    # The generator serves one op after the other: random ops keep their order.
    draws = [op.name for op in graph.ops if is_random(op) and replayed_op(op) is None]
    for op in graph.ops:
        if replayed_op(op) is not None:
            before[op.name].add(str(replayed_op(op)))
    for earlier, later in itertools.pairwise(draws):
        before[later].add(earlier)
    named = {op.name: op for op in graph.ops}
    dice = random.Random(seed)
    ready = sorted(name for name, needs in before.items() if not needs)
    followers: dict[str, list[str]] = {name: [] for name in named}
    for name, needs in before.items():
        for need in sorted(needs):
            followers[need].append(name)
    order: list[Op] = []
    while ready:
        name = ready.pop(dice.randrange(len(ready)))
        order.append(named[name])
        for follower in followers[name]:
            before[follower].discard(name)
            if not before[follower]:
                ready.append(follower)
    assert len(order) == len(graph.ops)
    return order


def replayed_op(op: Op) -> str | None:
    """Return the op whose random numbers an op draws once more."""
    return (op.arguments or {}).get("redraws") if not op.is_source else None


def is_random(op: Op) -> bool:
    """Whether an op draws from the generator."""
    if op.is_source or not op.kind.startswith("aten."):
        return False
    _, name, overload = op.kind.split(".")
    call = getattr(getattr(torch.ops.aten, name), overload)
    return torch.Tag.nondeterministic_seeded in call.tags


def unordered_writes(graph: Graph) -> list[tuple[str, str]]:
    """Pairs of a write and an access of the same storage that no path of the graph orders."""
    parent = {t.name: t.alias_of for op in graph.ops for t in op.outputs}

    def owner(name: str) -> str:
        while parent[name] is not None:
            name = parent[name]
        return name

    producer = {t.name: i for i, op in enumerate(graph.ops) for t in op.outputs}
    index = {op.name: i for i, op in enumerate(graph.ops)}
    ancestors = [0] * len(graph.ops)
    for i in graph.arrays.topological:
        op = graph.ops[i]
        for j in {producer[t] for t in op.inputs} | {index[o] for o in op.after}:
            ancestors[i] |= ancestors[j] | 1 << j
    accesses: dict[str, set[int]] = {}
    for i, op in enumerate(graph.ops):
        for name in op.inputs:
            accesses.setdefault(owner(name), set()).add(i)
    found = []
    for i, op in enumerate(graph.ops):
        for name in writes(op):
            found += [
                (op.name, graph.ops[j].name)
                for j in accesses[owner(name)] - {i}
                if not ancestors[i] >> j & 1
                and not ancestors[j] >> i & 1
                and not is_view(graph.ops[j])
            ]
    return found


def is_view(op: Op) -> bool:
    """Whether an op reads no content and returns a view."""
    return op.memory == "reference" and not writes(op)
