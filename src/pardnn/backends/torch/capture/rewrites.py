"""Steps of torch's own that branch on data, written without the branch while they are traced.

One graph must hold for every step, so `if` on a tensor is refused in a user's code. In torch's code
the user cannot rewrite it; here it is written as a choice between two results, bit by bit what the
branch gives:

- RAdam leaves out its rectification in the first steps: `radam.py`.
- `GradScaler` leaves out the optimizer's step where a gradient is not finite: the step is taken,
  and what it changed is put back. One tensor at a time, so it takes the memory of one.
- `AveragedModel` copies the model the first time and averages from then on: it does both.
- A distribution raises where its arguments or values are wrong: here it does not look.
- Adafactor clips numbers by Python's `min` and `max`, and reads norms of parameters as numbers.

Complexity: what the branch takes, and one copy of what it changes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.optim import swa_utils

from pardnn.backends.torch.capture import rewrite_radam, unsupported
from pardnn.backends.torch.capture.trace_ir import Call, Storage
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import choose

#: Their schemas take Python floats only, and would bake in the hyperparameters.
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_CHECK = "_amp_foreach_non_finite_check_and_unscale_"
_ADAFACTOR = "torch.optim._adafactor"


@contextlib.contextmanager
def rewritten(tracer: Tracer) -> Iterator[None]:
    """While it is open, torch's branches on data are choices, and fused optimizers keep numbers.

    Args:
        tracer: Of the step that runs inside.
    """
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, new: Callable[..., Any]) -> None:
            patch = functools.partial(new, tracer, getattr(owner, name, None))
            stack.enter_context(mock.patch.object(owner, name, _bound(patch), create=True))

        for name in _FUSED:
            put(torch, name, _with_live_numbers)
        put(torch, "ctc_loss", _with_length_tensors)
        put(torch, _CHECK, _checked_one_by_one)
        put(torch.amp.GradScaler, "_maybe_opt_step", _maybe_step)
        put(torch.amp.GradScaler, "update", _update_scale)
        put(swa_utils.AveragedModel, "update_parameters", _update_average)
        adafactor = sys.modules[_ADAFACTOR]
        put(adafactor, "min", _smaller)
        put(adafactor, "max", _larger)
        put(adafactor, "adafactor", _with_numbers)
        unchecked = mock.patch.object(torch.distributions.Distribution, "_validate_args", False)
        stack.enter_context(unchecked)
        optimizer = sys.modules["torch.optim.radam"]
        put(optimizer, "_single_tensor_radam", rewrite_radam.one_by_one)
        put(optimizer, "_multi_tensor_radam", rewrite_radam.all_together)
        yield


def _bound(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, which a class binds to its instances; a partial would not be bound."""
    return lambda *args, **kwargs: patch(*args, **kwargs)


def _with_length_tensors(
    _tracer: Tracer, real: Any, odds: Any, targets: Any, steps: Any, lengths: Any, *args: Any
) -> Any:
    """Let CTC's mean read lengths that are a list as a tensor: the same bits, of fake ones too."""
    made = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (steps, lengths)]
    return real(odds, targets, *made, *args)


def _with_live_numbers(tracer: Tracer, real: Any, *args: Any, **kwargs: Any) -> Any:
    live = {key: tracer.disguise(value) for key, value in kwargs.items()}
    return real(*(tracer.disguise(arg) for arg in args), **live)


def _with_numbers(tracer: Tracer, real: Any, *args: Any, **kwargs: Any) -> Any:
    """Let torch's own optimizer read numbers from parameters: they feed arithmetic alone."""
    tracer.may_read_numbers = True
    try:
        return real(*args, **kwargs)
    finally:
        tracer.may_read_numbers = False


def _smaller(_tracer: Tracer, _real: Any, a: Any, b: Any) -> Any:
    return choose(b < a, b, a)


def _larger(_tracer: Tracer, _real: Any, a: Any, b: Any) -> Any:
    return choose(b > a, b, a)


def _checked_one_by_one(
    _tracer: Tracer, real: Any, grads: list[torch.Tensor], found: torch.Tensor, inv: torch.Tensor
) -> None:
    """Unscale each gradient by itself: one call on all of them would tie them to one device."""
    marks = []
    for grad in grads:
        mark = torch.zeros_like(found)
        real([grad], mark, inv)
        marks.append(mark)
    if marks:
        found.copy_(torch.maximum(found, torch.stack(marks).amax(0)))


def _maybe_step(
    tracer: Tracer,
    _real: Any,
    _scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    optimizer_state: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    marks = list(optimizer_state["found_inf_per_device"].values())
    skipped = torch.stack([mark.to(marks[0].device) for mark in marks]).sum() != 0
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += [t for state in optimizer.state.values() for t in state.values()]
    with keep_unless(tracer, skipped, [t for t in held if isinstance(t, torch.Tensor)]):
        return optimizer.step(*args, **kwargs)


def _update_scale(
    _tracer: Tracer, real: Any, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any
) -> None:
    """Forget the step's own notes where they stand: a new dictionary looks like changed state."""
    if not scaler.is_enabled():
        return real(scaler, *args, **kwargs)
    notes = scaler._per_optimizer_states
    real(scaler, *args, **kwargs)
    if notes is not scaler._per_optimizer_states:
        notes.clear()
        scaler._per_optimizer_states = notes
    return None


def _update_average(
    tracer: Tracer, real: Any, average: swa_utils.AveragedModel, model: torch.nn.Module
) -> None:
    """Average as always, and put the model itself in the place of the first average."""
    is_first = average.n_averaged == 0
    inside = [*average.module.parameters()]
    outside = [*model.parameters()]
    if average.use_buffers:
        inside, outside = [*inside, *average.module.buffers()], [*outside, *model.buffers()]
    tracer.answers = [False, True]  # is this the first one; is there one to go on from
    try:
        real(average, model)
    finally:
        tracer.answers = []
    with torch.no_grad():
        for mine, theirs in zip(inside, outside, strict=True):
            mine.copy_(torch.where(is_first.to(mine.device), theirs.to(mine.device), mine))


@contextlib.contextmanager
def keep_unless(
    tracer: Tracer, skipped: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Undo what happens inside to `tensors` where `skipped` is true, bit by bit.

    Args:
        tracer: Of the step that is running.
        skipped: A truth of no dimensions, computed before.
        tensors: What may be written in place inside; what is not written costs nothing.

    Raises:
        UnsupportedError: E802, if one of them gets another storage inside.
    """
    start = len(tracer.calls)
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in by_storage and key not in kept:
            kept[key] = tracer.recorded(torch.ops.aten.clone.default, by_storage[key])

    tracer.before_write = keep
    try:
        yield
    finally:
        tracer.before_write = None
    blocks: list[tuple[Storage, int]] = []
    for key, old in kept.items():
        tensor = by_storage[key]
        storage = tracer.memory.value(tensor).storage
        if storage is None or tensor.untyped_storage()._cdata != key:
            raise unsupported.decision_by_value(tracer.locator.line())
        blocks.append((storage, len(tracer.calls)))
        with torch.no_grad():
            tensor.copy_(torch.where(skipped.to(tensor.device), old, tensor))
    if blocks:
        _move_up(tracer.calls, start, blocks)


def _move_up(calls: list[Call], start: int, blocks: list[tuple[Storage, int]]) -> None:
    """Move each block of calls to where its storage has been touched for the last time."""
    first = blocks[0][1]
    last: dict[Storage, int] = {}
    for i in range(start, first):
        values = [*calls[i].inputs, *calls[i].outputs]
        last.update((value.storage, i) for value in values if value.storage is not None)
    keys = [(i, 0, i) for i in range(start, first)]
    ends = [begin for _, begin in blocks[1:]] + [len(calls)]
    for (storage, begin), end in zip(blocks, ends, strict=True):
        keys += [(last[storage], 1, i) for i in range(begin, end)]
    calls[start:] = [calls[i] for _, _, i in sorted(keys)]
