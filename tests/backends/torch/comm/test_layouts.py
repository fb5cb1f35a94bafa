"""A tensor that was sent is read as on its own device: bit for bit, whatever its layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from pardnn.backends.torch.ops.codec import find_call
from testbed.op_samples import SAMPLES, Draw, with_keywords
from tests.backends.torch.messages import LAYOUTS, delivered

#: Readers whose results are no function of their inputs.
_MADE_UP = ("empty", "rand", "bernoulli", "dropout", "multinomial")
#: Kernels that take some arguments to be contiguous and would read beyond others, eager too.
_ROWS = ("attention",)
_NO_REPEATS = (
    "_embedding_bag",
    "native_group_norm_backward",
    "native_layer_norm_backward",
    "nanmedian",
)


def takes(kind: str, layout: str) -> bool:
    """Whether a call with such arguments has a meaning to compare."""
    if any(word in kind for word in _ROWS):
        return layout in ("contiguous", "at an offset", "slices of rows")
    is_repeated = layout.startswith(("expanded", "overlapping"))
    if is_repeated and (kind.split(".")[1].endswith("_") or "_fused" in kind):
        return False  # what is repeated is not written
    excluded = _MADE_UP + _NO_REPEATS if is_repeated else _MADE_UP
    return not any(word in kind for word in excluded)


def arguments(kind: str, layout: str) -> list[Any]:
    """Arguments of every sample of a call, in single precision, in that layout."""

    def laid_out(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.float() if leaf.dtype == torch.float64 else leaf
        return LAYOUTS[layout](leaf)

    made = []
    for draw in SAMPLES[kind]:
        args, kwargs = with_keywords(draw(Draw(0)))
        kwargs = {k: torch.float32 if v is torch.float64 else v for k, v in kwargs.items()}
        args = tuple(torch.float32 if arg is torch.float64 else arg for arg in args)
        made.append(pytree.tree_map(laid_out, (args, kwargs)))
    return made


def called(kind: str, args: Any, kwargs: Any) -> list[Any] | None:
    """Strides and bytes of each result; None if the call does not take these arguments."""
    try:
        found = find_call(kind)(*args, **kwargs)
    except (RuntimeError, IndexError):
        return None
    leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    return [(t.stride(), t.contiguous().reshape(-1).view(torch.uint8).tolist()) for t in leaves]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_reader_gives_the_same_bits_and_strides(layout: str) -> None:
    wrong, ran = [], 0
    for kind in sorted(SAMPLES):
        for args, kwargs in arguments(kind, layout) if takes(kind, layout) else ():
            sent = pytree.tree_map_only(torch.Tensor, delivered, (args, kwargs))
            here, there = called(kind, args, kwargs), called(kind, *sent)
            ran += here is not None
            if here is not None and here != there:
                wrong.append(kind)
    assert not wrong
    assert ran > 200
