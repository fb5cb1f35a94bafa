"""The roofline's figures for the processor at hand, probed in about a second and cached.

No data sheet describes "this CPU": clocks depend on the instruction set in use, bandwidth on the
memory fitted. So a child process with the wanted number of threads (numpy's BLAS reads it when it
is loaded) multiplies matrices and copies memory with numpy, and the medians are kept in the
cost cache under this machine's name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pardnn.cost.host import cpu_name
from pardnn.cost.roofline import DeviceModel
from pardnn.cost.table import (
    CostTable,
    Entry,
    Machine,
    cache_folder,
    load_table,
    save_table,
)
from pardnn.errors import PardnnError

#: Rows and columns of the probe's matrices, and bytes of its copies (larger than caches).
PROBE_SIZE = 768
PROBE_BYTES = 128 << 20

_PROBE = """
import json, statistics, sys, threading, time
import numpy as np
size, num_bytes, threads = map(int, sys.argv[1:])
def median(action, times=7):
    action()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
found = {}
for dtype in ("float32", "float64"):
    a = np.full((size, size), 0.5, dtype=dtype)
    out = np.empty_like(a)
    found["matmul." + dtype] = median(lambda: np.matmul(a, a, out=out))
part = num_bytes // threads
pairs = [(np.ones(part, np.uint8), np.ones(part, np.uint8)) for _ in range(threads)]
def copies():
    workers = [threading.Thread(target=np.copyto, args=pair) for pair in pairs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
found["copy"] = median(copies)
print(json.dumps(found))
"""


def this_cpu(threads: int = 1, *, folder: Path | None = None) -> DeviceModel:
    """Return this processor's model for ops of `threads` threads.

    Args:
        threads: That one op may use.
        folder: Of the cost cache; the user's if absent.

    Raises:
        PardnnError: If the probe cannot be run.
    """
    machine = Machine(
        device=cpu_name(),
        library=f"numpy {np.__version__} probe {PROBE_SIZE} {PROBE_BYTES}",
        threads=threads,
    )
    folder = folder or cache_folder()
    entries = load_table(machine, folder).entries
    if not {"matmul.float32", "matmul.float64", "copy"} <= set(entries):
        entries = {
            name: Entry(seconds=seconds, repetitions=7) for name, seconds in _probe(threads).items()
        }
        save_table(CostTable(machine, entries), folder)
    return _model(machine, entries)


def _probe(threads: int) -> dict[str, float]:
    environment = os.environ | {
        name: str(threads)
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    }
    command = [sys.executable, "-c", _PROBE, str(PROBE_SIZE), str(PROBE_BYTES), str(threads)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, check=True, timeout=60, text=True
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PardnnError(
            f"the probe of this CPU failed: {error}.\n"
            "Choose another cost preset, such as --costs v100, or --costs measured.",
            code="E102",
        ) from error


def _model(machine: Machine, entries: Mapping[str, Entry]) -> DeviceModel:
    single, double = (
        2 * PROBE_SIZE**3 / entries[f"matmul.{dtype}"].seconds for dtype in ("float32", "float64")
    )
    bandwidth = 2 * PROBE_BYTES / entries["copy"].seconds
    rates = {"float32": single, "float64": double}
    vector = {"float32": single / 4, "float64": double / 4}
    return DeviceModel(
        name="cpu",
        flops={"matmul": rates, "conv": rates, "vector": vector},
        efficiency={"matmul": 1.0, "conv": 0.7, "vector": 1.0},
        bandwidth=bandwidth,
        launch=4e-6,
        width=64.0 * machine.threads,
        fill=bandwidth * 2e-7,
        sources={
            "flops": f"measured: numpy matmul of {PROBE_SIZE} x {PROBE_SIZE} on {machine.device} "
            "with the given threads; element-wise work at a quarter of it (assumed: separate "
            "multiplies and adds, one vector port); half precision as float32 (assumed)",
            "efficiency": "1 since measured; convolutions 0.7 (assumed)",
            "bandwidth": f"measured: copies of {PROBE_BYTES} bytes, read and written",
            "launch": "assumed: 4 us for an op called from Python",
            "width": "assumed: 16 lanes x 4 accumulators a thread",
            "fill": "assumed: 0.2 us of memory latency under load",
        },
    )
