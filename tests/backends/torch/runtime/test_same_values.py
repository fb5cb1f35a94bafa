"""Ranks that are not given the same step of the same model refuse, all of them, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pardnn.backends.torch.checkpoint.contents import memory
from pardnn.backends.torch.ops.codec import encode_constant
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.runtime import same_values
from pardnn.backends.torch.runtime.same_values import checksum
from tests.backends.torch.executors import captured, perceptron
from tests.backends.torch.plans import random_plan
from tests.backends.torch.ranks import Outcome, connect, run_ranks

Hook = Callable[[int, Any, list[torch.Tensor], int], None]


def nothing(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    """Leave all as it is."""


def outcomes(before: Hook = nothing, each: Hook = nothing) -> list[Outcome]:
    """Train five steps on two ranks; `before` disturbs what they start from, `each` the calls."""
    plan = random_plan(captured(perceptron), 2, seed=1)

    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, args = perceptron()
        before(rank, args, list(args[2:]), 0)
        fast = parallelize(step, *args, plan=plan, timeout=20, device="cpu")
        losses = []
        for number in range(5):
            batch = [x.clone() for x in args[2:]]
            each(rank, args, batch, number)
            losses.append(fast(*batch).item())
        fast.close()
        return losses

    return run_ranks(2, body)


def refused(found: list[Outcome], code: str, what: str, *advice: str) -> None:
    """All ranks end with one code and say what; who fails first says what to do, too."""
    for outcome in found:
        assert outcome.code == code, outcome.error
        assert what in outcome.error["message"]
    for word in advice:
        assert any(word in outcome.error["message"] for outcome in found)


def test_equal_ranks_train() -> None:
    first, second = outcomes()
    assert first.status == second.status == 0, first.error
    assert first.value == second.value


@pytest.mark.parametrize("read", [checksum, encode_constant, lambda x: bytes(memory(x))])
def test_one_element_of_stride_zero_reads_like_any_other(
    read: Callable[[torch.Tensor], Any],
) -> None:
    assert read(torch.tensor(1.5).expand(1)) == read(torch.tensor([1.5]))


def other_weights(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    if rank == 1:
        with torch.no_grad():
            args[0][3].bias.add_(1e-6)


def other_seed(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    torch.manual_seed(rank)


def other_batch(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    if rank == 1:
        batch[0][0, 0] += 1e-6


def other_rate(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    args[1].param_groups[0]["lr"] = 0.01 + rank


def test_other_weights_are_refused() -> None:
    refused(
        outcomes(before=other_weights),
        "E518",
        "'model.3.bias' has other values on rank 1",
        "seed all",
    )


def test_another_seed_is_refused_where_the_step_draws() -> None:
    refused(outcomes(before=other_seed), "E518", "random state", "manual_seed")


@pytest.mark.parametrize("hook", [other_batch, other_rate])
def test_another_batch_is_refused(hook: Hook) -> None:
    name = "x" if hook is other_batch else "optimizer.param_groups.0.lr"
    refused(outcomes(each=hook), "E518", f"'{name}'", "global", "DistributedSampler")


def late_batch(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    if step == 2 and rank == 1:
        batch[0][0, 0] += 1e-6


def test_batches_are_compared_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_values, "COMPARE_EVERY", 2)
    refused(outcomes(each=late_batch), "E518", "'x'")
    monkeypatch.setattr(same_values, "COMPARE_EVERY", 3)
    assert [outcome.status for outcome in outcomes(each=late_batch)] == [0, 0]


def evaluated(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    if step == 2:
        args[0].eval()


def thinned(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    args[0][1].p = 0.3 if step < 2 else 0.5


def frozen(rank: int, args: Any, batch: list[torch.Tensor], step: int) -> None:
    if step == 2:
        args[0][0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (evaluated, ("'model.training' is False, but was True", "must stay as it was")),
        (thinned, ("'model.1.p' is 0.5, but was 0.3",)),
        (frozen, ("'model.0.weight.requires_grad' is False, but was True",)),
    ],
)
def test_what_was_captured_may_not_change(hook: Hook, words: tuple[str, ...]) -> None:
    refused(outcomes(each=hook), "E509", *words)


def test_a_checksum_tells_values_shapes_and_dtypes_apart() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert checksum(x) == checksum(x.clone()) == checksum(x.t().contiguous().t())
    others = [x.reshape(3, 2), x.double(), x + 1e-7, x.t(), 1.0, 1, True, torch.tensor(1.0)]
    assert len({checksum(value) for value in (x, *others)}) == len(others) + 1
    assert checksum(torch.empty(2, device="meta")) is None
    assert checksum(torch.empty(0)) is not None
    assert checksum(torch.ones((), dtype=torch.bfloat16)) is not None
    assert checksum(torch.ones(2).expand(3, 2)) == checksum(torch.ones(3, 2))
