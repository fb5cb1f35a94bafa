"""Writes of whole tensors by parts: each device updates its part, and receives those of others.

Problem: if optimizer states are cut and parameters are whole on every device (ZeRO, stages 1 and
2), a device lacks the states for most of the parameter that it has to update.
Idea: a call that writes a tensor in place may cut a loop that its layout does not. Each device
makes the call on a view of a part of its own block, and copies the parts of others into the block:
an all-gather in place, part by part. A fused update also writes the states: tensors that are
already cut like its loop are not gathered.
Complexity: O(devices x parts) per write.
Reference: Rajbhandari et al., "ZeRO", SC 2020, section 5.
Deviations: parts are received beside the parameter and copied into it. So is a device's own part if
it is not one run of memory but the kernel assumes it is, as fused updates do.
"""

from __future__ import annotations

from pardnn.graph.ir import Op, writes
from pardnn.plan.partitioned_graph import UPDATE
from pardnn.shard.boxes import Slice, cover, inside, nearest, relative
from pardnn.shard.spmd.collectives import collective_of
from pardnn.shard.spmd.emitter import Anchor, Emitter, ShardedTensor, box_list, local_tensor
from pardnn.shard.spmd.multi_fetch import send_slices
from pardnn.shard.spmd.templates import PartitionedOp, shared_input


def gathered_writes(emitter: Emitter, op: Op, partitioned: PartitionedOp) -> dict[str, str]:
    """Return the results that an op writes by parts of the blocks that devices own.

    Args:
        emitter: Has the layouts.
        op: The op.
        partitioned: What each device does of it.

    Returns:
        By result, the tensor whose new contents it is. Other writes of the op are left out.
    """
    found: dict[str, str] = {}
    for name in writes(op):
        shared = [t.name for t in op.outputs if shared_input(emitter, op, t) == name]
        if len(shared) == 1 and _is_by_parts(emitter, partitioned, shared[0], name):
            found[shared[0]] = name
    return found


def _is_by_parts(emitter: Emitter, partitioned: PartitionedOp, result: str, name: str) -> bool:
    """Whether devices make parts of the blocks of a tensor that they own, and all of them."""
    boxes, template = emitter.boxes[name], partitioned.template
    if boxes != emitter.boxes[result] or result not in partitioned.returned:
        return False
    number = partitioned.returned.index(result)
    made = template.made[number]
    regions = [template.boxes[slot] for slot, of in partitioned.names.items() if of == name]
    if template.is_partial[number] or regions != [made] or made == boxes:
        return False
    return all(
        part is not None and inside(part, box) and cover(box, made, tuple(range(len(made))))[1]
        for part, box in zip(made, boxes, strict=True)
    )


def gather_in_place(
    emitter: Emitter,
    computed: ShardedTensor,
    target: str,
    anchor: Anchor,
    copied: frozenset[int],
) -> None:
    """Copy the parts that other devices computed into the tensor.

    Args:
        emitter: Where to write.
        computed: The parts: on each device a view of its own tensor, or a copy.
        target: The tensor as it was before the write.
        anchor: The op that wrote them.
        copied: Devices that computed even their own part outside the tensor.
    """
    tensor, own = computed.tensor, emitter.own(target)
    base = emitter.fresh(f"{tensor.name}:gather")
    parts: list[list[Slice]] = []
    for device in emitter.devices:
        box = own.boxes[device]
        assert box is not None
        found, _ = cover(box, computed.boxes, nearest(emitter.mesh.shape, device))
        parts.append([part for part in found if part[0] != device or device in copied])
    steps = [
        [*(emitter.fresh(base) + f"@{device}" for _ in found[1:]), f"{base}@{device}"]
        for device, found in enumerate(parts)
    ]
    # Sent before anything is copied beside it; so receives are posted before the call itself.
    at_once = Anchor(anchor.op, (None,) * emitter.mesh.size)
    posts = [f"{anchor.op.name}@{device}" for device in emitter.devices]
    slices = send_slices(emitter, computed, dict(enumerate(parts)), at_once, posts)
    collective = collective_of(
        emitter.mesh, computed.boxes, emitter.boxes[tensor.name], tensor.shape or ()
    )
    for device, found in enumerate(parts):
        name = str(own.names[device])
        for step, part in zip(steps[device], found, strict=True):
            is_last = step == steps[device][-1]
            box = own.boxes[device]
            assert box is not None
            made = f"{tensor.name}@{device}" if is_last else step
            output = local_tensor(tensor, made, box, name)
            args = [{"tensor": name}, box_list(relative(part[1], box)), {"tensor": slices[part]}]
            name = emitter.helper(
                device, step, UPDATE, args, [name, slices[part]], output, anchor,
                memory="reference", more={"mutates": [name], "collective": collective},
                after=(f"{anchor.op.name}@{device}",),
            )  # fmt: skip
