"""What changes between calls is followed: losses, states and random numbers stay those of eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime import notices
from pardnn.backends.torch.runtime.notices import MANY_IN_A_ROW, Notices, told
from pardnn.backends.torch.user_step.guards.item import Change
from pardnn.cluster import Cluster
from pardnn.errors import MismatchError, UnsupportedError
from pardnn.graph.ir import Graph
from pardnn.plan.plan import Plan
from pardnn.plan.state_in_place import StateInPlace
from pardnn.planner.next_plan import next_plan
from pardnn.planner.options import PlanOptions
from tests.backends.torch.executors import bits
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import Outcome, connect, run_ranks
from tests.long_cases import long_but

CONFIG = SimpleNamespace(scale=1.0)
FACTOR = 1.0


class Net(nn.Module):
    """Two layers with all that has a mode or a setting between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.act: nn.Module = nn.Tanh()
        self.power = 1

    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.act(self.norm(self.first(x))))
        return self.last(x) * self.gain**self.power


@dataclasses.dataclass
class Made:
    """A step, its objects and its batch."""

    step: Callable[..., Any]
    model: Net
    optimizer: torch.optim.Optimizer
    criterion: nn.Module
    set_cell: Callable[[float], None]
    batch: list[Any]


def made() -> Made:
    torch.manual_seed(0)
    model, cell = Net(), 1.0
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    held = [*model.first.parameters(), *model.norm.parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)

    def step(model, criterion, optimizer, x, y, times, is_doubled, name):
        model.zero_grad()
        loss = criterion(model(x), y) * cell * FACTOR * CONFIG.scale
        for _ in range(times):
            loss = loss * 1.25
        if is_doubled or name == "double":
            loss = loss * 2
        if model.training:
            loss.backward()
            optimizer.step()
        return loss

    def set_cell(value: float) -> None:
        nonlocal cell
        cell = value

    batch = [torch.randn(5, 6), torch.randint(4, (5,)), 1, False, "one"]
    return Made(step, model, optimizer, criterion, set_cell, batch)


def set_global(value: float) -> None:
    global FACTOR
    FACTOR = value


def add_group(m: Made, i: int) -> None:
    if i == 2:
        m.optimizer.add_param_group({"params": list(m.model.last.parameters()), "lr": 0.2})


def hook(m: Made, i: int) -> None:
    if i == 2:
        m.model.first.register_forward_hook(lambda module, args, out: out * 2)


def replace(m: Made, i: int) -> None:
    if i == 2:
        m.model.act = nn.ReLU()


def replace_linear(m: Made, i: int) -> None:
    if i == 2:
        m.model.last = nn.Linear(8, 4)


def shorten(m: Made, i: int) -> None:
    rows = 3 if i % 3 == 2 else 5
    m.batch[:2] = [torch.randn(rows, 6), torch.randint(4, (rows,))]


#: Each is called before step i, and switches back and forth where it can.
CHANGES: dict[str, Callable[[Made, int], Any]] = {
    "int argument": lambda m, i: m.batch.__setitem__(2, i % 2),
    "bool argument": lambda m, i: m.batch.__setitem__(3, bool(i % 2)),
    "str argument": lambda m, i: m.batch.__setitem__(4, "double" if i % 3 else "one"),
    "dropout.p": lambda m, i: setattr(m.model.dropout, "p", 0.4 if i % 2 else 0.2),
    "bn.momentum": lambda m, i: setattr(m.model.norm, "momentum", 0.1 if i % 2 else 0.3),
    "label_smoothing": lambda m, i: setattr(m.criterion, "label_smoothing", 0.1 * (i % 2)),
    "eval": lambda m, i: m.model.train(i % 3 != 2),
    "eval of dropout": lambda m, i: m.model.dropout.train(i % 2 == 0),
    "config object": lambda m, i: setattr(CONFIG, "scale", 1.0 + i % 2),
    "closure cell": lambda m, i: m.set_cell(1.0 + i % 2),
    "global": lambda m, i: set_global(1.0 + i % 2),
    "class attribute": lambda m, i: setattr(Net, "gain", 1.0 + i % 2),
    "module attribute": lambda m, i: setattr(m.model, "power", i % 2),
    "requires_grad": lambda m, i: m.model.first.requires_grad_(i % 4 < 2),
    "group added": add_group,
    "hook added": hook,
    "layer replaced": replace,
    "parameters replaced": replace_linear,
    "nesterov": lambda m, i: m.optimizer.param_groups[0].__setitem__("nesterov", i % 2 == 1),
    "optimizer.load_state_dict": lambda m, i: (
        i == 2 and m.optimizer.load_state_dict(m.optimizer.state_dict())
    ),
    "short batch": shorten,
}
STEPS = 6


def states(m: Made) -> dict[str, str]:
    named = dict(m.model.named_parameters()) | dict(m.model.named_buffers())
    for name, parameter in m.model.named_parameters():
        buffer = m.optimizer.state.get(parameter, {}).get("momentum_buffer")
        named |= {} if buffer is None else {f"momentum of {name}": buffer}
    return {name: bits(tensor) for name, tensor in named.items()}


def trained(m: Made, change: Callable[[Made, int], Any], run: Callable[..., Any]) -> list[Any]:
    """Losses, and where the generator ends."""
    torch.manual_seed(7)
    losses = []
    for i in range(STEPS):
        change(m, i)
        losses.append(bits(run(*m.batch)))
    return [losses, bits(torch.get_rng_state())]


def eager(change: Callable[[Made, int], Any]) -> list[Any]:
    def body(_rank: int, _store: str) -> list[Any]:
        m = made()
        run = lambda *batch: m.step(m.model, m.criterion, m.optimizer, *batch)  # noqa: E731
        return [trained(m, change, run), states(m)]

    (outcome,) = run_ranks(1, body)
    assert outcome.status == 0, outcome.error
    return outcome.value


def scattered(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
    """A random plan, which keeps the state wherever it falls."""
    return random_plan(graph, size, seed=len(graph.ops))


def on_ranks(change: Callable[[Made, int], Any], size: int, decide: Any = scattered) -> Any:
    def body(rank: int, path: str) -> Any:
        connect(rank, size, path, 20).close()
        m = made()
        args = (m.model, m.criterion, m.optimizer, *m.batch)
        fast = parallelize(m.step, *args, decide=decide, timeout=20, device="cpu")
        found = trained(m, change, fast)
        held = {name: bits(fast.whole(name)) for name in fast.names}
        fast.close()
        return [found, held, fast.captures, fast.moved]

    return run_ranks(size, body)


def renamed(name: str) -> str:
    """The name of eager state in the graph."""
    if name.startswith("momentum of "):
        return f"optimizer.state.model.{name.removeprefix('momentum of ')}.momentum_buffer"
    return f"model.{name}"


def assert_followed(name: str, size: int) -> None:
    change = CHANGES[name]
    trajectory, held = eager(change)
    for outcome in on_ranks(change, size):
        assert outcome.status == 0, outcome.error
        found, state, captures, _ = outcome.value
        assert found == trajectory
        for each, value in held.items():
            assert state[renamed(each)] == value, each
        assert captures == 2


@pytest.mark.parametrize(
    "name",
    long_but(
        {"int argument", "eval", "global", "group added", "short batch"},
        CHANGES,
    ),
)  # fmt: skip
def test_what_changes_is_followed(name: str) -> None:
    assert_followed(name, 1)


@pytest.mark.parametrize(
    "name",
    long_but(
        {"eval", "group added", "parameters replaced"},
        ["eval", "requires_grad", "group added", "parameters replaced", "short batch"],
    ),
)
def test_ranks_follow_alike_and_state_moves_where_a_plan_wants_it(name: str) -> None:
    """Random plans keep the state wherever it falls."""
    assert_followed(name, 2)


def test_a_replaced_layer_refuses_to_be_read() -> None:
    """As the layers do that were there from the beginning."""

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        m = made()
        args = (m.model, m.criterion, m.optimizer, *m.batch)
        fast = parallelize(m.step, *args, decide=scattered, timeout=20, device="cpu")
        replace_linear(m, 2)
        fast(*m.batch)
        codes = []
        for read in (m.model.last.state_dict, lambda: m.model.last(torch.ones(1, 8))):
            with pytest.raises(MismatchError) as caught:
                read()
            codes.append(caught.value.code)
        fast(*m.batch)
        captures = fast.captures
        fast.close()
        return [codes, captures]

    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == [["E523", "E523"], 2]


# Plans that leave the state where it is.


def planner(algorithm: str) -> Any:
    options = PlanOptions(algorithm=algorithm, costs="v100")

    def decide(graph: Graph, size: int, state: StateInPlace | None) -> Plan:
        return next_plan(graph, Cluster.uniform(size), options, None, state)

    return decide


def lengths(m: Made, i: int) -> None:
    rows = 3 + i % (STEPS // 2)
    m.batch[:2] = [torch.randn(rows, 6), torch.randint(4, (rows,))]


def test_each_length_is_captured_once_and_no_state_moves() -> None:
    trajectory, held = eager(lengths)
    for outcome in on_ranks(lengths, 2, planner("pardnn")):
        assert outcome.status == 0, outcome.error
        found, state, captures, moved = outcome.value
        assert found == trajectory
        assert all(state[renamed(each)] == value for each, value in held.items())
        assert (captures, moved) == (STEPS // 2, 0)


def double_made() -> Made:
    m = made()
    m.model.double()
    m.model.dropout.p = 0.0
    return dataclasses.replace(m, batch=[m.batch[0].double(), *m.batch[1:]])


def cut_changes(m: Made, i: int) -> None:
    rows = 3 if i % 3 == 2 else 4
    m.batch[:2] = [torch.randn(rows, 6).double(), torch.randint(4, (rows,))]
    m.batch[3] = bool(i % 2)
    m.model.first.requires_grad_(i < 4)


def test_a_cut_step_is_followed_with_its_shards_where_they_are() -> None:
    def values(m: Made, run: Callable[..., Any]) -> list[float]:
        torch.manual_seed(7)
        losses = []
        for i in range(STEPS):
            cut_changes(m, i)
            losses.append(run(*m.batch).item())
        return losses

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        m = double_made()
        args = (m.model, m.criterion, m.optimizer, *m.batch)
        fast = parallelize(m.step, *args, decide=planner("tofu"), timeout=20, device="cpu")
        first = list(m.model.parameters())
        losses = values(m, fast)
        same = all(p is q for p, q in zip(m.model.parameters(), first, strict=True))
        names = [name for name, _ in m.model.named_parameters()]
        whole = {name: fast.whole(f"model.{name}").tolist() for name in names}
        fast.close()
        return [losses, whole, fast.moved, same]

    m = double_made()
    expected = values(m, lambda *b: m.step(m.model, m.criterion, m.optimizer, *b))
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        losses, whole, moved, same = outcome.value
        assert losses == pytest.approx(expected, rel=1e-10)
        assert (moved, same) == (0, True)
        for name, parameter in m.model.named_parameters():
            assert torch.allclose(torch.tensor(whole[name]).double(), parameter, atol=1e-10), name


def test_shapes_are_planned_ahead() -> None:
    m = made()
    short = [torch.randn(3, 6), torch.randint(4, (3,)), *m.batch[2:]]
    args = (m.model, m.criterion, m.optimizer, *m.batch)
    fast = parallelize(m.step, *args, decide=scattered, device="cpu", shapes=[short, m.batch])
    assert fast.captures == 2
    for batch in (m.batch, short, m.batch):
        fast(*batch)
    assert fast.captures == 2


# What cannot be followed.


def test_a_change_that_cannot_be_captured_leaves_the_rest_usable() -> None:
    def refuse(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 2 if out.sum() > 0 else out

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        m = made()
        args = (m.model, m.criterion, m.optimizer, *m.batch)
        fast = parallelize(m.step, *args, decide=scattered, timeout=20, device="cpu")
        torch.manual_seed(7)
        losses = [bits(fast(*m.batch))]
        hook = m.model.first.register_forward_hook(refuse)
        with pytest.raises(UnsupportedError) as caught:
            fast(*m.batch)
        hook.remove()
        losses.append(bits(fast(*m.batch)))
        fast.close()
        return [losses, caught.value.code]

    expected = eager(lambda m, i: None)[0][0][:2]
    for outcome in run_ranks(2, body):
        assert outcome.status == 0, outcome.error
        assert outcome.value == [expected, "E802"]


def accumulating() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, x, is_fresh):
        if is_fresh:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, optimizer, torch.randn(3, 4)


def test_a_gradient_that_one_path_leaves_to_another_is_refused() -> None:
    step, model, optimizer, x = accumulating()
    fast = parallelize(step, model, optimizer, x, True, decide=scattered, device="cpu")
    fast(x, True)
    with pytest.raises(UnsupportedError, match="an earlier call left") as caught:
        fast(x, False)
    assert caught.value.code == "E808"
    # What `test_accumulation` does.
    assert "zero_grad() after optimizer.step() instead of at the start" in str(caught.value)
    fast(x, True)


def test_parameters_that_the_optimizer_does_not_hold_are_named() -> None:
    step, model, optimizer, x = accumulating()
    fast = parallelize(step, model, optimizer, x, True, decide=scattered, device="cpu")
    fast(x, True)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(UnsupportedError, match=r"load_state_dict\(assign=True\)") as caught:
        fast(x, True)
    assert caught.value.code == "E808"


def test_parameters_that_are_taken_out_of_a_group_are_named_unless_frozen() -> None:
    def losses(call: Any, model: nn.Module, group: dict[str, Any]) -> list[float]:
        found = [call().item()]
        group["params"] = group["params"][:1]
        model.bias.requires_grad_(False)
        return [*found, call().item(), call().item()]

    step, model, optimizer, x = accumulating()
    fast = parallelize(step, model, optimizer, x, True, decide=scattered, device="cpu")
    found = losses(lambda: fast(x, True), model, optimizer.param_groups[0])
    step, model, optimizer, x = accumulating()
    eager = losses(lambda: step(model, optimizer, x, True), model, optimizer.param_groups[0])
    assert found == eager

    step, model, optimizer, x = accumulating()
    fast = parallelize(step, model, optimizer, x, True, decide=scattered, device="cpu")
    fast(x, True)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]
    with pytest.raises(UnsupportedError, match=r"no optimizer holds[\s\S]+requires_grad_\(False\)"):
        fast(x, True)


def test_what_a_hook_computed_and_is_a_parameter_now_is_named() -> None:
    step, model, optimizer, x = accumulating()
    prune.l1_unstructured(model, "weight", 0.5)
    fast = parallelize(step, model, optimizer, x, True, decide=scattered, device="cpu")
    fast(x, True)
    prune.remove(model, "weight")
    with pytest.raises(UnsupportedError, match=r"'model\.weight' is a parameter now") as caught:
        fast(x, True)
    assert caught.value.code == "E808"
    assert "prune.remove" in str(caught.value)


def test_without_a_planner_a_change_is_refused() -> None:
    m = made()
    args = (m.model, m.criterion, m.optimizer, *m.batch)
    plan = random_plan(capture(m.step, *args), 1)
    fast = parallelize(m.step, *args, plan=plan, device="cpu")
    m.model.eval()
    with pytest.raises(MismatchError, match="model.training") as caught:
        fast(*m.batch)
    assert caught.value.code == "E509"


# Ranks that see different things.


def disagreeing(before: int, change: Callable[[Made, int, int], None]) -> list[Outcome]:
    def body(rank: int, path: str) -> Any:
        # One rank captures anew while the other one waits: over 2 s on a busy machine.
        connect(rank, 2, path, 6).close()
        m = made()
        args = (m.model, m.criterion, m.optimizer, *m.batch)
        fast = parallelize(m.step, *args, decide=scattered, timeout=6, device="cpu")
        for i in range(before):
            m.batch[3] = bool(i % 2)
            fast(*m.batch)
        for i in range(3):
            change(m, rank, i)
            fast(*m.batch)
        return None

    return run_ranks(2, body)


def one_changes(m: Made, rank: int, i: int) -> None:
    m.batch[2] = 1 + rank


def both_change(m: Made, rank: int, i: int) -> None:
    m.batch[2] = 2 + rank


def one_switches(m: Made, rank: int, i: int) -> None:
    m.batch[3] = bool(rank)


@pytest.mark.parametrize(
    ("before", "change"), [(1, one_changes), (1, both_change), (3, one_switches)]
)
def test_ranks_that_see_different_changes_stop_by_name(
    before: int, change: Callable[[Made, int, int], None]
) -> None:
    found = disagreeing(before, change)
    for outcome in found:
        assert outcome.code == "E519", outcome.error
        assert outcome.seconds < 30
    assert any("same calls" in outcome.error["message"] for outcome in found)


# Notices.


def test_one_line_tells_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    m = made()
    args = (m.model, m.criterion, m.optimizer, *m.batch)
    fast = parallelize(m.step, *args, decide=scattered, device="cpu")
    for training in (True, False, True, False):
        m.model.train(training)
        fast(*m.batch)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "pardnn"]
    assert "step 1 is captured again" in line
    assert "'model.training' is False, but was True" in line


def test_a_value_that_changes_at_every_call_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tell = Notices("step", is_silent=False)
    for step in range(2 * MANY_IN_A_ROW):
        tell.captured(notices.Made(0.1, 0.1), [Change("epoch", step, step + 1)], step, [])
    advice = [r.getMessage() for r in caplog.records if "again and again" in r.getMessage()]
    assert len(advice) == 1
    assert "'epoch' changes again and again" in advice[0]


def test_a_place_that_two_guards_watch_is_told_once() -> None:
    changes = [Change("a", 1, 2), Change("a", 1, 2), *(Change(f"b{i}", i, None) for i in range(4))]
    expected = "'a' is 2, but was 1; 'b0' is None, but was 0; 'b1' is None, but was 1 (and 2 more)"
    assert told(changes) == expected


def test_what_has_changed_is_told_in_one_line() -> None:
    changes = [Change("mask", None, torch.zeros(2, 9)), Change("text", "a", "b\n  c")]
    expected = r"'mask' is a tensor of shape [2, 9], but was None; 'text' is 'b\n c', but was 'a'"
    assert told(changes) == expected
