"""Coverage of TDL on torch's own samples of operators: what they call, forward and backward.

    python -m bench.tofu.opinfo > page.md

Every call of ATen that a sample of OpInfo makes is kept, and up to 10 distinct calls of each
operator are cut along every loop of its description by 2 and 3 workers, run and compared.
"""

import collections
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pardnn import backends
from pardnn.backends.torch.ops.codec import op_kind
from pardnn.errors import PardnnError
from pardnn.planner.check_descriptions import verify_call
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.aten.without import reason_without

SAMPLES, CALLS, KEPT, ELEMENTS = 12, 10, 30, 20_000
PLAIN = (bool, int, float, str, complex, torch.dtype)

Calls = dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, Any]]]]


class Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of distinct calls."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            _, kept = self.calls.setdefault(op_kind(func), (func, {}))
            shapes = _pytree.tree_map(lambda v: getattr(v, "shape", v), [args, kwargs])
            if len(kept) < KEPT and repr(shapes) not in kept:
                kept[repr(shapes)] = copied(list(args)), copied(kwargs)
        return func(*args, **kwargs)


def copied(value: Any) -> Any:
    """Return arguments with tensors copied, and without what says where results lie."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() < ELEMENTS else None
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value if isinstance(value, PLAIN) else None


def recorded() -> Calls:
    """Run the samples of all operators, forward and backward."""
    # Its tests of its own outputs need this package; its samples do not.
    stand_in = cast(Any, types.ModuleType("expecttest"))
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    calls: Calls = {}
    for op in op_db:
        dtypes = (torch.float64, torch.float32, torch.bool, torch.int64)
        dtype = next((d for d in dtypes if op.supports_dtype(d, "cpu")), torch.complex128)
        differentiates = op.supports_autograd and dtype.is_floating_point
        samples = op.sample_inputs("cpu", dtype, requires_grad=differentiates)
        for sample in itertools.islice(samples, SAMPLES):
            try:
                with Recorder(calls):
                    result = op(sample.input, *sample.args, **sample.kwargs)
                    tensors = [t for t in _pytree.tree_leaves(result) if torch.is_tensor(t)]
                    roots = [t for t in tensors if t.requires_grad]
                    torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            except (RuntimeError, TypeError, ValueError, AssertionError):
                continue  # some have no gradient, or no result that can be one
    return calls


def status(kind: str, function: Any, kept: dict[str, tuple[Any, Any]]) -> str:
    """Return what cutting the largest calls of an operator shows."""
    if description_of(kind) is None:
        return "no description"
    cuts = 0
    for args, kwargs in sorted(kept.values(), key=size, reverse=True)[:CALLS]:
        try:
            call = backends.call_with_values(function, args, kwargs)
            done = verify_call(*call, workers=(2, 3))
        except (PardnnError, RuntimeError):
            continue
        if done.problems:
            return f"wrong: {done.problems[0]}"
        cuts += len(done.verified)
    return "verified" if cuts else "described, not cut by these samples"


def size(call: tuple[Any, Any]) -> int:
    return sum(t.numel() for t in _pytree.tree_leaves(call) if torch.is_tensor(t))


def rows(calls: Calls) -> Iterator[tuple[str, str]]:
    """Yield operators, overloads and in-place forms together, with the best that one shows."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for kind, (function, kept) in sorted(calls.items()):
        found[kind.split(".")[1].rstrip("_")].add(status(kind, function, kept))
    order = ("verified", "described, not cut by these samples", "no description")
    for name, each in sorted(found.items()):
        wrong = [text for text in each if text.startswith("wrong")]
        yield name, wrong[0] if wrong else next(text for text in order if text in each)


def main() -> None:
    warnings.simplefilter("ignore")
    found = dict(rows(recorded()))
    counts = collections.Counter(text.partition(":")[0] for text in found.values())
    total = "; ".join(f"{count} {text}" for text, count in counts.most_common())
    sys.stdout.write(f"{len(found)} operators: {total}.\n\n| operator | | |\n| --- | --- | --- |\n")
    for name, text in found.items():
        if text != "verified":
            sys.stdout.write(f"| {name} | {text} | {reason_without(f'aten.{name}') or ''} |\n")


if __name__ == "__main__":
    main()
