"""What to write instead of torch calls that need data: one text per kind of case.

Each rewrite is captured and compared with eager steps by `tests/.../capture/test_advice.py`.
"""

from __future__ import annotations

_NUMBER = (
    "Arithmetic with numbers is followed: x * t.item(), math.sqrt(t.item()), and also\n"
    "torch.tensor(t.item()). This needs the number itself. Pass the tensor: x ** t.detach() for\n"
    "x ** t.item(), x.lerp(y, t.detach()), torch.atan for math.atan, torch.stack(losses).mean()\n"
    "for statistics.fmean.\n"
    'To see numbers: print(f"{x.item():.3f}"), "%.3f" % x.item() and log.append(float(x)) are\n'
    "followed, unlike x.numpy(), which needs them at once."
)
_BRANCH = (
    "Compute both sides and select: torch.where(condition, a, b) for `if`, torch.clamp or\n"
    "torch.maximum for max and min. A loop runs a fixed number of times, each under\n"
    "torch.where. A condition may depend on sizes and literals only; nn.Transformer\n"
    "reads a mask from outside the step, unless is_causal is passed with it.\n"
    "A branch that ends in `raise` is a check, if before that it only prints, logs and collects.\n"
    "FusedMovingAvgObsFakeQuantize has no branch, unlike FakeQuantize."
)
POSITION = (
    "x[i], x[i : i + n] and x.narrow with an i from data are followed, as copies, and so are\n"
    "writes: x[i] = x[i] * 2 for x[i].mul_(2), and x[i].clone() if x changes before its use.\n"
    "Instead of a slice up to a length, use torch.arange(n) < length. For a ring buffer:\n"
    "at = (pointer + torch.arange(n)) % size, and queue.index_copy_(0, at, new).\n"
    "Pass num_classes to F.one_hot, which otherwise reads it from the data."
)
#: For data-dependent code.
UNDONE = (
    "Under a condition on data, `optimizer.step()`, prints, logs and counts (`n += 1`) are\n"
    "followed. Move zero_grad() to the start of the step, and the rest after the step, where it\n"
    "can use what the step returned."
)
#: For such code in the first step of an optimizer.
FIRST = "What an optimizer makes at its first step is there after one step of your own."
#: For such code that draws random numbers.
DRAWN = (
    "Random numbers have to be drawn in every step: compute both sides, and select. To skip a\n"
    "layer at random: x = torch.where(torch.rand([]) < p, x, layer(x)). Models of transformers\n"
    "skip none with layerdrop=0.0 in their configuration."
)
#: By Python's use of a tensor's value: what the step does, and what to write instead.
OF_VALUES = {
    "bool": ("branches on a tensor", _BRANCH),
    "int": ("turns a tensor into a Python int, as int(i) and x[i] do", POSITION),
    "float": ("turns a tensor into a Python float", _NUMBER),
    "data": ("reads the content of a tensor", _NUMBER),
    "numpy": (
        "lets NumPy add or multiply 8 numbers or more, in an order of its own",
        "Python's own sum(numbers) / len(numbers) is followed, and torch.stack(losses).mean().",
    ),
    "ufunc": (
        "passes a tensor's value to a function of NumPy, which computes with it at once",
        "Functions of Python and of torch are followed: round(x.item(), 3) for np.round.",
    ),
    "complex": (
        "turns a tensor into a Python complex number",
        "Numbers that are real are followed: x.abs().item(), x.real.item() and x.imag.item().",
    ),
}

_MASK = (
    "A mean over what a mask selects is torch.where(mask, x, 0).sum() / mask.sum(); a loss over\n"
    "it (loss * mask).sum() / mask.sum(), or a target of ignore_index. To write where a mask is:\n"
    "torch.where(mask, new, old), or masked_fill."
)
_COUNTS = (
    "To count how often each of n values occurs, use\n"
    "torch.zeros(n).index_add_(0, ids, torch.ones(len(ids))), whose size does not depend on\n"
    "data; the values that occur are those with a count > 0."
)
#: By op: what to write instead of a call whose result has a size that depends on data.
_OF_OPS = {
    "nonzero": _MASK,
    "masked_select": _MASK,
    "bincount": _COUNTS,
    "_unique": _COUNTS,
    "unique": _COUNTS,
    "repeat_interleave": (
        "Give the size that you know: x.repeat_interleave(repeats, 0, output_size=n)."
    ),
    "_ctc_loss": (
        "CTC needs a table as wide as the longest target, and the lengths of the targets are\n"
        "data. If they are all the same, write them in the step:\n"
        "torch.full((batch,), length)."
    ),
}
_OTHERS = (
    "Call it before the step and pass the result, or compute on all elements and mask those that\n"
    "do not count: torch.where(mask, x, 0)."
)


def instead_of(op: str) -> str:
    """Return what to write instead of an op whose result has a size that depends on data."""
    name = op.split(".")[1] if op.startswith("aten.") else op
    known = [prefix for prefix in _OF_OPS if name.startswith(prefix)]
    return _OF_OPS[known[0]] if known else _OTHERS
