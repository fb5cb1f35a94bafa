"""Keys of large files: what the scan calls plain has no key twice and no great depth."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pardnn import files, json_keys
from pardnn.errors import FileError
from pardnn.graph.file import GraphFile, graph_from_json
from pardnn.json_keys import has_plain_keys, may_be_large

NAMES = st.sampled_from(["a", "b", "name", "name of nine", "{", "]", "a,b", "x:y", "ä", "a" * 40])
PAIRS: Any = st.recursive(
    st.integers() | NAMES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(st.tuples(NAMES, inner), max_size=4).map(tuple)
    ),
    max_leaves=30,
)  # fmt: skip


def text_of(value: Any) -> str:
    """JSON, objects from tuples of pairs, so that a key may stand in one twice."""
    if isinstance(value, tuple):
        pairs = (f"{json.dumps(k, ensure_ascii=False)}: {text_of(v)}" for k, v in value)
        return "{" + ",\n".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",\n".join(map(text_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def has_twice(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    if isinstance(value, tuple):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(has_twice(inner) for _, inner in value)
    return any(map(has_twice, value))


@pytest.mark.parametrize("part", [1, 1 << 20])
@example(value=[(("a", 1), ("b", 1)), (("a", 1), ("b", 1))])
@example(value=[(("a", 1), ("b", (("c", 1), ("a", 1))), ("a", 1))])
@given(value=PAIRS)
def test_keys_that_appear_twice_are_seen(part: int, value: Any) -> None:
    # Parts of a line each: what was opened in an earlier one is still open.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_keys, "PART_BYTES", part)
        content = (text_of(value) + "\n" * 60).encode()
        assert has_plain_keys(content, 64) == (not has_twice(value))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "\\u0061": 2}', '{"a" : 1, "a" : 2}', '{"a"\n:1, "a"\t:1}',
        "[" * 9 + "]" * 9, f'{{"{"a" * 300}": 1}}',
    ],
)  # fmt: skip
def test_what_is_left_to_the_parser(text: str) -> None:
    assert not has_plain_keys((text + "\n" * 400).encode(), 8)


@pytest.mark.parametrize("text", ["[NaN]", '{"x": -Infinity}', "[1e999]", "[1E+100]", "9" * 41])
def test_numbers_that_are_looked_at_one_by_one(text: str) -> None:
    assert may_be_large(text.encode(), 40)
    assert not may_be_large(b"[1.5e-99, 1e-7, 1e40]", 40)


def graph_text(arguments: str, padding: str = "\n") -> bytes:
    op = f'{{"name": "x", "kind": "k", "arguments": {{"args": [{arguments}]}}}}'
    return f'{{"format": "pardnn.graph/1",\n "name": "g", "ops": [{op}]}}{padding}'.encode()


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ("1", None, ""),
        ("NaN", "E406", "NaN is not a number"),
        ("1e999", "E406", "too large for a number"),
        ("9" * 50, "E406", "a number has 50 digits"),
        ('{"a": 1, "a": 2}', "E406", "key 'a' appears twice"),
        ("[" * 70 + "]" * 70, "E406", "nested more than 64 deep"),
        ("1,", "E406", "Expecting value"),
        ('"\t"', "E406", "control character"),
        ('1], "other": [', "E402", "unknown key"),
    ],
)
def test_large_files_are_refused_as_small_ones(
    arguments: str, code: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for large in (0, 1 << 40):
        monkeypatch.setattr(files, "LARGE_BYTES", large)
        content = graph_text(arguments)
        if code is None:
            assert graph_from_json(content).ops[0].arguments == {"args": [1]}
            continue
        with pytest.raises(FileError) as caught:
            graph_from_json(content)
        assert caught.value.code == code
        assert reason in caught.value.message


def test_a_large_file_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    content = graph_text("1", padding=" " * files.LARGE_BYTES)
    monkeypatch.setattr(files, "parse_json", None)
    assert files.parse_as(GraphFile, content, "g").name == "g"
