"""Sizes, rates and times as people write them, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn.errors import UsageError
from pardnn.units import parse_bandwidth, parse_bytes, parse_limits, parse_seconds, size_texts


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 << 30), ("1.5GB", 1_500_000_000), ("7 B", 7), ("9007199254740993B", 2**53 + 1),
     ("2TiB", 2 << 40), (12, 12)],
)  # fmt: skip
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["10Gb", "ten", "10", "", "-1GiB", "0B", "1e999GiB", "10 G"])
def test_sizes_refused_list_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match="GiB") as error:
        parse_bytes(text)
    assert error.value.code == "E202"


@pytest.mark.parametrize("value", [0, -5, True, 1.5, None, [], {}])
def test_values_that_are_no_size(value: object) -> None:
    with pytest.raises(UsageError):
        parse_bytes(value)  # pyright: ignore[reportArgumentType]


def test_a_suggestion_names_the_unit_meant() -> None:
    with pytest.raises(UsageError, match='"10GB"'):
        parse_bytes("10Gb")
    with pytest.raises(UsageError, match='"25us"'):
        parse_seconds("25")
    with pytest.raises(UsageError, match='"300GB/s"'):
        parse_bandwidth("300")


def test_rates_and_times() -> None:
    assert parse_bandwidth("300GB/s") == 300e9
    assert parse_bandwidth(3) == 3.0
    assert parse_seconds("25us") == 25e-6
    assert parse_seconds("1.5ms") == 1.5e-3


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan"), "0GB/s"])
def test_rates_refused(rate: float | str) -> None:
    with pytest.raises(UsageError):
        parse_bandwidth(rate)


@given(st.integers(1, 2**62), st.sampled_from(["B", "KiB", "MB", "GiB"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    scale = {"B": 1, "KiB": 1024, "MB": 10**6, "GiB": 1 << 30}[unit]
    assert parse_bytes(f"{number}{unit}") == number * scale


def test_limits_in_all_forms_keep_their_ids() -> None:
    assert parse_limits("1KiB", 2) == {0: 1024, 1: 1024}
    assert parse_limits(None, 2) == {0: None, 1: None}
    assert parse_limits(["1KiB", 7], 2) == {0: 1024, 1: 7}
    assert parse_limits({0: "1KiB", 2: 7, "cpu": 9}, 2) == {0: 1024, 2: 7, "cpu": 9}


@pytest.mark.parametrize("limits", [{}, {"gpu": 1}, {-1: 1}, {True: 1}, ["1KiB"], 1.5])
def test_limits_refused(limits: object) -> None:
    with pytest.raises(UsageError):
        parse_limits(limits, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("2", "2GB/s"), ("2e9", "2e9B/s"), ("10Gbit/s", "1.25GB/s"), ("1gbps", "0.125GB/s")],
)
def test_a_rate_without_a_unit_gets_the_likely_one(text: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f'did you mean "{meant}"'):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["16G", "16g", "16gib"])
def test_a_misspelt_size_gets_the_likely_one(text: str) -> None:
    with pytest.raises(UsageError, match='did you mean "16GiB"'):
        parse_bytes(text)


def test_no_unit_is_advised_for_nothing() -> None:
    for parse in (parse_bytes, parse_bandwidth):
        with pytest.raises(UsageError) as error:
            parse("0")
        assert "did you mean" not in error.value.message


def test_size_texts_differ_where_the_sizes_do() -> None:
    assert size_texts(3 << 30, 2 << 30) == ("3.00 GiB", "2.00 GiB")
    assert size_texts((2 << 30) + 1, 2 << 30) == ("2,147,483,649 B", "2,147,483,648 B")
    assert size_texts(2 << 30, 2 << 30) == ("2.00 GiB", "2.00 GiB")
    assert size_texts(5, None) == ("5 B", "unlimited")
