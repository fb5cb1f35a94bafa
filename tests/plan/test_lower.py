"""What ranks do, against a twin that gives each action a time by itself and sorts them."""

from hypothesis import given

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.actions import Action, Allocate, Compute, Free, Receive, Send, Wait
from pardnn.plan.lower import lower, lower_messages
from pardnn.plan.plan import Message, Plan, plan_arrays
from tests.plan.test_plan import plans


@given(plans())
def test_each_action_comes_where_its_own_rule_says(pair: tuple[Graph, Plan]) -> None:
    """Posts in the global order, as soon as a rank is there; frees after a last use or a send."""
    graph, plan = pair
    lowered = lower(graph, plan)
    assert sorted(lowered.messages, key=str) == sorted(plan.messages, key=str)
    for device, actions in enumerate(lowered.ranks):
        assert list(actions) == naive_actions(graph, plan, lowered.messages, device)
    alone = lower_messages(graph, plan, plan_arrays(graph, plan))
    assert alone.messages == lowered.messages
    for few, all_of_them in zip(alone.ranks, lowered.ranks, strict=True):
        assert list(few) == [a for a in all_of_them if isinstance(a, Send | Receive | Wait)]


def test_a_receive_that_waits_for_its_turn_alone_is_posted_before_a_rank_waits_for_a_send() -> None:
    """`b` is made of `a`, so it comes later in the global order; its buffer was there first."""
    reads = {"a": (), "b": ("a",), "c": ("b",)}
    graph = build_graph("there and back", [
        Op(name=name, kind="op" if inputs else "input", inputs=inputs,
           outputs=(Tensor(name=name, bytes=8),))
        for name, inputs in reads.items()
    ])  # fmt: skip
    plan = Plan(
        placement={"a": 1, "b": 0, "c": 1}, order=(("b",), ("a", "c")),
        messages=(
            Message(tensor="a", source=1, target=0, post_before="b", hold_until="a"),
            Message(tensor="b", source=0, target=1, post_before="a"),
        ),
    )  # fmt: skip
    assert lower(graph, plan).ranks[1] == (
        Allocate(1), Compute("a"), Send(0), Receive(1), Wait(0), Free(("a",)), Wait(1),
        Compute("c"), Free(("b",)), Free(("c",)),
    )  # fmt: skip


def naive_actions(
    graph: Graph, plan: Plan, messages: tuple[Message, ...], device: int
) -> list[Action]:
    """Slot s lies before the op at position s. In a slot: posts, waits for sends, frees, buffers,
    posts from the first receive on that needs a buffer of this slot, arrivals, the op."""
    row = plan.order[device]
    at = {name: position for position, name in enumerate(row)}
    ops = {op.name: op for op in graph.ops}
    producer = {t.name: op.name for op in graph.ops for t in op.outputs}
    alias = {t.name: t.alias_of for op in graph.ops for t in op.outputs}
    found: list[tuple[int, int, int, Action]] = [
        (position, 6, 0, Compute(name)) for name, position in at.items()
    ]

    def owner(name: str) -> str:
        while producer[name] in at and (of := alias[name]) is not None:
            name = of
        return name

    last: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for name, position in at.items():
        for tensor in [*ops[name].inputs, *(t.name for t in ops[name].outputs)]:
            last[owner(tensor)] = position
        for tensor in ops[name].outputs:
            names.setdefault(owner(tensor.name), []).append(tensor.name)
    slot, waiting = 0, set[int]()
    for number, m in enumerate(messages):
        if device not in (m.source, m.target):
            continue
        if m.source == device:
            own, until = at[producer[m.tensor]] + 1, len(row)
            if m.hold_until is not None:
                until = at[m.hold_until]
            found.append((until + 1, 1, number, Wait(number)))
            last[owner(m.tensor)] = max(last[owner(m.tensor)], until)
        else:
            own = at[m.post_before]
            found.append((own, 3, number, Allocate(number)))
            read = min(at[name] for name in row if m.tensor in ops[name].inputs)
            found.append((read, 5, number, Wait(number)))
        slot = max(slot, own)
        if m.target == device and own == slot:
            waiting.add(slot)
        post = Send(number) if m.source == device else Receive(number)
        found.append((slot, 4 if slot in waiting else 0, number, post))
    copies = {m.tensor: number for number, m in enumerate(messages) if m.target == device}
    for name, position in last.items():
        is_own = producer[name] in at
        if is_own and ops[producer[name]].memory == "residual":
            continue
        number = list(alias).index(name) + len(messages) if is_own else copies[name]
        shared = [each for each in names.get(name, []) if each != name]
        if is_own:
            number += at[producer[name]] * len(alias)
        found.append((position + 1, 2, number, Free((name, *shared))))
    return [action for *_, action in sorted(found, key=lambda each: each[:3])]
