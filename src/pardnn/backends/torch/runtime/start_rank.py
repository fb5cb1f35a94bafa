"""From graph, plan and connections to a rank that is ready: all agree first, then each prepares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pardnn.backends.torch.comm import handshake
from pardnn.backends.torch.comm.failure_detector import State
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.rng.generator import Draws
from pardnn.backends.torch.runtime.executor import Executor
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import (
    check_fixed_draws,
    check_one_draw,
    drawn_once,
    draws_from_data,
    draws_to_data,
    measure_draws,
    random_ops,
    redrawn,
)
from pardnn.errors import PardnnError


def agree_with_all(program: Program, world: World) -> None:
    """Compare with all ranks what is about to run.

    Raises:
        MismatchError: E510 or E511, on all ranks.
        StuckError: E702, if a rank does not come.
    """
    handshake.check_world(world.size, program.plan)
    if world.store is None:
        return
    actions = program.lowered.ranks[world.rank]
    facts = handshake.make_facts(program.whole, program.plan, program.wires, actions, world.size)
    handshake.check_agreement(world.exchange("facts", facts))


def share_draws(program: Program, world: World) -> dict[str, Draws]:
    """Measure what this rank's random ops do to the generator, and learn it of the others'.

    Raises:
        UnsupportedError: E822, if an op's draws depend on values.
    """
    ops = random_ops(program.graph)
    if not ops or (world.store is None and _draws_as_written(program)):
        return {}
    check_fixed_draws(ops)
    mine = [op for op in ops if program.plan.placement[op.name] == world.rank]
    found = measure_draws(mine, program.tensors, world.device)
    whole = {op.name: op for op in program.whole.ops}
    named: dict[str, Draws] = {}
    for op in mine:
        name = drawn_once(op, whole)
        check_one_draw(op, whole[name], found[op.name])
        named[name] = found[op.name]
    data = draws_to_data(named)
    everyone = [data] if world.store is None else world.exchange("draws", data)
    return draws_from_data({name: each for said in everyone for name, each in said.items()})


def _draws_as_written(program: Program) -> bool:
    """Whether a plan for one device draws as the step does, so that no generator is moved."""
    own = [op.name for op in random_ops(program.graph)]
    drawing = set(own)
    ordered = [name for order in program.plan.order for name in order if name in drawing]
    return ordered == own and all(redrawn(op) is None for op in random_ops(program.whole))


def start(
    program: Program,
    world: World,
    residents: Callable[[], Mapping[str, Any]],
    *,
    checked: bool = True,
    on_failure: Callable[[State], None] | None = None,
) -> Executor:
    """Return this rank's executor, ready for its first step.

    Args:
        program: What to run.
        world: This rank's connections.
        residents: Gives the live values of this rank's sources, once all ranks agree.
        checked: Compare the plan with the other ranks first; tests of what happens without say no.
        on_failure: See `Watch`.
    """
    world.look_out(on_failure)
    try:
        if checked:
            agree_with_all(program, world)
        draws = share_draws(program, world)
        executor = Executor(program, world, residents(), draws)
    except PardnnError as error:
        raise world.settle(error) from error.__cause__
    world.describe = executor.describe
    return executor
