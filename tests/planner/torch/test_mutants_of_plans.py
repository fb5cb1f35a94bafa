"""Mutants of cut plans' files: what the checker accepts computes every bit, in the bytes it states.

A mutant differs in one place of the file, any: a number, a name, an item left out, doubled, or
exchanged for one of another place. Those that are accepted run in one process, messages delivered
as late as their sender allows; every tensor that they make is compared with the first plan's.
"""

import copy
import functools
import itertools
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pardnn.api.simulate import plan_problems
from pardnn.backends.torch.ops.codec import constant_value
from pardnn.errors import PardnnError
from pardnn.graph.ir import LOSS_KIND, Op
from pardnn.plan.file import plan_from_json, plan_to_dict
from pardnn.plan.memory import peak_bytes
from pardnn.plan.plan import Message, Plan, plan_arrays, planned_graph
from tests.backends.torch import spmd
from tests.planner.torch.test_check_cut import entry, graph, planned

NAMES = (
    "data-parallel", "four devices", "microbatches", "terms", "accumulator", "second calls",
)  # fmt: skip


@functools.cache
def values() -> dict[str, Any]:
    return spmd.source_values(*entry(), graph())


class Run:
    """The ranks of a plan, one op of one of them after the other."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ops = {op.name: op for op in planned_graph(graph(), plan).ops}
        self.envs: list[dict[str, Any]] = [{} for _ in plan.order]
        self.at = [0] * len(plan.order)
        self.waiting = list(plan.messages)
        #: Tensors as they were when their op had run, by device and name.
        self.made: dict[tuple[int, str], Any] = {}

    def all(self) -> dict[tuple[int, str], Any]:
        with torch.no_grad():
            while self.step() or self.deliver(is_late=False):
                pass
        assert self.at == [len(row) for row in self.plan.order], "a rank waits forever"
        return self.made

    def step(self) -> bool:
        """Run what can run now; whether there was anything."""
        before = list(self.at)
        for device, row in enumerate(self.plan.order):
            while self.at[device] < len(row):
                op = self.ops[row[self.at[device]]]
                if not all(name in self.envs[device] for name in op.inputs):
                    break
                self.run(device, op)
                self.at[device] += 1
                self.deliver(is_late=True)
        return self.at != before

    def deliver(self, *, is_late: bool) -> bool:
        """Deliver what is sent: only what its sender waits for now, or all."""
        sent = [m for m in self.waiting if self.is_sent(m, is_late)]
        for m in sent:
            self.envs[m.target][m.tensor] = spmd.copied(self.envs[m.source][m.tensor])
            self.waiting.remove(m)
        return bool(sent)

    def is_sent(self, m: Message, is_late: bool) -> bool:
        if m.tensor not in self.envs[m.source]:
            return False
        row = self.plan.order[m.source][: self.at[m.source] + 1]
        return not is_late or m.hold_until in row

    def run(self, device: int, op: Op) -> None:
        env = self.envs[device]
        if op.kind == "constant":
            env[op.outputs[0].name] = constant_value(op)
        elif op.is_source:
            shard = (op.arguments or {}).get("shard") or {"of": op.name, "box": []}
            env[op.outputs[0].name] = spmd.copied(
                spmd.narrowed(values()[shard["of"]], shard["box"])
            )
        elif op.kind != LOSS_KIND:
            if spmd.is_random(op.kind):
                spmd.seed(op.name)
            spmd.step_of(op, env)
        for tensor in op.outputs:
            value = env[tensor.name]
            if isinstance(value, torch.Tensor):
                assert value.numel() * value.element_size() == tensor.bytes, tensor.name
            if "empty" not in tensor.name:
                self.made[device, tensor.name] = spmd.copied(value)


def same(found: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return found == expected
    return found.dtype == expected.dtype and torch.equal(
        found.nan_to_num(7.5), expected.nan_to_num(7.5)
    )


def places(data: Any) -> list[Any]:
    return list(data) if isinstance(data, dict) else list(range(len(data)))


def leaf(data: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container somewhere in the data, and a place in it; each level is as likely an end."""
    key = rng.choice(places(data))
    inner = data[key]
    if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
        return leaf(inner, rng)
    return data, key


def mutant(data: dict[str, Any], rng: random.Random) -> str:
    """Change one place; what was done to which."""
    top = rng.choice([*data, "order", "messages", "messages"])
    at, key = (
        leaf(data[top], rng) if data[top] and isinstance(data[top], dict | list) else (data, top)
    )
    old, what = at[key], rng.choice(["drop", "exchange", "change", "double"])
    if what == "drop":
        del at[key]
    elif what == "exchange":
        other = rng.choice(places(at))
        if isinstance(key, int) and rng.random() < 0.5:
            other = max(key - 1, 0)
        at[key], at[other] = at[other], at[key]
    elif what == "double" and isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), copy.deepcopy(old))
    elif isinstance(old, bool):
        at[key] = not old
    elif isinstance(old, int | float):
        at[key] = rng.choice([old + 1, old - 1, 2 * old, 0, -old, old / 2])
    else:
        there, of = leaf(data, rng)
        at[key] = copy.deepcopy(there[of])
    return f"{what} {key!r:.40} of {top}, {old!r:.80}"


def accepted(name: str, rng: random.Random) -> Iterator[tuple[str, Plan | None]]:
    """Mutants of a plan without end; None for those that are refused. Others say the same."""
    data = plan_to_dict(planned(name))
    text = json.dumps(data)
    first = plan_from_json(text.encode())
    for _ in itertools.count():
        spoilt = json.loads(text)
        told = mutant(spoilt, rng)
        try:
            plan = plan_from_json(json.dumps(spoilt).encode())
        except PardnnError:
            yield told, None
            continue
        if plan == first or json.dumps(spoilt) == text:
            continue
        yield told, plan if plan_problems(graph(), plan) == [] else None


@functools.cache
def expected(name: str) -> dict[tuple[int, str], Any]:
    return Run(planned(name)).all()


def assert_equal(name: str, told: str, plan: Plan) -> None:
    """Compare a mutant with the plan that it was made of: bits by name, wherever they are made."""
    whole = {tensor: value for (_, tensor), value in expected(name).items()}
    found = {tensor: value for (_, tensor), value in Run(plan).all().items()}
    assert found.keys() == whole.keys(), told
    assert [tensor for tensor, value in found.items() if not same(value, whole[tensor])] == [], told
    local = planned_graph(graph(), plan)
    if plan.predicted is not None:
        peaks = peak_bytes(local, plan_arrays(local, plan))
        assert list(plan.predicted.peak_bytes) == peaks, told


def tried(number: int, seed: int) -> tuple[int, int]:
    """Run so many accepted mutants; how many there were in all."""
    rng = random.Random(seed)
    streams = [(name, accepted(name, rng)) for name in NAMES]
    ran = 0
    for made, (name, stream) in enumerate(itertools.cycle(streams), start=1):
        told, plan = next(stream)
        if plan is not None:
            ran += 1
            assert_equal(name, f"seed {seed}, mutant {made} of {name!r}: {told}", plan)
        if ran == number:
            return made, ran
    raise AssertionError


@pytest.mark.parametrize("name", NAMES)
def test_the_runs_of_plans_agree_with_one_device(name: str) -> None:
    whole = spmd.run_whole(graph(), values())
    for (_, tensor), value in expected(name).items():
        if tensor in whole and isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, whole[tensor], rtol=1e-5, atol=1e-6)


def test_accepted_mutants_compute_every_bit() -> None:
    """`make plan-mutants` runs 400, of another seed each time."""
    number = int(os.environ.get("PLAN_MUTANTS", "4"))
    seed = int(os.environ.get("SEED") or (random.randrange(10**6) if number > 4 else 0))
    made, ran = tried(number, seed)
    print(f"SEED={seed}: of {made} mutants {ran} were accepted, and none differs")
