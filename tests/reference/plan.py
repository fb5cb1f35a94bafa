"""Naive twins of the plan room: the definitions, written down slowly."""

from collections.abc import Sequence

from pardnn.graph.ir import Graph, Op, writes
from pardnn.plan.plan import Message, Plan


def naive_curves(graph: Graph, plan: Plan) -> list[list[int]]:
    """Bytes held while each op runs, by keeping a table of live storages per device."""
    ops = {op.name: op for op in graph.ops}
    producer = {t.name: op for op in graph.ops for t in op.outputs}
    tensors = {t.name: t for op in graph.ops for t in op.outputs}
    return [
        _curve(graph, plan, device, [ops[name] for name in row], producer, tensors)
        for device, row in enumerate(plan.order)
    ]


def _curve(graph, plan, device, row, producer, tensors):
    here = {op.name for op in row}

    def storage(name: str) -> tuple[str, str]:
        """("own", tensor) or ("copy", tensor): what holds `name` on this device."""
        while producer[name].name in here and tensors[name].alias_of is not None:
            name = tensors[name].alias_of
        return ("own" if producer[name].name in here else "copy", name)

    def last_use(key: tuple[str, str]) -> int:
        used = [0]
        for at, op in enumerate(row):
            names = [*op.inputs, *(t.name for t in op.outputs)]
            used += [at] if any(storage(name) == key for name in names) else []
        return max(used)

    def held_by_message(key: tuple[str, str], at: int) -> bool:
        for m in plan.messages:
            if m.source == device and storage(m.tensor) == key:
                names = [op.name for op in row]
                if m.hold_until is None or names.index(m.hold_until) > at:
                    return True
        return False

    live = {
        ("own", t.name): t.bytes
        for op in row
        if op.memory == "residual"
        for t in op.outputs
        if t.alias_of is None
    }
    residual = set(live)
    curve = []
    for at, op in enumerate(row):
        for m in plan.messages:
            if m.target == device and m.post_before == op.name:
                live["copy", m.tensor] = tensors[m.tensor].bytes
        for t in op.outputs:
            if t.alias_of is None:
                live["own", t.name] = t.bytes
        curve.append(sum(live.values()) + op.workspace)
        for key in [key for key in live if key not in residual]:
            if last_use(key) <= at and not held_by_message(key, at):
                del live[key]
    return curve


def serial_plan(
    graph: Graph, place: Sequence[int], num_devices: int, hold_at_once: bool = True
) -> Plan:
    """A valid plan for any placement: one global serial order, receives before the first use."""
    order = [graph.ops[i] for i in graph.arrays.topological]
    device = {op.name: place[i] for i, op in enumerate(graph.ops)}
    producer = {t.name: op for op in graph.ops for t in op.outputs}
    messages: dict[tuple[str, int], Message] = {}
    for op in order:
        for name in op.inputs:
            source, target = device[producer[name].name], device[op.name]
            if source != target and (name, target) not in messages:
                messages[name, target] = Message(
                    tensor=name,
                    source=source,
                    target=target,
                    post_before=op.name,
                    hold_until=_hold(order, device, producer[name], op) if hold_at_once else None,
                )
    if not hold_at_once:
        written = {_root(graph, name) for op in graph.ops for name in writes(op)}
        for key, m in messages.items():
            if _root(graph, m.tensor) in written:
                op = next(o for o in order if o.name == m.post_before)
                hold = _hold(order, device, producer[m.tensor], op)
                messages[key] = Message(**{**_fields(m), "hold_until": hold})
    rows = tuple(tuple(op.name for op in order if device[op.name] == d) for d in range(num_devices))
    placement = {op.name: device[op.name] for op in graph.ops}
    return Plan(placement=placement, order=rows, messages=tuple(messages.values()))


def _fields(message: Message) -> dict[str, object]:
    return {name: getattr(message, name) for name in Message.__slots__}


def _root(graph: Graph, name: str) -> str:
    parent = {t.name: t.alias_of for op in graph.ops for t in op.outputs if t.alias_of}
    while name in parent:
        name = parent[name]
    return name


def _hold(order: Sequence[Op], device: dict[str, int], producer: Op, reader: Op) -> str:
    """The sender's last op before the reader in the global order: it stops there until sent."""
    before = order[: order.index(reader)]
    return [op.name for op in before if device[op.name] == device[producer.name]][-1]


def naive_keeps_order(graph: Graph, plan: Plan) -> bool:
    """Whether all ranks finish if each message goes only after the one listed before it."""
    ops = {op.name: op for op in graph.ops}
    producer = {t.name: op.name for op in graph.ops for t in op.outputs}
    at, sent, moved = [0] * plan.num_devices, 0, True
    ran: set[str] = set()

    def reached(device: int, position: int) -> bool:
        row = plan.order[device]
        return position <= at[device] and (
            position == 0 or all(
                n < sent for n, m in enumerate(plan.messages)
                if m.source == device and m.hold_until == row[position - 1]
            )
        )  # fmt: skip

    while moved:
        moved = False
        if sent < len(plan.messages):
            m = plan.messages[sent]
            if producer[m.tensor] in ran and reached(
                m.target, plan.order[m.target].index(m.post_before)
            ):
                sent, moved = sent + 1, True
        for device, row in enumerate(plan.order):
            if at[device] == len(row) or not reached(device, at[device]):
                continue
            op = ops[row[at[device]]]
            waited = [
                n for n, m in enumerate(plan.messages)
                if m.target == device and m.tensor in op.inputs
            ]  # fmt: skip
            if all(n < sent for n in waited) and ran.issuperset(op.after):
                ran.add(op.name)
                at[device], moved = at[device] + 1, True
    return sent == len(plan.messages) and len(ran) == len(ops)
