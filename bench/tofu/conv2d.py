"""A 3x3 convolution under 15 pairs of layouts of input and weight: DTensor, and our strategies.

    python -m bench.tofu.conv2d

DTensor runs on 2 real ranks (gloo); its result, gathered, is compared with `torch.conv2d`. For ours
the same layouts are looked up among the strategies of TDL, whose pieces are run and compared.
"""

import os
import sys
import tempfile
from typing import Any

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn

from pardnn.api.verify import verify
from pardnn.shard.partition.call import Call
from pardnn.shard.partition.strategy import Cut, Layout, strategies

INPUT, WEIGHT = (4, 4, 8, 8), (6, 4, 3, 3)
WINDOW: list[Any] = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
CASES = [(i, w) for i in (None, 0, 1, 2, 3) for w in (None, 0, 1)]


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(INPUT, dtype=torch.float64), torch.randn(WEIGHT, dtype=torch.float64)


def distributed(rank: int, address: str, results: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    data, weight = tensors()
    expected = torch.nn.functional.conv2d(data, weight, padding=1)
    for case in CASES:
        placements = [Replicate() if dim is None else Shard(dim) for dim in case]
        try:
            a, b = (
                distribute_tensor(t, mesh, [p])
                for t, p in zip((data, weight), placements, strict=True)
            )
            result = torch.nn.functional.conv2d(a, b, padding=1)
            assert isinstance(result, DTensor)
            found = result.full_tensor()
            right = found.shape == expected.shape and torch.allclose(found, expected)
            status = "right" if right else "wrong"
        except Exception as error:  # whatever it raises is its answer
            status = f"raises {type(error).__name__}"
        if rank == 0:
            results[case] = status
    dist.destroy_process_group()


def dim_of(layout: Layout) -> int | None:
    return layout.dim if isinstance(layout, Cut) else None


def ours() -> dict[tuple[int | None, int | None], str]:
    """Status of each pair of layouts that one strategy takes as they are."""
    args = [{"tensor": "x"}, {"tensor": "w"}, None, *WINDOW]
    shapes = {"x": INPUT, "w": WEIGHT}
    call = Call("aten.convolution.default", tuple(args), {}, shapes, ((4, 6, 8, 8),))
    done = verify("aten.convolution.default", *tensors(), None, *WINDOW, workers=(2,))
    wrong = {axis for axis, _, _ in done.problems}
    return {
        (dim_of(s.inputs["input"]), dim_of(s.inputs["weight"])): (
            "wrong" if s.loop in wrong else f"right, loop {s.loop}"
        )
        for s in strategies(call)
    }


def main() -> None:
    results = multiprocessing.Manager().dict()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        spawn(distributed, (address, results), nprocs=2)
    mine = ours()
    sys.stdout.write("| input | weight | DTensor | TDL |\n| --- | --- | --- | --- |\n")
    for case in CASES:
        names = ["whole" if dim is None else f"dim {dim}" for dim in case]
        own = (
            "right, nothing cut" if case == (None, None) else mine.get(case, "no strategy: fetched")
        )
        sys.stdout.write(f"| {names[0]} | {names[1]} | {results[case]} | {own} |\n")


if __name__ == "__main__":
    main()
