"""Placeholders: fake tensors in place of the live ones, for as long as a step is traced.

In every slot that holds a source, a new fake tensor of the same geometry replaces it, without
content and without history. `restore.restore` puts the live ones back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pardnn.backends.torch.capture.refusals import unsupported
from pardnn.backends.torch.capture.refusals.tensor_questions import through_earlier_steps
from pardnn.backends.torch.user_step.object_graph import ObjectGraph, attributes_of
from pardnn.backends.torch.user_step.sources import (
    Source,
    WholeOf,
    WholeTensor,
    is_on_meta,
    mark_on_meta,
    mark_places,
)
from pardnn.errors import UnsupportedError


def fake_mode_of(tensors: Iterable[torch.Tensor]) -> FakeTensorMode:
    """Return the mode under which the arguments were made, or a new one.

    Raises:
        UnsupportedError: E801, if they were made under several.
    """
    modes = {id(t.fake_mode): t.fake_mode for t in tensors if isinstance(t, FakeTensor)}
    if len(modes) > 1:
        raise UnsupportedError(
            "the step's arguments are fake tensors of several FakeTensorModes.\n"
            "Make the model and the batch under one mode."
        )
    return next(iter(modes.values())) if modes else FakeTensorMode()


def placeholder(
    tensor: torch.Tensor, mode: FakeTensorMode, whole: WholeTensor | None
) -> FakeTensor:
    """Return a new fake of a tensor's geometry, of its class and with its hooks.

    Args:
        tensor: A live tensor.
        mode: The mode of the fake tensor.
        whole: The whole of which the live tensor is a shard; None if it is the whole.

    Raises:
        UnsupportedError: E801, if the tensor is sparse, quantized or lazily conjugated.
    """
    fake = _empty_like(tensor, mode, whole)
    if isinstance(tensor, torch.nn.Parameter):  # `Parameter(fake)` would call `detach`: 150 us
        fake._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
    fake.requires_grad_(tensor.requires_grad)
    if is_on_meta(tensor):
        mark_on_meta(fake)
    _copy_hooks(tensor, fake)
    return fake


class _Earlier(torch.autograd.Function):
    """Stands for what made a tensor before the step: the backward pass must not get there."""

    @staticmethod
    def forward(ctx: Any, tensor: FakeTensor, name: str) -> Any:
        ctx.name = name
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        raise through_earlier_steps(ctx.name)


def _empty_like(
    tensor: torch.Tensor, mode: FakeTensorMode, whole: WholeTensor | None
) -> FakeTensor:
    """Return a new fake of a tensor's geometry, see `placeholder`."""
    if tensor.is_nested:
        raise unsupported.nested(None)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(
            f"a source of the step is a {tensor.layout} tensor of shape {list(tensor.shape)};\n"
            "capture takes dense tensors."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            f"a tensor of shape {list(tensor.shape)} that the step gets is a lazy conjugate or "
            "negative: its\n"
            "memory holds other numbers, which ranks would send and save.\n"
            "Call x.resolve_conj().resolve_neg() where it is made."
        )
    # A model on the meta device is planned as if it were on the host.
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    shape, strides = (tensor.shape, tensor.stride()) if whole is None else whole[:2]
    # What `torch.empty_strided` does under the mode, in 20 us instead of 120.
    with torch._C._DisableTorchDispatch():
        inner = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, inner, torch.device(device))


def _copy_attributes(tensor: torch.Tensor, fake: torch.Tensor) -> None:
    """Copy a tensor's attributes to its placeholder."""
    own, given = fake.__dict__, attributes_of(tensor)
    copied = {k: x for k, x in given.items() if k not in own and not k.startswith("_pardnn")}
    if copied:
        own.update(copied, _pardnn_given=tuple(copied))


def _copy_hooks(tensor: torch.Tensor, fake: torch.Tensor) -> None:
    """Make the user's hooks on a parameter see the placeholder's gradient."""
    # In the order of torch's C++ code, which does not see `OrderedDict.move_to_end`.
    for hook in dict.values(tensor._backward_hooks or {}):
        fake.register_hook(hook)
    for hook in dict.values(getattr(tensor, "_post_accumulate_grad_hooks", None) or {}):
        fake.register_post_accumulate_grad_hook(hook)


def insert_placeholders(
    objects: ObjectGraph, sources: Iterable[Source], mode: FakeTensorMode, whole_of: WholeOf
) -> dict[str, FakeTensor]:
    """Put a placeholder into every slot of every tensor source, dictionary keys included.

    Args:
        objects: The object graph of the step.
        sources: Its sources; those that hold no tensor are left alone.
        mode: The mode of the fake tensors.
        whole_of: Returns the whole of which a live tensor is a shard.

    Returns:
        The placeholders by source name.
    """
    made: dict[str, FakeTensor] = {}
    by_id: dict[int, FakeTensor] = {}
    pairs: list[tuple[torch.Tensor, FakeTensor]] = []
    for source in sources:
        live = source.get()
        if isinstance(live, torch.Tensor):
            fake = placeholder(live, mode, whole_of(live))
            if not live.is_leaf:  # as it is to the user's code: `self.total += loss`
                fake = _Earlier.apply(fake, source.name)
            made[source.name] = fake
            by_id.setdefault(id(live), fake)
            mark_places(fake, source.slots)
            pairs.append((live, fake))
    # All are made before any is inserted, since a tuple is rebuilt around its present items.
    for source in sources:
        if source.name in made:
            for slot in source.slots:
                slot.set(made[source.name])
    for live, fake in pairs:  # by now, tensors among the attributes have placeholders
        _copy_attributes(live, fake)
    for _, holder, content in objects.contents:
        if isinstance(content, dict) and isinstance(holder, dict):
            _rekey(holder, by_id)
    return made


def insert_gradient_placeholders(
    gradients: Iterable[Source],
    kept: Mapping[str, torch.Tensor],
    mode: FakeTensorMode,
    whole_of: WholeOf,
) -> dict[str, FakeTensor]:
    """Give each placeholder of a parameter a placeholder of its gradient.

    Args:
        gradients: Sources of the gradients.
        kept: The gradients themselves, by source name.
        mode: The mode of the fake tensors.
        whole_of: Returns the whole of which a live tensor is a shard.

    Returns:
        The placeholders by source name.
    """
    made: dict[str, FakeTensor] = {}
    for source in gradients:
        live = kept[source.name]
        fake = made[source.name] = _empty_like(live, mode, whole_of(live))
        if live.is_meta:
            mark_on_meta(fake)
        source.set(fake)
    return made


def _rekey(holder: dict[Any, Any], by_id: dict[int, FakeTensor]) -> None:
    """Put placeholders in place of tensors that are keys, as in an optimizer's state."""
    if any(isinstance(key, torch.Tensor) for key in holder):
        items = [(by_id.get(id(key), key), value) for key, value in holder.items()]
        holder.clear()
        holder.update(items)
