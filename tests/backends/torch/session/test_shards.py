"""Tensors of which a rank holds a shard refuse by name what would be wrong on it."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.parallelize import parallelize
from pardnn.backends.torch.user_step.shards import ShardOf, mark_shard, shard_held
from pardnn.errors import PardnnError
from tests.backends.torch.ranks import connect, run_ranks
from tests.backends.torch.session.kept_data.test_rebound import made, nothing, rows, trained
from tests.backends.torch.stepping import cut_plan

HERE = ShardOf("model.w", (8, 4), ((0, 4), (0, 4)))
THERE = ShardOf("model.v", (8, 4), ((4, 8), (0, 4)))


def shard(of: ShardOf = HERE, kind: type = nn.Parameter) -> Any:
    tensor = torch.arange(16.0).view(4, 4)
    tensor = nn.Parameter(tensor) if kind is nn.Parameter else tensor
    mark_shard(tensor, of)
    return tensor


def filled(p: Any) -> Any:
    p[...] = 3.0
    return p


RIGHT: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.clamp_(-1, 1),
    "iadd": lambda p: p.__iadd__(1.0),
    "a count": lambda p: p.mul_(torch.tensor(2.0)),
    "round": lambda p: p.copy_(p.round(decimals=2)),
    "all": filled,
    "init": lambda p: nn.init.constant_(p, 2.0),
    "itself": lambda p: p.mul_(p.sign() * (1 - p)),
    "foreach": lambda p: (torch._foreach_mul_([p], 0.5), p)[1],
    "like": lambda p: p.add_(torch.full_like(p, 2.0)),
}
WRONG: dict[str, Callable[[Any], Any]] = {
    "item": lambda p: p.__setitem__(0, 1.0),
    "row": lambda p: p[0].mul_(2),
    "draws": lambda p: nn.init.normal_(p),
    "fan": lambda p: nn.init.xavier_uniform_(p),
    "like": lambda p: torch.rand_like(p),
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data.sum(),
    "of a result": lambda p: (p * 2).max(),
    "transposed": lambda p: p.T.mul_(2),
    "list": lambda p: p.tolist(),
    "array": lambda p: p.detach().numpy(),
    "another part": lambda p: p.mul_(shard(THERE)),
    "others": lambda p: p.mul_(torch.ones(4, 4)),
    "average": lambda p: torch.zeros(4, 4).lerp_(p, 0.1),
    "matrix": lambda p: p @ p,
    "gradient": lambda p: setattr(p, "grad", torch.ones(8, 4)),
    "file": lambda p: torch.save(p, io.BytesIO()),
}


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
@pytest.mark.parametrize("act", RIGHT.values(), ids=RIGHT)
def test_what_computes_each_element_from_itself_gives_a_shard(
    act: Callable[[Any], Any], kind: type
) -> None:
    p, plain = shard(kind=kind), torch.arange(16.0).view(4, 4)
    with torch.no_grad():
        result, expected = act(p), act(plain)
    assert shard_held(p) == shard_held(result) == HERE
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(p, plain)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("act", WRONG.values(), ids=WRONG)
def test_what_needs_the_whole_is_refused(act: Callable[[Any], Any]) -> None:
    p = shard()
    words = r"'model.[wv]', \[[04]:[48], 0:4\] of \[8, 4\] \(test_shards.py:"
    with torch.no_grad(), pytest.raises(PardnnError, match=words) as caught:
        act(p)
    assert caught.value.code == "E529"
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(p, torch.arange(16.0).view(4, 4))


def test_it_is_described_copied_and_replaced_as_any_other() -> None:
    p = shard()
    assert isinstance(p, nn.Parameter)
    assert type(p).__name__ == "Parameter"
    assert repr(p).startswith("Parameter containing:\ntensor([[ 0.")
    assert (p.shape, p.dim(), p.numel(), len(p)) == ((4, 4), 2, 16, 4)
    one, other = copy.deepcopy([p, p])
    assert one is other
    assert shard_held(one) == HERE
    assert one.requires_grad
    p.grad = torch.ones_like(p)
    p.grad = None
    p.data = p.data * 0.5
    assert shard_held(p) == HERE
    p.data = torch.ones(4, 4)
    assert type(p) is nn.Parameter
    assert p.norm() == 4


def test_other_tensors_at_its_address_are_none() -> None:
    for _ in range(20):
        p = shard(kind=torch.Tensor)
        del p
        tensor = torch.ones(4, 4)
        assert shard_held(tensor.data) is None
        assert tensor.sum() == 16


def halved(model: Any, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model[1].running_var[:] = 0.5
        model[2].weight.data = torch.full_like(model[2].weight, 0.25)


def made_of_shards(model: Any, _: Any) -> None:
    model[2] = copy.deepcopy(model[2])


def momentum_of_shards(model: Any, optimizer: Any) -> None:
    state = optimizer.state[model[2].weight]
    state["momentum_buffer"] = state["momentum_buffer"] * 0.5


def one_item(model: Any, _: Any) -> None:
    model[1].running_mean[0] = 5.0


def own_data(model: Any, _: Any) -> None:
    model[2].weight.data = rows(*model[2].weight.shape)


def cut(graph: Any, size: int, _: Any) -> Any:
    return cut_plan(graph, size)


def on_two_ranks(changes: list[Any]) -> list[Any]:
    def body(rank: int, path: str) -> Any:
        connect(rank, 2, path, 20).close()
        step, *objects = made()
        fast = parallelize(step, *objects, rows(4, 6), decide=cut, device="cpu")
        try:
            losses = trained(changes, objects, fast)
        except PardnnError as error:
            return error.code, str(error)
        held = shard_held(objects[0][2].weight)
        return losses, fast.whole("model.2.weight").sum().item(), held is not None

    return [outcome.value for outcome in run_ranks(2, body)]


def test_writes_that_are_right_on_shards_are_done() -> None:
    step, *objects = made()
    changes = [nothing, halved, nothing]
    losses = trained(changes, objects, lambda x: step(*objects, x))
    for found, whole, is_shard in on_two_ranks(changes):
        assert found == pytest.approx(losses, rel=1e-12)
        assert whole == pytest.approx(objects[0][2].weight.sum().item(), rel=1e-12)
        assert is_shard


@pytest.mark.parametrize("change", [made_of_shards, momentum_of_shards])
def test_what_was_made_from_shards_is_not_taken_for_the_whole(change: Any) -> None:
    for code, text in on_two_ranks([nothing, change]):
        assert code == "E529"
        assert "was made from what this rank holds of '" in text


@pytest.mark.parametrize(("change", "code"), [(one_item, "E529"), (own_data, "E527")])
def test_writes_that_are_wrong_on_shards_are_refused(change: Any, code: str) -> None:
    assert [found[0] for found in on_two_ranks([nothing, change])] == [code] * 2
