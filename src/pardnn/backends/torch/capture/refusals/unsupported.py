"""The errors of capture for unsupported code, with the user's line and the usual rewrite.

Each function returns one error. `where` is "file.py:line" of the user's code; None if unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pardnn.backends.torch.capture.refusals import advice
from pardnn.errors import UnsupportedError


def at(where: str | None) -> str:
    """Return the place of an error as text: " (file.py:line)", or nothing if it is unknown."""
    return f" ({where})" if where else ""


def error_at(
    where: str | None, message: str, code: str = "E801", **details: Any
) -> UnsupportedError:
    """Return an error whose details name the place, if it is known."""
    source = {"source": where} if where else {}
    return UnsupportedError(message, code=code, details=details | source)


def data_dependent_branch(where: str | None, wanted: str = "bool") -> UnsupportedError:
    """Return E802: Python branches, loops or prints by a number that only a run knows.

    Args:
        where: "file.py:line" of the user's code; None if unknown.
        wanted: What Python makes of the tensor: a key of `advice.OF_VALUES`.
    """
    what, instead = advice.OF_VALUES[wanted]
    return error_at(
        where,
        f"the step {what}{at(where)}, whose value\n"
        f"is not known while it is captured: one graph must hold for every step.\n{instead}",
        "E802",
    )


def choice(where: str | None, what: str, rewrite: str = advice.UNDONE) -> UnsupportedError:
    """Return E802: code that runs depending on data and cannot be undone completely.

    Args:
        where: "file.py:line" of the condition; None if unknown.
        what: What the code does besides.
        rewrite: What to write instead.
    """
    return error_at(
        where,
        f"the step runs code under a condition on data{at(where)}, and that code\n"
        f"{what}.\n"
        "One graph must hold for every step: such code always runs, and what it writes in place\n"
        "into tensors is undone where the condition is false.\n"
        f"{rewrite}",
        "E802",
    )


def left_by_a_check(where: str | None, what: str) -> UnsupportedError:
    """Return E802: a failing check changes something before it raises.

    Args:
        where: "file.py:line" of the condition; None if unknown.
        what: What it changes.
    """
    return error_at(
        where,
        f"where a check on data fails{at(where)}, the step changes {what}\n"
        "before it raises. Each rank learns after the step that it failed, and then prints, logs\n"
        "and raises as the step does; anything else it does there would be lost.\n"
        "Do it where the exception is caught, around the call of the step:\n"
        "except ValueError: trainer.failures += 1.",
        "E802",
    )


def data_dependent_size(where: str | None) -> UnsupportedError:
    """Return E803: a number that only a run knows becomes a size or an index."""
    return error_at(
        where,
        f"a value read from a tensor decides a shape or an index{at(where)}. Memory is planned\n"
        f"before the step, so shapes must not depend on data.\n{advice.POSITION}",
        "E803",
    )


def flag_of_a_number(where: str | None) -> UnsupportedError:
    """Return E802: torch needs a plain bool, but gets a comparison of changing numbers."""
    return error_at(
        where,
        f"the step compares a number that changes from step to step{at(where)} and passes the\n"
        "outcome where torch takes only True or False, as in requires_grad_(n > 2),\n"
        "autocast(enabled=n > 2) and inference_mode(n > 2).\n"
        "Write bool(n > 2): the step is captured once for each of the two. This does not work for\n"
        "numbers from tensors (loss.item()), which are known only in a run: decide on those\n"
        "before the step, from what the last one returned, and pass the flag as an argument.\n"
        "A model's mode is set before the step: model.train(n > 2) between two calls of it.",
        "E802",
    )


def data_dependent_draws(kind: str, where: str | None) -> UnsupportedError:
    """Return E822: how many random numbers an op draws depends on its input."""
    return error_at(
        where,
        f"{kind}{at(where)} draws a number of random values that depends on its input: a sampler\n"
        "of gamma, beta, Dirichlet, binomial or Poisson variables rejects and draws again. Ranks\n"
        "that do not run it could not follow the generator.\n"
        "Draw before the step and pass the numbers in.",
        "E822",
    )


def data_dependent_shape(op: str, where: str | None) -> UnsupportedError:
    """Return E803: the shape of an op's result depends on data."""
    return error_at(
        where,
        f"the shape of the result of {op} depends on data{at(where)}. Memory is planned before\n"
        f"the step, so shapes must not.\n{advice.instead_of(op)}",
        "E803",
    )


def packed_lengths(where: str | None) -> UnsupportedError:
    """Return E803: sequences are packed by lengths that only a run knows."""
    return error_at(
        where,
        f"the step packs sequences by lengths that are data{at(where)}: they decide the size of\n"
        "the packed tensor, and memory is planned before the step.\n"
        "Lengths that are Python numbers are followed: pass lengths.tolist(), made before the\n"
        "step, if they are the same in every step. Otherwise run a layer of one direction on the\n"
        "padded sequences and mask what is beyond the ends: out = rnn(x)[0]; out * mask, where\n"
        "mask = torch.arange(len(x))[:, None, None] < lengths[:, None], time first. The last\n"
        "state of each sequence is out[lengths - 1, torch.arange(len(lengths))].",
        "E803",
    )


def untraceable(op: str, where: str | None) -> UnsupportedError:
    """Return E801: an op cannot be recorded as a call."""
    return error_at(
        where,
        f"op {op} cannot be captured{at(where)}: it is not a call on tensors of known shape.\n"
        "A user-defined op needs a fake implementation: torch.library.register_fake.",
    )


def unknown_workspace(op: str, where: str | None) -> UnsupportedError:
    """Return E801: a fused recurrent kernel, whose memory is not known before it runs."""
    flags = "cudnn" if "cudnn" in op else "mkldnn"
    return error_at(
        where,
        f"the fused recurrent kernel {op} takes memory that is not known before"
        f" it runs{at(where)}.\n"
        f"Run the layer unfused: `with torch.backends.{flags}.flags(enabled=False):` around it,\n"
        "or unroll it with torch.nn.LSTMCell or GRUCell.",
    )


def scripted(name: str) -> UnsupportedError:
    """Return E801: a module that TorchScript has compiled."""
    return UnsupportedError(
        f"{name!r} is made by torch.jit.script or torch.jit.trace: its parameters live outside\n"
        "Python, where no placeholder can replace them.\n"
        "Pass the module that it was made from; torch.compile(module) is accepted, too.",
        details={"module": name},
    )


def held_node(name: str) -> UnsupportedError:
    """Return E801: the node that adds up a gradient, whose hooks nothing lists."""
    return UnsupportedError(
        f"something holds the node that accumulates the gradient of {name!r}, for a hook, as\n"
        "register_multi_grad_hook does: capture cannot see the hook and would leave it out.\n"
        "Use tensor.register_hook or tensor.register_post_accumulate_grad_hook; within the step,\n"
        "register_multi_grad_hook is followed.",
        details={"tensor": name},
    )


def sparse(where: str | None) -> UnsupportedError:
    """Return E803: a sparse tensor, whose content decides its size."""
    return error_at(
        where,
        f"the step makes a sparse tensor{at(where)}, whose size depends on data.\n"
        "Make embeddings with sparse=False, and take an optimizer for dense gradients (Adam for\n"
        "SparseAdam). A product with a sparse matrix of fixed places is a sum over them:\n"
        "torch.zeros(n, k).index_add_(0, rows, values[:, None] * x[columns]).",
        "E803",
    )


def nested(where: str | None) -> UnsupportedError:
    """Return E803: a nested tensor, whose ragged sizes are data."""
    return error_at(
        where,
        f"the step uses a nested tensor{at(where)}, whose sizes are data.\n"
        "Pad before the step: torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), and pass\n"
        "a mask of what is there: torch.arange(longest) < lengths[:, None].",
        "E803",
    )


def higher_order(op: str, where: str | None) -> UnsupportedError:
    """Return E801: an operator on functions, where only a run knows which it calls."""
    return error_at(
        where,
        f"torch's operator {op!r} on functions cannot be captured{at(where)}: only in a run is it\n"
        "known which function it calls, or how often.\n"
        "torch.cond(p, f, g, (x,)) on a tensor p becomes torch.where(p, f(x), g(x)): both sides\n"
        "are computed, so they must be finite where they are not taken. On a Python bool it is\n"
        "captured. A loop runs a fixed number of times, each under torch.where.",
    )


def unlike_ways(where: str | None) -> UnsupportedError:
    """Return E801: two functions that one graph cannot both run to choose a result."""
    return error_at(
        where,
        f"both functions of torch.cond run{at(where)}, and only a run tells which one counts:\n"
        "neither may draw or write in place, and their results have one shape, type and device.\n"
        "Draw and write before it, or select from what is finite: torch.where(p, f(x), g(x)).",
    )


def zero_tangent(where: str | None) -> UnsupportedError:
    """Return E801: a tangent of forward-mode derivatives that torch keeps without memory."""
    return error_at(
        where,
        f"the step takes a forward-mode derivative under vmap{at(where)}, in which torch\n"
        "computes with zeros that have no memory; capture cannot see what becomes of them.\n"
        "Use reverse mode: torch.func.vmap(jacrev(grad(f))) for vmap(hessian(f)).",
    )


def custom_generator(where: str | None) -> UnsupportedError:
    """Return E801: random numbers from a generator of the user's own."""
    return error_at(
        where,
        f"the step draws from a torch.Generator of its own{at(where)}; ranks can only follow\n"
        "the default one. Leave out `generator=` and seed with torch.manual_seed before the step.",
    )


def reseeded(where: str | None) -> UnsupportedError:
    """Return E801: random numbers after the step has set the generator's state."""
    return error_at(
        where,
        f"the step sets the state of the random generator and then draws from it{at(where)},\n"
        "so the graph cannot tell which numbers come out: only the same calls that drew from\n"
        "that state before may follow it, as in torch.utils.checkpoint.\n"
        "Seed before the step, or draw before it and pass the numbers as tensors.",
    )


def unknown_tensor(shape: Sequence[int], where: str | None) -> UnsupportedError:
    """Return E801: a tensor whose origin the trace does not know."""
    return error_at(
        where,
        f"the step uses a tensor of shape {list(shape)}{at(where)}, which it\n"
        "keeps from an earlier step in a place that capture does not reach, or which was made\n"
        "without torch's ops. Keep it in a module's buffer or attribute, or pass it as an "
        "argument.\n"
        "Of a tensor from a cache of functools, keep a copy: self.mask = mask(n).clone(). Or run\n"
        "one step of your own before: the attribute then is there.",
    )


def unreachable_parameter(shape: Sequence[int], where: str | None) -> UnsupportedError:
    """Return E801: a trainable tensor outside the step's object graph."""
    return error_at(
        where,
        f"the step uses a trainable tensor of shape {list(shape)} that belongs to no model or\n"
        f"optimizer reachable from the step{at(where)}. Pass its model as an argument.",
    )


def shared_storage(names: Sequence[str]) -> UnsupportedError:
    """Return E801: two sources over one storage, one of which the step writes."""
    return error_at(
        None,
        f"the step writes {names[0]!r}, which shares its memory with {', '.join(names[1:])},\n"
        "though they are tensors of their own; on several ranks they would drift apart.\n"
        "Tie them by assigning the same Parameter, or clone one of them.",
    )


def large_constant(shape: Sequence[int], num_bytes: int, where: str | None) -> UnsupportedError:
    """Return E801: a constant too large for a graph file.

    Args:
        shape: The shape of the tensor.
        num_bytes: Its size.
        where: "file.py:line" of the user's code; None if unknown.
    """
    return error_at(
        where,
        f"the step uses a tensor of shape {list(shape)} ({num_bytes} bytes) that is not an\n"
        f"argument, parameter or buffer{at(where)}. Up to 1 MiB may be a constant of the graph.\n"
        "Pass it to the step as an argument, or register it: module.register_buffer(name, tensor).",
    )


def text_of_a_number(where: str | None) -> UnsupportedError:
    """Return E802: a text made from a number that changes, and not printed or logged."""
    return error_at(
        where,
        f"the step makes a string of a number that differs from step to step{at(where)}, and does\n"
        "more with it than print, log or collect it, or write it to a file that was open before\n"
        "the step. String methods that depend on its length or letters (ljust, replace) count as\n"
        'more: give a width instead, f"{x:<10.3f}".\n'
        "Return the number from the step, and make the string there.",
        "E802",
    )


def schedule_with_arguments(name: str, where: str | None) -> UnsupportedError:
    """Return E804: a schedule that the step calls both with arguments and without."""
    return error_at(
        where,
        f"the step calls {name}.step with arguments and without{at(where)}.\n"
        "Call it one way: scheduler.step(), or scheduler.step(metric).",
        "E804",
    )


def read_after_schedule(name: str, where: str | None) -> UnsupportedError:
    """Return E804: a rate or count is read after the schedule that changes it was stepped."""
    return error_at(
        where,
        f"the step calls {name}.step() and then reads a number that it changes{at(where)}:\n"
        "schedules are stepped after each step, outside of the graph.\n"
        "Make scheduler.step() the step's last call, or call it after the step.",
        "E804",
    )


def host_randomness(library: str) -> UnsupportedError:
    """Return E804: random numbers drawn on the host, which would become constants."""
    return UnsupportedError(
        f"the step draws from {library}, whose numbers would be frozen in the graph.\n"
        "Draw with torch (torch.rand), or before the step and pass the numbers as tensors.",
        code="E804",
    )


def drawn_from(name: str, kind: str) -> UnsupportedError:
    """Return E804: the step takes from an iterator or a generator of numbers of its own."""
    return UnsupportedError(
        f"the step takes from {name!r}, a {kind} that advances from step to step: what it gave\n"
        "would be frozen in the graph.\n"
        "Take from it before the step, and pass what it gives as an argument: step(..., "
        "next(iterator)).",
        code="E804",
        details={"name": name},
    )


def changing_step(what: str, where: str | None) -> UnsupportedError:
    """Return E804: two traces of the step differ."""
    return error_at(
        where,
        f"the step is not the same twice: {what}{at(where)}. A number or tensor that\n"
        "Python makes again in each step (a clock, an iterator) would be frozen in the graph.\n"
        "Pass it to the step as an argument; fast.step_s has the seconds of each step.",
        "E804",
        differs=what,
    )


def no_loss(returned: str) -> UnsupportedError:
    """Return E805: the step neither returns nor differentiates what could be its loss."""
    return UnsupportedError(
        f"the step returned {returned}, and no scalar floating-point tensor in it,\n"
        "and calls backward() on none.\n"
        "Return the loss: a tensor with one element, or a tuple, dict or object that holds it\n"
        "(a field named `loss` is taken first).",
        code="E805", details={"returned": returned},
    )  # fmt: skip


def replaced_tensor(name: str, reason: str) -> UnsupportedError:
    """Return E807: a tensor attribute that cannot be followed from step to step."""
    return UnsupportedError(
        f"the step replaces {name!r} {reason}.\nChange it in place instead: tensor.copy_(new).",
        code="E807",
        details={"tensor": name},
    )
