"""Every description against its operator: inputs cut, local ops run, compared in float64."""

import json
import zlib
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from pardnn.api.verify import Verification, verify
from pardnn.shard.aten.lookup import description_of
from pardnn.shard.aten.without import reason_without
from testbed import DATA
from testbed.op_samples import SAMPLES, Draw, with_keywords

LISTS = json.loads((DATA / "aten_ops.json").read_text())
WANTED = sorted({*LISTS["core"], *LISTS["training"]})

#: Described, but every call is run whole: a number, one draw, or no argument says where to begin.
NOTHING_TO_CUT = {
    "aten.arange.default", "aten.empty_strided.default", "aten.randperm.default",
    "aten.scalar_tensor.default", "aten.atan2.out",
}  # fmt: skip


def verified(kind: str, seed: int) -> list[Verification]:
    found = []
    for sampler in SAMPLES[kind]:
        args, kwargs = with_keywords(sampler(Draw(seed)))
        found.append(verify(kind, *args, **kwargs))
    return found


@pytest.mark.filterwarnings("ignore:.*(deprecated|is in beta)")
@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_description_agrees_with_the_operator(kind: str) -> None:
    base = zlib.crc32(kind.encode())
    found = [v for seed in range(base, base + 3) for v in verified(kind, seed)]
    assert [v.problems for v in found if v.problems] == []
    assert {count for v in found for _, count in v.verified} >= {2, 3}


OTHER_DTYPES = ["mm.default", "add.Tensor", "sum.dim_IntList", "amax.default", "cat.default",
                "embedding.default", "slice.Tensor", "view.default", "convolution.default",
                "_softmax.default", "native_layer_norm.default"]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_descriptions_hold_for_other_dtypes(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point and name.startswith(("convolution", "_softmax", "native")):
        pytest.skip("the operator takes no integers")

    def convert(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return (value * 4).to(dtype) if is_float else value

    args, kwargs = with_keywords(SAMPLES[f"aten.{name}"][0](Draw(5)))
    done = verify(f"aten.{name}", *tree_map(convert, args), double=False, **kwargs)
    assert done.verified
    assert not done.problems


@pytest.mark.parametrize("kind", WANTED)
def test_every_operator_is_verified_or_has_a_reason(kind: str) -> None:
    without = reason_without(kind) is not None
    assert [kind in SAMPLES, kind in NOTHING_TO_CUT, without].count(True) == 1
    assert (description_of(kind) is None) == without


GROUPS = torch.tensor([3, 9, 16], dtype=torch.int32)
GROUPED: dict[str, Any] = {
    "rows": ([16, 32], [3, 32, 24], {"k", "n"}),
    "batch": ([3, 16, 24], [3, 24, 32], {"g", "k", "m", "n"}),
    "columns": ([3, 24, 16], [16, 16], {"k", "m"}),
    "sum": ([32, 16], [16, 24], {"m", "n"}),
}


@pytest.mark.parametrize("form", GROUPED)
def test_products_of_groups(form: str) -> None:
    """In single precision, the best that the kernel takes; shards keep to rows of 16 bytes."""
    one, other, loops = GROUPED[form]
    draw = Draw(1)
    call = [draw.f(*one).float(), draw.f(*other).float(), *([] if form == "batch" else [GROUPS])]
    done = verify("aten._grouped_mm.default", *call, workers=(2,), double=False)
    assert {loop for loop, _ in done.verified} == loops
    assert not done.problems
