"""Measuring, in a child process, the calls of a graph that somebody else may have written.

A captured graph holds the calls of the user's own step. A graph file may name any operator with any
arguments: one that reads foreign memory, or that makes 8 GiB where the file says 16 bytes. So its
calls run only on request (`--costs measured`), and then

- only operators on a list of names are run (`Allowed`); the others are estimated,
- each call is first made on tensors without data, and refused if its results are not those that the
  file declares,
- all of this happens in a child process with limits of memory and time, which writes nothing and
  ends with this one, or at once on SIGTERM.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pardnn.backends.large_pages import LARGE_PAGES, has_large_pages
from pardnn.backends.torch.comm.private_folder import private_folder
from pardnn.backends.torch.ops.codec import bind, find_call
from pardnn.backends.torch.profile.op_times import (
    BUDGET_SECONDS,
    ProfileStats,
    machine_of,
    profile_graph,
)
from pardnn.backends.torch.profile.synthetic_inputs import synthetic_inputs
from pardnn.cost.host import available_bytes
from pardnn.cost.table import CostTable, Entry, cache_folder, load_table, save_table
from pardnn.errors import FileError, UnsupportedError, shown
from pardnn.files import parse_json
from pardnn.graph.file import read_graph, write_graph
from pardnn.graph.ir import Graph, Op, Tensor

_GRAPH, _REQUEST = "graph.json", "request.json"
_PR_SET_PDEATHSIG = 1
#: Bytes besides tensors: torch's libraries and its kernels' own memory.
ALLOWANCE_BYTES = 2 << 30
#: Seconds that the child has beyond its budget to load torch and to end the current call.
GRACE_SECONDS = 60.0


def profile_file(
    graph: Graph,
    device: torch.device | str = "cpu",
    *,
    allowed: Collection[str],
    threads: int = 1,
    memory: int | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    keeps_freed: bool = True,
) -> tuple[CostTable, ProfileStats]:
    """Time the calls of a graph that was read from a file; see `profile_graph`.

    Args:
        graph: The graph in the file.
        device: Where to run the calls.
        allowed: Kinds of calls that may run; the others are estimated.
        threads: How many threads an op may use on a CPU.
        memory: Bytes of tensors that it may take; None: what the device has free.
        budget_seconds: Time after which each remaining call is estimated.
        keeps_freed: See `profile_graph`.

    Raises:
        FileError: E412, if the child process ends by a signal or takes too long.
    """
    free = available_bytes()
    request = {
        "device": str(torch.device(device)), "allowed": sorted(allowed), "threads": threads,
        "memory": min(free, memory or free), "budget_seconds": budget_seconds,
        "parent": os.getpid(), "keeps_freed": keeps_freed,
    }  # fmt: skip
    with private_folder() as folder:
        write_graph(graph, folder / _GRAPH)
        (folder / _REQUEST).write_text(json.dumps(request), encoding="utf-8")
        answer = _asked(folder, budget_seconds + GRACE_SECONDS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    table = load_table(machine_of(torch.device(device), keeps_freed=keeps_freed), cache_folder())
    torch.set_num_threads(before)
    # What is known stays: plans have been made with it.
    answered = {text: Entry(**row) for text, row in answer["entries"].items()}
    entries = {text: each for text, each in answered.items() if text not in table.entries}
    # Estimates are not kept, since these calls can be measured where the step is captured.
    save_table(table.with_entries({k: v for k, v in entries.items() if v.repetitions}),
               cache_folder())  # fmt: skip
    stats = answer["stats"]
    rows = tuple((name, kind, why) for name, kind, why in stats.pop("estimated"))
    return table.with_entries(entries), ProfileStats(**stats, estimated=rows)


def _asked(folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run the child and return its answer."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    path[LARGE_PAGES] = "1" if has_large_pages() else "0"  # as of this process
    command = [sys.executable, "-m", "pardnn.backends.torch.profile.of_file", str(folder)]
    try:
        done = subprocess.run(
            command, env=os.environ | path, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise _ended(f"took longer than {timeout_s:g} s") from None
    if done.returncode < 0:
        raise _ended(f"ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[
            -1
        ]
        raise _ended(f"failed: {shown(last)}")
    return parse_json(done.stdout, "the answer of the process that measures")


def _ended(how: str) -> FileError:
    return FileError(
        f"measuring the calls of this graph file {how}.\n"
        "Take a preset's costs instead: --costs a100, or cpu.",
        code="E412",
    )


class Allowed:
    """Which ops may run: those of listed kinds, with the results that the graph declares.

    Args:
        kinds: The kinds that may run.
        tensors: The tensors of the graph, by name.
    """

    def __init__(self, kinds: Collection[str], tensors: Mapping[str, Tensor]) -> None:
        self._kinds = frozenset(kinds)
        self._tensors = tensors

    def __call__(self, op: Op) -> None:
        """Check an op, without running it.

        Raises:
            UnsupportedError: E801, if it may not run.
        """
        kind = _inner_kind(op)
        if not may_run(kind, self._kinds):
            raise UnsupportedError(f"op {kind!r:.80} of a file is not run")
        with FakeTensorMode(), torch.no_grad():
            values = synthetic_inputs(op, self._tensors, torch.device("cpu"))
            try:
                bind(op, "cpu")(values)
            except DataDependentOutputException:  # a number read from a tensor, always of one size
                return
        for output in op.outputs:
            problem = _difference(output, values[output.name])
            if problem is not None:
                raise UnsupportedError(f"op {op.name!r:.80} makes {problem}")


def may_run(kind: str, kinds: Collection[str]) -> bool:
    """Whether calls of a kind may run: host arithmetic, a listed one, or one of core ATen."""
    if kind.startswith(("scalar.", "pardnn.")) or kind in kinds:
        return True
    found = find_call(kind)
    tags = getattr(found, "tags", ())
    return kind.startswith("aten.") and torch.Tag.core in tags


def _inner_kind(op: Op) -> str:
    """Return the kind of the call that an op makes: a draw holds another one."""
    args = (op.arguments or {}).get("args")
    is_draw = op.kind.startswith("pardnn.") and isinstance(args, list) and args
    return args[0] if is_draw and isinstance(args[0], str) else op.kind


def _difference(declared: Tensor, found: Any) -> str | None:
    """Return how a result differs from its declaration; None if it does not."""
    if not isinstance(found, torch.Tensor):
        is_host = (declared.dtype or "").startswith("host.")
        return None if is_host else f"no tensor {declared.name!r:.80}"
    dtype, shape = str(found.dtype).removeprefix("torch."), tuple(found.shape)
    if (dtype, shape) != (declared.dtype, declared.shape):
        return f"{dtype}{list(shape)}, the file says {declared.dtype}{list(declared.shape or ())}"
    needed = math.prod(shape) * found.element_size()
    is_owner = declared.alias_of is None
    if is_owner and needed > declared.bytes and 0 not in (found.stride() or (1,)):
        return f"{needed} bytes, the file says {declared.bytes}"
    return None


def main(folder: Path) -> None:
    """Measure as the child, and print the answer as one JSON object.

    Args:
        folder: The folder with the graph and the request.
    """
    request = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # torch asks for a temporary folder while it loads, and Python finds one by writing to it.
    tempfile.tempdir = str(folder)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != request["parent"]:
            os._exit(1)
    _limit(resource.RLIMIT_DATA, request["memory"] + ALLOWANCE_BYTES)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CPU, int(request["budget_seconds"] + GRACE_SECONDS) * max(
        1, request["threads"]))  # fmt: skip
    begin = time.perf_counter()
    graph = read_graph(folder / _GRAPH)
    tensors = {t.name: t for op in graph.ops for t in op.outputs}
    table, stats = profile_graph(
        graph, request["device"], threads=request["threads"], memory=request["memory"],
        budget_seconds=request["budget_seconds"], admit=Allowed(request["allowed"], tensors),
        is_kept=False, keeps_freed=request["keeps_freed"],
    )  # fmt: skip
    rows = asdict(stats) | {"seconds": time.perf_counter() - begin}
    entries = {text: asdict(each) for text, each in table.entries.items()}
    sys.stdout.write(json.dumps({"entries": entries, "stats": rows}))


def _limit(which: int, amount: int) -> None:
    _, hard = resource.getrlimit(which)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(which, (amount, amount))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
