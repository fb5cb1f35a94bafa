"""Whether a graph of a step reads only what the calls before it have left as eager calls would."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.errors import UnsupportedError, shown


def check_carried(stale: Collection[str], program: Program, binding: Binding) -> None:
    """Refuse a graph that reads what earlier calls did not leave as eager calls would.

    Args:
        stale: Names of tensors that the calls so far have not left so.
        program: Of the graph that is to run.
        binding: The binding of its sources.

    Raises:
        UnsupportedError: E808, naming the first one.
    """
    read = sorted(set(stale).intersection(program.state))
    lost = [name for each in read if (name := _without_optimizer(binding, each)) is not None]
    if lost:
        raise UnsupportedError(
            f"no optimizer holds {shown(lost[0])} any more, so nothing resets its gradient "
            "or updates it: it was taken\n"
            "out of its group, or took another one's place, as load_state_dict(assign=True) "
            "does.\n"
            "Freeze what you take out: p.requires_grad_(False). Load without assign, or make "
            "the optimizer after\nthat and parallelize again.",
            code="E808",
            details={"tensors": lost[:20]},
        )
    read = [name for name in read if binding.sources[name].parameter is None]
    if read and binding.sources[read[0]].kind == "parameter":
        raise UnsupportedError(
            f"{shown(read[0])} is a parameter now, and the calls before computed it within the "
            f"step, as the hooks of weight_norm and prune do ({len(read)} such): its values "
            "are on no rank.\nUndo that on the whole model: fast.sync_model(), then "
            "remove_weight_norm or prune.remove, a new optimizer of model.parameters(), and "
            "parallelize again.",
            code="E808",
            details={"tensors": read[:20]},
        )
    if read:
        raise _left(
            read, "a tensor", "Register tensors that are passed from call to call: "
            "module.register_buffer(name, tensor).",
        )  # fmt: skip


def check_left(gradients: Sequence[str]) -> None:
    """Refuse a graph that uses gradients that an earlier call has left.

    Args:
        gradients: The names of those that it uses.

    Raises:
        UnsupportedError: E808, naming the first one.
    """
    if gradients:
        raise _left(
            gradients, "a gradient", "Call optimizer.zero_grad() after optimizer.step() instead "
            "of at the start, so that gradients add up until then; or at the end of every call.",
        )  # fmt: skip


def _left(names: Sequence[str], what: str, rewrite: str) -> UnsupportedError:
    return UnsupportedError(
        f"{shown(names[0])} is {what} that an earlier call left for this one, which takes another "
        f"path through the step ({len(names)} such).\n{rewrite}",
        code="E808",
        details={"tensors": list(names[:20])},
    )


def _without_optimizer(binding: Binding, name: str) -> str | None:
    """Return the name of a gradient's parameter if no optimizer of the step has it.

    Args:
        binding: The binding of the graph that reads the gradient.
        name: The name of the gradient.
    """
    parameter = binding.sources[name].parameter
    found = [entry.value for entry in binding.stateful()]
    optimizers = [each for each in found if isinstance(each, torch.optim.Optimizer)]
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    is_lost = parameter is not None and optimizers and id(parameter) not in held
    return name.removesuffix(".grad") if is_lost else None
