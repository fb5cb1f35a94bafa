"""Start a rank: the handshake, the exchange of random draws, the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pardnn.backends.torch.comm import handshake
from pardnn.backends.torch.comm.failure_detector import State
from pardnn.backends.torch.comm.world import World
from pardnn.backends.torch.rng.generator import Draws
from pardnn.backends.torch.runtime.executor import Executor, History
from pardnn.backends.torch.runtime.failures import naming_out_of_memory
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import (
    check_fixed_draws,
    check_one_draw,
    drawn_once,
    draws_from_data,
    draws_to_data,
    measure_draws,
    random_ops,
    replayed_op,
)
from pardnn.errors import PardnnError


def run_handshake(program: Program, world: World, key: str = "") -> None:
    """Compare what is about to run on all ranks; see `comm.handshake`.

    Args:
        program: What this rank is about to run.
        world: This rank's connections.
        key: Distinguishes this exchange from others of these ranks.

    Raises:
        MismatchError: E510 or E511, on all ranks.
        StuckError: E702, if a rank does not come.
    """
    handshake.check_world(world.size, program.plan)
    if world.store is None:
        return
    actions = program.lowered.ranks[world.rank]
    facts = handshake.make_facts(program.whole, program.plan, program.specs, actions, world.size)
    handshake.check_agreement(world.all_gather(f"facts{key}", facts))


def exchange_draws(program: Program, world: World, key: str = "") -> dict[str, Draws]:
    """Measure how this rank's random ops advance the generator, and all-gather the measurements.

    Args:
        program: What runs.
        world: This rank's connections.
        key: Distinguishes this exchange from others of these ranks.

    Returns:
        By name of the random op in the whole graph; empty if no generator has to be moved.

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
    gathered = [data] if world.store is None else world.all_gather(f"draws{key}", data)
    return draws_from_data({name: each for draws in gathered for name, each in draws.items()})


def _draws_as_written(program: Program) -> bool:
    """Whether a plan for one device draws in the step's order, so that no generator is moved."""
    own = [op.name for op in random_ops(program.graph)]
    drawing = set(own)
    again = {call.name for call in program.plan.recompute or ()}
    ordered = [name for order in program.plan.order for name in order if name in drawing]
    is_once = all(replayed_op(op) is None for op in random_ops(program.whole))
    return ordered == own and is_once and not again & drawing


def prepare(program: Program, world: World, history: History, key: str) -> Executor:
    """Return this rank's executor, which has no values yet; all ranks call it.

    Args:
        program: What to run.
        world: This rank's connections.
        history: The steps of this rank so far.
        key: Distinguishes the exchanges from others of these ranks.

    Raises:
        MismatchError: E510 or E511, if ranks and plan do not belong together.
        UnsupportedError: E822, if a random op's draws depend on values.
    """
    run_handshake(program, world, key)
    return Executor(program, world, None, exchange_draws(program, world, key), history)


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
        residents: Returns the values of this rank's residents; called after the handshake.
        checked: Whether to do the handshake; only tests of what happens without it pass False.
        on_failure: See `FailureDetector`.

    Raises:
        MismatchError: E510, E511 or E514, if ranks, plan and values do not belong together.
        RankError: E6xx, if a rank failed meanwhile.
        StuckError: E702, if a rank does not come.
        UnsupportedError: E822, if a random op's draws depend on values.
    """
    world.detect_failures(on_failure)
    try:
        if checked:
            run_handshake(program, world)
        draws = exchange_draws(program, world)
        with naming_out_of_memory(world, "making its share of the state"):
            values = residents()
        executor = Executor(program, world, values, draws)
    except PardnnError as error:
        raise world.report_failure(error) from error.__cause__
    world.describe = executor.describe
    return executor
