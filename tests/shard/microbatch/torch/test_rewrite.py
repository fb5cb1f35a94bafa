"""Cut graphs on one device beside the whole step: every tensor, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.ops.codec import bind
from pardnn.errors import PardnnError
from pardnn.graph.build import build_graph
from pardnn.graph.ir import LOSS_KIND, Graph
from pardnn.plan.mesh import make_mesh
from pardnn.plan.pieces import ADD, Pieces, piece_of
from pardnn.plan.rewritten.check_pieces import pieces_problems
from pardnn.shard.microbatch.analysis import analyse_batch, most_pieces
from pardnn.shard.microbatch.rewrite import cut_batch
from pardnn.shard.recipes.data_parallel import data_parallel
from pardnn.sim.peak import one_device_peak
from testbed import small_models
from tests.backends.torch import models, spmd


def perceptron(loss: Callable[..., Any], target: torch.Tensor, **layers: Any) -> models.Entry:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8, bias="norm" not in layers), *layers.values(), nn.Linear(8, 5)
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return value

    return step, (model, optimizer, torch.randn(7, 6, dtype=torch.float64), target)


CLASSES = torch.tensor([0, 4, -100, 2, -100, 1, 3])
SCORES = torch.linspace(-1, 1, 35, dtype=torch.float64).reshape(7, 5)


def distances(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every sample beside every other one."""
    return nn.functional.cross_entropy(z @ z.t(), torch.arange(7)) + (z - y).abs().mean()


STEPS = {
    "rows that do not count": lambda: perceptron(nn.functional.cross_entropy, CLASSES),
    "class weights": lambda: perceptron(
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 6, dtype=torch.float64)), CLASSES
    ),
    "mean": lambda: perceptron(nn.functional.mse_loss, SCORES, drop=nn.Dropout(0.4)),
    "in place": lambda: perceptron(nn.functional.l1_loss, SCORES, relu=nn.ReLU(inplace=True)),
    "batch norm": lambda: perceptron(nn.functional.mse_loss, SCORES, norm=nn.BatchNorm1d(8)),
    "contrast": lambda: perceptron(distances, SCORES, relu=nn.GELU()),
}


def run_pieces(graph: Graph, values: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of a cut graph, as it was when its op had run."""
    env = {name: spmd.copied(value) for name, value in values.items()}
    seen = {name: spmd.copied(value) for name, value in values.items()}
    with torch.no_grad():
        for number in graph.arrays.topological.tolist():
            op = graph.ops[number]
            if op.is_source or op.kind == LOSS_KIND:
                continue
            if spmd.is_random(op.kind):
                spmd.seed(op.name)
            bind(op, spmd.CPU)(env)
            seen |= {t.name: spmd.copied(env[t.name]) for t in op.outputs}
            for t in op.outputs:
                assert t.shape is None or tuple(getattr(env[t.name], "shape", ())) == t.shape
    return seen


def assert_equal(
    step: Any, args: Any, num_pieces: int, accumulators: int | None = None
) -> tuple[Graph, Pieces]:
    """Compare what each tensor of the step is, whole and in pieces."""
    graph = capture(step, *args)
    pieces = cut_batch(graph, num_pieces, accumulators)
    assert list(pieces_problems(graph, pieces)) == []
    cut, values = build_graph("cut", pieces.ops), spmd.source_values(step, args, graph)
    whole, seen = spmd.run_whole(graph, values), run_pieces(cut, values)
    for name, expected in whole.items():
        found = seen.get(name)
        if name in pieces.batch and piece_of(name, 0) in seen:
            dim, _, outer = pieces.batch[name]
            parts = [seen[piece_of(name, i)].unflatten(dim, (outer, -1)) for i in range(num_pieces)]
            joined = torch.cat(parts, dim + 1).flatten(dim, dim + 1)
            torch.testing.assert_close(joined, expected, rtol=1e-10, atol=1e-13)
        if found is not None and "empty" not in name:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
        assert found is not None or name in pieces.batch or "forward.1" in name, name
    return graph, pieces


@pytest.mark.parametrize("name", STEPS)
def test_pieces_compute_what_the_whole_batch_does(name: str) -> None:
    step, args = STEPS[name]()
    _, pieces = assert_equal(step, args, 3)
    assert pieces.points == (0, 2, 4, 7)


@pytest.mark.parametrize("accumulators", [1, 2])
def test_products_add_themselves_to_their_accumulators(accumulators: int) -> None:
    _, pieces = assert_equal(*STEPS["rows that do not count"](), 4, accumulators)
    into = [op for op in pieces.ops if op.kind == "aten.addmm_.default"]
    assert len(into) == 2 * (4 - accumulators)
    assert all(op.outputs[0].alias_of == op.inputs[0] for op in into)
    added = [op.name.rpartition(":")[2] for op in pieces.ops if op.kind == ADD and ":" in op.name]
    biases = [f"add@{i}" for i in range(1, 4) if i % (4 // accumulators)]
    gathered = ["gather@3"] * (accumulators == 2)
    assert sorted(added) == sorted(2 * biases + 4 * gathered)


def test_a_recurrent_network_is_cut_from_its_first_state_on() -> None:
    step, args = small_models.lstm()
    graph = capture(step, *args)
    pieces = cut_batch(graph, 2)
    assert not [op.name for op in pieces.ops if op.name.endswith(":join")]


class Tokens(nn.Module):
    """Tokens of texts through layers that put the sequence first."""

    def __init__(self, kind: str, *, batch_first: bool) -> None:
        super().__init__()
        self.kind, first = kind, {"batch_first": batch_first}
        if kind == "encoder":
            layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, **first)
            self.layer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        elif kind == "attention":
            self.layer = nn.MultiheadAttention(6, 3, **first)
        else:
            self.layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](6, 6, **first)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "attention":
            return self.head(self.layer(x, x, x, need_weights=False)[0])
        found = self.layer(x)
        return self.head(found if self.kind == "encoder" else found[0])


def tokens(kind: str, batch_first: bool, loss: str = "squares") -> models.Entry:
    """Return a step of 7 texts of 4 tokens."""
    torch.manual_seed(3)
    model = Tokens(kind, batch_first=batch_first).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shape = (7, 4) if batch_first else (4, 7)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if loss == "squares":
            value = nn.functional.mse_loss(model(x), y)
        else:
            value = nn.functional.cross_entropy(model(x).reshape(-1, 5), y.reshape(-1))
        value.backward()
        optimizer.step()
        return value

    x = torch.randn(*shape, 6, dtype=torch.float64)
    y = torch.randn(*shape, 5, dtype=torch.float64)
    return step, (model, optimizer, x, y if loss == "squares" else y.argmax(-1))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "attention", "lstm", "gru"])
def test_layers_that_put_the_sequence_first_are_cut(kind: str, batch_first: bool) -> None:
    """Rows of tokens, each with all texts: only transposed weights and the update stay whole."""
    graph, pieces = assert_equal(*tokens(kind, batch_first), 3)
    assert pieces.points[-1] == 7
    cut = {op.name.rpartition("@")[0] for op in pieces.ops}
    products = [op.name for op in graph.ops if "mm" in op.kind or "attention" in op.kind]
    assert products
    assert cut.issuperset(products)
    if kind != "gru":
        assert any(outer > 1 for _, _, outer in pieces.batch.values())


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_that_a_loss_counts_are_counted_before_they_are_viewed(batch_first: bool) -> None:
    """Targets of texts behind tokens: how many count needs no order, and so no join."""
    graph, pieces = assert_equal(*tokens("encoder", batch_first, "classes"), 2)
    assert pieces.points[-1] == 7
    losses = [op.name for op in graph.ops if "nll_loss" in op.kind]
    assert len(losses) == 2
    assert {op.name.rpartition("@")[0] for op in pieces.ops}.issuperset(losses)
    assert not [op.name for op in pieces.ops if op.name.endswith(":join")]


def rows(kind: str) -> models.Entry:
    """Return a step on rows of 2 tokens of 7 texts each, some of whose ops look at all rows."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        h = model[0](x.view(14, 6))
        if kind == "norm":
            h = model[1](h)
        elif kind == "sum":
            h = h + 0.1 * h.cumsum(0)
        value = nn.functional.mse_loss(model[2](h).view(2, 7, 5), y)
        value.backward()
        optimizer.step()
        return value

    x = torch.randn(2, 7, 8, dtype=torch.float64)
    x = x[..., :6] if kind == "wide" else x[..., :6].contiguous()
    return step, (model, optimizer, x, torch.randn(2, 7, 5, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["plain", "norm", "sum", "wide"])
def test_rows_that_are_read_as_a_whole_are_not_cut(kind: str) -> None:
    """Nor those of an input that is no one run of memory: its slices cannot be viewed as rows."""
    _, pieces = assert_equal(*rows(kind), 3)
    if kind == "plain":
        assert any(outer > 1 for _, _, outer in pieces.batch.values())


def test_data_parallelism_keeps_to_boxes() -> None:
    step, args = tokens("encoder", batch_first=False)
    graph = capture(step, *args)
    found = data_parallel(graph, make_mesh((7,)))
    apart = [name for name, at in analyse_batch(graph, 7).dims.items() if at.outer > 1]
    assert apart
    assert all(found.layouts.get(name) in (None, (None,)) for name in apart)


def test_the_optimizer_runs_once_and_one_accumulator_is_held() -> None:
    graph, pieces = assert_equal(*STEPS["mean"](), 2)
    names = [op.name for op in pieces.ops]
    updates = [op.name for op in graph.ops if "addcdiv" in op.kind]
    assert updates
    assert all(names.count(name) == 1 for name in updates)
    sums = [op for op in pieces.ops if ":add@" in op.name and op.outputs[0].shape]
    assert all(op.memory == "reference" and op.outputs[0].alias_of for op in sums)
    assert len(sums) == 4  # two weights and two biases


def test_no_piece_waits_for_the_loss_of_another() -> None:
    """The first piece's backward pass needs the targets of all, and no scores but its own."""
    step, args = STEPS["rows that do not count"]()
    pieces = cut_batch(capture(step, *args), 2)
    producer = {t.name: op for op in pieces.ops for t in op.outputs}
    stack, needed = ["nll_loss_backward@0"], set()
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += producer[name].inputs
    assert "nll_loss_forward.0@1" not in needed
    assert not [
        name for name in needed if name.startswith(("addmm", "log_softmax")) and "@1" in name
    ]


@pytest.mark.parametrize("name", ["rows that do not count", "mean"])
def test_a_piece_is_done_before_the_next_one_begins(name: str) -> None:
    step, args = STEPS[name]()
    pieces = cut_batch(capture(step, *args), 3)
    row = [op.name.rpartition("@")[2] for op in pieces.ops if op.kind == "aten.addmm.default"]
    row += [op.name.rpartition("@")[2] for op in pieces.ops if op.kind == "aten.mm.default"]
    order = [op.name for op in pieces.ops if op.kind in ("aten.addmm.default", "aten.mm.default")]
    assert [name.rpartition("@")[2] for name in order] == sorted(row)


def test_in_their_order_pieces_hold_little() -> None:
    """Labels that all pieces wait for come with the first one, and nothing else does."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = (model, optimizer, torch.randn(512, 16), torch.randint(16, (512,)))
    step = small_models.classify_step
    graph = capture(step, *args)
    cut = build_graph("cut", cut_batch(graph, 8).ops)
    assert 3 * one_device_peak(cut.arrays) < one_device_peak(graph.arrays)


def test_a_gradient_that_is_clipped_does_not_join_what_is_beside_it() -> None:
    """A norm's backward pass makes the input's gradient, too, which is in pieces."""
    _, pieces = assert_equal(*perceptron(nn.functional.mse_loss, SCORES, norm=nn.LayerNorm(8)), 3)
    names = {op.name for op in pieces.ops}
    assert {f"native_layer_norm_backward@{i}" for i in range(3)} <= names
    assert not [name for name in names if name.endswith(":join")]


def test_a_short_batch_is_cut_in_as_many_pieces_as_it_has_samples() -> None:
    step, args = STEPS["mean"]()
    graph = capture(step, *args)
    assert [most_pieces(graph, wanted) for wanted in (3, 7, 8)] == [3, 7, 7]


def test_features_are_no_samples() -> None:
    """Pieces of features, more than there are samples, were planned, and refused by the checker."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, model, optimizer, torch.randn(5, 16))
    assert [most_pieces(graph, wanted) for wanted in (4, 8)] == [4, 5]
    with pytest.raises(PardnnError, match="its inputs have 5 samples"):
        cut_batch(graph, 8)


def test_more_pieces_than_samples_are_refused() -> None:
    step, args = STEPS["mean"]()
    with pytest.raises(PardnnError, match="E226|7 samples") as caught:
        cut_batch(capture(step, *args), 8)
    assert caught.value.code == "E226"
