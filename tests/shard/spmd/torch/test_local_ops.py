"""Operators whose kernels take a contiguous input for granted get one on every device."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pardnn.backends.torch.capture.capture import capture
from pardnn.plan.mesh import make_mesh
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from pardnn.shard.tdl import registry
from tests.backends.torch import spmd

#: A user's module. Its name ends like that of a file of ours whose kernels do read strides.
REVIEW = """
import pardnn

@pardnn.describe("pardnn_strides::halve")
def halve(x):
    return lambda i, j: x[i, j] * 0.5
"""


def halve(x: torch.Tensor) -> torch.Tensor:
    """Half of x, read in the order of a contiguous tensor, as many hand-written kernels do."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return (0.5 * flat).reshape(x.shape)


@pytest.fixture
def described(tmp_path: Path) -> Iterator[None]:
    made = torch.library.Library("pardnn_strides", "FRAGMENT")
    made.define("halve(Tensor x) -> Tensor")
    made.impl("halve", halve, "CPU")
    made.impl("halve", lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device), "Meta")
    path = tmp_path / "review.py"
    path.write_text(REVIEW)
    spec = importlib.util.spec_from_file_location("review", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    yield
    made._destroy()
    registry.USERS.pop("pardnn_strides.halve")
    registry.find.cache_clear()


@pytest.mark.usefixtures("described")
def test_a_users_kernel_gets_contiguous_inputs_whatever_its_file_is_called() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.SGD, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * torch.ops.pardnn_strides.halve(x)).sum()
        loss.backward()
        optimizer.step()
        return loss

    model = torch.nn.Linear(6, 6, dtype=torch.float64)
    args = (model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 6, dtype=torch.float64))
    graph = capture(step, *args)
    op = next(op for op in graph.ops if op.kind.startswith("pardnn_strides"))
    whole: dict = {t.name: (None,) for each in graph.ops for t in each.outputs}
    axes: dict = {each.name: (None,) for each in graph.ops} | {op.name: ("j",)}
    sharding = legalize(graph, Sharding(make_mesh((2,)), whole, axes))
    assert sharding.axes[op.name] == ("j",)
    values = spmd.source_values(step, args, graph)
    plan = spmd_partition(graph, sharding)
    assert spmd.run_partitioned(graph, plan, values, spmd.run_whole(graph, values)) == []
