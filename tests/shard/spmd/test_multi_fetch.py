"""Two ops that need the same region of a tensor share one fetch, while it is cached."""

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.check import plan_problems
from pardnn.plan.memory import peak_bytes
from pardnn.plan.mesh import make_mesh
from pardnn.plan.partitioned_graph import FETCH
from pardnn.plan.plan import Plan, plan_arrays, planned_graph
from pardnn.shard.sharding import Sharding
from pardnn.shard.spmd.partitioner import spmd_partition


def tensor(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name=name, bytes=4 * rows * columns, shape=(rows, columns), dtype="float32")


def product(name: str, left: str, right: str) -> Op:
    return Op(name=name, kind="aten.mm.default", inputs=(left, right),
              outputs=(tensor(name, 8, 8),),
              arguments={"args": [{"tensor": left}, {"tensor": right}]})  # fmt: skip


def twice() -> tuple[Graph, Sharding]:
    """w, cut by rows, is needed whole by the first op and by the third."""
    graph = build_graph(
        "twice",
        [
            Op(name="x", kind="input", outputs=(tensor("x", 8, 8),)),
            Op(name="w", kind="parameter", outputs=(tensor("w", 8, 8),), memory="residual"),
            product("a", "x", "w"), product("b", "a", "x"), product("c", "b", "w"),
        ],
    )  # fmt: skip
    layouts = dict.fromkeys(("x", "w", "a", "b", "c"), (0,))
    return graph, Sharding(make_mesh((2,)), layouts, dict.fromkeys("abc", ("i",)))


def fetches(plan: Plan, of: str) -> int:
    assert plan.partition is not None
    kinds = [op.kind for op in plan.partition.ops if op.name.startswith(f"{of}:")]
    return kinds.count(FETCH)


def test_a_region_is_fetched_again_where_it_is_not_kept() -> None:
    graph, sharding = twice()
    for reuse, count in ((0, 2), (1, 2), (2, 1), (100, 1)):
        plan = spmd_partition(graph, sharding, reuse=reuse)
        assert plan_problems(graph, plan) == []
        assert fetches(plan, "w") == 2 * count  # on two devices
        sent = [message.tensor for message in plan.messages]
        assert sum(name.startswith("w:") for name in sent) == 2 * count


def test_what_is_kept_takes_memory_until_its_last_use() -> None:
    graph, sharding = twice()
    apart, shared = (spmd_partition(graph, sharding, reuse=reuse) for reuse in (0, 2))
    peaks = [
        peak_bytes(parts, plan_arrays(parts, plan))
        for plan in (apart, shared)
        for parts in [planned_graph(graph, plan)]
    ]
    assert peaks[1] == [peak + 8 * 8 * 4 for peak in peaks[0]]
