"""Moving tensors between devices: what each needs is cut out, sent, and put together.

A piece whose place is one run of the buffer's memory is received right there. Others are received
on their own and put together at once; in turn, each is received just before it is copied to its
place, so that only one is there beside the buffer: less memory, and less transfer at a time.

Idea: a piece is cut out once per owner and box, whoever needs it. A piece with gaps is packed
before it is sent, so that the memory of the copy is part of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pardnn.errors import InvalidPlanError, shown
from pardnn.graph.ir import Tensor
from pardnn.plan.mesh import Box
from pardnn.plan.partitioned_graph import FETCH, JOIN, SLICE, UPDATE
from pardnn.shard.boxes import (
    Part,
    clipped,
    cover,
    inside,
    is_dense,
    lengths,
    nearest,
    relative,
    whole,
)
from pardnn.shard.spmd.builder import At, Builder, Held, Want, box_list, number, part
from pardnn.shard.spmd.collectives import collective_of


def provide(b: Builder, held: Held, wants: Sequence[Want | None], at: At) -> list[str | None]:
    """Return, per device, the name of a local tensor that holds the box that it wants."""
    found: list[str | None] = []
    fetched: list[Want | None] = []
    for device, want in enumerate(wants):
        own = held.boxes[device]
        found.append(None)
        fetched.append(None)
        if want is None:
            continue
        is_form = not want.content and own is not None and lengths(want.box) == lengths(own)
        if want.box == own or is_form:
            found[device] = held.names[device]
        elif own is not None and want.content and inside(want.box, own):
            found[device] = view(b, held, device, want.box, at)
        else:
            fetched[device] = want
    if any(want is not None for want in fetched):
        outs = _fetched(b, held, tuple(fetched), at)
        found = [
            out if want is not None else name
            for name, out, want in zip(found, outs, fetched, strict=True)
        ]
    return found


def _fetched(b: Builder, held: Held, wants: tuple[Want | None, ...], at: At) -> list[str | None]:
    """Return what is fetched for an op, or was for one shortly before; it is freed at last use."""
    key = held.tensor.name, wants
    when, outs = b.fetched.get(key, (-1, []))
    if not outs or b.now - when > b.reuse:
        name = b.fresh(f"{held.tensor.name}:{at.op.name}")
        outs = [f"{name}@{device}" for device in b.devices]
        fetch(b, held, wants, at, outs, outs)
    b.fetched[key] = b.now, list(outs)
    return list(outs)


def view(b: Builder, held: Held, device: int, box: Box, at: At, name: str | None = None) -> str:
    """Cut a box out of a device's own part, without a copy; return its name."""
    source, own = held.names[device], held.boxes[device]
    assert source is not None
    assert own is not None
    helper = b.fresh(f"{held.tensor.name}:{at.op.name}:part") + f"@{device}"
    output = part(held.tensor, name or helper, box, source)
    args = [{"tensor": source}, box_list(relative(box, own))]
    if source in b.gaps or not is_dense(held.tensor, own, box):
        b.gaps.add(output.name)
    return b.helper(device, helper, SLICE, args, (source,), output, at, memory="reference")


def pieces_of(
    b: Builder,
    held: Held,
    parts: Mapping[int, Sequence[Part]],
    at: At,
    makers: Sequence[str],
    posts: Mapping[tuple[int, Part], str] | None = None,
    into: Mapping[tuple[int, Part], tuple[str, str]] | None = None,
) -> dict[Part, str]:
    """Cut out and send what devices take of each other; return the name of each piece.

    Receives are posted before the op in `makers`, or in `posts` by device and piece; those in
    `into` are received in place.
    """
    targets: dict[Part, list[int]] = {}
    for device, listed in parts.items():
        for key in listed:
            targets.setdefault(key, []).append(device)
    names: dict[Part, str] = {}
    copies: set[str] = set()
    for (owner, box), readers in targets.items():
        own, name = held.boxes[owner], held.names[owner]
        assert own is not None
        assert name is not None
        if readers == [owner] and box == own:
            names[owner, box] = name
            continue
        piece = view(b, held, owner, box, at)
        if readers != [owner] and piece in b.gaps:
            piece = packed(b, held.tensor, owner, box, piece, at)
            copies.add(piece)
        names[owner, box] = piece
    for (owner, box), readers in targets.items():
        for device in readers:
            if device != owner:
                piece = names[owner, box]
                at_device = device, (owner, box)
                before = (posts or {}).get(at_device, makers[device])
                hold = at.hold[owner] or piece
                if posts is not None and owner in parts and piece in copies:
                    hold = makers[owner]  # a copy is let go before the op itself allocates
                place = (into or {}).get(at_device)
                b.send(piece, owner, device, before, hold, place and place[0])
    return names


def packed(b: Builder, tensor: Tensor, device: int, box: Box, piece: str, at: At) -> str:
    """Copy a device's part of a tensor without its gaps; return the name of the copy."""
    name = b.fresh(f"{tensor.name}:{at.op.name}:packed") + f"@{device}"
    shape = list(lengths(box))
    args = [shape, None, [[{"tensor": piece}, box_list(whole(shape))]]]
    return b.helper(device, name, FETCH, args, (piece,), part(tensor, name, box), at)


def fetch(
    b: Builder,
    held: Held,
    wants: Sequence[Want | None],
    at: At,
    makers: Sequence[str],
    outs: Sequence[str],
) -> None:
    """Let each device put together what it wants.

    Args:
        b: Where to write.
        held: The tensor.
        wants: A box for each device that fetches.
        at: Where in the step.
        makers: Names of the fetching ops.
        outs: Names of what they make.
    """
    tensor, shape = held.tensor, held.tensor.shape or ()
    parts: dict[int, Sequence[Part]] = {}
    for device, want in enumerate(wants):
        if want is None:
            continue
        order = nearest(b.mesh.shape, device)
        needed = clipped(want.box, shape)
        parts[device], is_all = cover(needed, held.boxes, order) if want.content else ((), True)
        if not is_all:
            raise InvalidPlanError(
                f"no device holds all that op {shown(at.op.name)} needs of {shown(tensor.name)}"
            )
    plans = {
        device: _landing(b, held, device, wants[device], listed, makers, outs)
        for device, listed in parts.items()
    }
    posts = {(device, key): op for device, plan in plans.items() for key, op in plan.posts.items()}
    into = {(device, key): plan.buffer for device, plan in plans.items() for key in plan.direct}
    pieces = pieces_of(b, held, parts, at, makers, posts, into)
    collective = collective_of(b.mesh, held.boxes, [w and w.box for w in wants], shape)
    for device, plan in plans.items():
        _put_together(b, tensor, device, plan, pieces, collective, at)


class _Landing(NamedTuple):
    """How a device puts together what it wants.

    Attributes:
        want: What it wants.
        buffer: Name of what the fetch makes, and of the fetch itself.
        makers: Ops that follow, each with what it makes of the buffer: updates, then a join.
        together: Pieces that the fetch copies.
        turns: Pieces of each update.
        direct: Pieces that are received in place.
        posts: Op before which each piece is received that the fetch does not wait for.
    """

    want: Want
    buffer: tuple[str, str]
    makers: Sequence[tuple[str, str]]
    together: Sequence[Part]
    turns: Sequence[Part]
    direct: Sequence[Part]
    posts: Mapping[Part, str]


def _landing(
    b: Builder,
    held: Held,
    device: int,
    want: Want | None,
    listed: Sequence[Part],
    makers: Sequence[str],
    outs: Sequence[str],
) -> _Landing:
    """Decide which pieces are received in place, which in turn, and which together."""
    assert want is not None
    tensor, final = held.tensor, (makers[device], outs[device])
    remote = [key for key in listed if key[0] != device]
    direct = [key for key in remote if is_dense(tensor, want.box, key[1])]
    staged = [key for key in remote if key not in direct]
    turns = staged if b.in_turn or direct else []
    together = [key for key in listed if key not in direct and key not in turns]
    if not direct and not turns:
        return _Landing(want, (final[1], final[0]), (), together, (), (), {})
    buffer = b.fresh(f"{final[0].rpartition('@')[0]}:buffer") + f"@{device}"
    steps = [b.fresh(f"{tensor.name}:turn") + f"@{device}" for _ in (*turns, *direct[:1])]
    follow = [*((name, name) for name in steps[:-1]), final]
    posts = dict.fromkeys(direct, follow[0][0])
    for turn, key in enumerate(turns):
        posts[key] = follow[turn if b.in_turn else 0][0]
    return _Landing(want, (buffer, buffer), follow, together, turns, direct, posts)


def _put_together(
    b: Builder,
    tensor: Tensor,
    device: int,
    plan: _Landing,
    pieces: Mapping[Part, str],
    collective: Mapping[str, Any],
    at: At,
) -> None:
    """Write the fetch of a device, and what completes its buffer."""
    box = plan.want.box

    def rows(keys: Sequence[Part]) -> list[Any]:
        return [[{"tensor": pieces[key]}, box_list(relative(key[1], box))] for key in keys]

    buffer, maker = plan.buffer
    args: list[Any] = [list(lengths(box)), number(plan.want.fill), rows(plan.together)]
    names = [pieces[key] for key in plan.together]
    more: dict[str, Any] = {"collective": collective}
    b.helper(device, maker, FETCH, args, names, part(tensor, buffer, box), at, more=more)
    for (name, out), key in zip(plan.makers, (*plan.turns, None), strict=False):
        output = part(tensor, out, box, buffer)
        if key is not None:
            args, names = [{"tensor": buffer}, *reversed(rows([key])[0])], [buffer, pieces[key]]
            more = {"mutates": [buffer]}
            kind = UPDATE
        else:
            args, names = [{"tensor": buffer}, rows(plan.direct)], [buffer]
            names += [pieces[key] for key in plan.direct]
            more, kind = {}, JOIN
        b.helper(device, name, kind, args, names, output, at, memory="reference", more=more)
        buffer = out
