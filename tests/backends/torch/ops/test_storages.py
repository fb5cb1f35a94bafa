"""What a kernel allocates for its results is what its results show, or is accounted for."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import pardnn
from pardnn.backends.torch.capture.capture import capture
from pardnn.backends.torch.ops.codec import REDUCED_LOSSES, find_call
from pardnn.backends.torch.parallelize import parallelize
from testbed.op_draw import Draw
from testbed.op_samples import SAMPLES, with_keywords

#: Their results keep more than they show; the first up to three times, the second eight bytes.
LARGER = {"aten.col2im.default", "aten._embedding_bag.default"}


def excess(result: object, inputs: object) -> int:
    """Bytes of new storages beyond those of the results on them."""
    given = {t.untyped_storage()._cdata for t in pytree.tree_leaves(inputs) if torch.is_tensor(t)}
    made = [t for t in pytree.tree_leaves(result) if torch.is_tensor(t)]
    new = [t for t in made if t.untyped_storage()._cdata not in given]
    return sum(t.untyped_storage().nbytes() - t.numel() * t.itemsize for t in new)


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_results_hold_no_more_than_they_show(kind: str) -> None:
    found = []
    for draw in SAMPLES[kind]:
        args, kwargs = with_keywords(draw(Draw(0)))
        found.append(excess(find_call(kind)(*args, **kwargs), (args, kwargs)))
    assert (max(found) > 0) == (kind in LARGER), found


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
    assert f"aten.{name}.default" in REDUCED_LOSSES
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
