"""Arithmetic on arrays of boxes, point by point."""

import itertools

import numpy as np

from pardnn.shard.search.box_volumes import (
    common_volumes,
    group_numbers,
    overlaps,
    partial_volumes,
    same_boxes,
    volumes,
)


def points(box: np.ndarray) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(low, high) for low, high in box.tolist())))


def drawn(seed: int, *shape: int) -> np.ndarray:
    """Boxes of two dims within 7; some are empty, and some end before they begin."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 3, (*shape, 2))
    return np.stack([low, low + rng.integers(-1, 6, (*shape, 2))], axis=-1)


def test_volumes_and_what_boxes_have_in_common() -> None:
    one, other = drawn(0, 60), drawn(1, 60)
    assert volumes(one).tolist() == [len(points(box)) for box in one]
    common = [len(points(a) & points(b)) for a, b in zip(one, other, strict=True)]
    assert 10 < sum(map(bool, common)) < 50, "some meet, some do not"
    assert common_volumes(one, other).tolist() == common
    assert volumes(overlaps(one, other)).tolist() == common
    assert overlaps(one, other).shape == one.shape
    crossed = common_volumes(one[:5, None], other[None, :7])
    assert crossed.tolist() == [[len(points(a) & points(b)) for b in other[:7]] for a in one[:5]]


def test_equal_boxes_of_devices() -> None:
    boxes = np.array([[[0, 2], [0, 3]], [[0, 2], [0, 3]], [[0, 2], [1, 3]]])
    assert same_boxes(boxes).tolist() == [[True, True, False], [True, True, False],
                                          [False, False, True]]  # fmt: skip


def test_partial_results_that_make_up_what_devices_own() -> None:
    """Of one group equal results count once, and one that lies elsewhere apart."""
    rng = np.random.default_rng(2)
    for _ in range(40):
        groups = rng.integers(0, 2, (1, 4))
        results = drawn(int(rng.integers(99)), 1, 2)[:, rng.integers(0, 2, 4)]
        owned = drawn(int(rng.integers(99)), 1, 3, 4)
        named = zip(groups[0].tolist(), results[0], strict=True)
        parts = {(group, str(box.tolist())): points(box) for group, box in named}.values()
        expected = [
            sum(len(points(own) & part) for own in layout for part in parts) for layout in owned[0]
        ]
        assert partial_volumes(results, groups, owned).tolist() == [expected]


def test_devices_that_make_up_one_result_differ_along_what_is_reduced() -> None:
    assert group_numbers((True, False), (2, 3)).tolist() == [0, 0, 0, 1, 1, 1]
    assert group_numbers((False, True), (2, 3)).tolist() == [0, 1, 2, 0, 1, 2]
    assert group_numbers((True, True), (2, 3)).tolist() == [0, 1, 2, 3, 4, 5]
    assert group_numbers((False, False), (2, 3)).tolist() == [0] * 6
