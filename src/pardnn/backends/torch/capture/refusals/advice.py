"""What to write in the place of torch calls that need data: one text per kind of case.

Each rewrite is captured and compared with eager steps by `tests/.../capture/test_advice.py`.
"""

from __future__ import annotations

_NUMBER = (
    "Keep it a tensor: torch.sqrt for math.sqrt, x * t for x * float(t), unbind for tolist.\n"
    'To see numbers: print(f"{x.item():.3f}"), "%.3f" % x.item() and log.append(float(x)) are\n'
    "followed, unlike x.numpy(), which needs them at once."
)
_BRANCH = (
    "Compute both sides and select: torch.where(condition, a, b) for `if`, torch.clamp or\n"
    "torch.maximum for max and min. A loop runs a fixed number of times, each under\n"
    "torch.where. What the step makes of sizes and literals alone may decide; nn.Transformer\n"
    "looks into a mask from elsewhere, unless is_causal is given beside it.\n"
    "What ends in `raise` is a check, if it does nothing before but print, log and collect."
)
POSITION = (
    "Followed are x[i], x[i : i + n] and x.narrow at an i that is data, as copies, and writes\n"
    "there: x[i] = x[i] * 2 for x[i].mul_(2), and x[i].clone() where x changes before its use.\n"
    "A slice up to a length is torch.arange(n) < length. What begins again at the end of a queue:\n"
    "at = (pointer + torch.arange(n)) % size, and queue.index_copy_(0, at, new).\n"
    "F.one_hot takes num_classes, which it otherwise reads off the data."
)
#: For code that runs by a condition on data.
UNDONE = (
    "Under a condition on data `optimizer.step()`, prints, logs and counts (`n += 1`) are\n"
    "followed; zero_grad() goes to the begin of the step, all else after it, by its result."
)
#: For such code that draws random numbers.
DRAWN = (
    "What is drawn has to be drawn in every step: compute both sides, and select. To leave out a\n"
    "layer by chance: x = torch.where(torch.rand([]) < p, x, layer(x)). Models of transformers\n"
    "leave none out with layerdrop=0.0 in their configuration."
)
#: By what Python makes of a tensor's value: what the step does, and what to write instead.
OF_VALUES = {
    "bool": ("branches on a tensor", _BRANCH),
    "int": ("turns a tensor into a Python int, as int(i) and x[i] do", POSITION),
    "float": ("turns a tensor into a Python float", _NUMBER),
    "data": ("reads the content of a tensor", _NUMBER),
}

_MASK = (
    "A mean over what a mask selects is torch.where(mask, x, 0).sum() / mask.sum(); a loss over\n"
    "it (loss * mask).sum() / mask.sum(), or a target of ignore_index. To write where a mask is:\n"
    "torch.where(mask, new, old), or masked_fill."
)
_COUNTS = (
    "How often each of n values occurs is\n"
    "torch.zeros(n).index_add_(0, ids, torch.ones(len(ids))), of a size that does not depend on\n"
    "data; which of them occur is that > 0."
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
        "CTC takes a table as wide as the longest target, and the lengths of the targets are\n"
        "data. Write them down in the step where they are all the same:\n"
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
