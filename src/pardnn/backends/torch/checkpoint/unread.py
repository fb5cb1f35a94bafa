"""State of a checkpoint that no graph of the step has read so far.

Problem: optimizer states and gradients exist once a call has made them. If calls alternate, with
    some adding to gradients and one updating, a resumed run has not yet made calls of every kind,
    so no graph says where such state belongs.
Idea: put it into its places in the user's objects, on the device of its parameter. The graph that
reads it is captured and planned with it in place, as after any call; until then it is saved,
gathered and exported together with the state of the graph that runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import empty_tensor
from pardnn.backends.torch.ops.host_memory import new_state
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.held_numbers import StateOwner, state_owners
from pardnn.backends.torch.user_step.sources import Source, state_source
from pardnn.checkpoint.manifest import Manifest, SavedTensor, whole_box
from pardnn.graph.ir import Op, Tensor, contiguous_strides
from pardnn.plan.mesh import Box
from pardnn.plan.state_in_place import Held
from pardnn.plan.state_layout import Shard

Keep = Callable[[Source, Held, torch.Tensor | None], None]
"""Puts this rank's shard, or None, into a source, and notes what the ranks hold of it."""


class UnreadState:
    """The state that no graph of a step reads so far.

    Args:
        world: This rank's connections.
        held: Returns which parts of a live tensor the ranks hold; None if they keep none of it.
        keep: See `Keep`.

    Attributes:
        held: As given.
    """

    def __init__(self, world: World, held: Callable[[Any], Held | None], keep: Keep) -> None:
        self._world, self.held, self._keep = world, held, keep
        self._sources: dict[str, Source] = {}
        self._last: tuple[Any, ...] = (None, None, None, None)

    def __contains__(self, name: object) -> bool:
        """Whether a state is one of these."""
        return name in self._sources

    def take(self, manifest: Manifest, program: Program, binding: Binding) -> None:
        """Make room for the states of a checkpoint, and drop an earlier one's that it lacks.

        Args:
            manifest: The manifest of the checkpoint, checked.
            program: What runs.
            binding: The binding of the user's objects.
        """
        saved = [tensor for tensor in manifest.tensors if tensor.name not in program.state]
        for name in self._sources.keys() - {tensor.name for tensor in saved}:
            _remove(self._sources.pop(name))
        self._last = (None, None, None, None)
        load = [0] * program.plan.num_devices
        owners = owners_of(saved, binding)
        for tensor in saved:
            if tensor.name not in self._sources:
                owner = owners[tensor.name]
                held, parts = _laid_out(tensor, owner.name, program, load)
                source = self._sources[tensor.name] = state_source(tensor.name, owner)
                mine = parts.get(self._world.rank)
                value = None if mine is None else new_state(mine, self._world.device, 0)
                self._keep(source, held, value)

    def beside(
        self, program: Program, binding: Binding, live: Mapping[str, Any]
    ) -> tuple[Program, Mapping[str, Any]]:
        """Return a program and its live values, extended by the state that it does not read.

        Args:
            program: What runs.
            binding: The binding of its sources; it gets those of the rest.
            live: This rank's live values, by the names of the planned graph.
        """
        if not self._sources:
            return program, live
        for name in [name for name in self._sources if name in program.state]:
            del self._sources[name]  # by now, a graph reads it
        held = {name: self.held(source.get()) for name, source in self._sources.items()}
        rest = {name: each for name, each in held.items() if each is not None}
        if not rest:
            return program, live
        binding.sources.update((name, self._sources[name]) for name in rest)
        of, values, before, found = self._last
        if of is not program or values is not live or before != rest:
            others = [_ops(name, each) for name, each in rest.items()]
            own = {
                op.outputs[0].name: self._sources[source.name].get()
                for source, shards in others
                for shard, op in shards
                if shard.device == self._world.rank
            }
            found = program.beside(others), ChainMap(own, live)  # pyright: ignore[reportArgumentType]
            self._last = program, live, rest, found
        return found


def owners_of(saved: Iterable[SavedTensor], binding: Binding) -> dict[str, StateOwner]:
    """Return what states of a checkpoint belong to, by name; states without an owner are left out.

    Args:
        saved: What the checkpoint holds.
        binding: The binding of the user's objects.
    """
    states = {tensor.name: tensor for tensor in saved if tensor.kind == "state"}
    parameters = {s.name: s.get() for s in binding.sources.values() if s.kind == "parameter"}
    found = state_owners(states, parameters, binding.stateful())
    return {name: owner for name, owner in found.items() if _fits(states[name], owner)}


def _fits(saved: SavedTensor, owner: StateOwner) -> bool:
    if owner.optimizer is None:
        return saved.dtype == str(owner.parameter.dtype).removeprefix("torch.")
    groups = owner.optimizer.param_groups
    return any(each is owner.parameter for group in groups for each in group["params"])


def _remove(source: Source) -> None:
    """Remove a state."""
    if source.parameter is not None:
        source.parameter.grad = None
    for slot in source.slots:
        slot.holder.pop(slot.key, None)


def _laid_out(
    saved: SavedTensor, parameter: str, program: Program, load: list[int]
) -> tuple[Held, dict[int, Op]]:
    """Return where a state is: each part is on a device that has the same part of the parameter.

    Args:
        saved: The state.
        parameter: Name of the parameter that it belongs to.
        program: What runs.
        load: Bytes of such states on each device so far; written.

    Returns:
        What the devices hold, and the op of each.
    """
    shards = program.state.get(parameter, ())
    like = next((op.outputs[0] for op in program.sources.values() if op.name == parameter), None)
    is_alike = like is not None and like.shape == saved.shape
    places: dict[Box | None, list[Shard]] = {}
    for shard in shards or (Shard(0, "", None),):
        places.setdefault(shard.box if is_alike else None, []).append(shard)
    sizes, found, ops = [0] * len(load), list[Shard](), dict[int, Op]()
    for box, holders in places.items():
        _, device, op = min((load[each.device], each.device, each.op) for each in holders)
        part = _tensor(saved, box, device, program.ops[op].outputs[0] if is_alike else None)
        found.append(Shard(device, part.name, box))
        ops[device] = Op(name=part.name, kind="state", outputs=(part,))
        load[device] += part.bytes
        sizes[device] += part.bytes
    mesh = None if program.plan.partition is None else program.plan.partition.mesh
    whole = _tensor(saved, None, None, like if is_alike else None)
    return Held(whole, tuple(sorted(found)), tuple(sizes), mesh), ops


def _tensor(saved: SavedTensor, box: Box | None, device: int | None, like: Tensor | None) -> Tensor:
    """Return a part of a state, with the strides of a tensor made like its parameter's part."""
    shape = tuple(high - low for low, high in box or whole_box(saved.shape))
    strides = None
    if like is not None:
        strides = torch.empty_like(empty_tensor(like, torch.device("meta"))).stride()
    return Tensor(
        name=saved.name if device is None else f"{saved.name}@{device}",
        bytes=math.prod(shape) * saved.itemsize,
        shape=shape,
        dtype=saved.dtype,
        strides=None if strides == contiguous_strides(shape) else strides,
    )


def _ops(name: str, held: Held) -> tuple[Op, list[tuple[Shard, Op]]]:
    """Return the source op of a state, and that of each shard."""
    shards: list[tuple[Shard, Op]] = []
    for shard in held.shards:
        box = shard.box or whole_box(held.tensor.shape or ())
        part = Tensor(
            name=f"{name}@{shard.device}",
            bytes=held.bytes[shard.device],
            shape=tuple(high - low for low, high in box),
            dtype=held.tensor.dtype,
        )
        of = {"shard": {"of": name, "box": box}}
        op = Op(name=part.name, kind="state", outputs=(part,), arguments=of)
        shards.append((shard._replace(op=op.name), op))
    whole = dataclasses.replace(held.tensor, name=name)
    return Op(name=name, kind="state", outputs=(whole,)), shards
