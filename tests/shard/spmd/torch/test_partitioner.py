"""The certificate of SPMD partitioning: whatever is cut how, every block has the one-device values.

Random shardings (any loops, any layouts, any mesh) of small captured steps run with all devices in
this process, in float64, and every tensor's block is compared when it is made.
"""

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.cluster import Cluster
from pardnn.errors import InvalidPlanError, UnsupportedError
from pardnn.graph.ir import Graph, storage_owners
from pardnn.plan.check import plan_problems
from pardnn.plan.file import plan_from_json, plan_to_json, stamped
from pardnn.plan.lower import message_order
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import DRAW, FETCH, REDUCE
from pardnn.plan.plan import Plan, PlanArrays, plan_arrays, planned_graph
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.strategy import strategies
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.comm_overlap import OverlapScheduler, overlapped_plan
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.backends.torch import models, spmd
from tests.long_cases import long_but

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2)]
#: Model and how many shardings of it are tried: a model of 1,000 ops takes a second or two each.
TRIED = {"small": 4, "resnet": 2, "inception": 1, "lstm": 1, "gpt2": 1}


@functools.cache
def captured(name: str) -> tuple[Graph, dict[str, Any], dict[str, Any]]:
    """A step's graph, values of its sources, and every tensor of the one-device run."""
    torch.set_default_dtype(torch.float64)
    try:
        step, args = getattr(models, name)()
        graph = capture(step, *args)
        values = spmd.source_values(step, args, graph)
        return graph, values, spmd.run_whole(graph, values)
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def loops(name: str) -> dict[str, list[str]]:
    graph = captured(name)[0]
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    return {
        op.name: [strategy.loop for strategy in strategies(call_of(op, tensors))]
        for op in graph.ops
        if not op.is_source and op.kind.startswith("aten.")
    }


def random_sharding(
    name: str, shape: tuple[int, ...], rng: random.Random, shares: tuple[tuple[int, ...], ...] = ()
) -> Sharding:
    """Any layouts and loops; tensors that share a storage get one layout if they can."""
    graph = captured(name)[0]
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}

    def chosen(options: list[Any]) -> tuple[Any, ...]:
        return tuple(rng.choice(options) if options and rng.random() < 0.7 else None for _ in shape)

    layouts = {name: chosen(list(range(len(t.shape or ())))) for name, t in tensors.items()}
    for of, owner in storage_owners(graph.ops).items():
        if owner is not None and tensors[owner].shape == tensors[of].shape:
            layouts[of] = layouts[owner]
    axes = {op: chosen(found) for op, found in loops(name).items()}
    return legalize(graph, Sharding(make_mesh(shape, shares), layouts, axes))


def certified(name: str, sharding: Sharding, rng: random.Random) -> Plan:
    """The same of a step of `TRIED`."""
    return certified_run(*captured(name), sharding, rng)


def certified_run(
    graph: Graph, values: Any, expected: Any, sharding: Sharding, rng: random.Random
) -> Plan:
    """Partition, overlap transfers with computation of any length, check both, run the latter."""
    in_turn, axes = rng.random() < 0.5, rng.randrange(len(sharding.mesh.shape))
    plan = spmd_partition(
        graph, sharding, in_turn=in_turn, reuse=rng.choice([0, 9, 10_000]), relay_axes=axes
    )
    assert plan_problems(graph, plan) == []
    seconds = [[rng.choice([0.0, 1e-6, 1e-4]) for _ in row] for row in plan.order]
    cluster = Cluster.uniform(plan.num_devices)
    parts = planned_graph(graph, plan)
    scheduler = OverlapScheduler(parts, plan_arrays(parts, plan), seconds, cluster)
    overlapped = overlapped_plan(parts, plan, scheduler.schedule(rng.choice([1.0, 9.0])))
    assert plan_problems(graph, overlapped) == []
    assert spmd.run_partitioned(graph, overlapped, values, expected) == []
    return plan


@pytest.mark.parametrize("name", long_but({"small"}, TRIED))
def test_any_sharding_computes_the_same(name: str) -> None:
    cut: list[int] = []

    @settings(max_examples=TRIED[name], deadline=None)
    @given(shape=st.sampled_from(MESHES), seed=st.integers(0, 1 << 30))
    def run(shape: tuple[int, ...], seed: int) -> None:
        rng = random.Random(seed)
        sharding = random_sharding(name, shape, rng)
        certified(name, sharding, rng)
        cut.append(sum(any(axes) for axes in sharding.axes.values()))

    run()
    assert max(cut) > 10  # something was cut, and not everything repaired away


@pytest.mark.parametrize(("name", "seeds"), [("small", 2), ("resnet", 1)])
def test_any_shares_compute_the_same(name: str, seeds: int) -> None:
    for seed in range(seeds):
        rng = random.Random(seed)
        shape = rng.choice([(2,), (3,), (2, 2)])
        shares = tuple(tuple(rng.choice([1, 3, 7]) for _ in range(size)) for size in shape)
        sharding = random_sharding(name, shape, rng, shares)
        plan = certified(name, sharding, rng)
        assert plan_from_json(plan_to_json(plan)).partition == plan.partition
        assert any(any(axes) for axes in sharding.axes.values())


def test_dropout_is_one_draw_for_all_devices() -> None:
    graph = captured("accumulation")[0]
    sharding = random_sharding("accumulation", (2,), random.Random(3))
    plan = spmd_partition(graph, sharding)
    assert plan.partition is not None
    draws = [op for op in plan.partition.ops if op.kind == DRAW]
    names = {op.arguments["of"] for op in draws if op.arguments}
    assert names == {op.name for op in graph.ops if "bernoulli" in op.kind}
    assert len(draws) == 2 * len(names)


def test_undescribed_ops_run_whole_and_are_named() -> None:
    graph = captured("small")[0]
    ops = (dataclasses.replace(op, kind=op.kind.replace("aten.mm", "mylib.mm")) for op in graph.ops)
    plan = spmd_partition(
        dataclasses.replace(graph, ops=tuple(ops)), Sharding(make_mesh((2,)), {}, {})
    )
    assert any("mylib.mm.default has no description" in note for note in plan.notes)


def test_a_sharded_plan_survives_its_file() -> None:
    graph = captured("small")[0]
    plan = stamped(spmd_partition(graph, random_sharding("small", (2, 2), random.Random(1))), graph)
    assert plan_from_json(plan_to_json(plan)) == dataclasses.replace(
        plan, checksum=plan_from_json(plan_to_json(plan)).checksum
    )


def test_moves_name_their_collective() -> None:
    found: set[str] = set()
    for seed in range(3):
        plan = spmd_partition(
            captured("resnet")[0], random_sharding("resnet", (2, 2), random.Random(seed))
        )
        graph = planned_graph(captured("resnet")[0], plan)
        found |= {
            op.arguments["collective"]["collective"]
            for op in graph.ops
            if op.kind in (FETCH, REDUCE) and op.arguments and "collective" in op.arguments
        }
    assert found >= {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice"}


def test_a_convolution_cut_in_space_fetches_a_halo() -> None:
    graph, _, _ = captured("resnet")
    convolution = next(op for op in graph.ops if op.kind == "aten.convolution.default")
    (result,) = convolution.outputs
    layouts = {convolution.inputs[0]: (2,), result.name: (2,)}
    axes = {convolution.name: ("x0",)}
    sharding = legalize(graph, Sharding(make_mesh((2,)), layouts, axes))
    assert sharding.axes[convolution.name] == ("x0",)
    plan = certified("resnet", sharding, random.Random(0))
    assert plan.partition is not None
    halos = [
        op.arguments["args"]
        for op in plan.partition.ops
        if op.arguments and op.arguments.get("collective", {}).get("collective") == "halo"
    ]
    assert len(halos) == 2
    for shape, fill, parts in halos:
        assert fill == 0.0  # one row of padding outside, one row of the neighbour
        assert shape[2] == 8 // 2 + 2
        assert sorted(box[2][1] - box[2][0] for _, box in parts) == [1, 4]


@pytest.mark.parametrize(("shape", "seed"), [((2, 2, 2), 0), ((2, 2, 2), 1)])
def test_transfers_beside_computation_never_wait_in_a_circle(shape: Any, seed: int) -> None:
    graph, rng = captured("resnet")[0], random.Random(seed)
    plan = spmd_partition(graph, random_sharding("resnet", shape, rng))
    parts = planned_graph(graph, plan)
    seconds = [[rng.choice([0.0, 1e-6, 1e-4]) for _ in row] for row in plan.order]
    cluster = Cluster.uniform(plan.num_devices)
    scheduler = OverlapScheduler(parts, plan_arrays(parts, plan), seconds, cluster)
    for lead in (1 / 9, 9.0, 81.0):
        overlapped = scheduler.schedule(lead)
        assert dry_problems(parts, overlapped.arrays) == []
    assert overlapped.arrays.order_op.tolist() != plan_arrays(parts, plan).order_op.tolist()


def dry_problems(parts: Graph, plan: PlanArrays) -> list[str]:
    try:
        message_order(parts, plan)
    except InvalidPlanError as error:
        return [error.message]
    return []


def test_sums_that_are_added_inside_of_groups_first_are_the_same() -> None:
    graph, values, expected = captured("resnet")
    sharding = random_sharding("resnet", (2, 2), random.Random(0))
    plan = spmd_partition(graph, sharding, relay_axes=1)
    assert plan.partition is not None
    # Of each device two of parameters, the sum of losses, and what it is divided by.
    assert sum(":group" in op.name for op in plan.partition.ops) == 16
    assert plan_problems(graph, plan) == []
    assert spmd.run_partitioned(graph, plan, values, expected) == []  # replicas in every bit


def test_a_block_that_no_partial_result_reaches_is_neutral() -> None:
    """The gradient of a convolution of one pixel with stride 2 does not reach odd rows."""
    graph = captured("resnet")[0]
    backward = next(
        op for op in graph.ops
        if op.kind == "aten.convolution_backward.default"
        and (op.arguments or {})["args"][4] == [2, 2] and "x0" in loops("resnet")[op.name]
        and graph_shapes(graph)[op.inputs[2]][2:] == (1, 1)
    )  # fmt: skip
    gradient = backward.outputs[0].name
    sharding = legalize(
        graph, Sharding(make_mesh((2, 2)), {gradient: (2, 2)}, {backward.name: ("x0", None)})
    )
    assert sharding.layouts[gradient] == (2, 2)
    plan = certified("resnet", sharding, random.Random(0))
    assert plan.partition is not None
    empty = [op for op in plan.partition.ops if op.kind == FETCH and not op.inputs]
    assert [op.outputs[0].name for op in empty] == [f"{gradient}@1", f"{gradient}@3"]


def graph_shapes(graph: Graph) -> dict[str, Any]:
    return {tensor.name: tensor.shape for op in graph.ops for tensor in op.outputs}


def test_a_query_that_all_samples_share_arrives_as_the_kernel_reads_it() -> None:
    """torch's kernel of attention takes for granted that the last stride is 1, and checks nothing.

    The query is expanded, stride 0, and cut along its features: devices store what it repeats.
    """
    torch.manual_seed(0)
    query = torch.nn.Parameter(torch.randn(1, 1, 1, 8, dtype=torch.float64))

    def step(optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        asked = (query + 1).expand(4, 2, 1, 8)
        loss = torch.nn.functional.scaled_dot_product_attention(asked, x, x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    args = (torch.optim.SGD([query], 0.1), torch.randn(4, 2, 3, 8, dtype=torch.float64))
    graph = capture(step, *args)
    values = spmd.source_values(step, args, graph)
    attention = next(op for op in graph.ops if op.kind.endswith("_for_cpu.default"))
    expand = next(op for op in graph.ops if op.outputs[0].name == attention.inputs[0])
    layouts = dict.fromkeys([*expand.inputs, *attention.inputs[:1]], (3,))
    axes = {expand.name: ("i3",), attention.name: ("b",)}
    sharding = legalize(graph, Sharding(make_mesh((2,)), layouts, axes))
    assert sharding.layouts[attention.inputs[0]] == (3,)
    assert sharding.axes[attention.name] == ("b",)
    certified_run(graph, values, spmd.run_whole(graph, values), sharding, random.Random(0))


def test_an_op_that_draws_a_result_and_an_argument_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RReLU(), torch.nn.Linear(8, 8))
    args = (model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 8), torch.arange(8))
    graph = capture(models.classify_step, *args)
    with pytest.raises(UnsupportedError, match=r"rrelu_with_noise.*draws random numbers") as caught:
        spmd_partition(graph, legalize(graph, Sharding(make_mesh((2,)), *uncut(graph))))
    assert caught.value.code == "E822"
    with pytest.raises(UnsupportedError, match="rrelu_with_noise"):  # whatever is cut around it
        pardnn.plan(graph, Cluster.uniform(2), "tofu", "bytes", costs="v100")


def uncut(graph: Graph) -> tuple[dict[str, Any], dict[str, Any]]:
    layouts = {tensor.name: (None,) for op in graph.ops for tensor in op.outputs}
    return layouts, {op.name: (None,) for op in graph.ops}
