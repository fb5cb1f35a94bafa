"""A step computes under one setting of torch's kernels: its caller's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pardnn.backends.torch.capture.capture import capture
from pardnn.errors import UnsupportedError
from tests.backends.torch.stepping import assert_leaves_as_eager, weighed

onednn = torch.backends.mkldnn
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Put back what steps set."""
    threads = torch.get_num_threads()
    yield
    onednn.enabled = True
    onednn.conv.fp32_precision = onednn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(threads)


def captured(weigh: Any, layer: nn.Module, x: torch.Tensor) -> Any:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(layer: Any, optimizer: Any, x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = weigh(layer, x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return capture(step, layer, optimizer, x)


def without(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with onednn.flags(enabled=False):
        return layer(x)


CONVOLUTION, LINEAR = nn.Conv2d(2, 2, 3), nn.Linear(4, 4)
IMAGE, ROWS = torch.ones(1, 2, 4, 4), torch.ones(2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_op_under_a_setting_of_its_own_is_refused(dtype: torch.dtype) -> None:
    is_short = dtype is torch.bfloat16  # products of long numbers are not oneDNN's
    layer, x = (LINEAR.to(dtype), ROWS.to(dtype)) if is_short else (CONVOLUTION, IMAGE)
    with pytest.raises(UnsupportedError, match=r"mkldnn\.enabled = False \(.*test_kernel") as e:
        captured(without, layer, x)
    assert e.value.code == "E801"
    onednn.enabled = False  # as the message says
    assert captured(without, layer, x).ops


def test_what_no_kernel_depends_on_may_be_set() -> None:
    assert captured(without, LINEAR.float(), ROWS).ops


def test_a_precision_for_a_part_of_the_step_is_refused() -> None:
    def part(layer: Any, x: torch.Tensor) -> torch.Tensor:
        onednn.matmul.fp32_precision = "bf16"
        y = layer(x)
        onednn.matmul.fp32_precision = "ieee"
        return layer(y)

    with pytest.raises(UnsupportedError, match=r"mkldnn\.matmul\.fp32_precision = 'bf16'"):
        captured(part, LINEAR.float(), ROWS)


def test_flushing_of_small_numbers_cannot_be_set_in_a_step() -> None:
    def flushing(layer: Any, x: torch.Tensor) -> torch.Tensor:
        torch.set_flush_denormal(True)
        return layer(x)

    with pytest.raises(UnsupportedError, match=r"set_flush_denormal\(True\).*\n.*before the step"):
        captured(flushing, LINEAR.float(), ROWS)
    assert not torch.tensor([1e-310], dtype=torch.float64).mul(1.0).eq(0).item()


NOW = SimpleNamespace(threads=1, precision="highest")


def set_threads() -> None:
    torch.set_num_threads(NOW.threads)


def set_precision() -> None:
    torch.set_float32_matmul_precision(NOW.precision)


def between(i: int, _args: Any) -> None:
    NOW.threads, NOW.precision = 1 + i % 2, ["highest", "medium"][i % 2]


@pytest.mark.parametrize("set_it", [set_threads, set_precision])
def test_each_call_computes_under_what_it_sets(set_it: Any) -> None:
    def make() -> Any:
        between(0, None)
        step, args, _ = weighed(lambda loss: loss)

        def setting(*args: Any) -> Any:
            set_it()
            return step(*args)

        return setting, args, lambda: [torch.get_num_threads(), _precision()]

    assert_leaves_as_eager(make, 4, between=between)


def _precision() -> str:
    return torch.get_float32_matmul_precision()
