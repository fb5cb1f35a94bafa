"""One all-gather and one reduce-scatter, as messages and as collectives of gloo.

    python -m bench collectives [--ranks 2,4] [--rounds 60]

The plan's form is messages: every rank posts its sends and receives, waits, and puts together or
adds up. The others are `torch.distributed` and its functional collectives. All take turns in the
same processes; time is the fastest round's on the slowest rank, CPU is that of one rank.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from bench.common.forked import forked, process_group

SIZES = (1 << 10, 1 << 18)  # elements of float32 on each rank


def gather_by_messages(own: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    whole = torch.empty(size * len(own))
    others = [other for other in range(size) if other != rank]
    received = {other: torch.empty_like(own) for other in others}
    works = [dist.isend(own, other) for other in others]
    works += [dist.irecv(received[other], other) for other in others]
    for work in works:
        work.wait()
    return torch.cat([own if i == rank else received[i] for i in range(size)], out=whole)


def gather_by_collective(own: torch.Tensor, _rank: int, size: int) -> torch.Tensor:
    whole = torch.empty(size * len(own))
    dist.all_gather_into_tensor(whole, own)
    return whole


def gather_by_functional(own: torch.Tensor, _rank: int, _size: int) -> torch.Tensor:
    return functional.wait_tensor(functional.all_gather_tensor(own, 0, dist.group.WORLD))


def scatter_by_messages(own: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    parts = own.chunk(size)
    others = [other for other in range(size) if other != rank]
    received = {other: torch.empty_like(parts[rank]) for other in others}
    works = [dist.isend(parts[other], other) for other in others]
    works += [dist.irecv(received[other], other) for other in others]
    for work in works:
        work.wait()
    total = (parts[0] if rank == 0 else received[0]).clone()
    for i in range(1, size):
        total += parts[rank] if i == rank else received[i]
    return total


def scatter_by_collective(own: torch.Tensor, _rank: int, size: int) -> torch.Tensor:
    total = torch.empty(len(own) // size)
    dist.reduce_scatter_tensor(total, own.clone())
    return total


def scatter_by_functional(own: torch.Tensor, _rank: int, _size: int) -> torch.Tensor:
    scattered = functional.reduce_scatter_tensor(own, "sum", 0, dist.group.WORLD)
    return functional.wait_tensor(scattered)


Exchange = Callable[[torch.Tensor, int, int], torch.Tensor]
IMPLEMENTATIONS: dict[str, dict[str, Exchange]] = {
    "all-gather": {"messages": gather_by_messages, "collective": gather_by_collective,
                   "functional": gather_by_functional},
    "reduce-scatter": {"messages": scatter_by_messages, "collective": scatter_by_collective,
                       "functional": scatter_by_functional},
}  # fmt: skip


def measure(size: int, rounds: int) -> list[list[Any]]:
    """Return a row per case: collective, elements, implementation, seconds, CPU seconds.

    Seconds are those of the fastest round, on the slowest rank.
    """

    def body(rank: int, store: str) -> list[list[Any]]:
        process_group(rank, size, store)
        found = []
        for collective, exchanges in IMPLEMENTATIONS.items():
            for elements in SIZES:
                best = {name: [float("inf"), float("inf")] for name in exchanges}
                own = torch.arange(float(elements)) + rank
                expected = exchanges["messages"](own, rank, size)
                for _ in range(rounds):
                    for name, run in exchanges.items():
                        dist.barrier()
                        start, cpu = time.perf_counter(), time.process_time()
                        result = run(own, rank, size)
                        taken = [time.perf_counter() - start, time.process_time() - cpu]
                        best[name] = [min(a, b) for a, b in zip(best[name], taken, strict=True)]
                        assert torch.equal(result, expected)
                found += [[collective, elements, name, *best[name]] for name in exchanges]
        return found

    ranks = forked(size, body)
    return [
        [*rows[0][:3], max(row[3] for row in rows), max(row[4] for row in rows)]
        for rows in zip(*ranks, strict=True)
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench collectives")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    sys.stdout.write("| collective | ranks | KiB a rank | by | fastest, us | CPU, us |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
    for size in map(int, options.ranks.split(",")):
        for collective, elements, name, seconds, cpu in measure(size, options.rounds):
            cells = [
                collective,
                size,
                elements * 4 >> 10,
                name,
                f"{1e6 * seconds:.0f}",
                f"{1e6 * cpu:.0f}",
            ]
            sys.stdout.write("| " + " | ".join(map(str, cells)) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
