"""A step's results for its caller: what it returned, and the batch tensors that it wrote.

An eager step that writes into its batch (`h.copy_(new.detach())` of truncated backpropagation
through time) changes the caller's tensor. Here the rank that runs the write works on the storage of
its caller's tensor, and after the step sends it to the others. They receive it in place if the
strides are equal, so all ranks continue with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from pardnn.backends.torch.capture.trace_ir import geometry_of
from pardnn.backends.torch.capture.view_overlap import are_disjoint
from pardnn.backends.torch.comm.pending_loss import post_loss, settle_loss
from pardnn.backends.torch.comm.wire_format import MessageSpec, laid_out, write_once
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.devices import empty_tensor
from pardnn.backends.torch.ops.codec import decode
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.user_step.places import SEQUENCES
from pardnn.errors import MismatchError, shown


def check_written(program: Program, inputs: Mapping[str, Any], device: torch.device) -> None:
    """Check that every batch tensor that the step writes is writable and shares no memory.

    Args:
        program: Names the written tensors.
        inputs: This step's inputs by name.
        device: This rank's device.

    Raises:
        MismatchError: E512, if one is on another device than the rank, or shares its memory with
            another input, since they are separate in the graph.
    """
    for name in program.written:
        if inputs[name].device.type != device.type:
            raise MismatchError(
                f"input {shown(name)} is on {inputs[name].device}, and the step writes into it on "
                f"{device}.\nPass it on the device of the ranks.",
                code="E512",
                details={"input": name},
            )
        for other, value in inputs.items():
            if other != name and _overlap(inputs[name], value):
                raise MismatchError(
                    f"inputs {shown(name)} and {shown(other)} share their memory, and the step "
                    "writes into the first: eager code would see that in the second, but the "
                    "captured graph keeps them apart.\nPass a copy of one: x.clone().",
                    code="E512",
                    details={"input": name, "other": other},
                )


def _overlap(one: torch.Tensor, other: Any) -> bool:
    """Whether two inputs may have memory in common."""
    if not isinstance(other, torch.Tensor) or other.layout is not torch.strided:
        return False
    is_one = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_one and not are_disjoint(geometry_of(one), geometry_of(other))


def share_results(
    program: Program, world: World, loss: Any, inputs: Mapping[str, Any], live: Mapping[str, Any]
) -> tuple[Any, Any, list[Any]]:
    """Exchange the step's results; every rank calls it after its last action.

    Args:
        program: What ran.
        world: This rank's connections.
        loss: On the rank that computed it; None elsewhere.
        inputs: This step's inputs by name; those that the step writes are updated.
        live: This rank's live values, by the names of the planned graph.

    Returns:
        The loss, what the step returned, and its effects (`runtime.effects`), in separate tensors,
        the same on every rank. A loss that is returned alone may still be pending.
    """
    settle_loss(world)
    if _returns_loss(program) and program.result_specs:
        loss = post_loss(world, program.result_specs, loss)
        return loss, loss, []
    shards = {shard.tensor for found in program.kept.values() for shard in found}
    values = {name: live[name] for name in shards if name in live}
    written = {name: inputs[name].detach() for name in program.written}
    channel, rank = world.channel, world.rank
    mine = [spec for spec in program.result_specs if rank in (spec.source, spec.target)]
    for spec in mine:
        assert channel is not None
        value = written.get(spec.tensor)
        if spec.source == rank:
            found = values.get(spec.tensor, loss) if value is None else value
            channel.send(spec, laid_out(found, spec.strides))
        else:
            channel.allocate(spec, value if value is not None and _is_whole(value, spec) else None)
            channel.receive(spec)
    for spec in mine:
        assert channel is not None
        value, arrived = written.get(spec.tensor), channel.wait(spec)
        if spec.source == rank:
            continue
        if spec.tensor in shards:
            values[spec.tensor] = arrived
        elif value is None:
            loss = arrived
        elif arrived is not value:
            write_once(value, arrived)
    kept = {name: _assembled(program, name, values) for name in program.kept}
    effects = [each for each in _filled(program.effects, kept) if not each.pop("unless", False)]
    if program.result is None:
        return loss, loss, effects
    return loss, _rebuilt(program.result, loss, kept), effects


def _returns_loss(program: Program) -> bool:
    """Whether a step only returns its loss, a tensor, without other changes and effects."""
    loss = program.loss
    return (
        loss is not None
        and bool(loss.inputs)
        and not (program.tensors[loss.inputs[0]].dtype or "").startswith("host.")
        and not (program.result or program.effects or program.kept or program.written)
    )


def _filled(effects: Any, kept: Mapping[str, Any]) -> Any:
    """Return effects with the values of this step for the names of tensors and numbers."""
    if isinstance(effects, dict) and "kept" in effects:
        return kept[effects["kept"]]
    if isinstance(effects, dict):
        return {key: _filled(item, kept) for key, item in effects.items()}
    return [_filled(item, kept) for item in effects] if isinstance(effects, list) else effects


class Fields(dict[Any, Any]):
    """What a step returned as an object with fields, such as a dataclass: `out.loss`.

    The object's own class stays where the step ran.
    """

    def __getattr__(self, name: str) -> Any:
        """Return a field.

        Raises:
            AttributeError: There is none with this name.
        """
        try:
            return self[name]
        except KeyError:
            known = ", ".join(map(str, self))
            raise AttributeError(f"the step returned no {name!r:.80}, but {known}") from None


class NamedItems(tuple[Any, ...]):
    """What a step returned as a named tuple: `out.loss`, `out[0]`, `loss, logits = out`.

    The tuple's own class stays where the step ran.

    Args:
        named: Names and items, in order.
    """

    _fields: tuple[str, ...]

    def __new__(cls, named: Mapping[str, Any]) -> NamedItems:
        """Make the tuple of the items."""
        found = super().__new__(cls, named.values())
        found._fields = tuple(named)
        return found

    def __getattr__(self, name: str) -> Any:
        """Return an item by its name.

        Raises:
            AttributeError: There is none with this name.
        """
        if name not in self._fields:
            known = ", ".join(self._fields)
            raise AttributeError(f"the step returned no {name!r:.80}, but {known}")
        return self[self._fields.index(name)]

    def __getnewargs__(self) -> tuple[dict[str, Any]]:
        """Return the arguments that make a copy of it."""
        return (self._asdict(),)

    def __repr__(self) -> str:
        """Return its text."""
        return f"({', '.join(f'{name}={item!r}' for name, item in self._asdict().items())})"

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **items: Any) -> NamedItems:
        return NamedItems(self._asdict() | items)


class Held(NamedTuple):
    """Stands in a step's result for one of the step's own objects, by name."""

    name: str


def held_names(structure: Any) -> list[str]:
    """Return the names of the step's own objects in a result, as `capture.result` records it."""
    if isinstance(structure, list):
        return [name for item in structure for name in held_names(item)]
    if not isinstance(structure, dict):
        return []
    ((kind, content),) = structure.items()
    return [content] if kind == "held" else held_names(content) if kind in _NESTED else []


def with_held(result: Any, held: Mapping[str, Any]) -> Any:
    """Return a result with the step's own objects in their places."""
    if isinstance(result, Held):
        return held[result.name]
    if isinstance(result, NamedItems):
        return NamedItems(with_held(result._asdict(), held))
    if isinstance(result, dict):
        return type(result)((key, with_held(item, held)) for key, item in result.items())
    is_sequence = type(result) in (list, tuple)
    return type(result)(with_held(item, held) for item in result) if is_sequence else result


class NotReturned:
    """Stands in a step's result for an object other than a tensor, number, text or container.

    Args:
        kind: Name of its class.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        """Return its text."""
        return f"<{self.kind}: a step on several ranks returns tensors, numbers and containers>"


_KEYED = {"dict": dict, "fields": Fields, "named": NamedItems}
_NESTED = ("tuple", "list", "size", *_KEYED)


def _assembled(program: Program, name: str, values: Mapping[str, Any]) -> Any:
    """Return a tensor that the step returns as one device would hold it."""
    shards = program.kept[name]
    here = [(values[shard.tensor], shard.box) for shard in shards if shard.tensor in values]
    value, box = here[0]
    if box is None:
        return value
    whole = empty_tensor(program.kept_tensors[name], value.device)
    for value, box in here:
        box_view(whole, box or ()).copy_(value)
    return whole


def _rebuilt(structure: Any, loss: Any, kept: Mapping[str, Any]) -> Any:
    """Return a result from its structure, as `capture.result` records it."""
    ((kind, content),) = structure.items()
    if kind == "loss":
        return loss
    if kind == "kept":
        return kept[content]
    if kind == "value":
        return decode(content, torch.device("cpu"))
    if kind in ("opaque", "held"):
        return NotReturned(content) if kind == "opaque" else Held(content)
    if kind in _KEYED:
        return _KEYED[kind]({key: _rebuilt(item, loss, kept) for key, item in content})
    found = [_rebuilt(item, loss, kept) for item in content]
    return SEQUENCES[kind](found)


def _is_whole(value: torch.Tensor, spec: MessageSpec) -> bool:
    """Whether all bytes of a message are the tensor's: those in gaps would be the caller's."""
    return value.stride() == spec.strides and spec.bytes == value.numel() * value.itemsize
