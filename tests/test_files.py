"""Reading and writing files: strict, bounded, all or nothing."""

import errno
import fcntl
import gzip
import json
import os
import resource
import signal
import stat
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardnn import files
from pardnn.errors import FileError, MismatchError
from pardnn.json_keys import nested_depth

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Example:
    __pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # noqa: RUF012

    format: Literal["pardnn.example/1"] = "pardnn.example/1"
    count: int = 0
    ratio: float = 0.0
    sizes: tuple[int, ...] = ()
    by_name: dict[str, int] | None = None
    notes: dict[str, Any] | None = None


def refused(content: bytes) -> FileError:
    with pytest.raises(FileError) as caught:
        files.parse_as(Example, content, "example")
    assert caught.value.message.startswith("example")
    return caught.value


@given(JSON)
def test_dump_and_parse_are_inverse(value: Any) -> None:
    assert files.parse_json(files.dump_json(value), "value") == value


def test_dump_puts_one_element_on_a_line() -> None:
    assert files.dump_json({"a": [1, {"b": [2]}], "c": [], "d": None}) == (
        b'{"a": [\n  1,\n  {"b": [2]}\n],\n "c": [],\n "d": null}\n'
    )


def test_dump_has_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.dump_json({"a": [float("nan")]})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ('{"a": 1} 2', "Extra data"),
        ("NaN", "NaN is not a number of JSON"),
        ("[-Infinity]", "-Infinity is not a number of JSON"),
        ("1e999", "1e999 is too large for a number"),
        ("-1e999", "-1e999 is too large for a number"),
        ("9" * 5000, "a number has 5000 digits"),
        ("9" * 5000 + ".0", "is too large for a number"),
        ('{"a": 1, "a": 1}', "key 'a' appears twice in one object"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "key 'b' appears twice"),
        ("[" * 65 + "]" * 65, "it is nested more than 64 deep"),
        ("[" * 100_000, "it is nested more than 64 deep"),
        ('{"a":' * 100_000, "it is nested more than 64 deep"),
        ("\ufeff{}", "Unexpected UTF-8 BOM"),
        ('"\n"', "Invalid control character"),
    ],
)
def test_not_json(content: str, reason: str) -> None:
    with pytest.raises(FileError, match="thing is not valid JSON: ") as caught:
        files.parse_json(content.encode(), "thing")
    assert caught.value.code == "E406"
    assert reason in caught.value.message
    assert len(caught.value.message) < 300


def test_not_text() -> None:
    with pytest.raises(FileError, match="E406 thing is not valid JSON: 'utf-8' codec"):
        files.parse_json(b'"\xff"', "thing")


@given(JSON)
def test_depth_counts_brackets_outside_of_strings(value: Any) -> None:
    def depth(value: Any) -> int:
        if isinstance(value, list | dict):
            inner = value.values() if isinstance(value, dict) else value
            return 1 + max((depth(v) for v in inner), default=0)
        return 0

    for ensure_ascii in (True, False):
        text = json.dumps(value, ensure_ascii=ensure_ascii)
        assert nested_depth(text.encode()) == depth(value)


def test_brackets_in_strings_are_free() -> None:
    for text in ("[" * 1000, '\\"[' * 1000, "\\\\" + "{" * 1000):
        assert files.parse_json(json.dumps([text]).encode(), "x") == [text]
    assert files.parse_json(b"[" * 64 + b"]" * 64, "x") != []


@pytest.mark.parametrize("piece", ['\\"', '"', '"\\', "[", '"a":', "\\"])
def test_hostile_text_takes_linear_time(piece: str) -> None:
    content = b"[" * 70 + b'"' + piece.encode() * 400_000
    start = time.process_time()
    with pytest.raises(FileError):
        files.parse_json(content, "x")
    assert time.process_time() - start < 5  # quadratic would take hours


def test_a_million_keys_of_which_two_are_equal() -> None:
    keys = ", ".join(f'"{i}": 0' for i in range(200_000))
    with pytest.raises(FileError, match="key '199999' appears twice"):
        files.parse_json(f'{{{keys}, "199999": 0}}'.encode(), "x")


def test_keys_are_not_looked_at_again_in_a_large_file_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = {str(i): i for i in range(100_000)}
    content = files.dump_json({"format": Example.format, "by_name": many})
    assert len(content) > files.LARGE_BYTES
    expected = files.parse_as(Example, content, "example")
    asked: list[int] = []
    monkeypatch.setattr(files, "has_plain_keys", lambda *_: asked.append(1) or True)
    assert files.parse_summed(Example, files.with_checksum(content), "example") == expected
    assert not asked
    assert files.parse_summed(Example, content, "example") == expected
    assert asked


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_no_number_in_a_large_file_with_a_checksum(value: str) -> None:
    many = ", ".join(f'"{i}": {i}' for i in range(100_000))
    head = f'{{"format": "pardnn.example/1", "notes": {{"x": {value}}}, "by_name": {{{many}}}}}\n'
    with pytest.raises(FileError, match="E406 example is not valid JSON: -?[NI][a-z]+"):
        files.parse_summed(Example, files.with_checksum(head.encode()), "example")


@pytest.mark.parametrize(
    ("fields", "place", "reason"),
    [
        ('"count": true', "$.count", "valid integer"),
        ('"count": 1.0', "$.count", "valid integer"),
        ('"count": "1"', "$.count", "valid integer"),
        ('"count": null', "$.count", "valid integer"),
        ('"ratio": true', "$.ratio", "valid number"),
        ('"ratio": "1"', "$.ratio", "valid number"),
        ('"sizes": 1', "$.sizes", "valid array"),
        ('"sizes": [1, 2, "3"]', "$.sizes[2]", "valid integer"),
        ('"by_name": {"a b": "x"}', "$.by_name['a b']", "valid integer"),
        ('"other": 1', "$.other", "nexpected"),
        ('"\\u001b[31m": 1', "$['\\x1b[31m']", "nexpected"),
    ],
)
def test_wrong_field(fields: str, place: str, reason: str) -> None:
    error = refused(f'{{"format": "pardnn.example/1", {fields}}}'.encode())
    assert (error.code, error.details) == ("E407", {"path": place})
    assert f"example: {place}: " in error.message
    assert reason in error.message
    assert error.message.isprintable()


@pytest.mark.parametrize("content", ["[]", "{}", "7", '{"format": 1}', '{"format": "other/1"}'])
def test_other_formats(content: str) -> None:
    error = refused(content.encode())
    assert (error.code, error.details) == ("E407", {"path": "$.format"})


def test_other_version() -> None:
    with pytest.raises(MismatchError, match="reads 'pardnn.example/1'") as caught:
        files.parse_as(Example, b'{"format": "pardnn.example/2", "new": 1}', "example")
    assert (caught.value.code, caught.value.exit_status) == ("E502", 5)


def test_right_fields() -> None:
    content = b'{"format": "pardnn.example/1", "ratio": 1, "sizes": [1, 2]}'
    assert files.parse_as(Example, content, "example") == Example(ratio=1.0, sizes=(1, 2))


# Reading


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"E403 .*No such file or directory \(errno 2\)"):
        files.read_bytes(tmp_path / "missing")
    with pytest.raises(FileError, match="E403 .*Is a directory"):
        files.read_bytes(tmp_path)
    with pytest.raises(FileError, match="E403 .*null byte"):
        files.read_bytes("a\0b")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_reading_takes_memory_for_what_is_there(name: str, tmp_path: Path) -> None:
    """And not for the most that might be: a rank under a limit reads manifests too."""
    path = tmp_path / name
    content = bytes(range(256)) * 12_000
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    tracemalloc.start()
    found = files.read_bytes(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == content
    assert peak < 3 * len(content)


def test_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    path = tmp_path / "f"
    path.write_bytes(b"x" * 1000)
    assert files.read_bytes(path) == b"x" * 1000
    path.write_bytes(b"x" * 1001)
    with pytest.raises(FileError, match="E404 .* holds more than 1000 bytes"):
        files.read_bytes(path)


def test_two_gigabytes_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as stream:
        stream.truncate(2 << 30)  # a hole: takes no space
    start = time.process_time()
    with pytest.raises(FileError, match="E404"):
        files.read_bytes(path)
    assert time.process_time() - start < 0.5


def test_gzip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0" * (200 << 20)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match="E404.*\n.*gunzip"):
        files.read_bytes(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)  # it would be too large unpacked, too
    with pytest.raises(FileError) as caught:
        files.read_bytes(path)
    assert "gunzip" not in caught.value.message


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "f.gz"
    content = gzip.compress(bytes(range(256)) * 4, mtime=0)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        if length:
            with pytest.raises(FileError, match="E403"):
                files.read_bytes(path)
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 0xFF
        path.write_bytes(damaged)
        try:
            assert files.read_bytes(path) == bytes(range(256)) * 4
        except FileError as error:
            assert error.code == "E403"  # noqa: PT017


# Writing


@pytest.mark.parametrize("name", ["f", "f.gz"])
def test_write_read(tmp_path: Path, name: str) -> None:
    files.write_bytes(tmp_path / name, b"content")
    assert files.read_bytes(tmp_path / name) == b"content"
    files.write_bytes(tmp_path / name, b"other")
    assert files.read_bytes(tmp_path / name) == b"other"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_no_place_to_write(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"E405 .*No such file or directory \(errno 2\)"):
        files.write_bytes(tmp_path / "missing" / "f", b"")
    with pytest.raises(FileError, match=r"E405 .*Is a directory \(errno 21\)"):
        files.write_bytes(tmp_path, b"")
    with pytest.raises(FileError, match="E405 .*null byte"):
        files.write_bytes(tmp_path / "a\0b", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_bytes(pipe, b"content")
    assert os.read(reader, 100) == b"content"
    assert pipe.is_fifo()
    os.close(reader)


def _in_child(action: Callable[[], None]) -> int:
    """Exit status of a fork that runs `action`; limits set in it end with it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_bytes(path, b"old")

    def write_too_much() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            files.write_bytes(path, b"x" * 5000)
        except FileError as error:
            assert error.code == "E405"  # noqa: PT017
            assert "errno 27" in error.message  # noqa: PT017
            return
        raise AssertionError("5000 bytes were written")

    assert _in_child(write_too_much) == 0
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody")
def test_read_only_directory_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_bytes(path, b"old")

    def write_as_nobody() -> None:
        # Of the directories above, which nobody may enter, none is needed from inside.
        os.chdir(tmp_path)
        os.chmod(".", 0o555)  # noqa: PTH101
        os.setuid(65534)
        try:
            files.write_bytes("f", b"new")
        except FileError as error:
            assert "errno 13" in error.message  # noqa: PT017
            return
        raise AssertionError("the directory could be written")

    assert _in_child(write_as_nobody) == 0
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failing_device_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "f"
    files.write_bytes(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    with pytest.raises(FileError, match=r"E405 .*Input/output error \(errno 5\)"):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "f"
    files.write_bytes(path, b"old")
    path.chmod(0o600)
    files.write_bytes(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_rename_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file before it has its name, the folder after."""
    synced, fsync = [], os.fsync

    def noting(handle: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        synced.append((is_folder, (tmp_path / "f").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    files.write_bytes(tmp_path / "f", b"new")
    assert synced == [(False, False), (True, True)]


def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refusing(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refusing)
    files.write_bytes(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    """Neither a young file nor one that a process holds is touched."""
    names = ["dead", "young", "held"]
    dead, young, held = (tmp_path / f"{files.TEMPORARY}{name}" for name in names)
    for path in (dead, young, held):
        path.write_bytes(b"half")
        if path != young:
            os.utime(path, (0, 0))
    with held.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        files.write_bytes(tmp_path / "f", b"new")
    assert sorted(tmp_path.iterdir()) == sorted([young, held, tmp_path / "f"])


def test_interrupt_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(tmp_path / "f", b"new")
    assert list(tmp_path.iterdir()) == []
