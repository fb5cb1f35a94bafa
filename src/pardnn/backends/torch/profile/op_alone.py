"""Timing one call alone, on synthetic inputs.

Alone, a call finds its inputs in the fastest caches; in a step, the ops in between have displaced
them. So on a CPU 4 MiB are written before each repetition, which leaves the inputs at most in the
last-level cache. Sum of op times over the time of eager steps (processor time, one thread, 1 MiB of
second-level and 36 MiB of third-level cache), by MiB written:

                            0     2     4     8    12
    six linear layers    0.56  0.65  0.78  0.79  0.97
    CNN, batch norm      0.85  0.96  1.04  1.23  1.32
    GPT-2, 4 layers      0.85  0.86  1.00  1.14  1.17
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from pardnn.backends.torch.ops.codec import bind
from pardnn.backends.torch.ops.host_allocator import keep_next
from pardnn.backends.torch.ops.out_forms import may_have_place
from pardnn.backends.torch.profile.cpu_clock import undisturbed
from pardnn.backends.torch.profile.synthetic_inputs import synthetic_inputs
from pardnn.cost.costs import HOST_SIGNATURE, VIEW_SIGNATURE
from pardnn.cost.host import available_bytes
from pardnn.cost.table import Entry
from pardnn.graph.ir import Op, Tensor

#: Timed repetitions of one call, and the seconds after which no more start. Few
#: enough that in-place calls on [0.5, 1) reach neither infinity nor denormal numbers.
MAX_REPETITIONS = 25
MIN_REPETITIONS = 3
CALL_SECONDS = 0.05

#: A call that takes longer, in seconds, is timed twice, its first run included.
SLOW_SECONDS = 0.3

#: Bytes written before each repetition on a CPU.
SWEEP_BYTES = 4 << 20


def measure_alone(
    op: Op, tensors: Mapping[str, Tensor], device: torch.device, memory: int | None, *, hurry: bool
) -> Entry:
    """Time one op on synthetic inputs.

    Args:
        op: The op.
        tensors: The graph's tensors by name.
        device: Where to run it.
        memory: Bytes of tensors that it may take; None: what the device has free.
        hurry: Whether to time it only once.

    Raises:
        RuntimeError: Whatever the op raises on them, or if it does not fit the device.
    """
    needed = sum(tensors[name].bytes for name in op.inputs) + sum(t.bytes for t in op.outputs)
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    room = int(0.9 * free) if memory is None else min(int(0.9 * free), memory)
    if needed > room:  # no CPU allocator refuses in time
        raise RuntimeError(f"it needs {needed} bytes, {room} may be taken")
    keep_next(may_have_place(op))
    run = bind(op, device)
    env = synthetic_inputs(op, tensors, device)
    results = [output.name for output in op.outputs if output.name not in op.inputs]

    def once() -> None:
        for name in results:
            env.pop(name, None)
        run(env)

    return (_time_cuda if device.type == "cuda" else _time_cpu)(once, hurry)


def _repetitions(seconds: float, hurry: bool) -> int:
    if hurry:
        return 1
    return max(MIN_REPETITIONS, min(MAX_REPETITIONS, int(CALL_SECONDS / max(seconds, 1e-9))))


def _timed(once: Callable[[], None]) -> float:
    start = time.perf_counter()
    once()
    return time.perf_counter() - start


def _time_cpu(once: Callable[[], None], hurry: bool) -> Entry:
    sweep = torch.zeros(SWEEP_BYTES // 4)

    with undisturbed() as own_time:

        def timed() -> float:
            sweep.add_(1.0)
            return own_time(once)

        first = timed()  # loads kernels, plans the convolution: milliseconds
        warm = first if CALL_SECONDS < first <= SLOW_SECONDS else timed()
        # If only the first run is slow, it must not be half of the result.
        if min(first, warm) > SLOW_SECONDS and not hurry:
            return _entry([first, warm])
        return _entry([timed() for _ in range(_repetitions(warm, hurry))])


def _entry(seconds: list[float]) -> Entry:
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    spread = (ordered[-1 - quarter] - ordered[quarter]) / 2
    return Entry(seconds=statistics.median(ordered), spread=spread, repetitions=len(ordered))


def _time_cuda(once: Callable[[], None], hurry: bool) -> Entry:
    """Time back-to-back calls with events, and measure the workspace of a call in bytes.

    Back to back, the launch overhead of a short op shows as it does in a step: the device waits.
    """
    once()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    warm = _timed(lambda: (once(), torch.cuda.synchronize())[0])
    # `once` frees the last result first, so a run without workspace peaks at `before` again.
    workspace = max(0, torch.cuda.max_memory_allocated() - before)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_repetitions(warm, hurry) + 1)]
    marks[0].record()
    for mark in marks[1:]:
        once()
        mark.record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(marks)
    return replace(_entry([a.elapsed_time(b) / 1e3 for a, b in pairs]), workspace=workspace)


def measure_overheads(device: torch.device) -> dict[str, Entry]:
    """Return the overheads of a call from Python: of a view, and of host arithmetic.

    With a GPU, views cost nothing: the host makes them while the device works.

    Args:
        device: Where the views are made.
    """
    env: dict[str, Any] = {"x": torch.zeros(8, 8, device=device), "s": 0.5}
    view, power = torch.ops.aten.view.default, pow

    def make_view() -> None:
        env["y"] = view(env["x"], [64])

    def make_power() -> None:
        env["t"] = power(env["s"], 2.0)

    views = _entry([_timed(make_view) for _ in range(500)])
    return {
        VIEW_SIGNATURE: Entry(seconds=0.0) if device.type == "cuda" else views,
        HOST_SIGNATURE: _entry([_timed(make_power) for _ in range(500)]),
    }
