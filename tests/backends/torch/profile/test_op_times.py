"""Profile: every distinct call once, kept, restored, believable; links between local ranks."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pardnn.api.run import shared_cores_seconds
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.comm import unix_sockets
from pardnn.backends.torch.profile import link_times, op_alone
from pardnn.backends.torch.profile import op_times as module
from pardnn.backends.torch.profile.link_times import cached_links, measure_links
from pardnn.backends.torch.profile.op_times import cached_table, machine_of, profile_graph
from pardnn.backends.torch.profile.synthetic_inputs import synthetic_inputs
from pardnn.cluster import Cluster
from pardnn.cost.call import signature, tensors_by_name
from pardnn.cost.costs import HOST_SIGNATURE, VIEW_SIGNATURE, measured_costs, preset_costs
from pardnn.cost.links import LinkCosts, LinkFit
from pardnn.cost.table import CostCacheWarning
from pardnn.errors import StuckError, UnsupportedError
from pardnn.graph.build import build_graph
from pardnn.planner.make_plan import make_plan
from pardnn.planner.options import PlanOptions
from pardnn.planner.problem import Problem
from tests.backends.torch import models
from tests.backends.torch.ranks import run_ranks
from tests.cost.helpers import call, mlp_graph, mm_graph, source, tensor
from tests.long_cases import long_but

LIBRARY = torch.library.Library("pardnn_profile_test", "FRAGMENT")
LIBRARY.define("sleep(Tensor x) -> Tensor")
LIBRARY.define("refuse(Tensor x) -> Tensor")
LIBRARY.define("slow_at_first(Tensor x) -> Tensor")
SLEEP_SECONDS = 0.02


@torch.library.impl(LIBRARY, "sleep", "CPU")
def _sleep(x):
    time.sleep(SLEEP_SECONDS)
    return x.clone()


_seen: list[torch.Tensor] = []


@torch.library.impl(LIBRARY, "slow_at_first", "CPU")
def _slow_at_first(x):
    if not _seen:
        time.sleep(SLEEP_SECONDS)
    _seen.append(x)
    return x.clone()


@torch.library.impl(LIBRARY, "refuse", "CPU")
def _refuse(x):
    raise RuntimeError("only real data will do\nsecond line")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keep the estimates' probe of this CPU out of the user's cache."""
    monkeypatch.setenv("PARDNN_CACHE", str(tmp_path / "probe"))


def one_call(kind, *shape, name="y"):
    made = [source("x", *shape), call(name, kind, ["x"], [tensor(name, *shape)])]
    return build_graph("one", made)


@pytest.mark.parametrize(
    "entry",
    [models.gpt2, *long_but((), [models.resnet, models.lstm, models.mixture])],
    ids=lambda entry: entry.__name__,
)
def test_every_call_of_real_steps_runs_on_made_up_inputs(entry, tmp_path):
    step, args = entry()
    graph = capture(step, *args)
    table, stats = profile_graph(graph, folder=tmp_path, budget_seconds=0)
    assert stats.estimated == ()
    assert stats.measured > 20
    assert stats.cached == 0
    seconds = measured_costs(graph, {"accelerator": table}).seconds["accelerator"]
    called = [not op.is_source and op.kind != "pardnn.loss" for op in graph.ops]
    assert (seconds[called] > 0).all()
    assert seconds.max() < 1.0


@pytest.mark.parametrize("keeps", [False, True])
def test_calls_are_timed_and_kept_apart_by_what_becomes_of_freed_tensors(
    tmp_path, monkeypatch, keeps
):
    seen = []

    @contextmanager
    def as_on_ranks(*, keeps):
        seen.append(keeps)
        yield

    monkeypatch.setattr(module, "as_on_ranks", as_on_ranks)
    table, _ = profile_graph(mm_graph(2, 3, 4), folder=tmp_path, keeps_freed=keeps)
    assert seen == [keeps]
    assert cached_table(folder=tmp_path, keeps_freed=keeps).entries == table.entries
    assert not cached_table(folder=tmp_path, keeps_freed=not keeps).entries


def test_a_second_profile_measures_nothing(tmp_path, monkeypatch):
    graph = mlp_graph(8)
    seen = []
    first, stats = profile_graph(graph, folder=tmp_path, progress=lambda *at: seen.append(at))
    assert (stats.measured, stats.cached) == (4, 0)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    monkeypatch.setattr(module, "measure_alone", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(module, "measure_overheads", lambda *_: pytest.fail("measured again"))
    second, stats = profile_graph(graph, folder=tmp_path)
    assert (stats.measured, stats.cached) == (0, 4)
    assert second == first


def test_without_a_place_to_write_it_measures_all_the_same(tmp_path, monkeypatch):
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("PARDNN_CACHE", str(occupied / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(occupied))
    table, stats = profile_graph(mm_graph(2, 3, 4))
    assert stats.measured == 1
    assert len(table.entries) == 3


def test_only_what_is_damaged_is_measured_again(tmp_path):
    graph = mlp_graph(8)
    table, _ = profile_graph(graph, folder=tmp_path)
    path = tmp_path / table.machine.file_name
    text = path.read_text()
    entry = next(e for t, e in table.entries.items() if "aten.mm" in t)
    assert text.count(repr(entry.seconds)) == 1
    path.write_text(text.replace(repr(entry.seconds), repr(entry.seconds * 2)))
    with pytest.warns(CostCacheWarning):
        again, stats = profile_graph(graph, folder=tmp_path)
    assert (stats.measured, stats.cached) == (1, 3)
    assert set(again.entries) == set(table.entries)


def test_equal_layers_are_timed_once(tmp_path):
    layers = [
        call(f"x{i}", "aten.exp.default", [f"x{i - 1}"], [tensor(f"x{i}", 16, 16)])
        for i in range(1, 6)
    ]
    _, stats = profile_graph(build_graph("deep", [source("x0", 16, 16), *layers]), folder=tmp_path)
    assert stats.measured == 1


def test_a_known_duration_is_measured(tmp_path):
    graph = one_call("pardnn_profile_test::sleep.default", 4)
    table, _ = profile_graph(graph, folder=tmp_path)
    entry = table.entries[signature(graph.ops[1], tensors_by_name(graph))]
    assert entry.repetitions >= op_alone.MIN_REPETITIONS
    assert SLEEP_SECONDS <= entry.seconds < 3 * SLEEP_SECONDS


def test_more_work_takes_longer(tmp_path):
    def seconds(size):
        graph = mm_graph(size, size, size)
        table, _ = profile_graph(graph, folder=tmp_path, threads=1)
        return measured_costs(graph, {"cpu": table}).seconds["cpu"][2]

    assert seconds(512) > 8 * seconds(64)  # 512 times the work


def test_a_call_that_is_slow_once_is_not_slow(tmp_path, monkeypatch):
    """It was timed twice, with its first run, so half of what loading took was its time."""
    monkeypatch.setattr(op_alone, "SLOW_SECONDS", SLEEP_SECONDS / 2)
    monkeypatch.setattr(module, "profile_in_context", lambda *_, **__: {})
    graph = one_call("pardnn_profile_test::slow_at_first.default", 4)
    table, _ = profile_graph(graph, folder=tmp_path, threads=1)
    entry = table.entries[signature(graph.ops[1], tensors_by_name(graph))]
    assert entry.seconds < SLEEP_SECONDS / 10
    assert entry.repetitions > 2


def test_what_cannot_be_run_is_estimated_and_listed(tmp_path):
    graph = one_call("pardnn_profile_test::refuse.default", 1 << 20)
    table, stats = profile_graph(graph, folder=tmp_path)
    assert stats.measured == 0
    assert stats.estimated == (
        ("y", "pardnn_profile_test::refuse.default", "RuntimeError: only real data will do"),
    )
    entry = table.entries[signature(graph.ops[1], tensors_by_name(graph))]
    assert entry.repetitions == 0
    assert 1e-5 < entry.seconds < 1e-1  # 8 MiB through memory


def test_what_does_not_fit_is_not_tried(tmp_path):
    _, stats = profile_graph(one_call("aten.exp.default", 1 << 45), folder=tmp_path)
    ((_, _, reason),) = stats.estimated
    assert reason.startswith(f"RuntimeError: it needs {8 << 45} bytes")


def test_after_the_budget_each_call_is_timed_once(tmp_path):
    table, stats = profile_graph(mlp_graph(8), folder=tmp_path, budget_seconds=0)
    assert stats.measured == 4
    overheads = (VIEW_SIGNATURE, HOST_SIGNATURE)
    calls = [e for t, e in table.entries.items() if not t.startswith(overheads)]
    assert [entry.repetitions for entry in calls] == [1] * 4


def test_generators_threads_and_gradients_are_left_as_they_were(tmp_path):
    graph = build_graph(
        "random",
        [
            source("x", 64),
            call("y", "aten.bernoulli.default", ["x"], [tensor("y", 64)]),
        ],
    )
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    table, stats = profile_graph(graph, folder=tmp_path, threads=threads + 1)
    assert stats.estimated == ()
    assert table.machine.threads == threads + 1
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_costs_of_other_thread_counts_are_kept_apart(tmp_path):
    for threads in (1, 2):
        _, stats = profile_graph(mm_graph(8, 8, 8), folder=tmp_path, threads=threads)
        assert stats.measured == 1
    assert len(list(Path(tmp_path).glob("costs-*.json"))) >= 2


def test_the_machine_names_processor_library_and_product_precision():
    machine = machine_of(torch.device("cpu"))
    assert "cores" in machine.device
    assert torch.__version__ in machine.library
    assert torch.get_float32_matmul_precision() in machine.library


def made(name, kind, args, inputs):
    op = call(name, kind, args, [tensor(name, 1)])
    return synthetic_inputs(op, tensors_by_name(build_graph("g", inputs)), torch.device("cpu"))


def test_made_up_tensors_have_form_and_range():
    inputs = [
        source("a", 5, 7, strides=(1, 5)),
        source("e", 4, 300, strides=(0, 1)),
        source("h", 3, dtype="bfloat16"),
        source("b", 1000, dtype="bool"),
        source("z", 0, 3),
        source("big", 1 << 17),
    ]
    found = made("y", "mylib::op.default", [op.name for op in inputs], inputs)
    for op in inputs:
        (form,) = op.outputs
        value = found[form.name]
        assert tuple(value.shape) == form.shape
        assert str(value.dtype) == f"torch.{form.dtype}"
        assert form.strides is None or value.stride() == form.strides
        if value.is_floating_point():
            assert ((value >= 0.5) & (value <= 1)).all()
    assert 300 < int(found["b"].sum()) < 700
    assert found["e"].untyped_storage().nbytes() == 4 * 300


@pytest.mark.parametrize(
    ("kind", "args", "bound"),
    [
        ("aten.embedding.default", ["w", "i"], 40),
        ("aten.embedding_dense_backward.default", ["w", "i", 33, -1, False], 33),
        ("aten.nll_loss_forward.default", ["w", "i", None, 1, -100], 6),
        ("aten.gather.default", ["w", 1, "i"], 6),
        ("aten.index_select.default", ["w", -2, "i"], 40),
        ("aten.index.Tensor", ["w", ["i"]], 6),
        ("mylib::op.default", ["w", "i"], 1),
    ],
)
def test_made_up_indices_are_valid_and_spread(kind, args, bound):
    inputs = [source("w", 40, 6), source("i", 5000, dtype="int64")]
    indices = made("y", kind, args, inputs)["i"]
    assert int(indices.min()) == 0
    assert int(indices.max()) == bound - 1


@pytest.mark.long
def test_local_links_are_measured_and_kept(tmp_path):
    assert cached_links(tmp_path) is None
    found = measure_links(folder=tmp_path)
    assert cached_links(tmp_path) == found
    for fit in (found.idle, found.sending, found.taking):
        assert 1e-6 < fit.latency < 1e-1
        assert 1e7 < fit.bandwidth < 1e12
    assert 1e-6 < found.posting < 1e-2
    assert 0.0 <= found.waking < 1e-1


def test_links_are_measured_where_buffers_hold_little() -> None:
    """Most machines allow 208 KiB a buffer: ranks waited for each other for ever (E701).

    A send is two calls: it is posted, and waited for.
    """

    @contextlib.contextmanager
    def counted() -> Iterator[Callable[[Callable[[], Any]], float]]:
        yield lambda call: (call(), 1.0)[1]

    def body(rank: int, store: str) -> dict[str, float]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(unix_sockets, "BUFFER_BYTES", 1 << 14)
            patch.setattr(link_times, "undisturbed", counted)
            for name, few in (("SIZE_SECONDS", 0.0), ("ROUNDS", 2)):
                patch.setattr(link_times, name, few)
            return link_times._bounce(f"{store}-links", rank, 10.0)

    outcomes = run_ranks(2, body, limit_s=20.0)
    wanted = {f"{kind}{size}" for kind, sizes in link_times._SIZES.items() for size in sizes}
    for outcome in outcomes:
        assert outcome.status == 0, outcome
        assert outcome.value.keys() == wanted
        assert {outcome.value[f"pardnn.send.{size}"] for size in (1 << 6, 1 << 20)} == {2.0}
        assert outcome.value[f"pardnn.take.{1 << 20}"] == 1.0


def test_a_step_on_shared_cores_is_predicted_once_messages_and_calls_are_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("pardnn.backends.torch.devices.this_device", lambda: "cpu")
    step, args = models.small()
    graph = capture(step, *args)
    costs = preset_costs(graph, "cpu", ["accelerator"])
    options = PlanOptions(algorithm="round-robin")
    plan, _ = make_plan(Problem(graph, Cluster.uniform(2), costs, options))
    assert plan.messages
    assert shared_cores_seconds(graph, plan) is None  # neither is known
    fit = LinkFit(latency=1.0, bandwidth=1e9, error=0.0)  # long, to be seen
    links = LinkCosts(idle=fit, sending=fit, taking=fit, posting=0.0, waking=0.0)
    monkeypatch.setattr("pardnn.backends.torch.profile.link_times.cached_links", lambda: links)
    assert shared_cores_seconds(graph, plan) is None  # calls are not
    table, _ = profile_graph(graph, threads=1)
    seconds = shared_cores_seconds(graph, plan)
    work = measured_costs(graph, {"accelerator": table}).on("accelerator").sum()
    least = 2.0  # one message on the way to the loss, from one end to the other
    assert seconds is not None
    assert least < seconds < work + 2 * len(plan.messages) + 1


def test_links_that_take_too_long_are_given_up():
    start = time.monotonic()
    with pytest.raises(StuckError, match="host name") as caught:
        measure_links(timeout_s=0.05)
    assert caught.value.code == "E701"
    assert time.monotonic() - start < 10


def test_a_call_that_may_not_run_leaves_the_others_in_context(monkeypatch, tmp_path):
    """Alone, calls are timed with their inputs in the caches: of a GPT-2 a fifth too fast."""
    refusing = call("r", "aten.exp.default", ["c"], [tensor("r", 8, 8)])
    after = call("s", "aten.abs.default", ["r"], [tensor("s", 8, 8)])
    graph = build_graph("g", [*mm_graph(8, 8, 8).ops, refusing, after])
    alone = []

    def admit(op):
        if op.kind == "aten.exp.default":
            raise UnsupportedError("not this one")

    monkeypatch.setattr(module, "measure_alone", lambda op, *_, **__: alone.append(op.name))
    table, stats = profile_graph(graph, folder=tmp_path, threads=1, admit=admit)
    assert alone == []
    assert [name for name, *_ in stats.estimated] == ["r"]
    names = {op.name: signature(op, tensors_by_name(graph)) for op in graph.ops[2:]}
    assert names["c"] in table.entries
    assert names["s"] in table.entries
