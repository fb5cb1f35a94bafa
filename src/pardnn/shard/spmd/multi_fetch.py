"""MultiFetch: every device assembles the region that its op reads from the shards of others.

Problem: an op needs a box of a tensor that several devices own. Split, copy and concatenate would
leave intermediate buffers beside the result.
Idea: one fetch per region. The owners cut out slices, each box once for all receivers; a strided
slice is copied into contiguous memory before it is sent, so that the memory of the copy is part of
the plan. A slice that is one contiguous run of the destination buffer is received in place. Others
are received into buffers of their own and copied together at once; in sequence, each is received
just before it is copied, so that one slice at a time is held beside the buffer: less memory, and
less transfer at a time. Slices are sent, and regions assembled, directly before the op that reads
them (delayed until needed; `comm_overlap` moves them earlier so that transfers overlap). If links
between groups of devices are slow (`relays`), a slice that several devices of a group need of
another group crosses once: the first of them passes it on, out of the region that it has assembled.
Complexity: O(devices x slices) per region.
Reference: Tofu (EuroSys 2019), section 6, "Fusing operators for remote data fetch".
Deviations: their kernel reads remote memory through CUDA UVA; ours are messages, so slices that are
strided at their destination pass through a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Tensor, writes
from pardnn.plan.mesh import Box
from pardnn.plan.partitioned_graph import FETCH, JOIN, SLICE, UPDATE
from pardnn.shard.boxes import (
    Slice,
    clipped,
    cover,
    inside,
    is_dense,
    lengths,
    nearest,
    relative,
    whole,
)
from pardnn.shard.partition.regions import Region
from pardnn.shard.spmd.collectives import collective_of
from pardnn.shard.spmd.emitter import (
    Anchor,
    Emitter,
    ShardedTensor,
    box_list,
    local_tensor,
    number,
)
from pardnn.shard.spmd.relays import relays_of, served_by


def reshard(
    emitter: Emitter,
    sharded: ShardedTensor,
    requests: Sequence[Region | None],
    anchor: Anchor,
) -> list[str | None]:
    """Give every device the box that it requests: as it is, as a view, or fetched.

    Args:
        emitter: Where to write.
        sharded: The tensor.
        requests: One per device, None if nothing is needed.
        anchor: The op that reads the boxes.

    Returns:
        The name of each device's local tensor.

    Raises:
        InvalidPlanError: E410, if no device has all that one requests.
    """
    found: list[str | None] = []
    remote: list[Region | None] = []
    for device, request in enumerate(requests):
        own = sharded.boxes[device]
        found.append(None)
        remote.append(None)
        if request is None:
            continue
        is_shape_only = (
            not request.content and own is not None and lengths(request.box) == lengths(own)
        )
        if request.box == own or is_shape_only:
            found[device] = sharded.names[device]
        elif own is not None and request.content and inside(request.box, own):
            cut = view(emitter, sharded, device, request.box, anchor)
            is_read = sharded.tensor.name not in writes(anchor.op)
            if is_read and cut in emitter.strided and emitter.may_leave(sharded.tensor):
                cut = contiguous_copy(emitter, sharded.tensor, device, request.box, cut, anchor)
            found[device] = cut
        else:
            remote[device] = request
    if any(request is not None for request in remote):
        outs = _fetched(emitter, sharded, tuple(remote), anchor)
        found = [
            out if request is not None else name
            for name, out, request in zip(found, outs, remote, strict=True)
        ]
    return found


def _fetched(
    emitter: Emitter,
    sharded: ShardedTensor,
    requests: tuple[Region | None, ...],
    anchor: Anchor,
) -> list[str | None]:
    """Return the region fetched for an op or one shortly before; it is freed at its last use."""
    key = sharded.tensor.name, requests
    when, outs = emitter.fetched.get(key, (-1, []))
    if not outs or emitter.now - when > emitter.reuse:
        name = emitter.fresh(f"{sharded.tensor.name}:{anchor.op.name}")
        outs = [f"{name}@{device}" for device in emitter.devices]
        fetch(emitter, sharded, requests, anchor, outs, outs)
    emitter.fetched[key] = emitter.now, list(outs)
    return list(outs)


def view(
    emitter: Emitter,
    sharded: ShardedTensor,
    device: int,
    box: Box,
    anchor: Anchor,
    name: str | None = None,
) -> str:
    """Cut a box out of a device's own shard, without a copy.

    Args:
        emitter: Where to write.
        sharded: The tensor.
        device: Whose shard.
        box: In indices of the whole tensor; lies in the shard.
        anchor: The op beside which the view is made.
        name: Of the view; a fresh one if not given.

    Returns:
        The name of the view.
    """
    source, own = sharded.names[device], sharded.boxes[device]
    assert source is not None
    assert own is not None
    helper = emitter.fresh(f"{sharded.tensor.name}:{anchor.op.name}:part") + f"@{device}"
    output = local_tensor(sharded.tensor, name or helper, box, source)
    args = [{"tensor": source}, box_list(relative(box, own))]
    if source in emitter.strided or not is_dense(sharded.tensor, own, box):
        emitter.strided.add(output.name)
    return emitter.helper(
        device, helper, SLICE, args, (source,), output, anchor, memory="reference"
    )


def send_slices(
    emitter: Emitter,
    sharded: ShardedTensor,
    sources: Mapping[int, Sequence[Slice]],
    anchor: Anchor,
    consumers: Sequence[str],
    posts: Mapping[tuple[int, Slice], str] | None = None,
    buffers: Mapping[tuple[int, Slice], tuple[str, str]] | None = None,
) -> dict[Slice, str]:
    """Cut out and send the slices that devices need of each other's shards.

    Args:
        emitter: Where to write.
        sharded: The tensor.
        sources: By receiving device, the slices that it takes, its own included.
        anchor: The op that needs them.
        consumers: By device, the op before which its receives are posted, unless it is in `posts`.
        posts: By device and slice, the op before which that receive is posted.
        buffers: By device and slice, the buffer that it is received into in place.

    Returns:
        The name of each slice on the device that it is taken from.
    """
    targets: dict[Slice, list[int]] = {}
    for device, taken in sources.items():
        for key in taken:
            targets.setdefault(key, []).append(device)
    names: dict[Slice, str] = {}
    copies: set[str] = set()
    for (owner, box), receivers in targets.items():
        own, name = sharded.boxes[owner], sharded.names[owner]
        assert own is not None
        assert name is not None
        if receivers == [owner] and box == own:
            names[owner, box] = name
            continue
        cut = view(emitter, sharded, owner, box, anchor)
        is_sent = receivers != [owner] or emitter.may_leave(sharded.tensor)
        if is_sent and cut in emitter.strided:
            cut = contiguous_copy(emitter, sharded.tensor, owner, box, cut, anchor)
            copies.add(cut)
        names[owner, box] = cut
    for (owner, box), receivers in targets.items():
        for device in receivers:
            if device != owner:
                cut = names[owner, box]
                received = device, (owner, box)
                before = (posts or {}).get(received, consumers[device])
                hold = anchor.hold[owner] or cut
                if posts is not None and owner in sources and cut in copies:
                    hold = consumers[owner]  # a copy is let go before the op itself allocates
                into = (buffers or {}).get(received)
                emitter.send(cut, owner, device, before, hold, into and into[0])
    return names


def contiguous_copy(
    emitter: Emitter, tensor: Tensor, device: int, box: Box, strided: str, anchor: Anchor
) -> str:
    """Copy a strided local tensor into a contiguous one.

    Args:
        emitter: Where to write.
        tensor: The whole tensor.
        device: Where the local one is.
        box: What the local one is of the whole.
        strided: Its name.
        anchor: The op beside which it is copied.

    Returns:
        The name of the copy.
    """
    name = emitter.fresh(f"{tensor.name}:{anchor.op.name}:packed") + f"@{device}"
    shape = list(lengths(box))
    args = [shape, None, [[{"tensor": strided}, box_list(whole(shape))]]]
    output = local_tensor(tensor, name, box)
    return emitter.helper(device, name, FETCH, args, (strided,), output, anchor)


def fetch(
    emitter: Emitter,
    sharded: ShardedTensor,
    requests: Sequence[Region | None],
    anchor: Anchor,
    ops: Sequence[str],
    outs: Sequence[str],
) -> None:
    """Let each device assemble the region that it requests.

    Args:
        emitter: Where to write.
        sharded: The tensor.
        requests: A box for each device that fetches.
        anchor: The op that reads the regions.
        ops: By device, the name of its last fetching op.
        outs: By device, the name of the region.

    Raises:
        InvalidPlanError: E410, if no device has all that one requests.
    """
    tensor, shape = sharded.tensor, sharded.tensor.shape or ()
    sources = _sources(emitter, sharded, requests, anchor)
    relays = relays_of(emitter.mesh, emitter.relay_axes, tensor, sources)
    taken, direct = sources, sources
    if relays:
        taken = {d: [relays.get((d, key), key) for key in keys] for d, keys in sources.items()}
        direct = {d: [key for key in keys if (d, key) not in relays] for d, keys in sources.items()}
    assemblies = {
        device: _assembly(emitter, sharded, device, requests[device], needed, ops, outs)
        for device, needed in taken.items()
    }
    posts = {
        (device, key): op for device, each in assemblies.items() for key, op in each.posts.items()
    }
    buffers = {
        (device, key): each.buffer for device, each in assemblies.items() for key in each.in_place
    }
    slices = send_slices(emitter, sharded, direct, anchor, ops, posts, buffers)
    boxes = [request and request.box for request in requests]
    collective = collective_of(emitter.mesh, sharded.boxes, boxes, shape)
    regions = ShardedTensor(tensor, tuple(outs), tuple(boxes))
    passed_on = Anchor(anchor.op, (None,) * emitter.mesh.size)
    for device, each in sorted(assemblies.items()):  # a relay is numbered below those it serves
        _emit_assembly(emitter, tensor, device, each, slices, collective, anchor)
        if relays:
            served = served_by(relays, device)
            slices |= send_slices(emitter, regions, served, passed_on, ops, posts, buffers)


def _sources(
    emitter: Emitter,
    sharded: ShardedTensor,
    requests: Sequence[Region | None],
    anchor: Anchor,
) -> dict[int, Sequence[Slice]]:
    """Return the slices that make up the region of each device that requests one."""
    tensor, shape = sharded.tensor, sharded.tensor.shape or ()
    sources: dict[int, Sequence[Slice]] = {}
    for device, request in enumerate(requests):
        if request is None:
            continue
        order = nearest(emitter.mesh.shape, device)
        needed = clipped(request.box, shape)
        sources[device], is_all = (
            cover(needed, sharded.boxes, order) if request.content else ((), True)
        )
        if not is_all:
            raise InvalidPlanError(
                f"no device holds all that op {shown(anchor.op.name)} needs of {shown(tensor.name)}"
            )
    return sources


class _Assembly(NamedTuple):
    """How a device assembles the region that it requests.

    Attributes:
        request: The region.
        buffer: Name of what the fetch makes, and of the fetch itself.
        following: Ops that follow, each with what it makes of the buffer: updates, then a join.
        copied: Slices that the fetch copies.
        sequential: Slices that an update each copies.
        in_place: Slices that are received into the buffer.
        posts: For slices that the fetch does not wait for, the op before which each is received.
    """

    request: Region
    buffer: tuple[str, str]
    following: Sequence[tuple[str, str]]
    copied: Sequence[Slice]
    sequential: Sequence[Slice]
    in_place: Sequence[Slice]
    posts: Mapping[Slice, str]


def _assembly(
    emitter: Emitter,
    sharded: ShardedTensor,
    device: int,
    request: Region | None,
    needed: Sequence[Slice],
    ops: Sequence[str],
    outs: Sequence[str],
) -> _Assembly:
    """Decide which slices are received in place, which in sequence, and which together."""
    assert request is not None
    tensor, final = sharded.tensor, (ops[device], outs[device])
    remote = [key for key in needed if key[0] != device]
    in_place: list[Slice] = []
    if emitter.in_place:
        in_place = [key for key in remote if is_dense(tensor, request.box, key[1], is_new=True)]
    staged = [key for key in remote if key not in in_place]
    sequential = staged if emitter.in_turn or in_place else []
    copied = [key for key in needed if key not in in_place and key not in sequential]
    if not in_place and not sequential:
        return _Assembly(request, (final[1], final[0]), (), copied, (), (), {})
    buffer = emitter.fresh(f"{final[0].rpartition('@')[0]}:buffer") + f"@{device}"
    steps = [
        emitter.fresh(f"{tensor.name}:turn") + f"@{device}" for _ in (*sequential, *in_place[:1])
    ]
    following = [*((name, name) for name in steps[:-1]), final]
    posts = dict.fromkeys(in_place, following[0][0])
    for step, key in enumerate(sequential):
        posts[key] = following[step if emitter.in_turn else 0][0]
    return _Assembly(request, (buffer, buffer), following, copied, sequential, in_place, posts)


def _emit_assembly(
    emitter: Emitter,
    tensor: Tensor,
    device: int,
    assembly: _Assembly,
    slices: Mapping[Slice, str],
    collective: Mapping[str, Any],
    anchor: Anchor,
) -> None:
    """Write the fetch of a device, and what completes its buffer."""
    box = assembly.request.box

    def rows(keys: Sequence[Slice]) -> list[Any]:
        return [[{"tensor": slices[key]}, box_list(relative(key[1], box))] for key in keys]

    buffer, op = assembly.buffer
    args: list[Any] = [list(lengths(box)), number(assembly.request.fill), rows(assembly.copied)]
    names = [slices[key] for key in assembly.copied]
    more: dict[str, Any] = {"collective": collective}
    output = local_tensor(tensor, buffer, box)
    emitter.helper(device, op, FETCH, args, names, output, anchor, more=more)
    for (name, out), key in zip(assembly.following, (*assembly.sequential, None), strict=False):
        output = local_tensor(tensor, out, box, buffer)
        if key is not None:
            args, names = [{"tensor": buffer}, *reversed(rows([key])[0])], [buffer, slices[key]]
            more = {"mutates": [buffer]}
            kind = UPDATE
        else:
            args, names = [{"tensor": buffer}, rows(assembly.in_place)], [buffer]
            names += [slices[key] for key in assembly.in_place]
            more, kind = {}, JOIN
        emitter.helper(
            device, name, kind, args, names, output, anchor, memory="reference", more=more
        )
        buffer = out
