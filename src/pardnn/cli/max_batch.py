"""The command `max-batch`; `cli` adds it to the others."""

from __future__ import annotations

from pardnn.cli import options as opt
from pardnn.cli.output import show


def max_batch(
    target: opt.EntryPoint,
    devices: opt.Devices = None,
    max_memory: opt.MaxMemory = None,
    bandwidth: opt.Bandwidth = None,
    latency: opt.Latency = None,
    links: opt.Links = None,
    cluster: opt.ClusterChoice = None,
    algorithm: opt.Algorithm = "auto",
    objective: opt.Objective = "seconds",
    reserve: opt.Reserve = 0.1,
    seed: opt.Seed = 0,
    costs: opt.CostChoice = None,
    threads: opt.Threads = 1,
    as_json: opt.Json = False,
) -> None:
    """Find the largest batch size that fits; FUNCTION takes a keyword batch_size."""
    from pardnn.api.max_batch import max_batch as find_max_batch
    from pardnn.api.targets import PlanOptions

    machine = opt.cluster_from_options(devices, max_memory, bandwidth, latency, links, cluster)
    options = PlanOptions(
        algorithm=algorithm,
        objective=objective,  # pyright: ignore[reportArgumentType]
        reserve=reserve,
        seed=seed,
        costs=costs,
        threads=threads,
    )
    show(find_max_batch(target, machine, options), as_json, None)
