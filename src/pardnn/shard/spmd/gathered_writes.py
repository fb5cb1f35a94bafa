"""Writes of whole tensors by parts: each device updates its own part, and gets those of others.

Problem: where optimizer states are cut and parameters are whole on every device (ZeRO, stages 1 and
2), an update needs states that a device does not have for most of the parameter.
Idea: a call that writes a tensor in place may cut a loop that its layout does not. Each device
makes it on a view of a part of its own block, and copies the parts of others into the block: an
all-gather in place, part by part.
Complexity: O(devices x parts) per write.
Reference: Rajbhandari et al., "ZeRO", SC 2020, section 5.
Deviations: parts are received beside the parameter and copied into it.
"""

from __future__ import annotations

from pardnn.graph.ir import Op, writes
from pardnn.plan.partitioned_graph import UPDATE
from pardnn.shard.boxes import Slice, cover, inside, nearest, relative
from pardnn.shard.spmd.collectives import collective_of
from pardnn.shard.spmd.emitter import Anchor, Emitter, ShardedTensor, box_list, local_tensor
from pardnn.shard.spmd.multi_fetch import send_slices
from pardnn.shard.spmd.templates import PartitionedOp, shared_input


def gathered_write(emitter: Emitter, op: Op, partitioned: PartitionedOp) -> str | None:
    """Return the tensor that an op writes by parts of the blocks that devices own; None for none.

    Args:
        emitter: Has the layouts.
        op: The op.
        partitioned: What each device does of it.
    """
    changed = writes(op)
    if len(changed) != 1 or len(op.outputs) != 1:
        return None
    (name,), (result,) = changed, op.outputs
    boxes, template = emitter.boxes[name], partitioned.template
    if boxes != emitter.boxes[result.name]:
        return None
    if result.name not in partitioned.returned or shared_input(emitter, op, result) != name:
        return None
    number = partitioned.returned.index(result.name)
    made = template.made[number]
    regions = [template.boxes[slot] for slot, of in partitioned.names.items() if of == name]
    if template.is_partial[number] or regions != [made] or made == boxes:
        return None
    for part, box in zip(made, boxes, strict=True):
        if (
            part is None
            or not inside(part, box)
            or not cover(box, made, tuple(range(len(made))))[1]
        ):
            return None
    return name


def gather_in_place(emitter: Emitter, computed: ShardedTensor, target: str, anchor: Anchor) -> None:
    """Copy the parts that other devices made into the tensor that they are of.

    Args:
        emitter: Where to write.
        computed: The parts: on each device a view of its own tensor.
        target: The tensor as it was before the write.
        anchor: The op that wrote them.
    """
    tensor, own = computed.tensor, emitter.own(target)
    base = emitter.fresh(f"{tensor.name}:gather")
    parts: list[list[Slice]] = []
    for device in emitter.devices:
        box = own.boxes[device]
        assert box is not None
        found, _ = cover(box, computed.boxes, nearest(emitter.mesh.shape, device))
        parts.append([part for part in found if part[0] != device])
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
