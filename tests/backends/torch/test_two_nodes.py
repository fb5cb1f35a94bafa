"""Two nodes, each a network namespace with torchrun, and 1 Gbit/s with 1 ms between them.

`make two-nodes` runs this; where nodes cannot be made it fails. `make long` skips it and says
why.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pardnn.checkpoint.directory import committed
from pardnn.cluster import Cluster
from testbed.two_nodes import Done, Nodes, two_nodes, why_not

BANDWIDTH, LATENCY = 125e6, 1e-3
#: A user's script: the step, and the three lines.
SCRIPT = """
import json, os, sys
import torch
from torch import nn
import pardnn

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(32, 16), torch.randn(32, 1)
told = {"losses": []}
if "WORLD_SIZE" in os.environ:
    cluster = pardnn.Cluster.load(sys.argv[3]) if len(sys.argv) > 3 else None
    fast = pardnn.parallelize(
        step, model, optimizer, x, y, algorithm=sys.argv[1], costs="v100", cluster=cluster)
    told["messages"] = len(fast.plan.messages)
    told["latency"], told["bandwidth"] = (a[0, -1] for a in fast.plan.cluster.arrays[:2])
else:
    fast = lambda x, y: step(model, optimizer, x, y)
for i in range(4):
    told["losses"].append(fast(x, y).item().hex())
if len(sys.argv) > 2 and sys.argv[2]:
    try:
        fast.save(sys.argv[2])
    except pardnn.PardnnError as error:
        told["refused"] = str(error)
    told["losses"].append(fast(x, y).item().hex())
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    reason = why_not()
    if reason and "TWO_NODES" not in os.environ:
        pytest.skip(f"no two nodes: {reason}")
    assert not reason
    with two_nodes(bandwidth=BANDWIDTH, latency=LATENCY) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def told(done: list[Done]) -> Any:
    assert [each.status for each in done] == [0, 0], "\n".join(each.err[-3000:] for each in done)
    return json.loads(done[0].out)


def one_device(script: Path, *arguments: str) -> Any:
    command = [sys.executable, str(script), *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize(("per_node", "has_names"), [(1, False), (2, True)])
def test_losses_are_those_of_one_device_and_the_plan_knows_the_slow_link(
    per_node: int, has_names: bool, nodes: Nodes, script: Path
) -> None:
    nodes = dataclasses.replace(nodes, has_names=has_names)
    done = nodes.torchrun([str(script), "round-robin"], per_node=per_node)
    found = told(done)
    assert found["losses"] == one_device(script)["losses"]
    assert found["messages"] > 0
    assert 0.9 * LATENCY < found["latency"] < 20 * LATENCY
    assert found["bandwidth"] < 1.1 * BANDWIDTH
    (line,) = [line for line in done[0].err.splitlines() if "measured in" in line]
    assert f"links of {2 * per_node} ranks on 2 nodes measured" in line
    assert ("within a node" in line) == (per_node > 1)


def test_by_default_nothing_goes_over_a_link_that_costs_more_than_it_saves(
    nodes: Nodes, script: Path
) -> None:
    found = told(nodes.torchrun([str(script), "auto-whole"]))
    assert found["messages"] == 0
    assert found["losses"] == one_device(script)["losses"]


def test_links_between_nodes_are_profiled_into_a_cluster_file(
    nodes: Nodes, script: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.json"
    command = ["-m", "pardnn", "profile", "--links", "-o", str(path), "--json"]
    found = told(nodes.torchrun(command, per_node=2))
    cluster = Cluster.load(path)
    assert (found["num_devices"], found["num_nodes"], found["measured"]) == (4, 2, 6)
    assert found["between_bandwidth"] < 1.1 * BANDWIDTH
    assert found["between_latency_s"] > 0.9 * LATENCY
    a = cluster.arrays
    between = [a.latency[pair] for pair in ((0, 2), (0, 3), (1, 2), (1, 3))]
    assert min(between) > 0.9 * LATENCY
    # Of both nodes' links the faster: other work on this machine only ever makes one slower.
    assert min(a.latency[0, 1], a.latency[2, 3]) < min(between)
    done = nodes.torchrun([str(script), "round-robin", "", str(path)], per_node=2)
    assert "measured" not in done[0].err
    assert told(done)["latency"] == a.latency[0, 3]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_checkpoint_is_refused_where_nodes_share_no_directory(
    is_shared: bool, nodes: Nodes, script: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    if not is_shared:
        nodes = dataclasses.replace(nodes, private=(runs,))
    found = told(nodes.torchrun([str(script), "round-robin", str(runs)]))
    assert ("refused" in found) != is_shared
    if not is_shared:
        assert "E521" in found["refused"]
        assert "Checkpoints need a file system that all ranks share." in found["refused"]
    assert [each.step for each in committed(runs)] == ([4] if is_shared else [])
    # Training goes on after what was refused.
    expected = one_device(script)["losses"]
    assert found["losses"][:4] == expected
    assert len(found["losses"]) == 5
