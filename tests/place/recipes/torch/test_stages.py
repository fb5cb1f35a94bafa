"""Stages of captured training steps: no edge runs against the pipeline, and work is balanced."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.cost.costs import preset_costs
from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph
from pardnn.place.recipes.chain import forward_chain
from pardnn.place.recipes.phases import BACKWARD, FORWARD, SOURCE, WEIGHT, phases_of
from pardnn.place.recipes.stages import Stages, stages_of
from pardnn.place.recipes.units import units_of
from pardnn.shard.microbatch.rewrite import cut_batch
from testbed import small_models
from tests.long_cases import long_but


class UNet(nn.Module):
    """Two skip connections over what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1)])
        self.bottom = nn.Conv2d(16, 16, 3, 1, 1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 8, 2, 2), nn.Conv2d(16, 5, 3, 1, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, 5, height, width]."""
        high = self.down[0](x).relu()
        low = self.down[1](high).relu()
        x = torch.cat([self.bottom(low).relu(), low], 1)
        return self.up[1](torch.cat([self.up[0](x), high], 1))


def unet() -> small_models.Entry:
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(12, 3, 8, 8), torch.randint(5, (12, 8, 8))
    return small_models.classify_step, (model, optimizer, *data)


def t5() -> small_models.Entry:
    import transformers

    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=96,
        decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=y).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randint(96, (8, 12)), torch.randint(96, (8, 12)))


STEPS: dict[str, Callable[[], small_models.Entry]] = {
    "gpt2": small_models.gpt2, "lstm": small_models.lstm, "resnet": small_models.resnet,
    "t5": t5, "unet": unet,
}  # fmt: skip


@functools.cache
def captured(name: str) -> Graph:
    step, args = STEPS[name]()
    return capture(step, *args)


def seconds_of(graph: Graph) -> np.ndarray:
    return np.asarray(preset_costs(graph, "v100").seconds["accelerator"])


def staged(graph: Graph, count: int, batched: set[str] | None = None) -> Stages:
    return stages_of(graph, phases_of(graph, batched), seconds_of(graph), count)


def against_the_pipeline(graph: Graph, stage: np.ndarray, phase: np.ndarray) -> list[str]:
    """Edges that make a stage wait for one that it should not wait for."""
    a, found = graph.arrays, list[str]()
    for op in range(len(graph.ops)):
        for tensor in a.input_tensor[a.input_ptr[op] : a.input_ptr[op + 1]]:
            made = a.tensor_op[tensor]
            of, to = phase[made], phase[op]
            if of == SOURCE or (of == WEIGHT and to == WEIGHT):  # sums of weights' gradients
                continue
            is_back = (of == to == FORWARD and stage[made] > stage[op]) or (
                of == BACKWARD and to in (BACKWARD, WEIGHT) and stage[made] < stage[op]
            )
            if is_back or of > to:
                found.append(f"{graph.ops[made].name} -> {graph.ops[op].name}")
    return found


@pytest.mark.parametrize("name", long_but(set(STEPS) - {"t5"}, STEPS))
def test_stages_follow_each_other_and_are_balanced(name: str) -> None:
    graph = captured(name)
    found, seconds = staged(graph, 3), seconds_of(graph)
    assert against_the_pipeline(graph, found.stage, found.phase) == []
    work = np.bincount(found.stage, weights=seconds, minlength=3)
    assert len(work) == 3
    assert work.max() <= 1.5 * work.mean(), work / work.mean()
    forward = np.bincount(found.stage[found.phase == FORWARD], minlength=3)
    assert (forward > 0).all()


@pytest.mark.parametrize("name", long_but(set(STEPS) - {"t5"}, STEPS))
def test_pieces_follow_the_stages_of_the_whole_step(name: str) -> None:
    graph = captured(name)
    pieces = cut_batch(graph, 2)
    cut = build_graph("cut", pieces.ops)
    stages = staged(graph, 3, set(pieces.batch))
    units = units_of(graph, cut, stages)
    assert against_the_pipeline(cut, units.stage, units.phase) == []
    whole = {op.name: stages.stage[i] for i, op in enumerate(graph.ops)}
    for i, op in enumerate(cut.ops):
        base, _, number = op.name.rpartition("@")
        if base in whole:
            assert (units.stage[i], units.piece[i]) == (whole[base], int(number))


@pytest.mark.parametrize("name", STEPS)
def test_a_parameter_its_states_and_its_update_are_of_one_stage(name: str) -> None:
    graph = captured(name)
    stage = staged(graph, 3).stage
    of = {op.name: stage[i] for i, op in enumerate(graph.ops)}
    states = [op.name for op in graph.ops if op.kind == "state"]
    parameters = [op.name for op in graph.ops if op.kind == "parameter"]
    for name in states:
        owner = next(p for p in parameters if name.startswith(f"optimizer.state.{p}."))
        assert of[name] == of[owner]
    updates = [op for op in graph.ops if op.inputs and op.inputs[0] in parameters]
    assert updates
    assert all(of[op.name] == of[op.inputs[0]] for op in updates if op.kind.endswith("_.Tensor"))


def test_the_time_steps_of_a_layer_stand_together() -> None:
    graph = captured("lstm")
    p = phases_of(graph)
    position = forward_chain(graph, p, seconds_of(graph), 2)
    at = {
        name: [int(position[i]) for i, op in enumerate(graph.ops) if op.module == name and
               p.phase[i] == FORWARD]
        for name in ("model.embedding", "model.cells.0", "model.cells.1", "model.decoder")
    }  # fmt: skip
    rows = list(at.values())
    assert all(max(one) <= min(next_one) for one, next_one in itertools.pairwise(rows))


def test_the_gradient_of_a_tied_weight_is_summed_where_the_weight_is() -> None:
    """GPT-2's embedding and head: the head works most with the weight, and keeps it."""
    graph = captured("gpt2")
    pieces = cut_batch(graph, 2)
    cut = build_graph("cut", pieces.ops)
    units = units_of(graph, cut, staged(graph, 3, set(pieces.batch)))
    number = {op.name: i for i, op in enumerate(cut.ops)}
    stage = units.stage
    assert stage[number["model.transformer.wte.weight"]] == 2
    assert stage[number["embedding_dense_backward_1@0"]] == 0
    crossing = [
        op.name for op in cut.ops
        if any(stage[number[p.name]] == 0 and units.phase[number[p.name]] == WEIGHT
               for p in cut.ops for t in p.outputs if t.name in op.inputs)
        and stage[number[op.name]] == 2
    ]  # fmt: skip
    assert crossing == ["add_20"]
