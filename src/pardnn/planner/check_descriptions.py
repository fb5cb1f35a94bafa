"""Spot checks of users' descriptions against their operators, before a plan relies on them.

Problem: a wrong description makes training silently wrong.
Idea: a few of the graph's own calls are made on random values, whole and by two and three workers
along every loop (`backends/torch/ops/verify_description.py`). Large tensors are shrunk, equal sizes
equally, if the operator still makes results of the shrunk sizes. A difference counts if two draws
of values show it.
Complexity: at most `CALLS` calls of each operator, of at most `ELEMENTS` elements.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pardnn import backends
from pardnn.errors import UsageError, shown
from pardnn.graph.ir import Graph, Op
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.cache import cached
from pardnn.shard.partition.analysis import analyse
from pardnn.shard.partition.call import Call, bind_call, call_of, fingerprint
from pardnn.shard.partition.strategy import COMBINED, Reduce, can_combine, strategies
from pardnn.shard.partition.worker_ops import partition
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.registry import Description, is_users
from pardnn.time_limit import check_time

#: Distinct calls of an operator that are checked, and the elements of all tensors of one.
CALLS, ELEMENTS = 2, 1 << 18
#: Sizes that shrunk dims get, each another; more sizes than these are not shrunk.
SMALL = (6, 10, 9, 7, 8, 5, 12, 11)

#: What is known of a user's description, by its function and a call: None, or why it was not run.
_CHECKED: dict[Any, str | None] = cached({})


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying one call.

    Attributes:
        kind: The operator.
        verified: Loops and numbers of workers whose ops make up the whole.
        skipped: Those that cannot be cut this way.
        problems: Loop, number of workers and what is wrong.
    """

    kind: str
    verified: tuple[tuple[str, int], ...]
    skipped: tuple[tuple[str, int], ...]
    problems: tuple[tuple[str, int, str], ...]


def verify_call(
    kind: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Mapping[str, Any],
    workers: Sequence[int] = (2, 3, 4, 5),
) -> Verification:
    """Verify a call that is data already, see `pardnn.verify`.

    Args:
        kind: Such as "aten.mm.default".
        args: As in `Op.arguments`.
        kwargs: Likewise.
        values: Tensors and host scalars by name.
        workers: Numbers of workers to cut among.

    Raises:
        UsageError: E201, if the operator has no description.
        DescriptionError: E220, if its description cannot be analysed.
    """
    description = description_of(kind)
    if description is None:
        raise UsageError(f"{kind!r:.80} has no description; write one with @pardnn.describe")
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in values.items()}
    dtypes = {
        name: str(getattr(value, "dtype", "")).removeprefix("torch.") or None
        for name, value in values.items()
    }
    bare = Call(kind, tuple(args), dict(kwargs), shapes, (), dtypes)
    whole = backends.run_call(bare, values)
    outputs = tuple(tuple(r.shape) if hasattr(r, "shape") else None for r in whole)
    call = Call(kind, bare.args, bare.kwargs, shapes, outputs, dtypes)
    by_slot = {slot: values[name] for slot, name in bind_call(description, call).names.items()}
    analysis, _ = analyse(description, call)
    verified: list[tuple[str, int]] = []
    skipped: list[tuple[str, int]] = []
    problems: list[tuple[str, int, str]] = []
    for loop in analysis.loops:
        for count in workers:
            try:
                ops = partition(call, loop, count)
            except DescriptionError as error:
                problems.append((loop, count, error.message))
                continue
            if ops is None:
                skipped.append((loop, count))
                continue
            problem = backends.verify_worker_ops(whole, ops, by_slot, description.is_random)
            if problem:
                problems.append((loop, count, problem))
            else:
                verified.append((loop, count))
    return Verification(kind, tuple(verified), tuple(skipped), tuple(problems))


def check_descriptions(graph: Graph) -> tuple[str, ...]:
    """Check the user's descriptions that a graph needs against their operators.

    Returns:
        A note for each operator that could not be run here, with the reason, and for each loop
        whose reducer plans do not know.

    Raises:
        DescriptionError: E220, with the call, the loop and the difference, if one is wrong.
    """
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    counts: Counter[str] = Counter()
    notes: dict[str, str] = {}
    for op in graph.ops:
        check_time()
        description = None if op.is_source or "." not in op.kind else description_of(op.kind)
        if description is None or not is_users(description) or counts[op.kind] == CALLS:
            continue
        call = call_of(op, tensors)
        key = (description.function, fingerprint(call))
        if key not in _CHECKED:
            _CHECKED[key] = _unchecked(op, call, description)
        counts[op.kind] += 1
        if _CHECKED[key] is not None:
            notes[op.kind] = (
                f"the description of {op.kind} ({description.source}) was not checked: "
                f"{_CHECKED[key]}; check it with pardnn.verify"
            )
        for loop, reducer in _not_exchanged(call):
            notes[f"{op.kind} {loop}"] = (
                f"{op.kind} is not cut along {loop!r}: devices do not exchange partial results of "
                f"the reducer {shown(reducer)}, only of {', '.join(sorted(COMBINED))}"
            )
    return tuple(notes.values())


def _not_exchanged(call: Call) -> Iterator[tuple[str, str]]:
    """Yield the loops whose partial results no plan combines, with their reducers."""
    for strategy in strategies(call):
        for layout, shape in zip(strategy.outputs, call.outputs, strict=True):
            if isinstance(layout, Reduce) and not can_combine(layout.reducer, len(shape or ())):
                yield strategy.loop, layout.reducer


def _unchecked(op: Op, call: Call, description: Description) -> str | None:
    """Return why a call could not be made; None if it was made and matches its description."""
    reason = "its tensors are too large"
    for sample, double in itertools.product(_samples(call), (True, False)):
        try:
            values = [
                backends.sample_values(sample.shapes, sample.dtypes, seed, double=double)
                for seed in (0, 1)
            ]
            outputs = tuple(getattr(r, "shape", None) for r in backends.run_call(sample, values[0]))
        except Exception as error:  # an operator may raise anything when it gets made-up values
            reason = f"on made-up values it raises {type(error).__name__}: {str(error)[:120]}"
            continue
        if [o and tuple(o) for o in outputs] != [o for o in sample.outputs if o is not None]:
            reason = "its results have other shapes on made-up values"
            continue
        problem = _problem(sample, values)
        if problem is not None:
            loop, workers, text = problem
            shapes = ", ".join(f"{shown(name)} {list(s)}" for name, s in sample.shapes.items())
            raise DescriptionError(
                f"the description of {shown(description.name)} ({description.source}) is wrong: "
                f"cut along {loop!r} among {workers} workers, {text}.\n"
                f"The call is at {op.source or shown(op.name)}, here with {shapes}. Check it on "
                "your own values with pardnn.verify(op, ...)."
            )
        return None
    return reason


def _problem(call: Call, draws: Sequence[Mapping[str, Any]]) -> tuple[str, int, str] | None:
    """Return loop, workers and the fault, if every draw of values shows it."""
    found: list[tuple[str, int, str]] = []
    for values in draws:
        problems = verify_call(call.kind, call.args, call.kwargs, values, (2, 3)).problems
        if not problems:
            return None
        found.append(problems[0])
    return found[0]


def _samples(call: Call) -> Iterator[Call]:
    """Yield the call as it is if it is small, else with smaller sizes."""
    shapes = [*call.shapes.values(), *(s for s in call.outputs if s is not None)]
    if sum(math.prod(shape) for shape in shapes) <= ELEMENTS:
        yield call
        return
    large = sorted({n for shape in shapes for n in shape if n > max(SMALL)})
    if len(large) > len(SMALL):
        return
    new = dict(zip(large, SMALL, strict=False))

    def shrunk(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [shrunk(item) for item in value]
        return new.get(value, value) if type(value) is int else value

    made = Call(
        call.kind,
        tuple(shrunk(value) for value in call.args),
        {key: shrunk(value) for key, value in call.kwargs.items()},
        {name: tuple(shrunk(shape)) for name, shape in call.shapes.items()},
        tuple(s and tuple(shrunk(s)) for s in call.outputs),
        call.dtypes,
    )
    if sum(math.prod(shape) for shape in made.shapes.values()) <= ELEMENTS:
        yield made
