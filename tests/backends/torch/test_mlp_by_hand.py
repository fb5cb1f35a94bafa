"""A captured MLP moves the bytes that hand calculation gives, and replicas train alike."""

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.plan.check import plan_problems
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import REDUCE
from pardnn.plan.plan import planned_graph
from pardnn.shard.search.batch import batch_dims
from pardnn.shard.search.tofu import search
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.backends.torch import spmd


def perceptron(batch: int, inputs: int, hidden: int, outputs: int):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(inputs, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, outputs, bias=False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(model, optimizer, x, target):
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum() / 2
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, torch.randn(batch, inputs), torch.randn(batch, outputs))


#: Batch, inputs, hidden, outputs; elements that four devices move in all; size of x.
#: Column then row: 3 (2 S_x + 3 S_y). Sharded data parallelism: 3 (2 S_W1 + 3 S_W2).
CASES = {
    "column then row": ((32, 256, 512, 128), 3 * (2 * 32 * 256 + 3 * 32 * 128), 32 * 256),
    "data parallel": ((4096, 128, 128, 128), 3 * 5 * 128 * 128, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_captured_mlp_moves_what_is_known_by_hand(case):
    sizes, known, shared = CASES[case]
    step, args = perceptron(*sizes)
    graph = capture(step, *args)
    sharding = legalize(graph, search(graph, Cluster.uniform(4), "bytes"))
    for reuse, elements in ((0, known), (1000, known - 3 * (shared or 0))):
        plan = spmd_partition(graph, sharding, reuse=reuse)
        assert plan_problems(graph, plan) == []
        sizes_of = {t.name: t.bytes for op in planned_graph(graph, plan).ops for t in op.outputs}
        sent = [sizes_of[message.tensor] for message in plan.messages]
        # The loss is a sum of parts: numbers of four bytes.
        assert sum(size for size in sent if size > 4) == 4 * elements
        assert sum(size for size in sent if size <= 4) <= 12 * 4 * 2


def test_replicated_parameters_train_alike():
    step, (model, optimizer, *batch) = perceptron(8, 6, 12, 4)
    args = (model.double(), optimizer, *(x.double() for x in batch))
    graph = capture(step, *args)
    dims, loops = batch_dims(graph)
    layouts = {name: (dims.get(name),) for op in graph.ops for name in [t.name for t in op.outputs]}
    axes = {op.name: (loops.get(op.name),) for op in graph.ops if not op.is_source}
    sharding = legalize(graph, Sharding(make_mesh((4,)), layouts, axes))
    kept = {op.outputs[0].name for op in graph.ops if op.kind == "parameter"}
    assert all(sharding.layouts[name] == (None,) for name in kept)
    plan = spmd_partition(graph, sharding)
    assert plan_problems(graph, plan) == []
    values = spmd.source_values(step, args, graph)
    assert spmd.run_partitioned(graph, plan, values, spmd.run_whole(graph, values)) == []
    names = {op.arguments["collective"]["collective"] for op in planned_graph(graph, plan).ops
             if op.kind == REDUCE}  # fmt: skip
    assert "all_reduce" in names
