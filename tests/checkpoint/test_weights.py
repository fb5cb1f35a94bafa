"""Weight files: what the package `safetensors` writes is found, what is damaged is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pardnn.checkpoint.weights import open_weights, stored_rows
from pardnn.errors import FileError


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((5, 3), np.float32), "b": rng.integers(9, size=4),
        "scalar": np.array(2.5), "empty": np.zeros((0, 2), np.float16),
    }  # fmt: skip


def found(path: Path) -> dict[str, bytes]:
    tensors = open_weights(path).tensors
    return {
        name: b"".join(bytes(rows.data) for rows in stored_rows(t)) for name, t in tensors.items()
    }


def sharded(directory: Path) -> Path:
    names = list(arrays())
    where = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({n: arrays()[n] for n in names if where[n] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return index


def test_every_tensor_of_a_file_is_read_bit_for_bit(tmp_path: Path) -> None:
    save_file(arrays(), tmp_path / "model.safetensors", {"format": "pt"})
    expected = {name: value.tobytes() for name, value in arrays().items()}
    assert found(tmp_path / "model.safetensors") == expected
    assert found(tmp_path) == expected
    tensor = open_weights(tmp_path).tensors["w"]
    (rows,) = stored_rows(tensor, 1, 3)
    assert (rows.box, bytes(rows.data)) == (((1, 3), (0, 3)), arrays()["w"][1:3].tobytes())


def test_several_files_are_found_by_their_index(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    expected = {name: value.tobytes() for name, value in arrays().items()}
    assert found(index) == found(tmp_path) == expected


def header(path: Path, table: object, data: bytes = b"") -> Path:
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> object:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "table",
    [
        entry(offsets=(0, 4)), entry(offsets=(4, 12)), entry(shape=(-2,)), entry(shape=(2.0,)),
        entry(dtype="F4"), entry(dtype=["F32"]), entry(shape=3), entry(offsets=(0,)), {"w": 1}, [],
        entry(shape=(1 << 62, 4), offsets=(0, 8)), entry(shape=(True, 2)),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_its_file_is_refused(table: object, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        open_weights(header(tmp_path / "model.safetensors", table, bytes(8)))
    assert caught.value.code == "E436"


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 9, b"\x01" + bytes(7) + b"{"])
def test_what_is_no_weight_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError) as caught:
        open_weights(path)
    assert caught.value.code in ("E436", "E406")
    with pytest.raises(FileError) as caught:
        open_weights(tmp_path / "none")
    assert caught.value.code == "E434"


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file(arrays(), path := tmp_path / "model.safetensors")
    tensor = open_weights(path).tensors["w"]
    with path.open("r+b") as stream:
        stream.truncate(tensor.start + 4)
    with pytest.raises(FileError, match=r"model\.safetensors.*ends too early"):
        list(stored_rows(tensor))


@pytest.mark.parametrize(
    "where", [{"w": "../secret"}, {"w": "/etc/passwd"}, {"w": 1}, {"other": "one"}, None]
)
def test_an_index_names_files_beside_it_and_what_they_hold(where: object, tmp_path: Path) -> None:
    save_file(arrays(), tmp_path / "one")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(FileError) as caught:
        open_weights(index)
    assert caught.value.code == "E436"
