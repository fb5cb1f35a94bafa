"""What a kernel allocates for its results is what its results show, or is accounted for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.capture.trace_ir import geometry_of
from pardnn.backends.torch.devices import elements_of
from pardnn.backends.torch.ops.codec import bind, find_call
from pardnn.backends.torch.ops.kernel_memory import LARGER, compact, workspace
from pardnn.backends.torch.parallelize import parallelize
from testbed.op_draw import Draw
from testbed.op_samples import SAMPLES, with_keywords
from tests.backends.torch.messages import LAYOUTS

#: Kernels that take and release memory of their own while they run, which no peak contains.
SCRATCH = {
    f"aten.{name}"
    for name in (
        "_embedding_bag_backward.default", "_embedding_bag_dense_backward.default",
        "_histogramdd_from_bin_cts.default", "_histogramdd_from_bin_tensors.default",
        "_trilinear.default", "_unsafe_masked_index.default",
        "_unsafe_masked_index_put_accumulate.default", "_linalg_det.default",
        "_linalg_eigh.default", "_linalg_slogdet.default",
        "_linalg_solve_ex.default", "_linalg_svd.default", "_native_batch_norm_legit.default",
        "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_no_training.default",
        "_safe_softmax.default", "_scaled_dot_product_flash_attention_for_cpu.default",
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        "_upsample_nearest_exact1d.default", "_upsample_nearest_exact2d.default",
        "_upsample_nearest_exact3d.default", "any.dim", "any.dims", "cholesky_solve.default",
        "convolution.default", "convolution_backward.default", "count_nonzero.dim_IntList",
        "histc.default", "isinf.default", "kthvalue.default", "ldexp.Tensor", "linalg_eig.default",
        "linalg_inv_ex.default", "linalg_ldl_solve.default", "linalg_lu.default",
        "linalg_matrix_exp.default", "linalg_qr.default", "mvlgamma.default",
        "native_batch_norm.default", "native_batch_norm_backward.default",
        "native_dropout.default", "native_group_norm_backward.default",
        "native_layer_norm_backward.default", "soft_margin_loss_backward.default",
        "unfold_backward.default", "upsample_bilinear2d.vec", "upsample_nearest2d.vec",
        "upsample_nearest3d.vec",
    )
}  # fmt: skip


def excess(result: object, inputs: object) -> int:
    """Bytes of new storages beyond those of the results on them."""
    given = {t.untyped_storage()._cdata for t in pytree.tree_leaves(inputs) if torch.is_tensor(t)}
    made = [t for t in pytree.tree_leaves(result) if torch.is_tensor(t)]
    new = [t for t in made if t.untyped_storage()._cdata not in given]
    return sum(t.untyped_storage().nbytes() - elements_of(t).nbytes for t in new)


def at_an_offset(leaf: Any) -> Any:
    return LAYOUTS["at an offset"](leaf) if isinstance(leaf, torch.Tensor) else leaf


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_results_hold_no_more_than_they_show(kind: str) -> None:
    found = []
    for draw in SAMPLES[kind]:
        given = pytree.tree_map(at_an_offset, with_keywords(draw(Draw(0))))
        result = find_call(kind)(*given[0], **given[1])
        found.append(excess(result, given))
        if kind in LARGER:
            assert excess(compact(result), given) == 0
            assert found[-1] <= workspace(kind, geometries(given), geometries(result))
    assert (max(found) > 0) == (kind in LARGER), found


def geometries(values: object) -> list[Any]:
    return [geometry_of(t) for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]


#: Bytes of a tensor that is made between two calls, so that their allocations can be told apart.
_MARK = 7_654_321


def allocated(calls: Sequence[Callable[[], object]]) -> list[tuple[object, int]]:
    """Return each call's result, and the most bytes that were allocated at once while it ran."""
    results = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for call in calls:
            results.append(call())
            torch.empty(_MARK, dtype=torch.uint8)
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks, live = [0], 0
    for _, size in changes:
        if abs(size) == _MARK:
            live = 0
            peaks += [0] if size > 0 else []
        else:
            live += size
            peaks[-1] = max(peaks[-1], live)
    return list(zip(results, peaks[:-1], strict=True))


def test_what_kernels_allocate_is_known() -> None:
    """Every op under an allocation meter: its results and its workspace, or it is listed above.

    On one thread: with more, histograms take scratch for each.
    """
    torch.set_num_threads(1)
    drawn = [(kind, with_keywords(draw(Draw(0)))) for kind in SAMPLES for draw in SAMPLES[kind]]
    calls = [functools.partial(find_call(kind), *args, **kw) for kind, (args, kw) in drawn]
    for call in calls:
        call()  # what is made at a first call stays
    found = set()
    for (kind, given), (result, peak) in zip(drawn, allocated(calls), strict=True):
        known = sum(elements_of(t).nbytes for t in made(result, given))
        known += workspace(kind, geometries(given), geometries(result))
        if peak > known + 64:
            found.add(kind)
    assert sorted(found - SCRATCH) == sorted(SCRATCH - found) == []


def made(result: object, given: object) -> list[torch.Tensor]:
    """The tensors of a result that own their storages, each storage once."""
    old = {t.untyped_storage()._cdata for t in pytree.tree_leaves(given) if torch.is_tensor(t)}
    new = {t.untyped_storage()._cdata: t for t in pytree.tree_leaves(result) if torch.is_tensor(t)}
    return [t for key, t in new.items() if key not in old]


LOSSES = {
    "mse_loss": nn.MSELoss(),
    "smooth_l1_loss": nn.SmoothL1Loss(),
    "binary_cross_entropy": nn.BCELoss(),
    "soft_margin_loss": nn.SoftMarginLoss(reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_reduced_loss_holds_a_scalar(name: str) -> None:
    """Its kernel shrinks a tensor of the size of the input, which the peak knows and frees."""
    torch.manual_seed(0)
    x, y = torch.rand(60, 50), torch.rand(60, 50)
    assert f"aten.{name}.default" in LARGER
    assert excess(find_call(f"aten.{name}.default")(x, y), (x, y)) == x.nbytes - 4

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = LOSSES[name](model(x).sigmoid(), y)
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(50, 50)
    args = (model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    graph = capture(step, *args)
    loss = next(op for op in graph.ops if op.kind == f"aten.{name}.default")
    assert loss.workspace == x.nbytes
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(1), "single", costs="v100")
    fast = parallelize(step, *args, plan=plan, device="cpu")
    fast(x, y)
    assert plan.predicted is not None
    assert fast.peak_bytes <= plan.predicted.peak_bytes[0] <= 1.01 * fast.peak_bytes


def peaks(step: Any, args: tuple[Any, ...]) -> tuple[int, int]:
    """Measured and predicted peak of a step on one rank."""
    graph = capture(step, *args)
    plan = pardnn.plan(graph, pardnn.Cluster.uniform(1), "single", costs="v100")
    fast = parallelize(step, *args, plan=plan, device="cpu")
    fast(*args[2:])
    assert plan.predicted is not None
    return fast.peak_bytes, plan.predicted.peak_bytes[0]


def test_what_a_kernel_shrank_is_not_held() -> None:
    def step(model, optimizer, x):
        optimizer.zero_grad()
        images = torch.nn.functional.fold(x * model.weight, (16, 16), 3, padding=1)
        loss = images.exp().mean()
        loss.backward()
        optimizer.step()
        return loss

    model, x = nn.Linear(256, 36, bias=False), torch.randn(2, 36, 256)
    graph = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    op = next(op for op in graph.ops if op.kind == "aten.col2im.default")
    assert op.workspace == x.nbytes
    env = {op.inputs[0]: x}
    bind(op, "cpu")(env)
    assert env[op.name].untyped_storage().nbytes() == 2 * 4 * 16 * 16 * 4


def test_a_batch_that_is_part_of_a_data_set_counts_for_itself() -> None:
    torch.manual_seed(0)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        return loss

    model, data = nn.Linear(50, 50), torch.randn(1000, 50)
    args = (model, torch.optim.SGD(model.parameters(), lr=0.1), data[20:40])
    measured, predicted = peaks(step, args)
    assert measured <= predicted <= 1.01 * measured
