"""Cut plans whose losses leave the tolerance: is it the cut, or the precision of the step itself?

    python -m bench.tofu.rounding > page.md

Each step is run by one device and cut over two, and both are compared with one device that computes
in double precision throughout, without the step's own casts to bfloat16.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import pardnn
from bench.common.forked import forked
from bench.sweep import idioms, measure, optimizers
from bench.sweep.measure import Factory, Row

CASES = {
    "muon_plain": optimizers.CASES,
    "muon_weight_decay": optimizers.CASES,
    "bfloat16_model": idioms.CASES,
    "evaluated_in_between": idioms.CASES,
}
TIME_S = 60.0


def in_double(factory: Factory) -> Factory:
    """Return a factory of the same step with a model and a batch in double precision."""

    def made() -> tuple[Any, tuple[Any, ...]]:
        step, args = factory()
        for arg in args:
            if isinstance(arg, nn.Module):
                arg.double()
        return step, tuple(map(_doubled, args))

    return made


def _doubled(arg: Any) -> Any:
    return arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg


@contextlib.contextmanager
def without_casts() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch.Tensor, "bfloat16"), (nn.Module, "bfloat16")):
            stack.enter_context(mock.patch.object(owner, name, lambda self: self))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", lambda self: self))
        yield


def captured(factory: Factory) -> Any:
    step, args = factory()
    return pardnn.capture(step, *args)


def exact(factory: Factory) -> Row:
    """Return the losses and states of the step in double precision."""

    def run(_rank: int, _store: str) -> Row:
        with without_casts():
            double = in_double(factory)
            return measure.eager(double, captured(double))

    return forked(1, run, TIME_S)[0]


def line(name: str, factory: Factory) -> str:
    """Return the row of one case: differences of losses, and of all that is left."""
    graph, truth = captured(factory), exact(factory)
    eager = forked(1, lambda _rank, _store: measure.eager(factory, graph), TIME_S)[0]
    state = {key: value for key, value in eager["state"].items() if value is not None}
    cut = measure.RUNS["cut"]
    rows = [
        measure.compared(eager["losses"], state, truth),
        measure.on_ranks(factory, graph, truth, cut),
        measure.on_ranks(factory, graph, eager, cut),
    ]
    found = [f"{row['loss_difference']:.1e} | {row['state_difference']:.1e}" for row in rows]
    return f"| {name} | {' | '.join(found)} |\n"


def main() -> None:
    sys.stdout.write(
        "| step | one device beside double: loss | state | cut beside double: loss | state "
        "| cut beside one device: loss | state |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    for name, cases in CASES.items():
        sys.stdout.write(line(name, cases[name]))


if __name__ == "__main__":
    main()
