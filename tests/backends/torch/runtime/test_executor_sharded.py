"""Ranks that run partitioned graphs train as one device does, and hold no more than planned."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pardnn
from pardnn.backends.torch import runtime
from pardnn.backends.torch.capture.result import loss_of
from pardnn.backends.torch.make_step import make_step
from pardnn.backends.torch.ops.partition_ops import box_view
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.rng.generator import fixed
from pardnn.backends.torch.runtime.binding import Binding
from pardnn.backends.torch.runtime.program import Program
from pardnn.backends.torch.runtime.random_ops import check_one_draw, drawn_once
from pardnn.backends.torch.runtime.start_rank import start
from pardnn.errors import PardnnError, UnsupportedError, UsageError
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.file import plan_from_json, plan_to_json, stamped
from pardnn.plan.mesh import make_mesh
from pardnn.plan.plan import Plan
from pardnn.plan.state_layout import shard_of
from pardnn.shard.partition.call import call_of
from pardnn.shard.partition.strategy import strategies
from pardnn.shard.search.tofu import search
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.legalize import legalize
from pardnn.shard.spmd.partitioner import spmd_partition
from testbed.zoo import rnn, wresnet
from tests.backends.torch import models
from tests.backends.torch.executors import captured, perceptron
from tests.backends.torch.ranks import connect, run_ranks

STEPS = 5


def in_double(factory: Callable[[], models.Entry]) -> models.Entry:
    step, (model, optimizer, *batch) = factory()
    model.double()
    return step, (model, optimizer, *(x.double() if x.is_floating_point() else x for x in batch))


def double_perceptron() -> models.Entry:
    return in_double(perceptron)


def double_transformer() -> models.Entry:
    return models.double_language_step, in_double(models.gpt2)[1]


def double_convolutions() -> models.Entry:
    return in_double(lambda: wresnet.small(norm=True))


def double_recurrent() -> models.Entry:
    return in_double(rnn.small)


def random_sharding(graph: Graph, shape: tuple[int, ...], seed: int) -> Sharding:
    """Cut tensors along any dim and ops along any loop, where that can be."""
    rng = random.Random(seed)
    tensors = {tensor.name: tensor for op in graph.ops for tensor in op.outputs}
    layouts = {
        name: tuple(rng.choice([None, *range(len(t.shape or ()))]) for _ in shape)
        for name, t in tensors.items()
    }
    axes: dict[str, Any] = {}
    for op in graph.ops:
        if op.is_source:
            continue
        try:
            found = [strategy.loop for strategy in strategies(call_of(op, tensors))]
        except PardnnError:
            found = []
        axes[op.name] = tuple(rng.choice([None, *found]) for _ in shape)
    return legalize(graph, Sharding(make_mesh(shape), layouts, axes))


def sharded_plan(
    graph: Graph,
    shape: tuple[int, ...],
    seed: int | None = None,
    shares: tuple[tuple[int, ...], ...] = (),
) -> Plan:
    if seed is None:
        found = dataclasses.replace(search(graph, make_mesh(shape)), mesh=make_mesh(shape, shares))
        sharding = legalize(graph, found)
    else:
        sharding = random_sharding(graph, shape, seed)
    plan = stamped(spmd_partition(graph, sharding), graph)
    # Ranks read a file.
    return plan_from_json(plan_to_json(plan))


def one_device(factory: Callable[[], models.Entry]) -> list[Any]:
    """Losses, final parameters and generator of the user's own step."""

    def body(_rank: int, _store: str) -> list[Any]:
        step, args = factory()
        torch.manual_seed(99)
        losses = [loss_of(step(*args)).item() for _ in range(STEPS)]
        held = {f"model.{k}": v.tolist() for k, v in args[0].named_parameters()}
        return [losses, held, int(torch.get_rng_state().sum())]

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    return outcome.value


CASES: list[Any] = [
    (double_perceptron, (2,), 1, 1e-10),
    (double_perceptron, (2, 2), 2, 1e-10),
    (double_recurrent, (3,), None, 1e-10),
    (models.MODELS["gpt2"], (2,), None, 1e-4),
]
#: Two ranks with unlike shares.
SHARED: list[Any] = [
    (double_perceptron, (2,), None, 1e-10, ((3, 1),)),
    pytest.param(double_convolutions, (2,), None, 1e-10, (), marks=pytest.mark.long),
    pytest.param(double_transformer, (2,), None, 1e-10, ((5, 11),), marks=pytest.mark.long),
]


@pytest.mark.parametrize(
    ("factory", "shape", "seed", "tolerance", "shares"), [*((*case, ()) for case in CASES), *SHARED]
)
def test_cut_steps_train_as_one_device(
    factory: Callable[[], models.Entry],
    shape: tuple[int, ...],
    seed: int | None,
    tolerance: float,
    shares: tuple[tuple[int, ...], ...],
) -> None:
    graph = captured(factory)
    plan = sharded_plan(graph, shape, seed, shares)
    program = Program(graph, plan)
    losses, parameters, generator = one_device(factory)

    def body(rank: int, store: str) -> list[Any]:
        step, args = factory()
        world = connect(rank, plan.num_devices, store, 20.0)
        binding = Binding(step, args, program.whole, torch.device("cpu"))
        values = binding.live_values(program.residents(rank))
        executor = start(program, world, lambda: values)
        torch.manual_seed(99)
        batch = binding.example()
        found = [executor.step(binding.batch_inputs(batch)).item() for _ in range(STEPS)]
        executor.world.close()
        worst = 0.0
        for op in program.residents(rank):
            of, box = shard_of(op, program.sources)
            if of in parameters:
                part = values[op.name].detach()
                expected = torch.tensor(parameters[of], dtype=part.dtype)
                expected = expected if box is None else box_view(expected, box)
                worst = max(worst, float((part - expected).abs().max()))
                assert part.untyped_storage().nbytes() == part.numel() * part.itemsize
        state = int(torch.get_rng_state().sum())
        return [found, worst, state, executor.peak_bytes, program.peaks[rank]]

    host = sum(8 for op in graph.ops for t in op.outputs if (t.dtype or "").startswith("host"))
    for outcome in run_ranks(plan.num_devices, body):
        assert outcome.status == 0, outcome.error
        found, worst, state, measured, predicted = outcome.value
        assert found == pytest.approx(losses, rel=tolerance)
        assert worst <= tolerance
        assert state == generator, "the generator ends elsewhere"
        assert predicted - host <= measured <= 1.01 * predicted


def test_a_rank_makes_its_parts_from_the_factory_alone() -> None:
    """As `run` does: the construction is recorded, and replayed in parts."""
    graph = captured(perceptron)
    program = Program(graph, sharded_plan(graph, (2,)))
    expected = dict(perceptron()[1][0].named_parameters())
    for rank in range(2):
        step, args, recording = make_step(perceptron)
        binding = Binding(step, args, graph, torch.device("cpu"))
        values = binding.replayed(program.residents(rank), recording)
        cut = 0
        for op in program.residents(rank):
            of, box = shard_of(op, program.sources)
            assert values[op.name].shape == op.outputs[0].shape
            if of.removeprefix("model.") in expected and box is not None:
                whole = expected[of.removeprefix("model.")]
                assert torch.equal(values[op.name], box_view(whole, box))
                cut += 1
        assert cut >= 2


def test_a_script_reads_its_parts_and_the_whole() -> None:
    graph = captured(perceptron)
    plan = sharded_plan(graph, (2,))
    losses, parameters, _ = one_device(perceptron)

    def body(rank: int, store: str) -> list[Any]:
        shared = dist.FileStore(store, 2)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=2)
        step, args = perceptron()
        before = list(args[0].parameters())
        whole_shapes = [list(p.shape) for p in before]
        fast = parallelize(step, *args, plan=plan, timeout=20, device="cpu")
        torch.manual_seed(99)
        found = [fast(*args[2:]).item() for _ in range(STEPS)]
        same = [p is q for p, q in zip(args[0].parameters(), before, strict=True)]
        shapes = [list(p.shape) for p in before]
        state = [list(args[1].state[p]["exp_avg"].shape) for p in before]
        whole = {name: fast.whole(name).tolist() for name in fast.names}
        with pytest.raises(UsageError, match=r"Did you mean 'model\.0\.weight'"):
            fast.whole("0.weight")
        fast.close()
        return [found, all(same), whole_shapes, shapes, state, whole]

    outcomes = run_ranks(2, body)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.error
        found, is_same, whole_shapes, shapes, state, whole = outcome.value
        assert found == pytest.approx(losses, rel=1e-4)
        assert is_same
        assert shapes == state != whole_shapes
        for name, value in parameters.items():
            assert torch.allclose(torch.tensor(whole[name]), torch.tensor(value), atol=1e-5)
    assert outcomes[0].value[5] == outcomes[1].value[5]


def test_ranks_load_no_search_and_no_compiler() -> None:
    """What a rank imports to run a sharded plan."""
    rooms = (
        "launch.worker",
        "launch.rank",
        "launch.reference",
        "runtime",
        "make_step",
        "parallelize",
    )
    folder = Path(runtime.__file__).parent
    names = [*rooms, *(f"runtime.{path.stem}" for path in folder.glob("[a-z]*.py"))]
    text = "import sys\n" + "".join(f"import pardnn.backends.torch.{name}\n" for name in names)
    text += "rooms = ('numba', 'pardnn.shard', 'pardnn.place', 'pardnn.sim')\n"
    text += "bad = [m for m in sys.modules if m.startswith(rooms)]"
    done = subprocess.run(
        [sys.executable, "-c", f"{text}\nsys.exit(str(bad) if bad else 0)"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]


def test_an_op_that_draws_and_is_cut_is_refused() -> None:
    """Dropout inside of an attention kernel cannot be drawn apart from it."""
    whole = Op(name="a", kind="aten.rrelu_with_noise.default", outputs=(part("a", 8),))
    draws = fixed(8)
    check_one_draw(dataclasses.replace(whole, name="a@0"), whole, draws)
    cut = dataclasses.replace(whole, name="a@1", outputs=(part("a@1", 4),))
    check_one_draw(cut, whole, fixed(0))
    assert drawn_once(cut, {"a": whole}) == "a"
    with pytest.raises(UnsupportedError, match="this plan cuts it") as caught:
        check_one_draw(cut, whole, draws)
    assert caught.value.code == "E822"


def part(name: str, size: int) -> Tensor:
    return Tensor(name=name, bytes=4 * size, shape=(size,), dtype="float32")


class Neighbours(nn.Module):
    """Sums over the edges of a graph, weighed by a list that the code writes down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in (self.inner, self.outer):
            source, target = edges
            degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(edges.shape[1]))
            sent = layer(x)[source] / degree.clamp(min=1)[source, None]
            x = torch.zeros(len(x), sent.shape[1]).index_add_(0, target, sent)
        return x * torch.tensor([1.0, 0.5, 2.0, 1.5])


def neighbours() -> models.Entry:
    torch.manual_seed(8)
    model = Neighbours()
    x, edges, y = torch.rand(20, 6), torch.randint(20, (2, 60)), torch.randint(4, (20,))

    def step(model, optimizer, x, edges, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edges), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, torch.optim.Adam(model.parameters()), x, edges, y)


def test_several_remote_regions_of_one_op_and_cut_constants() -> None:
    """Its own part of a constant for each device; no receive is posted before its buffer."""
    graph = captured(neighbours)
    options = {"algorithm": "tofu", "objective": "bytes", "costs": "cpu"}
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(2), **options)
    assert plan.partition is not None
    data = [
        op for op in plan.partition.ops if op.kind == "constant" and op.outputs[0].shape == (2,)
    ]
    assert len({op.arguments["data"] for op in data}) == 2
    losses = one_device(neighbours)[0]
    for outcome in run_ranks(2, functools.partial(trained, neighbours, Program(graph, plan))):
        assert outcome.status == 0, outcome.error
        assert outcome.value == pytest.approx(losses, rel=1e-4)


def trained(factory: Any, program: Program, rank: int, store: str) -> list[float]:
    step, args = factory()
    world = connect(rank, program.plan.num_devices, store, 20.0)
    binding = Binding(step, args, program.whole, torch.device("cpu"))
    values = binding.live_values(program.residents(rank))
    executor = start(program, world, lambda: values)
    torch.manual_seed(99)
    batch = binding.batch_inputs(binding.example())
    found = [executor.step(batch).item() for _ in range(STEPS)]
    executor.world.close()
    return found
