"""Fixed places: storages that live at one time never overlap, and the room is kept to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.graph.build import build_graph
from pardnn.graph.ir import Graph, Op, Tensor
from pardnn.plan.places import PAGE_BYTES, choose_places, lowest_places
from pardnn.plan.plan import Plan, plan_arrays


def columns(blocks: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first, long, size = (np.array(each, dtype=np.int64) for each in zip(*blocks, strict=True))
    return first, first + long, size


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=12
    ),
    st.none() | st.integers(0, 30),
)
def test_blocks_that_live_at_one_time_are_apart(
    blocks: list[tuple[int, int, int]], most: int | None
) -> None:
    first, last, size = columns(blocks)
    at = lowest_places(first, last, size, most)
    placed = np.flatnonzero(at >= 0)
    assert most is not None or len(placed) == len(blocks)
    assert most is None or all(at[i] + size[i] <= most for i in placed)
    for i in placed:
        for j in placed[placed > i]:
            if first[i] <= last[j] and first[j] <= last[i]:
                assert at[i] + size[i] <= at[j] or at[j] + size[j] <= at[i]


def test_the_lowest_gap_that_is_wide_enough_is_taken() -> None:
    """Of 9, 5 and 4 at one time; 3 and 5 come when the 5 has ended."""
    first, last, size = columns([(0, 9, 9), (0, 1, 5), (0, 9, 4), (2, 9, 3), (2, 9, 5)])
    assert lowest_places(first, last, size, None).tolist() == [0, 9, 14, 18, 9]
    assert lowest_places(first, last, size, 17).tolist() == [0, 9, -1, 14, 9]


def chain(*pages: int) -> Graph:
    """A weight of 2 pages, and ops that each read the one before; the second has scratch of 1."""
    weight = Tensor(name="w", bytes=2 * PAGE_BYTES)
    ops = [Op(name="w", kind="parameter", memory="residual", outputs=(weight,))]
    for i, size in enumerate(pages):
        made = Tensor(name=f"x{i}", bytes=size * PAGE_BYTES)
        ops.append(
            Op(name=made.name, kind="aten.neg.default", inputs=(ops[-1].name,), outputs=(made,),
               workspace=PAGE_BYTES if i == 1 else 0)
        )  # fmt: skip
    return build_graph("chain", ops)


@pytest.mark.parametrize(
    ("room", "placed", "size", "peaks"),
    [
        # Outside are small blocks of 2 + 1 and the last tensor.
        (None, {1: 0, 2: 8}, 11, (3, 8, 8)),
        (22, {1: 0, 2: 8}, 11, (3, 8, 8)),
        (21, {2: 0}, 3, (3, 8, 8 + 1)),  # with the 8 in the block and the 3 outside it is 22, too
        (13, {}, 0, (3, 11, 11 + 1)),
    ],
)
def test_a_block_leaves_room_for_all_else(
    room: int | None, placed: dict[int, int], size: int, peaks: tuple[int, int, int]
) -> None:
    graph = chain(8, 3, 8)
    order = tuple(op.name for op in graph.ops)
    plan = Plan(placement=dict.fromkeys(order, 0), order=(order,), messages=())
    found = choose_places(
        graph, plan_arrays(graph, plan), 0, [1, 2], small_bytes=3 * PAGE_BYTES,
        room=None if room is None else room * PAGE_BYTES,
    )  # fmt: skip
    assert {tensor: at // PAGE_BYTES for tensor, at in found.offsets.items()} == placed
    assert found.bytes == size * PAGE_BYTES
    assert [each // PAGE_BYTES for each in found[2:]] == list(peaks)


@pytest.mark.parametrize(
    ("spare", "room", "fits"), [(0, 36, True), (0, 35, False), (12, 24, True), (11, 24, False)]
)
def test_what_small_blocks_waste_has_room_of_its_own(spare: int, room: int, fits: bool) -> None:
    """Beside the block of 11 pages are small ones of 2 and 8, which may waste 15."""
    graph = chain(8, 3, 8)
    order = tuple(op.name for op in graph.ops)
    plan = Plan(placement=dict.fromkeys(order, 0), order=(order,), messages=())
    found = choose_places(
        graph, plan_arrays(graph, plan), 0, [1, 2], small_bytes=9 * PAGE_BYTES, growth=2.5,
        spare_bytes=spare * PAGE_BYTES, room=room * PAGE_BYTES,
    )  # fmt: skip
    assert (found.bytes == 11 * PAGE_BYTES) == fits
