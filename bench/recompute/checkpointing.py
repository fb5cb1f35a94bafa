"""`--recompute` beside `torch.utils.checkpoint` on every block: `python -m bench checkpointing`.

Transformers on one device, simulated. A model's own gradient checkpointing, as its user turns it
on, sets the limit: the peak of that step in the order of eager execution. Under this limit and
larger ones, what does a step take that `pardnn` plans from the model as it is, and how many more
samples fit under the first? Prints a page, or writes it (`-o`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from pardnn import backends
from pardnn.cluster import Cluster
from pardnn.errors import InfeasibleError
from pardnn.graph.ir import Graph
from pardnn.planner.costs import costs_for
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from pardnn.report.results import PlanResult

COSTS, TOKENS, WIDTH, HEADS, WORDS = "v100", 256, 512, 8, 8192
#: Limits, as parts of the checkpointed step's peak, and batches, as parts of its batch.
LIMITS, BATCHES = (1.0, 1.15, 1.5, 2.0), (1.125, 1.25)


class Model(NamedTuple):
    """A model of so many layers."""

    name: str
    kind: type[transformers.PreTrainedModel]
    config: transformers.PreTrainedConfig


def models(layers: int) -> list[Model]:
    """Return three models of equal depth and width."""
    llama = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, vocab_size=WORDS,
    )  # fmt: skip
    bert = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
        num_attention_heads=HEADS, vocab_size=WORDS,
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(
        n_layer=layers, n_embd=WIDTH, n_head=HEADS, vocab_size=WORDS, n_positions=TOKENS
    )
    return [
        Model("GPT-2", transformers.GPT2LMHeadModel, gpt2),
        Model("Llama", transformers.LlamaForCausalLM, llama),
        Model("BERT", transformers.BertForMaskedLM, bert),
    ]


def step(model: Any, optimizer: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A training step as its user would write it."""
    optimizer.zero_grad()
    scores = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss


def captured(model: Model, batch: int, *, is_checkpointed: bool) -> Graph:
    """Return the graph of a step; no tensor data are allocated."""

    def factory() -> Any:
        torch.manual_seed(0)
        made = model.kind(model.config).train()
        if is_checkpointed:
            made.activation_checkpointing_enable({"use_reentrant": False})
        made.config.use_cache = False
        tokens, labels = (torch.randint(WORDS, (batch, TOKENS)) for _ in range(2))
        return step, (made, torch.optim.AdamW(made.parameters()), tokens, labels)

    return backends.capture_factory(factory)


def planned(graph: Graph, memory: int | None) -> PlanResult | None:
    """Return what a plan of one device takes, with second calls under a limit; None if none fits.

    Args:
        graph: Of the step.
        memory: Bytes; None for no limit and no second calls.
    """
    cluster = Cluster.uniform(1, memory=memory)
    options = PlanOptions(
        algorithm="single", reserve=0.0, costs=COSTS, recompute=memory is not None
    )
    try:
        return make_plan(Problem(graph, cluster, costs_for(graph, cluster, COSTS), options))[1]
    except InfeasibleError:
        return None


def rows_of(model: Model, batch: int) -> Iterator[str]:
    """Yield the rows of a model."""
    expert = planned(captured(model, batch, is_checkpointed=True), None)
    plain = captured(model, batch, is_checkpointed=False)
    free = planned(plain, None)
    assert expert is not None
    assert free is not None
    peak = expert.peak_bytes[0]
    start = f"| {model.name} | {len(plain.ops):,}"
    beside = f"{expert.makespan_s / free.makespan_s - 1:.1%}"
    for part in LIMITS:
        yield f"{start} | {batch} | {part:g} | {beside} | {_ours(plain, int(part * peak), free)} |"
    for part in BATCHES:
        larger = captured(model, int(part * batch), is_checkpointed=False)
        whole = planned(larger, None)
        assert whole is not None
        yield f"{start} | {int(part * batch)} | 1 | does not fit | {_ours(larger, peak, whole)} |"


def _ours(graph: Graph, limit: int, free: PlanResult) -> str:
    begin = time.process_time()
    found = planned(graph, limit)
    taken = time.process_time() - begin
    more = "does not fit" if found is None else f"{found.makespan_s / free.makespan_s - 1:.1%}"
    return f"{more} | {taken:.0f}"


def main(arguments: list[str] | None = None) -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench checkpointing", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16, help="of the checkpointed step")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(sys.argv[2:] if arguments is None else arguments)
    said = (
        f"`python -m bench checkpointing --layers {options.layers} --batch {options.batch}`: "
        f"models of transformers, width {WIDTH}, {TOKENS} tokens a sample, AdamW, on one V100 by "
        "preset (simulated). A limit is a part of the peak of the checkpointed step in the order "
        "of eager execution; seconds are those beyond the step without second calls."
    )
    lines = [
        "# `--recompute` beside `torch.utils.checkpoint` on every block",
        "",
        said,
        "",
        "| model | ops | batch | limit | checkpointed | `--recompute` | CPU s of planning |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in models(options.layers):
        for row in rows_of(model, options.batch):
            lines.append(row)
            print(row, flush=True)
    if options.output:
        options.output.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
