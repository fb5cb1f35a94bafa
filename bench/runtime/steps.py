"""Step times on two ranks of this machine: our plans beside DDP and FSDP2, measured in one run.

    python -m bench steps [--models gpt2,mlp] [--rounds 12] [--out FILE]

All systems live in the same two processes (gloo, one thread each) and take their steps in turn, so
that what else runs on the machine slows all of them; ratios are of the fastest steps. Every system
trains the same model on the same global batch: DDP and FSDP2 get their halves of it, as their users
would give them, ours the whole.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.common.forked import forked, process_group
from pardnn.api.planning import plan as make_plan
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.parallelize import parallelize
from pardnn.cluster import Cluster
from pardnn.plan.plan import Plan
from pardnn.planner.algorithms import ALGORITHMS, SHARDED
from testbed.small_models import classify_step, language_step

RANKS = 2
OURS = ("tofu", "pardnn", "data-parallel")
#: What `parallelize` decides by itself, with costs and links that it measures.
DEFAULT = "auto, measured"
#: Two local gloo ranks, as measured: bytes per second, seconds.
BANDWIDTH, LATENCY = 2e9, 140e-6


def gpt2(layers: int, width: int, words: int, batch: int, length: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_head=width // 64, n_embd=width, vocab_size=words, n_positions=length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return language_step, (model, optimizer, torch.randint(words, (batch, length)))


def mlp(width: int, batch: int) -> Any:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(batch, width), torch.randint(width, (batch,))
    return classify_step, (model, optimizer, *data)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2-small": lambda: gpt2(2, 128, 512, 8, 32),
    "gpt2-large-batch": lambda: gpt2(4, 256, 2048, 8, 128),
    "mlp-large-batch": lambda: mlp(512, 2048),
    "mlp-small-batch": lambda: mlp(1024, 16),
}


def half(args: Any, rank: int) -> list[Any]:
    """Return a rank's half of each tensor of a batch."""
    return [arg.chunk(RANKS)[rank] for arg in args]


def ddp(entry: Any, rank: int) -> Callable[[], Any]:
    step, (model, _, *batch) = entry
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    mine = half(batch, rank)
    return lambda: loss_of(step(wrapped, optimizer, *mine))


def fsdp2(entry: Any, rank: int) -> Callable[[], Any]:
    from torch.distributed.fsdp import fully_shard

    step, (model, _, *batch) = entry
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    blocks = getattr(getattr(model, "transformer", None), "h", None)
    for block in blocks if blocks is not None else model:
        if list(block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mine = half(batch, rank)
    return lambda: loss_of(step(model, optimizer, *mine))


def training_steps(
    make: Callable[[], Any], plans: dict[str, Plan], rank: int
) -> dict[str, Callable[[], Any]]:
    """Return one step of each system on this rank.

    Args:
        make: Makes the user's step and its arguments, anew for each system.
        plans: Ours, by algorithm.
        rank: Of this process.
    """
    found: dict[str, Callable[[], Any]] = {}
    for name, plan in (plans | {DEFAULT: None}).items():
        step, args = make()
        fast = parallelize(step, *args, plan=plan, timeout=300, device="cpu")
        if plan is None and rank == 0:
            sys.stderr.write(f"{DEFAULT}: {fast.plan.algorithm}\n")
        found[name] = lambda fast=fast, batch=args[2:]: fast(*batch)
    found["DDP"] = ddp(make(), rank)
    found["FSDP2"] = fsdp2(make(), rank)
    return found


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return seconds of each system's steps, and what it cost our plans in bytes and messages."""
    step, args = MODELS[name]()
    graph = capture(step, *args)
    cluster = Cluster.uniform(RANKS, bandwidth=BANDWIDTH, latency=LATENCY)
    known = [each for each in OURS if each in ALGORITHMS or each in SHARDED]
    plans = {each: make_plan(graph, cluster, algorithm=each, costs="cpu") for each in known}

    def body(rank: int, store: str) -> dict[str, Any]:
        process_group(rank, RANKS, store)
        taken: dict[str, list[float]] = {}
        losses: dict[str, list[float]] = {}
        steps = training_steps(MODELS[name], plans, rank)
        for _ in range(rounds + 2):
            for system, take in steps.items():
                dist.barrier()
                start = time.perf_counter()
                loss = take()
                taken.setdefault(system, []).append(time.perf_counter() - start)
                losses.setdefault(system, []).append(loss.item())
        return {"seconds": {system: row[2:] for system, row in taken.items()}, "losses": losses}

    ranks = forked(RANKS, body, limit_s=1800)
    slowest = {
        system: [max(pair) for pair in zip(*rows, strict=True)]
        for system in ranks[0]["seconds"]
        for rows in [[each["seconds"][system] for each in ranks]]
    }
    return {"seconds": slowest, "losses": ranks[0]["losses"], "plans": plans}


def table(name: str, found: dict[str, Any]) -> str:
    """Return one model's rows as a Markdown table."""
    base = min(found["seconds"]["DDP"])
    lines = [
        f"### {name}\n",
        "| system | fastest step, ms | median, ms | times DDP | messages a step | MB sent a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for system, seconds in found["seconds"].items():
        plan = found["plans"].get(system)
        sent = ("-", "-")
        if plan is not None:
            sent = (str(len(plan.messages)), f"{plan.predicted.transfer_bytes / 1e6:.2f}")
        lines.append(
            f"| {system} | {1e3 * min(seconds):.1f} | {1e3 * statistics.median(seconds):.1f} | "
            f"{min(seconds) / base:.2f} | {sent[0]} | {sent[1]} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench steps")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    head = (
        f"# Step times on two ranks\n\n{date}, {platform.machine()}, torch {torch.__version__}, "
        f"gloo, one thread a rank, {options.rounds} rounds. Measured.\n"
        f"`python -m bench steps {' '.join(arguments)}`\n"
    )
    parts = [head]
    for name in options.models.split(","):
        parts.append(table(name, measure(name, options.rounds)))
        sys.stdout.write(parts[-1] + "\n")
        sys.stdout.flush()
    if options.out is not None:
        options.out.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
