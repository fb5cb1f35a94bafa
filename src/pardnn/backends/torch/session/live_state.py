"""The live state: where the ranks keep each tensor of the user's program, from graph to graph.

Problem: a step that is captured again reads the same parameters and states, but by now the user's
objects hold shards of them, or nothing.
Idea: a table by tensor object tells of what each is a shard. Capture reads whole shapes from it; a
new graph finds its values in it, whatever their names; and a tensor that a graph does not read
stays where it is.

A tensor that the next plan keeps elsewhere is moved: its owners broadcast it. A plan that keeps the
layout moves none.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pardnn.backends.torch.comm.stop_signal import StopSignal
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.deferred_init.initialise import Recording
from pardnn.backends.torch.devices import empty_tensor, one_element
from pardnn.backends.torch.ops.host_memory import where_it_lies
from pardnn.backends.torch.ops.partition_ops import box_copy
from pardnn.backends.torch.profile.rank_links import ThisCluster, this_cluster
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.gather import gathered
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.session.left_gradients import LeftGradients
from pardnn.backends.torch.session.reset_gradients import ResetGradients
from pardnn.backends.torch.user_step.absent import mark_absent
from pardnn.backends.torch.user_step.access import SpreadObjects
from pardnn.backends.torch.user_step.shards import ShardOf, mark_shard
from pardnn.backends.torch.user_step.sources import Source, WholeTensor
from pardnn.errors import UsageError
from pardnn.graph.ir import Op, Tensor
from pardnn.plan.mesh import Box
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import Held, StateInPlace
from pardnn.plan.state_layout import Shard, covers, places_of, shard_at


class Known(NamedTuple):
    """How the ranks keep one tensor.

    Attributes:
        name: The name in the last graph that reads it.
        held: The whole tensor, and what each device holds.
        storage: A negative id, equal for tensors that shared their storage at first.
    """

    name: str
    held: Held
    storage: int


class LiveState:
    """What the ranks hold of the parameters, buffers and optimizer states of the user's objects.

    Several step functions and evaluations may work on it, each with its own graphs.

    Args:
        world: This rank's connections.

    Attributes:
        near: The plan that ran last; None before the first.
        version: How often tensors have moved away from where other steps' executors have them.
        holds_for: The values for which each captured graph holds, in words, by its number.
        executors: The executors that hold values.
        spread: The user's objects that refuse to be read.
        users: The steps that work on the state and have not been closed.
        is_limited: Whether this rank's memory limit is enforced.
        stop: Handles SIGTERM and SIGINT; None leaves them to Python.
    """

    def __init__(self, world: World) -> None:
        self.near: Plan | None = None
        self.holds_for: dict[int, str] = {}
        self.executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self.spread = SpreadObjects()
        self.users: list[Any] = []
        self.reset_gradients, self.left_gradients = ResetGradients(), LeftGradients()
        self.version, self.is_limited = 0, False
        self.stop: StopSignal | None = None
        self._world = world
        self._cluster: ThisCluster | None = None
        self._known: Any = WeakTensorKeyDictionary()
        self._num_storages = self._num_graphs = 0
        _LIVE.add(self)
        torch.utils.swap_tensors = _swap_tensors

    @property
    def world(self) -> World:
        """This rank's connections."""
        return self._world

    def leave_on_signal(self, done: str) -> None:
        """End this rank before a step, together with all others, if a signal asks for it.

        Args:
            done: What was done, in words.

        Raises:
            SystemExit: 130.
        """
        if self.stop is not None and self.stop.tick() and self.stop.on_signal == "stop":
            for user in self.users:
                user.finish()
            self.stop.leave(done)

    def tell_cluster(self, on_cluster: Callable[[ThisCluster], None] | None) -> None:
        """Measure the cluster of the ranks, once for all steps on this state, and report it.

        Args:
            on_cluster: Gets the cluster; nothing is measured if it is None, or with a single rank.
        """
        if on_cluster is None or self._world.size == 1:
            return
        is_known = self._cluster is not None
        self._cluster = self._cluster or this_cluster(self._world)
        on_cluster(self._cluster._replace(pairs=0) if is_known else self._cluster)

    def most_held(self) -> int:
        """Return the largest number of bytes that this rank holds in a step of any graph so far.

        State that a graph does not read is added to its peak.
        """
        rank = self._world.rank
        held = sum({x.storage: x.held.bytes[rank] for x in self._known.values()}.values())
        programs = [executor.program for executor in self.executors]
        return max((program.peaks[rank] + max(0, held - _resident_bytes(program, rank))
                    for program in programs), default=0)  # fmt: skip

    def next_number(self) -> int:
        """Return the number of a new graph, the same on all ranks."""
        self._num_graphs += 1
        return self._num_graphs - 1

    @property
    def has_several_graphs(self) -> bool:
        """Whether ranks could run different graphs."""
        return self._num_graphs > 1

    def held(self, tensor: Any) -> Held | None:
        """Return how a tensor is kept; None if it is whole on every rank."""
        known = self._known.get(tensor) if isinstance(tensor, torch.Tensor) else None
        return None if known is None else known.held

    def keep(self, source: Source, held: Held, value: torch.Tensor | None) -> None:
        """Take over a state that no graph reads yet; all ranks call it.

        Args:
            source: The source of a state that does not exist.
            held: What each device holds of it.
            value: What this rank holds; None for nothing.
        """
        if value is None:
            _hollow(held.tensor, source)
        else:
            source.set(value)
        self._keep(source, held, None)

    def forget(self, tensor: torch.Tensor) -> None:
        """Treat a tensor as new from here on, whole on every rank."""
        self._known.pop(tensor, None)

    def exchange(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Keep another tensor in the place of one; other steps take it at their next call."""
        self._known[new] = self._known.pop(old)
        self.mark(new)
        self.version += 1

    def mark(self, tensor: torch.Tensor) -> None:
        """Let a tensor of the user's refuse what would be wrong on the shard that it is."""
        name, held, _ = self._known[tensor]
        shard = shard_at(held.shards, self._world.rank)
        if shard is not None and shard.box is not None:
            mark_shard(tensor, ShardOf(name, tuple(held.tensor.shape or ()), shard.box))

    @contextlib.contextmanager
    def released(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Hold no weak reference to some tensors while the context is open."""
        known = [(each, self._known.pop(each, None)) for each in tensors]
        try:
            yield
        finally:
            self._known.update({each: held for each, held in known if held is not None})

    def shares_storage(self, tensor: torch.Tensor) -> bool:
        """Whether another kept tensor shared its storage with this one at first."""
        storage = self._known[tensor].storage
        return sum(known.storage == storage for known in self._known.values()) > 1

    def whole_of(self, tensor: torch.Tensor) -> WholeTensor | None:
        """Return the whole of which a tensor is a shard; None if it is whole on every rank."""
        known = self._known.get(tensor)
        if known is None:
            return None
        shape = tuple(known.held.tensor.shape or ())
        strides = known.held.tensor.strides or torch.empty(shape, device="meta").stride()
        return WholeTensor(shape, tuple(strides), known.storage)

    def in_place(self, sources: Iterable[Source], near: Plan) -> StateInPlace:
        """Return the state on the devices, by the names of a new graph.

        Args:
            sources: The sources of the graph.
            near: The plan that ran last.
        """
        tensors = [(source.name, source.get()) for source in sources]
        found = {name: held for name, t in tensors if (held := self.held(t)) is not None}
        present = {id(tensor) for _, tensor in tensors}
        for tensor, known in list(self._known.items()):
            if id(tensor) not in present:  # it is kept for another graph
                found[f"{known.name} ({len(found)})"] = known.held
        return StateInPlace(held=found, num_devices=self._world.size, near=near)

    def take(
        self, program: Program, binding: Binding, recording: Recording | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Keep on this rank what a program keeps here; all ranks call it.

        A tensor that a rank does not keep retains its shape and reads as NaN (0 for integers), in
        one element. For a sharded tensor, the user's object holds the shard from now on: the same
        `Parameter`, with the shard's shape and storage.

        Args:
            program: What runs next.
            binding: The binding of its sources.
            recording: The recording of models without data.

        Returns:
            The residents of this rank by the name of their op, and the names of what was moved.
        """
        sources, rank = binding.sources, self._world.rank
        storages = self._storages(sources[name].get() for name in program.state)
        outputs = {op.name: op.outputs[0] for op in program.sources.values()}
        mine = {name: shard_at(shards, rank) for name, shards in program.state.items()}
        # A state that starts as a copy of a parameter is new, although the parameter is kept below.
        before = {name: self.held(binding.first_tensor(name)) for name in program.state}
        new = [
            program.ops[shard.op]
            for name, shard in mine.items()
            if shard is not None and before[name] is None
        ]
        values = binding.first_values(new, recording)
        moved: list[str] = []
        for name, shards in program.state.items():
            source, shard = sources[name], mine[name]
            live, first = source.get(), binding.first_tensor(name)
            held = before[name]
            op = None if shard is None else program.ops[shard.op]
            if held is None:
                value = None if op is None else values[op.name]
            elif places_of(held.shards) == places_of(shards):
                value = first
            else:
                value, was_moved = self._again(first, held, op, shards)
                moved += [name] * was_moved
                self.version += 1
            if value is first is not live and op is not None:  # the state starts as a copy
                value = first.detach().clone()
            if op is not None and isinstance(value, torch.Tensor):
                value = where_it_lies(value, op, self._world.device)
            if op is None and (held is None or value is not live):
                _hollow(outputs[name], source)
            elif value is not live:
                source.set(value)
            if op is not None:
                values[op.name] = value
            now = _held(program, outputs[name], shards)
            self._keep(source, now, storages.get(id(live)))
        self.near = program.plan
        return values, moved

    def _storages(self, tensors: Iterable[Any]) -> dict[int, int]:
        """Number the storage of each tensor that no rank has taken yet, by the tensor's id."""
        numbers: dict[int, int] = {}
        found: dict[int, int] = {}
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                key = tensor.untyped_storage()._cdata
                found[id(tensor)] = numbers.setdefault(key, -1 - self._num_storages - len(numbers))
        self._num_storages += len(numbers)
        return found

    def _keep(self, source: Source, held: Held, storage: int | None) -> None:
        tensor = source.get()
        if not isinstance(tensor, torch.Tensor):
            return
        if (known := self._known.get(tensor)) is not None:
            storage = known.storage
        elif storage is None:
            self._num_storages += 1
            storage = -self._num_storages
        self._known[tensor] = Known(source.name, held, storage)
        self.mark(tensor)

    def _again(
        self, live: torch.Tensor, held: Held, op: Op | None, shards: Sequence[Shard]
    ) -> tuple[torch.Tensor | None, bool]:
        """Return this rank's shard under another layout, and whether ranks had to exchange it."""
        if all(covers(shard_at(held.shards, shard.device), shard.box) for shard in shards):
            whole, here = live, shard_at(held.shards, self._world.rank)
            low, is_moved = None if here is None else here.box, False
        else:
            mine = None if shard_at(held.shards, self._world.rank) is None else live
            whole = gathered(self._world, held.tensor, held.shards, mine).to(live.device)
            low, is_moved = None, True
        wanted = shard_at(shards, self._world.rank)
        if op is None or wanted is None:
            return None, is_moved
        if wanted.box is None:
            return whole, is_moved
        return box_copy(whole, _within(wanted.box, low), op.outputs[0].strides), is_moved


#: The states of this process.
_LIVE: weakref.WeakSet[LiveState] = weakref.WeakSet()


def live_state_of(tensors: Iterable[torch.Tensor]) -> LiveState | None:
    """Return the state that tensors are part of; None if no step keeps them.

    Raises:
        UsageError: E216, if they are part of several.
    """
    each = list(tensors)
    found = [live for live in _LIVE if live.users and any(live.held(t) for t in each)]
    if len(found) > 1:
        raise UsageError(
            "the models of this step are kept by several steps that were parallelized "
            "separately.\nParallelize the steps that share a model before those that share others.",
            code="E216",
        )
    return found[0] if found else None


_SWAP = torch.utils.swap_tensors


@functools.wraps(_SWAP)
def _swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Swap the contents of two tensor objects, even if they have weak references.

    torch refuses this. Each stays the same object, so that it is followed like `p.data = x`: see
    `rebound`.
    """
    with contextlib.ExitStack() as stack:
        for live in list(_LIVE):
            stack.enter_context(live.released((t1, t2)))
        _SWAP(t1, t2)


def _held(program: Program, tensor: Tensor, shards: tuple[Shard, ...]) -> Held:
    sizes = [0] * program.plan.num_devices
    for shard in shards:
        sizes[shard.device] += _device_bytes(program, shard)
    partition = program.plan.partition
    mesh = None if partition is None else partition.mesh
    return Held(tensor, shards, tuple(sizes), mesh)


def _resident_bytes(program: Program, rank: int) -> int:
    """Return the bytes of the state that a rank keeps for a program."""
    shards = (shard_at(each, rank) for each in program.state.values())
    return sum(_device_bytes(program, shard) for shard in shards if shard is not None)


def _device_bytes(program: Program, shard: Shard) -> int:
    return 0 if shard.on_host else program.ops[shard.op].outputs[0].bytes


def _within(box: Box, outer: Box | None) -> Box:
    """Return a box of the whole as a box of the shard `outer`."""
    if outer is None:
        return box
    return tuple((a - low, b - low) for (a, b), (low, _) in zip(box, outer, strict=True))


def _hollow(output: Tensor, source: Source) -> None:
    """Put a tensor without data in place of one that other ranks keep."""
    live = source.get()
    if isinstance(live, torch.Tensor):
        shape, dtype, device = live.shape, live.dtype, live.device
    else:
        like = empty_tensor(output, torch.device("meta"))
        shape, dtype = like.shape, like.dtype
        device = torch.device("cpu") if source.parameter is None else source.parameter.device
    whole = tuple(output.shape or ())
    # A gradient has its parameter's shape on this rank, which may be a shard's.
    shape = whole if source.parameter is None else source.parameter.shape
    source.set(one_element(shape, dtype, device))
    mark_absent(source.get(), source.name)
