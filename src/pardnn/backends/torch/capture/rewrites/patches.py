"""Parts of torch that branch on data, rewritten without the branch while a step is traced.

Problem: one graph must serve every step, so `if` on a tensor is an error in the user's code. In
torch's own code, the user cannot rewrite it.

Idea: compute both sides and select, with the same bits as the branch:

- RAdam leaves out its rectification in the first steps, ASGD its average: `radam`, `asgd`.
- SGD dampens all gradients but the first: `sgd`.
- `GradScaler` leaves out the optimizer's step if a gradient is not finite: the step is taken, and
  undone by a selection between the old and the new content of each tensor it wrote: `undoing`.
- `AveragedModel` copies the model the first time and averages from then on: it does both.
- A distribution raises if its arguments or values are wrong: the check is left out.
- Adafactor clips numbers by Python's `min` and `max`.
- Fused optimizers take Python floats, which would be frozen: they get sentinels instead. So does
  batch normalization, whose average over all batches divides by their number.
- Clipping of gradients calls `float` on its limit, which may be a number that the step makes.
- CTC's loss takes lengths as lists, too: it gets tensors.
- `torch.cond` on constants calls the function that they choose, otherwise both: `cond`.
- Packed sequences of known lengths are slices: `packed_sequences`.
- A slice at a number that only a run knows is indexing by a tensor: `positions`.
- transformers makes an attention mask from positions whenever it sees a fake tensor, and otherwise
  only if sequences are packed: positions made from constants are read, as in eager steps.
- Derivatives of products, largest items and medians compute both formulas: `derivatives`.

Complexity: the time of both sides, and one copy of what the branch changes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import swa_utils
from torch.utils._pytree import tree_leaves

from pardnn.backends.torch.capture.constant_folding import depends_on_constants, folded_list
from pardnn.backends.torch.capture.rewrites import asgd, cond, packed_sequences, radam, sgd
from pardnn.backends.torch.capture.rewrites.derivatives import derivatives_rewritten
from pardnn.backends.torch.capture.rewrites.positions import Positions, tensor_of_numbers
from pardnn.backends.torch.capture.rewrites.undoing import Undoing
from pardnn.backends.torch.capture.tracer import Tracer
from pardnn.backends.torch.ops.host_scalars import choose

#: Ops whose schemas take only Python floats, so hyperparameters would be frozen.
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_CHECK = "_amp_foreach_non_finite_check_and_unscale_"
_ADAFACTOR = "torch.optim._adafactor"
_TRANSFORMERS = "transformers.utils.import_utils"


@contextlib.contextmanager
def rewritten(tracer: Tracer) -> Iterator[None]:
    """Patch torch as described above while the context is open.

    Args:
        tracer: The tracer of the step that runs in it.
    """
    with contextlib.ExitStack() as stack, derivatives_rewritten(tracer):

        def patch(owner: Any, name: str, new: Callable[..., Any]) -> None:
            call = functools.partial(new, tracer, getattr(owner, name, None))
            stack.enter_context(mock.patch.object(owner, name, _as_function(call), create=True))

        for name in (*_FUSED, "batch_norm"):
            patch(torch, name, _with_sentinels)
        patch(sys.modules["torch.nn.modules.batchnorm"], "float", _float)
        patch(sys.modules["torch.nn.utils.clip_grad"], "float", _float)
        patch(torch, "ctc_loss", _ctc_loss)
        patch(torch, "cond", _cond)
        patch(torch._VF, "_pack_padded_sequence", packed_sequences.pack)
        patch(torch._VF, "_pad_packed_sequence", packed_sequences.pad)
        patch(torch, _CHECK, _unscale_each)
        patch(torch.amp.GradScaler, "_maybe_opt_step", _step_unless_skipped)
        patch(torch.amp.GradScaler, "update", _update_scale)
        patch(swa_utils.AveragedModel, "update_parameters", _update_average)
        for name, new in (("min", _min), ("max", _max)):
            patch(sys.modules[_ADAFACTOR], name, new)
        unchecked = mock.patch.object(torch.distributions.Distribution, "_validate_args", False)
        stack.enter_context(unchecked)
        for name, ours in {"radam": radam, "asgd": asgd}.items():
            optimizer = sys.modules[f"torch.optim.{name}"]
            patch(optimizer, f"_single_tensor_{name}", ours.single_tensor)
            patch(optimizer, f"_multi_tensor_{name}", ours.multi_tensor)
        dampening = sgd.Dampening()
        patch(torch.optim.SGD, "_init_group", dampening.init_group)
        patch(sys.modules["torch.optim.sgd"], "sgd", dampening.update)
        positions = Positions()
        patch(torch.Tensor, "__getitem__", positions.get)
        patch(torch.Tensor, "__setitem__", positions.set)
        patch(torch.Tensor, "narrow", positions.narrow)
        patch(torch, "tensor", tensor_of_numbers)
        patch(torch.Tensor, "__deepcopy__", _deep_copy)
        patch(torch.utils, "swap_tensors", _converted)
        if (library := sys.modules.get(_TRANSFORMERS)) is not None:
            patch(library, "is_fake_tensor", _is_fake)
        yield
        positions.check(tracer)


def _as_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, which a class binds to its instances, unlike a partial."""
    return lambda *args, **kwargs: call(*args, **kwargs)


def _ctc_loss(
    _tracer: Tracer, real: Any, log_probs: Any, targets: Any, steps: Any, lengths: Any, *args: Any
) -> Any:
    """Pass lengths that are lists as tensors, which fake tensors need; the bits are the same."""
    made = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (steps, lengths)]
    return real(log_probs, targets, *made, *args)


def _cond(
    tracer: Tracer, _real: Any, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()
) -> Any:
    """Call the function that a predicate of constants chooses, as Python does; else both."""
    if isinstance(pred, torch.Tensor):
        known = folded_list(tracer.aliases.fresh_value(pred), tracer.calls)
        if known is None:
            return cond.chosen(tracer, pred, (true_fn, false_fn), operands)
        pred = all(known) if isinstance(known, list) else known
    return (true_fn if pred else false_fn)(*operands)


def _deep_copy(_tracer: Tracer, real: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Copy a tensor of the trace by a recorded call, where torch copies its storage."""
    if not isinstance(tensor, FakeTensor) or not tensor.is_leaf or id(tensor) in memo:
        return real(tensor, memo)
    copy: torch.Tensor = tensor.detach().clone()
    if copy.stride() != tensor.stride():
        return real(tensor, memo)
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return copy


def _converted(_tracer: Tracer, real: Any, old: torch.Tensor, new: torch.Tensor) -> None:
    """Set `.data` where `Module.to` and the like would swap fake tensors, as for real ones."""
    if sys._getframe(2).f_code is not torch.nn.Module._apply.__code__:
        real(old, new)
        return
    with torch.no_grad():
        old.data = new.data


def _is_fake(tracer: Tracer, _real: Any, tensor: Any) -> bool:
    """Return whether the content of a tensor is unknown before a step runs."""
    if not isinstance(tensor, FakeTensor):
        return False
    return not depends_on_constants(tracer.aliases.fresh_value(tensor))


def _with_sentinels(tracer: Tracer, real: Any, *args: Any, **kwargs: Any) -> Any:
    live = {key: tracer.scalars.sentinel(value) for key, value in kwargs.items()}
    return real(*(tracer.scalars.sentinel(arg) for arg in args), **live)


def _min(_tracer: Tracer, _real: Any, a: Any, b: Any) -> Any:
    return choose(b < a, b, a)


def _max(_tracer: Tracer, _real: Any, a: Any, b: Any) -> Any:
    return choose(b > a, b, a)


def _float(_tracer: Tracer, _real: Any, number: Any) -> Any:
    """Return `float(number)`, a symbol if it is a tensor or a symbol."""
    return torch.sym_float(number.item() if isinstance(number, torch.Tensor) else number)


def _unscale_each(
    _tracer: Tracer, _real: Any, grads: list[torch.Tensor], found: torch.Tensor, inv: torch.Tensor
) -> None:
    """Unscale each gradient on its own, by calls that can be cut; the bits are the same."""
    overflows = []
    for grad in grads:
        if grad.numel():
            ends = torch.stack([grad.amax(), grad.amin()])  # both are NaN where an item is
            overflows.append(ends.isfinite().all().logical_not().to(found.dtype))
        grad.mul_(inv)
    if overflows:
        found.copy_(torch.maximum(found, torch.stack(overflows).amax()))


def _step_unless_skipped(
    tracer: Tracer,
    _real: Any,
    _scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    optimizer_state: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    overflows = list(optimizer_state["found_inf_per_device"].values())
    is_skipped = torch.stack([flag.to(overflows[0].device) for flag in overflows]).sum() != 0
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += tree_leaves(list(optimizer.state.values()))
    with undone_where(tracer, is_skipped, [t for t in held if isinstance(t, torch.Tensor)]):
        return optimizer.step(*args, **kwargs)


def _update_scale(
    _tracer: Tracer, real: Any, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any
) -> None:
    """Clear the scaler's states in place: a new dictionary would look like changed state."""
    if not scaler.is_enabled():
        return real(scaler, *args, **kwargs)
    states = scaler._per_optimizer_states
    real(scaler, *args, **kwargs)
    if states is not scaler._per_optimizer_states:
        states.clear()
        scaler._per_optimizer_states = states
    return None


def _update_average(
    tracer: Tracer, real: Any, average: swa_utils.AveragedModel, model: torch.nn.Module
) -> None:
    """Compute the running average, and select the model itself the first time."""
    is_first = average.n_averaged == 0
    averages = [*average.module.parameters()]
    originals = [*model.parameters()]
    if average.use_buffers:
        averages, originals = [*averages, *average.module.buffers()], [*originals, *model.buffers()]
    # Whether this is the first average, and whether there is one to update.
    tracer.scalars.forced_decisions = [False, True]
    try:
        real(average, model)
    finally:
        tracer.scalars.forced_decisions = []
    with torch.no_grad():
        for averaged, original in zip(averages, originals, strict=True):
            averaged.copy_(
                torch.where(is_first.to(averaged.device), original.to(averaged.device), averaged)
            )


@contextlib.contextmanager
def undone_where(
    tracer: Tracer, is_skipped: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Undo what the context writes to `tensors` where `is_skipped` is true, bit by bit.

    Args:
        tracer: The tracer of the step.
        is_skipped: A boolean tensor of no dimensions, computed before.
        tensors: Tensors that may be written in place; unwritten ones cost nothing.

    Raises:
        UnsupportedError: E802, if one of them gets another storage meanwhile.
    """
    by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    undoing = Undoing(tracer, lambda tensor: by_storage.get(tensor.untyped_storage()._cdata))
    try:
        yield
    finally:
        undoing.end()
    undoing.undo(is_skipped)
