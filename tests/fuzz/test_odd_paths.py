"""Paths that are no plain files, in the place of any input or output: no hang, nothing replaced."""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pardnn import files, pipes
from pardnn.errors import FileError
from tests.fuzz.targets import built_once, command, fill, limited

ODD = (
    "folder", "pipe", "loop", "dangling", "socket", "empty", "missing", "under", "long", "a\0b",
    "bad\udcff", "new\nline\x1b[31m", "", ".", "/dev/fd/99",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(pipes, "PIPE_S", 0.01)
    monkeypatch.chdir(tmp_path)
    with built_once(), limited(), socket.socket(socket.AF_UNIX) as end:
        fill(tmp_path)
        (tmp_path / "folder").mkdir()
        os.mkfifo("pipe")
        Path("loop").symlink_to("loop")
        Path("dangling").symlink_to("nowhere")
        Path("empty").touch()
        end.bind("socket")
        yield tmp_path


def path_of(folder: Path, odd: str) -> Path | str:
    names = {"under": folder / "graph.json" / "x", "long": "x" * 5000}
    return names.get(odd, odd if not odd or "/" in odd or "\0" in odd else folder / odd)


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_path_is_no_input(folder: Path, odd: str) -> None:
    path, graph, plan, two = path_of(folder, odd), "graph.json", "plan.json", ("--devices", 2)
    by = (*two, "--algorithm", "single")
    for words in (
        ("plan", path, *two), ("check", path, "--graph", graph), ("check", plan, "--graph", path),
        ("plan", graph, "--cluster", path), ("plan", graph, *by, "--constraints", path),
        ("plan", graph, *by, "--keep-state", path, plan), ("convert", path, "out"),
        ("plan", graph, *by, "--keep-state", graph, path), ("diff", plan, path, "--graph", graph),
        ("checkpoint", "show", path), ("checkpoint", "export", path, "-o", "out"),
        ("report", plan, "--graph", graph, "--run", path, "-o", "out"),
    ):  # fmt: skip
        assert command(*words) in (2, 4), words


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_plain_file_is_not_replaced(folder: Path, odd: str) -> None:
    path, of = path_of(folder, odd), ("plan.json", "--graph", "graph.json")
    (folder / "plain").write_text("x")
    for words in (
        ("plan", "graph.json", "--devices", 2, "--algorithm", "single", "-o", path),
        ("report", *of, "-o", path), ("draw", *of, "-o", path),
        ("export", *of, "--to", "perfetto", "-o", path),
        ("convert", "msr.json", "plain", "--write-cluster", path),
        ("checkpoint", "export", "run", "-o", path),
    ):  # fmt: skip
        assert command(*words) in (0, 2, 4), words
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    assert stat.S_ISSOCK(Path("socket").stat().st_mode)
    assert (folder / "folder").is_dir()
    assert not [each for each in folder.iterdir() if each.name.startswith(files.TEMPORARY)]
    assert not [each for each in folder.iterdir() if ".tmp-" in each.name]


def test_a_pipe_with_a_writer_is_read_and_one_with_a_reader_written(folder: Path) -> None:
    reads, writes = os.pipe()
    os.write(writes, Path("graph.json").read_bytes())
    os.close(writes)
    assert command("plan", f"/dev/fd/{reads}", "--devices", 2, "--algorithm", "single") == 0
    os.close(reads)
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_bytes("pipe", b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    with pytest.raises(FileError, match="E405 cannot write 'pipe': No such device"):
        files.write_bytes("pipe", b"content")
    with pytest.raises(FileError, match=r"E403 .*nothing came through this pipe within 0\.01 s"):
        files.read_bytes("pipe")


def test_a_device_without_end_is_refused_soon() -> None:
    with pytest.raises(FileError, match="E404 '/dev/zero' holds more than 4194304 bytes"):
        files.read_bytes("/dev/zero")


def test_what_has_no_room_says_so_and_keeps_the_old_file(folder: Path) -> None:
    """Files may have 200 bytes: what a full disk does to the last step of a command."""
    of, old = ("plan.json", "--graph", "graph.json"), Path("old")
    old.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        assert command("check", *of) == command("simulate", *of) == 0
        for words in (
            ("plan", "graph.json", "--devices", 2, "--algorithm", "single", "-o", old),
            ("report", *of, "-o", old), ("draw", *of, "-o", old), ("convert", "msr.json", old),
            ("export", *of, "--to", "perfetto", "-o", old),
            ("layout", "cut.json", *of[1:], "-o", old),
            ("checkpoint", "export", "run", "-o", old),
        ):  # fmt: skip
            assert command(*words) == 4, words
            assert old.read_text() == "old"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [each for each in folder.iterdir() if each.name.startswith(files.TEMPORARY)]
    assert not [each for each in folder.iterdir() if ".tmp-" in each.name]
