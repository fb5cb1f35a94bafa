"""GPT-2 of 51 million parameters on four ranks, each held to 1 MiB more than its step's peak."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_model

import pardnn
from pardnn.backends.torch.make_step import capture_factory
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime.memory.meter import live_bytes
from pardnn.plan.plan import Plan
from tests.backends.torch.checkpoint.test_memory import growth
from tests.backends.torch.checkpoint.training import values
from tests.backends.torch.ranks import connect, run_ranks

CONFIG = transformers.GPT2Config(n_layer=8, n_embd=512, n_head=8, n_positions=256)
SIZE, MIB = 4, 1 << 20


def gpt2() -> Any:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(CONFIG)
    model.loss_type = "ForCausalLM"  # what it would choose, after a warning
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(model, optimizer, tokens):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer)


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG.vocab_size, (1, 16), generator=generator)


def entry() -> Any:
    step, args = gpt2()
    return step, (*args, tokens())


def limited_plan() -> Plan:
    """A plan whose devices have 1 MiB more than it needs."""
    graph = capture_factory(entry)
    cluster = pardnn.Cluster.uniform(SIZE)
    plan = pardnn.plan(graph, cluster, "layer-round-robin", reserve=0.0, costs="v100")
    devices = tuple(
        dataclasses.replace(device, memory=peak + MIB)
        for device, peak in zip(plan.cluster.devices, plan.predicted.peak_bytes, strict=True)
    )
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, devices=devices))


def sums(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        for name, value in model.state_dict().items()
    }


def eager(_rank: int, _store: str) -> dict[str, str]:
    step, args = entry()
    torch.manual_seed(99)
    for _ in range(2):
        step(*args)
    return sums(args[0])


def test_the_whole_model_leaves_ranks_that_could_not_hold_it(tmp_path: Path) -> None:
    plan, path = limited_plan(), tmp_path / "model.safetensors"

    def run(rank: int, store: str) -> Any:
        connect(rank, SIZE, store, 60).close()
        with pardnn.deferred():
            step, args = gpt2()
        given = (*args, batch := tokens())
        fast = parallelize(step, *given, plan=plan, timeout=120, device="cpu", is_limited=True)
        torch.manual_seed(99)
        fast(batch)
        # Where the copy would not fit beside the step's peak, a save does not go on beside it.
        warnings.filterwarnings("ignore", message="rank . saves step 1 before it continues")
        held = live_bytes(fast._executor.live_values)
        grown = [
            growth(lambda: fast.save(tmp_path / "run")),
            growth(lambda: fast.save(tmp_path / "run", wait=False)),
            growth(lambda: fast.load(tmp_path / "run")),
        ]
        fast(batch)
        grown.append(growth(lambda: fast.export(path)))
        grown.append(growth(lambda: fast.save(tmp_path / "run")))
        found = [held, plan.cluster.devices[rank].memory, fast.peak_bytes, grown]
        fast.close()
        return found

    found = values(run_ranks(SIZE, run, limit_s=500))
    for rank, (held, limit, peak, grown) in enumerate(found):
        told = f"rank {rank}: state {held}, peak {peak}, limit {limit}, grown {grown}"
        sys.stdout.write(told + "\n")
        assert peak <= limit, told
        assert held + max(grown) <= limit, told
        assert max(grown) < 32 * MIB, told
    model = transformers.GPT2LMHeadModel(CONFIG)
    assert sum(p.numel() for p in model.parameters()) > 51_000_000
    assert load_model(model, path) == (set(), [])
    (expected,) = values(run_ranks(1, eager, limit_s=200))
    assert sums(model) == expected
    CONFIG.save_pretrained(tmp_path)
    assert sums(transformers.GPT2LMHeadModel.from_pretrained(tmp_path)) == expected
