"""Coverage of TDL on torch's own samples of operators: what they call, forward and backward.

    python -m bench coverage [--operators mm,pad] [--output FOLDER]

Every call of ATen that a sample of OpInfo makes is kept, and up to 10 distinct calls of each
operator are cut along every loop of its description by 2 and 3 workers, run and compared. It
writes `bench/results/<date>_opinfo.md` and `.json`: the figure, and what is not verified with its
reason.
"""

import argparse
import collections
import datetime
import itertools
import json
import platform
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common import RESULTS
from pardnn import backends
from pardnn.backends.torch.ops.codec import op_kind
from pardnn.errors import PardnnError
from pardnn.planner.check_descriptions import verify_call
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.aten.without import WHOLE, reason_without

SAMPLES, CALLS, KEPT, ELEMENTS = 60, 10, 100, 20_000
PLAIN = (bool, int, float, str, complex, torch.dtype)

#: What is said of an operator, the best first.
VERIFIED, NOT_CUT, WITHOUT, WRONG = "verified", "described, not cut", "no description", "wrong"

_HEAD = """\
`{command}`; {machine}. OpInfo's samples in float64 where there are such, at most {samples} of each
operator, forward and backward. The {calls} largest distinct calls of each ATen operator that they
make, and more until one can be cut, are cut along every loop by 2 and 3 workers, run and compared
with the whole (1e-10; of random operators the shapes). An operator counts as verified if a cut of
one of its overloads is and none is wrong.
"""

Calls = dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, Any]]]]


class Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of distinct calls that this machine can make."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
            return func(*args, **kwargs)
        shapes = repr(_pytree.tree_map(lambda v: getattr(v, "shape", v), [args, kwargs]))
        _, kept = self.calls.get(op_kind(func), (func, {}))
        before = None
        if len(kept) < KEPT and shapes not in kept:
            before = copied(list(args)), copied(kwargs)
        result = func(*args, **kwargs)
        if before is not None:
            self.calls.setdefault(op_kind(func), (func, {}))[1][shapes] = before
        return result


def copied(value: Any) -> Any:
    """Return arguments with tensors copied, and without what says where results lie."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() < ELEMENTS else None
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value if isinstance(value, PLAIN) else None


def recorded(names: Sequence[str]) -> Calls:
    """Run the samples of all operators, or those of these names, forward and backward."""
    # Its tests of its own outputs need this package; its samples do not.
    stand_in = cast(Any, types.ModuleType("expecttest"))
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    calls: Calls = {}
    for op in op_db:
        if names and op.name not in names:
            continue
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


def status(kind: str, function: Any, kept: dict[str, tuple[Any, Any]]) -> tuple[str, str]:
    """Return what cutting the largest calls of an overload shows, and why it shows no more."""
    if description_of(kind) is None:
        return WITHOUT, reason_without(kind) or ""
    cuts = loops = 0
    for number, (args, kwargs) in enumerate(sorted(kept.values(), key=size, reverse=True)):
        if cuts and number >= CALLS:
            break
        try:
            call = backends.call_with_values(function, args, kwargs)
            done = verify_call(*call, workers=(2, 3))
        except (PardnnError, RuntimeError):
            continue
        if done.problems:
            return WRONG, str(done.problems[0])
        cuts += len(done.verified)
        loops += len(done.verified) + len(done.skipped)
    if cuts:
        return VERIFIED, ""
    short = "the dims that can be cut have one element in all samples"
    plain = ".".join(kind.split(".")[:2])
    return NOT_CUT, WHOLE.get(plain) or (short if loops else "no loop of these calls can be cut")


def size(call: tuple[Any, Any]) -> int:
    return sum(t.numel() for t in _pytree.tree_leaves(call) if torch.is_tensor(t))


def operator_of(kind: str) -> str:
    """Return the operator of an overload, in-place forms with the others."""
    return kind.split(".")[1].rstrip("_")


def best(found: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield each operator with the best that an overload of it shows, unless one is wrong.

    Args:
        found: Status and reason by overload.
    """
    order = (WRONG, VERIFIED, NOT_CUT, WITHOUT)
    for name, kinds in itertools.groupby(sorted(found, key=operator_of), operator_of):
        text, reason = min((found[kind] for kind in kinds), key=lambda row: order.index(row[0]))
        yield name, text, reason


def page(report: Mapping[str, Any]) -> str:
    """Return the results as Markdown; every figure comes from the JSON."""
    found = report["overloads"]
    operators = list(best(found))
    verified = sum(text == VERIFIED for _, text, _ in operators)
    counts = ", ".join(f"{n} {text}" for text, n in _counts(row[0] for row in found.values()))
    lines = [f"# TDL on torch's own samples of operators, {report['date']}", ""]
    lines += [_HEAD.format(**report, samples=SAMPLES, calls=CALLS)]
    lines += [f"**{verified} of {len(operators)} operators are verified**; by overload: {counts}, "]
    lines[-1] += f"of {len(found)}.\n"
    lines += [
        "Not verified, each with its reason. They run whole on every device, never wrongly.\n"
    ]
    lines += ["| operator | | why |", "| --- | --- | --- |"]
    lines += [f"| {name} | {text} | {why} |" for name, text, why in operators if text != VERIFIED]
    return "\n".join(lines) + "\n"


def _counts(texts: Iterator[str]) -> list[tuple[str, int]]:
    return collections.Counter(texts).most_common()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page, or print it if only some operators are asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench coverage", description=__doc__)
    parser.add_argument("--operators", default="", help="names of OpInfo, with commas; default all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    names = [name for name in options.operators.split(",") if name]
    warnings.simplefilter("ignore")
    found = {kind: status(kind, *kept) for kind, kept in sorted(recorded(names).items())}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    report = {
        "date": today, "command": "python -m bench coverage",
        "machine": f"{platform.machine()}, torch {torch.__version__}", "overloads": found,
    }  # fmt: skip
    if names:
        sys.stdout.write(page(report))
        return
    path = options.output / f"{today}_opinfo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(report), encoding="utf-8")
    sys.stdout.write(f"{path.with_suffix('.md')}\n")


if __name__ == "__main__":
    main()
