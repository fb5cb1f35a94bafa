"""What a rank does not hold refuses writes by name, and reads as NaN; else it is what it was."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardnn.backends.torch.devices import one_element
from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.user_step.absent import is_absent, mark_absent
from pardnn.errors import PardnnError
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.session.kept_data.test_rebound import (
    eager,
    given,
    made,
    nothing,
    rows,
    scattered,
    trained,
)


def absent(
    kind: type = nn.Parameter, dtype: torch.dtype = torch.float32, shape: Sequence[int] = (4, 4)
) -> Any:
    tensor = one_element(shape, dtype, torch.device("cpu"))
    tensor = nn.Parameter(tensor) if kind is nn.Parameter else tensor
    mark_absent(tensor, "model.w")
    return tensor


def own() -> torch.Tensor:
    return torch.ones(4, 4)


def stepped(p: nn.Parameter) -> None:
    p.grad = own()
    torch.optim.Adam([p]).step()


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(0.9),
    "data": lambda p: p.data.clamp_(-1, 1),
    "operator": lambda p: p.__iadd__(1.0),
    "foreach": lambda p: torch._foreach_mul_([own(), p], 0.9),
    "init": lambda p: nn.init.xavier_uniform_(p),
    "copy_": lambda p: p.copy_(own()),
    "item": lambda p: p.__setitem__(0, 1.0),
    "out": lambda p: torch.exp(own(), out=p),
    "detached view": lambda p: p.detach().view(-1)[1:].add_(1),
    "two elements": lambda p: p[0, :2].mul_(2),
    "in a list": lambda p: p.unbind()[0].normal_(),
    "optimizer": stepped,
    "address": lambda p: p.data_ptr(),
}
READS: dict[str, Callable[[Any], Any]] = {
    "lerp_": lambda p: own().lerp_(p, 0.1),
    "data": lambda p: own().copy_(p.data),
    "row": lambda p: own().__setitem__(0, p[0]),
    "foreach": lambda p: torch._foreach_lerp_([own()], [p], 0.1),
    "out": lambda p: torch.add(p, 1, out=own()),
    "new parameter": lambda p: nn.Parameter(p),
    "new parameter of data": lambda p: nn.Parameter(p.data),
    "broadcast": lambda p: dist.broadcast(p.data, 0),
    "all_gather": lambda p: dist.all_gather([own()], p),
}


@pytest.mark.parametrize("act", [*WRITES.values(), *READS.values()], ids=[*WRITES, *READS])
def test_writes_and_what_keeps_its_values_are_refused(act: Callable[[Any], Any]) -> None:
    p = absent()
    with (
        torch.no_grad(),
        pytest.raises(PardnnError, match=r"'model.w' \(test_absent.py:") as caught,
    ):
        act(p)
    assert caught.value.code == "E529"
    assert p.isnan().all()


def test_what_fills_leaves_it_as_it_was_and_fills_the_others() -> None:
    p, other = absent(), own()
    with torch.no_grad():
        assert p.zero_() is p
        assert p[0].fill_(1) is not None
        assert nn.init.constant_(p, 2.0) is p
        assert nn.init.zeros_(p) is p
        torch._foreach_zero_([other, p])
    assert p.isnan().all()
    assert not other.any()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_writes_to_a_single_element_leave_it_as_it_was(shape: tuple[int, ...]) -> None:
    count, other = absent(torch.Tensor, shape=shape), torch.ones(shape)
    with torch.no_grad():
        assert count.mul_(0.5) is count
        assert count.copy_(torch.ones(shape)) is count
        count[...] = 3
        count.data.add_(1)
        count += 1
        torch._foreach_add_([count, other], 1)
        assert torch.exp(other, out=count) is count
        with pytest.raises(RuntimeError, match="shape"):
            count.add_(own())
        with pytest.raises(PardnnError, match="'model.w'"):
            other.add_(count)
    assert is_absent(count)
    assert count.isnan().all()
    assert other.item() == 2
    count.data = torch.full(shape, 7.0)
    assert count.item() == 7
    assert type(count.add_(1)) is torch.Tensor
    assert count.item() == 8


def test_numbers_for_a_single_element_are_drawn_as_where_it_is_held() -> None:
    torch.manual_seed(0)
    torch.ones(1).normal_()
    expected = torch.rand(3)
    torch.manual_seed(0)
    p = absent()
    with torch.no_grad():
        p[0, 0].normal_()
    assert torch.equal(torch.rand(3), expected)
    assert p.isnan().all()


def test_it_is_read_described_and_replaced_as_any_other() -> None:
    p, buffer = absent(), absent(torch.Tensor, torch.int64)
    assert isinstance(p, nn.Parameter)
    assert type(p).__name__ == "Parameter"
    assert (p * 2).isnan().all()
    assert p.norm().isnan()
    assert type(p * 2) is torch.Tensor
    assert np.isnan(p.detach().numpy()).all()
    assert not buffer.numpy().any()
    assert repr(p).startswith("Parameter containing:\ntensor([[nan")
    assert f"{p[0, 0]:.1f}" == "nan"
    assert p.shape == (4, 4)
    assert p.requires_grad
    assert hash(p) == id(p)
    p.grad = own()
    p.grad.detach_().requires_grad_(False).zero_()
    p.data = p.data * 0.5
    assert type(p) is nn.Parameter
    assert p.data_ptr()


def test_copies_are_plain_tensors() -> None:
    p = absent()
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    for each in (*copy.deepcopy([p, p]), torch.load(file, weights_only=True)):
        assert type(each) is nn.Parameter
        assert each.isnan().all()
        each.data.mul_(2)
    one, other = copy.deepcopy([p, p])
    assert one is other


def halved(model: Any, optimizer: Any) -> list[str]:
    told = []
    for held in (model[2].weight, optimizer.state[model[2].weight]["momentum_buffer"]):
        try:
            held.data.mul_(0.5)
        except PardnnError as error:
            told.append(str(error))
    return told


def test_ranks_that_hold_it_write_and_the_others_are_told() -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, *objects = made()
        fast = parallelize(step, *objects, rows(4, 6), decide=scattered, device="cpu")
        told: list[str] = []
        changes = [nothing, lambda *objects: told.extend(halved(*objects))]
        return trained(changes, objects, fast), told

    outcomes = run_ranks(2, body)
    losses, _ = eager([nothing, halved])
    assert [outcome.value[0] for outcome in outcomes] == [losses] * 2
    none, told = sorted((outcome.value[1] for outcome in outcomes), key=len)
    assert none == []
    assert "'model.2.weight' (test_absent.py:" in told[0]
    assert "'optimizer.state.model.2.weight.momentum_buffer' (test_absent.py:" in told[1]


def test_data_given_to_what_another_rank_holds_goes_with_the_next_step() -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, *objects = made()
        fast = parallelize(step, *objects, rows(4, 6), decide=scattered, device="cpu")
        losses = trained([nothing, given, nothing], objects, fast)
        return losses, objects[0][2].weight.isnan().all().item(), fast.captures

    losses, _ = eager([nothing, given, nothing])
    found = [outcome.value for outcome in run_ranks(2, body)]
    assert [each[0] for each in found] == [losses] * 2
    assert sorted(each[1:] for each in found) == [[False, 1], [True, 1]]


def test_what_was_whole_for_a_while_is_absent_again() -> None:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, model, optimizer = made()
        fast = parallelize(step, model, optimizer, rows(4, 6), decide=scattered, device="cpu")
        fast.sync_model()
        is_whole = not any(p.isnan().any() for p in model.parameters())
        fast(rows(4, 6))
        told = 0
        for parameter in model.parameters():
            try:
                parameter.data.mul_(1)
            except PardnnError:
                told += 1
        return is_whole, told

    (is_whole, first), (_, second) = (outcome.value for outcome in run_ranks(2, body))
    assert is_whole
    assert first > 0
    assert first + second == len(list(made()[1].parameters()))


def recounted(model: Any, optimizer: Any) -> None:
    model[1].num_batches_tracked.fill_(7)
    for state in optimizer.state.values():
        state["step"].fill_(3)
        state["step"].mul_(2)


def counts(model: Any, optimizer: Any) -> list[float]:
    steps = [state["step"].item() for state in optimizer.state.values()]
    return [model[1].num_batches_tracked.item(), *steps]


def with_adam(model: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def test_counts_that_another_rank_holds_are_never_out_of_date() -> None:
    changes = [nothing, recounted, nothing]

    def body(rank: int, path: str) -> Any:
        step, model, _ = made()
        objects = model, with_adam(model)
        if not path:
            return trained(changes, objects, lambda x: step(*objects, x)), counts(*objects)
        connect(rank, 2, path, 20).close()
        fast = parallelize(step, *objects, rows(4, 6), decide=scattered, device="cpu")
        return trained(changes, objects, fast), counts(*objects)

    ((losses, numbers),) = (each.value for each in run_ranks(1, lambda rank, _: body(rank, "")))
    found = [outcome.value for outcome in run_ranks(2, body)]
    assert [each[0] for each in found] == [losses] * 2
    for expected, *held in zip(numbers, *(each[1] for each in found), strict=True):
        held.remove(expected)
        assert held[0] in (0, expected) or held[0] != held[0]
