"""Plans with one thing changed, for the checker to find."""

import dataclasses
from typing import Any

from pardnn.plan.plan import Plan


def with_message(plan: Plan, number: int, **fields: Any) -> Plan:
    """The plan, one message of which has these fields."""
    messages = list(plan.messages)
    messages[number] = dataclasses.replace(messages[number], **fields)
    return dataclasses.replace(plan, messages=tuple(messages))


def moved(plan: Plan, name: str, target: int) -> Plan:
    """The plan with an op last on another device."""
    rows = [[each for each in row if each != name] for row in plan.order]
    rows[target].append(name)
    order = tuple(map(tuple, rows))
    return dataclasses.replace(plan, placement={**plan.placement, name: target}, order=order)
