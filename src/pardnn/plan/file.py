"""The plan file, `pardnn.plan/1`, and the placement file (`op device` lines).

Of a message, `post_before` is the post of an irecv: the receiver's op before which the buffer is
allocated and the receive posted. `hold_until` is the wait of an isend: the sender's op after which
it waits for the send and may free the tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from pardnn import files
from pardnn.cluster import cluster_to_dict
from pardnn.errors import FileError, MismatchError
from pardnn.gc_pause import collector_paused
from pardnn.graph.file import fingerprint, op_digests, op_to_dict
from pardnn.graph.ir import Graph
from pardnn.plan.constraints import constraint_to_dict
from pardnn.plan.partitioned_graph import Partition
from pardnn.plan.pieces import whole_name
from pardnn.plan.plan import Message, Plan, Tried
from pardnn.plan.rewritten.recompute import SecondCall


def _message_to_dict(message: Message) -> dict[str, Any]:
    return {
        "tensor": message.tensor,
        "from": message.source,
        "to": message.target,
        "post_before": message.post_before,
        "hold_until": message.hold_until,
        **({} if message.into is None else {"into": message.into}),
    }


def _partition_to_dict(partition: Partition) -> dict[str, Any]:
    mesh = partition.mesh
    shares = {"shares": [list(row) for row in mesh.shares]} if mesh.shares else {}
    how = {
        name: value for name in ("in_turn", "reuse", "relay_axes", "sums_in_place")
        if (value := getattr(partition, name))
    }  # fmt: skip
    if partition.submeshes != 1:
        how["submeshes"] = partition.submeshes
    if partition.loops is not None:
        how["loops"] = {name: list(row) for name, row in partition.loops.items()}
    return {
        "mesh": {"shape": list(mesh.shape), "names": list(mesh.names), **shares},
        "sharding": {name: list(words) for name, words in partition.sharding.items()},
        "ops": [op_to_dict(op) for op in partition.ops],
        **how,
    }


def _call_to_dict(call: SecondCall) -> dict[str, Any]:
    return {"op": call.op, "number": call.number, "readers": list(call.readers)}


def _tried_to_dict(tried: Tried) -> dict[str, Any]:
    found = dataclasses.asdict(tried)
    if tried.why is None:
        del found["why"]
    return found


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON types, without fields that are not set and without a checksum."""
    data = {f.name: getattr(plan, f.name) for f in fields(plan)}
    data["placement"] = dict(plan.placement)
    data["order"] = [list(row) for row in plan.order]
    data["messages"] = [_message_to_dict(message) for message in plan.messages]
    data["notes"] = list(plan.notes)
    data["tried"] = [_tried_to_dict(each) for each in plan.tried] or None
    data["cluster"] = None if plan.cluster is None else cluster_to_dict(plan.cluster)
    if plan.partition is not None:
        data["partition"] = _partition_to_dict(plan.partition)
    if plan.pieces is not None:
        data["pieces"] = {
            "points": list(plan.pieces.points),
            "batch": {name: list(at) for name, at in plan.pieces.batch.items()},
            "ops": [op_to_dict(op) for op in plan.pieces.ops],
        }
    if plan.offload is not None:
        data["offload"] = list(plan.offload)
    if plan.recompute is not None:
        data["recompute"] = [_call_to_dict(call) for call in plan.recompute]
    if plan.constraints is not None:
        data["constraints"] = [constraint_to_dict(each) for each in plan.constraints]
    if plan.predicted is not None:
        data["predicted"] = dataclasses.asdict(plan.predicted)
        data["predicted"]["peak_bytes"] = list(plan.predicted.peak_bytes)
        if plan.predicted.costs is None:
            del data["predicted"]["costs"]
    return {key: value for key, value in data.items() if value is not None and key != "checksum"}


def _checksum(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@collector_paused()
def plan_to_json(plan: Plan) -> bytes:
    """Return the content of the plan's file; the same plan gives the same bytes."""
    data = plan_to_dict(plan)
    return files.dump_json(data | {"checksum": _checksum(data)})


@collector_paused()
def plan_from_json(content: bytes, what: str = "plan") -> Plan:
    """Parse the content of a plan file; `plan.check` tells whether it suits a graph.

    Raises:
        FileError: E406 to E408.
        MismatchError: E502.
    """
    plan = files.parse_as(Plan, content, what)
    if plan.checksum is not None and plan.checksum != _checksum(plan_to_dict(plan)):
        raise FileError(
            f"{what} is damaged: its content does not match its checksum.\n"
            "If it was edited on purpose, delete the field `checksum`.",
            code="E408",
        )
    return plan


def read_plan(path: str | Path) -> Plan:
    """Read a plan file."""
    return plan_from_json(files.read_bytes(path), f"plan file {str(path)!r}")


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file."""
    files.write_bytes(path, plan_to_json(plan))


def stamped(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with the graph's fingerprint and digests."""
    found = op_digests(graph)
    digests = _digests(plan, graph, found)
    return dataclasses.replace(
        plan,
        graph_fingerprint=fingerprint(graph, found),
        op_digests="".join(digests.get(name, _NO_DIGEST) for name in _digested(plan)),
    )


#: Of a name that is no op of the graph.
_NO_DIGEST = "0" * 8


def _digested(plan: Plan) -> Iterable[str]:
    """Return of what a plan keeps digests: its ops, or the tensors of a graph that it cuts.

    Of a batch in pieces also what has no digest, as it is no op of the graph: sums of pieces, say.
    """
    if plan.pieces is not None:
        names = (op.name for op in plan.pieces.ops)
        return dict.fromkeys(each for name in names for each in (name, whole_name(name)))
    if plan.partition is not None:
        return list(plan.partition.sharding)
    added = {call.name for call in plan.recompute or ()}
    added |= {f"{name}{way}host" for name in plan.offload or () for way in "<>"}
    return [name for name in plan.placement if name not in added]


def _digests(plan: Plan, graph: Graph, found: dict[str, str]) -> dict[str, str]:
    if plan.pieces is not None or plan.partition is None:
        return found
    return {tensor.name: found[op.name] for op in graph.ops for tensor in op.outputs}


def check_fingerprint(plan: Plan, graph: Graph) -> None:
    """Raise if the plan was made for another graph.

    Raises:
        MismatchError: E503, listing the ops that were added, removed or changed.
    """
    if plan.graph_fingerprint is None or plan.graph_fingerprint == fingerprint(graph):
        return
    text = plan.op_digests or ""
    now = _digests(plan, graph, op_digests(graph)) if text else {}
    kept = {name: text[8 * i : 8 * i + 8] for i, name in enumerate(_digested(plan))}
    then = {name: digest for name, digest in kept.items() if digest not in ("", _NO_DIGEST)}
    differences = {
        "added": [name for name in now if name not in then],
        "removed": [name for name in then if name not in now],
        "changed": [name for name in now if then.get(name, now[name]) != now[name]],
    }
    lines = [
        f"{kind}: {', '.join(repr(name)[:60] for name in names[:5])}"
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for kind, names in differences.items()
        if names
    ]
    raise MismatchError(
        "the plan was made for another graph.\n" + "\n".join([*lines, "Plan this graph again."]),
        code="E503",
        details=differences,
    )


def placement_to_text(placement: dict[str, int] | Any) -> str:
    """Return one `op device` line per op; the device is after the last space.

    Raises:
        FileError: E409, if a name holds a line break.
    """
    for name in placement:
        if len(name.splitlines()) != 1 or name != name.strip():
            raise FileError(
                f"op {name!r:.80} cannot be written to a placement file: a line is `op device`",
                code="E409",
            )
    return "".join(f"{name} {device}\n" for name, device in placement.items())


def placement_from_text(text: str, what: str = "placement") -> dict[str, int]:
    """Parse `op device` lines.

    Raises:
        FileError: E409, with the line's number.
    """
    placement: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, _, device = line.rpartition(" ")
        if not name or not (device.isascii() and device.isdigit()) or len(device) > 9:
            raise FileError(f"{what}, line {number}: expected `op device`", code="E409")
        if name in placement:
            raise FileError(f"{what}, line {number}: op {name!r:.80} appears twice", code="E409")
        placement[name] = int(device)
    return placement
