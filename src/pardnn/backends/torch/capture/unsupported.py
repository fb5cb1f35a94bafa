"""What cannot be captured, said with the user's line and the usual rewrite."""

from __future__ import annotations

from collections.abc import Sequence

from pardnn.errors import UnsupportedError


def _at(where: str | None) -> str:
    return f" ({where})" if where else ""


def _refuse(message: str, where: str | None, code: str = "E801") -> UnsupportedError:
    details = {"source": where} if where else {}
    return UnsupportedError(message, code=code, details=details)


def decision_by_value(where: str | None) -> UnsupportedError:
    """Python branches, loops or prints by a number that only a run knows."""
    return _refuse(
        f"the step needs the value of a tensor while it is captured{_at(where)}: it branches on\n"
        "it, or turns it into a Python number. One graph must hold for every step.\n"
        "Keep it a tensor: torch.where(condition, a, b) for `if`, a mask for a filter,\n"
        "torch.sqrt for math.sqrt; print and log what the step returns, outside of it.\n"
        "What the step makes of sizes and literals alone may decide; nn.Transformer looks into a\n"
        "mask from elsewhere, unless is_causal is given beside it.",
        where,
        "E802",
    )


def decides_shape(where: str | None) -> UnsupportedError:
    """A number that only a run knows becomes a size or an index."""
    return _refuse(
        f"a value read from a tensor decides a shape or an index{_at(where)}. Memory is planned\n"
        "before the step, so shapes must not depend on data.\n"
        "Use torch.index_select or gather for an index, a mask of fixed size for a length.",
        where,
        "E803",
    )


def dynamic_shape(op: str, where: str | None) -> UnsupportedError:
    """The shape of an op's result depends on data."""
    if "_ctc_loss" in op:
        return _refuse(
            f"CTC takes a table as wide as the longest target, and the lengths of the targets are"
            f" data{_at(where)}.\n"
            "Write the lengths down in the step where they are all the same: torch.full((batch,), "
            "length).",
            where,
            "E803",
        )
    return _refuse(
        f"the shape of the result of {op} depends on data{_at(where)}. Memory is planned before\n"
        "the step, so shapes must not.\n"
        "Use torch.where(mask, x, 0) or multiply by the mask instead of selecting by it.",
        where,
        "E803",
    )


def untraceable(op: str, where: str | None) -> UnsupportedError:
    """An op that cannot be recorded as a call."""
    return _refuse(
        f"op {op} cannot be captured{_at(where)}: it is no call on tensors of known shape.\n"
        "A user-defined op needs a fake implementation: torch.library.register_fake.",
        where,
    )


def hidden_size(op: str, where: str | None) -> UnsupportedError:
    """A fused recurrent kernel whose memory is not known before it runs."""
    flags = "cudnn" if "cudnn" in op else "mkldnn"
    return _refuse(
        f"the fused recurrent kernel {op} takes memory that is not known before"
        f" it runs{_at(where)}.\n"
        f"Run the layer unfused: `with torch.backends.{flags}.flags(enabled=False):` around it,\n"
        "or unroll it with torch.nn.LSTMCell or GRUCell.",
        where,
    )


def scripted(name: str) -> UnsupportedError:
    """A module whose code is no Python any more."""
    return UnsupportedError(
        f"{name!r} is made by torch.jit.script or torch.jit.trace: its parameters live outside of\n"
        "Python, where no stand-in can take their place.\n"
        "Pass the module that it was made of; torch.compile(module) is accepted, too.",
        details={"module": name},
    )


def sparse(where: str | None) -> UnsupportedError:
    """A sparse tensor: what it holds decides how large it is."""
    return _refuse(
        f"the step makes a sparse tensor{_at(where)}, whose size depends on data.\n"
        "Make the embedding with sparse=False.",
        where,
        "E803",
    )


def own_generator(where: str | None) -> UnsupportedError:
    """Random numbers from a generator of the user's own."""
    return _refuse(
        f"the step draws from a torch.Generator of its own{_at(where)}; ranks can only follow\n"
        "the default one. Leave out `generator=` and seed with torch.manual_seed before the step.",
        where,
    )


def reseeded(where: str | None) -> UnsupportedError:
    """Random numbers after the step has set the generator's state."""
    return _refuse(
        f"the step sets the state of the random generator and then draws from it{_at(where)},\n"
        "so the graph cannot tell which numbers come out: only the very calls that drew from\n"
        "that state before may come after it, as torch.utils.checkpoint has it.\n"
        "Seed before the step, or draw before it and pass the numbers as tensors.",
        where,
    )


def unknown_tensor(shape: Sequence[int], where: str | None) -> UnsupportedError:
    """A tensor whose origin the trace does not know."""
    return _refuse(
        f"the step uses a tensor of shape {list(shape)} that it keeps from an earlier step\n"
        f"{_at(where).strip()} in a place that capture does not reach.\n"
        "Keep it in a module's buffer or attribute.",
        where,
    )


def hidden_parameter(shape: Sequence[int], where: str | None) -> UnsupportedError:
    """A trainable tensor that no walk has found."""
    return _refuse(
        f"the step uses a trainable tensor of shape {list(shape)} that belongs to no model or\n"
        f"optimizer it can be seen to reach{_at(where)}. Pass its model as an argument.",
        where,
    )


def shared_storage(names: Sequence[str]) -> UnsupportedError:
    """Two sources over one storage, one of which the step writes."""
    return _refuse(
        f"the step writes {names[0]!r}, which shares its memory with {', '.join(names[1:])},\n"
        "though they are tensors of their own; on several ranks they would drift apart.\n"
        "Tie them by assigning the same Parameter, or clone one of them.",
        None,
    )


def large_constant(shape: Sequence[int], num_bytes: int, where: str | None) -> UnsupportedError:
    """A constant too large to travel in a graph file."""
    return _refuse(
        f"the step uses a tensor of shape {list(shape)} ({num_bytes} bytes) that is no argument,\n"
        f"parameter or buffer{_at(where)}. Up to 1 MiB would travel in the graph as a constant.\n"
        "Pass it to the step as an argument, or register it: module.register_buffer(name, tensor).",
        where,
    )


def changed_state(names: Sequence[str]) -> UnsupportedError:
    """Python's own state differs after the step."""
    first = names[0]
    more = f" (and {len(names) - 1} more: {', '.join(names[1:4])})" if len(names) > 1 else ""
    return UnsupportedError(
        f"the step changes Python state: {first}{more}. The graph holds tensors only, so the\n"
        "change would happen once, at capture, and never again.\n"
        "Move it out of the step: call scheduler.step(), count and log after the step returns.",
        code="E804",
        details={"changed": list(names)},
    )


def host_randomness(library: str) -> UnsupportedError:
    """Random numbers drawn on the host become constants."""
    return UnsupportedError(
        f"the step draws from {library}, whose numbers would be frozen in the graph.\n"
        "Draw with torch (torch.rand), or before the step and pass the numbers as tensors.",
        code="E804",
    )


def changing_constant(what: str, where: str | None) -> UnsupportedError:
    """Two traces of the same step differ."""
    return _refuse(
        f"the step is not the same twice: {what}{_at(where)}. A number or tensor that\n"
        "Python makes anew in each step (a clock, an iterator) would be frozen in the graph.\n"
        "Pass it to the step as an argument.",
        where,
        "E804",
    )


def no_loss(returned: str) -> UnsupportedError:
    """The step returns nothing that could be its loss."""
    return UnsupportedError(
        f"the step returned {returned}, and no scalar floating-point tensor in it.\n"
        "Return the loss: a tensor with one element, or a tuple, dict or object that holds it\n"
        "(a field named `loss` is taken first).",
        code="E805",
        details={"returned": returned},
    )


def odd_initial_state(name: str, reason: str) -> UnsupportedError:
    """Optimizer state that does not start from a constant."""
    return UnsupportedError(
        f"optimizer state {name!r} {reason}, so no rank can create its share of it.\n"
        "Run one step of your own before capturing, so that the state exists, or use an\n"
        "optimizer whose state starts from a constant (SGD with dampening 0, Adam, AdamW).",
        code="E806",
        details={"state": name},
    )


def replaced(name: str, reason: str) -> UnsupportedError:
    """A tensor attribute that cannot be followed from step to step."""
    return UnsupportedError(
        f"the step puts another tensor in the place of {name!r}, {reason}.\n"
        "Change it in place instead: tensor.copy_(new).",
        code="E807",
        details={"tensor": name},
    )
