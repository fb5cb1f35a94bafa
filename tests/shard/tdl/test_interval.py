"""Interval arithmetic: Fig. 4 repaired, against every value that the variables take."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.shard.tdl.interval import (
    Affine,
    DescriptionError,
    affine,
    bare_variable,
    ceil_div,
    divisors,
    evaluate,
    interval,
    same,
    variable,
    variables,
)

i, j = variable("i"), variable("j")


def ends(index: Affine, **ranges: tuple[int, int]) -> tuple[int, int]:
    found = interval(index)
    return evaluate(found.lower, ranges), evaluate(found.upper, ranges)


def test_constants_belong_to_both_bounds() -> None:
    assert ends(i + 2, i=(0, 4)) == (2, 6)
    assert ends(i + 2, i=(5, 9)) == (7, 11)  # shift_two of section 4.2
    assert ends(3 - i, i=(0, 4)) == (-1, 3)


def test_a_negative_factor_swaps_the_ends() -> None:
    assert ends(i - j, i=(0, 4), j=(1, 3)) == (-3, 3)
    assert ends(-2 * i, i=(1, 4)) == (-8, -2)


def test_an_index_minus_itself_is_no_interval() -> None:
    assert same((i + 2) - i, affine(2))
    assert same(2 * (i + j) // 2, i + j)
    assert same((i + 1) // 3 - (i + 1) // 3, affine(0))


def test_division_rounds_down_and_up() -> None:
    assert ends(i // 2, i=(1, 4)) == (0, 2)
    assert ends(ceil_div(i, 2), i=(1, 4)) == (1, 2)
    assert ends((4 * i + 3) // 2, i=(0, 3)) == (1, 7)
    assert divisors(i // 4 + j // 3, "i") == {4}


def test_what_is_not_affine_is_refused() -> None:
    for wrong in (
        lambda: i * j, lambda: i / 2, lambda: i % 2, lambda: i < 3, lambda: i == j, lambda: bool(i),
        lambda: i * 0.5, lambda: i // 0, lambda: i // j, lambda: i + True,
    ):  # fmt: skip
        with pytest.raises(DescriptionError, match="index"):
            wrong()


def test_names() -> None:
    assert bare_variable(i) == "i"
    assert bare_variable(i + 1) is None
    assert bare_variable(2 * i) is None
    assert variables((i + 2 * j) // 3) == {"i", "j"}
    with pytest.raises(KeyError):
        evaluate(i, {"i": (0, 1)})


@st.composite
def indices(draw: st.DrawFn, depth: int = 3) -> Affine:
    if depth == 0:
        return draw(st.sampled_from([i, j, affine(1)]))
    part = draw(indices(depth - 1))
    kind = draw(st.sampled_from(["add", "sub", "mul", "floor", "ceil"]))
    if kind in ("add", "sub"):
        other = draw(indices(depth - 1))
        return part + other if kind == "add" else part - other
    number = draw(st.integers(1, 4))
    if kind == "mul":
        return part * (number * draw(st.sampled_from([-1, 1])))
    return part // number if kind == "floor" else ceil_div(part, number)


def value_of(index: Affine, at: dict[str, int]) -> int:
    found = interval(index)
    point = {name: (value, value) for name, value in at.items()}
    assert evaluate(found.lower, point) == evaluate(found.upper, point)
    return evaluate(found.lower, point)


@given(indices(), st.integers(-3, 3), st.integers(0, 4), st.integers(-3, 3), st.integers(0, 4))
def test_no_value_lies_outside(index: Affine, a: int, m: int, b: int, n: int) -> None:
    lower, upper = ends(index, i=(a, a + m), j=(b, b + n))
    seen = {
        value_of(index, {"i": x, "j": y})
        for x, y in itertools.product(range(a, a + m + 1), range(b, b + n + 1))
    }
    assert lower <= min(seen)
    assert upper >= max(seen)


@given(st.integers(-4, 4), st.integers(-4, 4), st.integers(-9, 9), st.integers(0, 5))
def test_bounds_are_tight_where_each_variable_occurs_once(p: int, q: int, c: int, n: int) -> None:
    index = p * i + q * j + c
    seen = {p * x + q * y + c for x in range(n + 1) for y in range(2, 5)}
    assert ends(index, i=(0, n), j=(2, 4)) == (min(seen), max(seen))
