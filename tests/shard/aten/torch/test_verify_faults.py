"""Wrong descriptions are caught, and users check descriptions of their own operators."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pardnn
from pardnn.api.verify import verify
from pardnn.errors import UsageError
from pardnn.shard.aten.conv import unpadded
from pardnn.shard.tdl import registry
from pardnn.shard.tdl.interval import DescriptionError
from pardnn.shard.tdl.language import At, Local, Max, Mean, Once, Opaque, Reducer, Sum


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "USERS", {})
    registry.find.cache_clear()
    yield
    registry.find.cache_clear()


f = torch.Generator().manual_seed(3)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=f)


def swapped(self: Any, mat2: Any) -> Any:
    """The second matrix is transposed."""
    return lambda i, j: Sum(lambda k: self[i, k] * mat2[j, k])


def wrong_reducer(self: Any, mat2: Any) -> Any:
    """A maximum instead of a sum."""
    return lambda i, j: Max(lambda k: self[i, k] * mat2[k, j])


def bias_in_each(self: Any, mat1: Any, mat2: Any) -> Any:
    """The addend is added by every worker."""
    return lambda i, j: Sum(lambda k: mat1[i, k] * mat2[k, j] + Opaque()(self.broadcast((i, j))))


def convolution(shift: int, has_local: bool) -> Callable[..., Any]:
    def described(input, weight, bias, stride, padding, dilation, transposed, output, groups):
        p = padding[0]
        made = lambda b, co, x: Sum(  # noqa: E731
            lambda ci, dx: (
                input.padded(0)[b, ci, x * stride[0] + dx - p + shift] * weight[co, ci, dx]
            )
        )
        return Local(made, padding=unpadded(padding)) if has_local else made

    return described


def narrow_halo(input, weight, bias, stride, padding, dilation, transposed, output, groups):
    """One element of the window is forgotten."""

    def made(b: Any, co: Any, x: Any) -> Any:
        window = slice(x * stride[0] - padding[0], x * stride[0] - padding[0] + 2)
        return Opaque()(input.padded(0)[b, :, window], weight[co, :, :])

    return Local(made, padding=unpadded(padding))


def softmax_elementwise(self: Any, dim: int, half: bool) -> Any:
    """The dim of the softmax is cut."""
    return lambda i, j: Opaque()(self[i, j])


def mean_of_sums(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Means of shards are added up."""
    return lambda i: Sum(lambda k: self[i, k])


def sum_of_means(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Sums of shards are averaged."""
    return lambda i: Mean(lambda k: self[i, k])


def rows_of_weight(weight: Any, indices: Any) -> Any:
    """Rows of a table are cut, though indices name any of them."""
    return lambda i, h: Sum(lambda v: weight[v, h] * indices[i])


def unread_bias(self: Any, mat1: Any, mat2: Any) -> Any:
    """The addend is not read."""
    return lambda i, j: Sum(lambda k: mat1[i, k] * mat2[k, j])


def only_its_form(self: Any, other: Any) -> Any:
    """Of one factor the shape alone is said to matter."""
    return lambda i, j: self[i, j] * other.form[i, j]


def unflipped(self: Any, dims: Any) -> Any:
    """The dim that is turned around is read the right way round."""
    return lambda i, j: Opaque()(self[i, j])


def all_rows(self: Any, size: Any) -> Any:
    """A dim that others are merged into is cut anywhere."""
    return Local(
        lambda i, j: Opaque()(self[i, :, :])[j], size=lambda local: [size[0], local.outputs[0][1]]
    )


CONV = (r(5, 4, 12), r(6, 4, 3), None, [1], [1], [1], False, [0], 1)
WRONG: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("aten.mm", swapped, (r(6, 6), r(6, 6))),
    ("aten.mm", wrong_reducer, (r(6, 6), r(6, 6))),
    ("aten.addmm", bias_in_each, (r(6, 5), r(6, 7), r(7, 5))),
    ("aten.addmm", unread_bias, (r(6, 5), r(6, 7), r(7, 5))),
    ("aten.convolution", convolution(1, True), CONV),
    ("aten.convolution", convolution(0, False), CONV),
    ("aten.convolution", narrow_halo, CONV),
    ("aten._softmax", softmax_elementwise, (r(6, 7), 1, False)),
    ("aten.mean", mean_of_sums, (r(6, 8), [1])),
    ("aten.sum", sum_of_means, (r(6, 8), [1])),
    ("aten.embedding", rows_of_weight, (r(9, 6), torch.randint(9, (7,)))),
    ("aten.mul", only_its_form, (r(6, 7), r(6, 7))),
    ("aten.flip", unflipped, (r(6, 7), [1])),
    ("aten.view", all_rows, (r(6, 5, 4), [6, 20])),
]


@pytest.mark.parametrize(
    ("name", "description", "args"), WRONG, ids=[wrong.__doc__ or "shift" for _, wrong, _ in WRONG]
)
def test_wrong_descriptions_are_caught(
    name: str, description: Any, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"mean": "mean.dim", "sum": "sum.dim_IntList", "mul": "mul.Tensor"}.get(name[5:])
    kind = f"aten.{kind}" if kind else f"{name}.default"
    assert not verify(kind, *args).problems  # what the package says is right
    registry.describe(name)(description)
    monkeypatch.delitem(registry.ATEN, kind, raising=False)
    registry.find.cache_clear()
    assert verify(kind, *args).problems


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("pardnn_test", "DEF")
    made.define("pair_norm(Tensor x, Tensor y) -> Tensor")
    made.impl("pair_norm", lambda x, y: (x * y).square().sum(-1), "CPU")
    made.define("log_sum(Tensor x) -> Tensor")
    made.impl("log_sum", lambda x: x.logsumexp(-1), "CPU")
    yield made
    made._destroy()


def test_users_describe_and_verify_their_own_operator(library: torch.library.Library) -> None:
    with pytest.raises(UsageError, match=r"no description.*@pardnn\.describe"):
        pardnn.verify("pardnn_test::pair_norm", r(6, 7), r(6, 7))

    @pardnn.describe("pardnn_test::pair_norm")
    def pair_norm(x: Any, y: Any) -> Any:
        return lambda i: Sum(lambda k: x[i, k] * y[i, k])

    done = pardnn.verify("pardnn_test::pair_norm", r(6, 7), r(6, 7), workers=(2, 5))
    assert done.verified == (("i", 2), ("i", 5), ("k", 2), ("k", 5))
    assert not done.problems


def test_a_reducer_of_ones_own(library: torch.library.Library) -> None:
    log_add = Reducer("log_add", combine=lambda parts: torch.stack(parts).logsumexp(0))

    @pardnn.describe("pardnn_test::log_sum")
    def log_sum(x: Any) -> Any:
        return lambda i: log_add(lambda k: x[i, k])

    done = pardnn.verify(torch.ops.pardnn_test.log_sum, r(6, 7), workers=(2, 3))
    assert done.verified == (("i", 2), ("i", 3), ("k", 2), ("k", 3))


def test_errors_name_operator_and_place(library: torch.library.Library) -> None:
    @pardnn.describe("pardnn_test::log_sum")
    def log_sum(x: Any) -> Any:
        return lambda i: x[i * i, 0]

    with pytest.raises(DescriptionError, match=r"pardnn_test\.log_sum.*test_verify_faults\.py:\d+"):
        pardnn.verify("pardnn_test::log_sum", r(6, 7))


def test_once_is_added_once() -> None:
    @registry.describe("aten.addmm")
    def addmm(self: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        return lambda i, j: Sum(lambda k: mat1[i, k] * mat2[k, j]) + Once(self[i, j], {})

    problems = verify("aten.addmm.default", r(6, 5), r(6, 7), r(7, 5)).problems
    assert {axis for axis, _, _ in problems} == {"k"}  # as nothing leaves it out


def test_random_operators_compare_shapes() -> None:
    @registry.describe("aten.bernoulli", is_random=True)
    def bernoulli(self: Any, p: float) -> Any:
        return lambda i, j: At((j, i), Opaque()(self[i, j]))

    assert verify("aten.bernoulli_.float", r(6, 8), 0.5).problems
