"""A checkpoint that is absent, torn, damaged or made up is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pardnn.checkpoint.directory import piece_path, read_manifest, resolve
from pardnn.checkpoint.manifest import manifest_from_json
from pardnn.checkpoint.pieces import PieceReader
from pardnn.checkpoint.verify import export, verify
from pardnn.errors import PardnnError, UsageError
from tests.checkpoint.steps import array, write_step


def opened(root: Path, step: int | None = None) -> None:
    path = resolve(root, step)
    verify(path, read_manifest(path))


def cut_off(root: Path) -> None:
    path = piece_path(resolve(root), 1)
    os.truncate(path, path.stat().st_size - 1)


def flipped(at: int) -> Callable[[Path], None]:
    def flip(root: Path) -> None:
        path = piece_path(resolve(root), 1)
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip


def edited(root: Path) -> None:
    path = resolve(root) / "manifest.json"
    path.write_text(path.read_text().replace('"epoch": 1', '"epoch": 2'))


def no_manifest(root: Path) -> None:
    (resolve(root) / "manifest.json").unlink()


def no_file(root: Path) -> None:
    piece_path(resolve(root), 0).unlink()


def half_a_manifest(root: Path) -> None:
    path = resolve(root) / "manifest.json"
    path.write_bytes(path.read_bytes()[:50])


@pytest.mark.parametrize(
    ("damage", "code", "text"),
    [
        (cut_off, "E431", "rank-00001.safetensors' has "),
        (flipped(-1), "E432", r"state 'optimizer\.state\.model\.w\.step'"),
        (flipped(-12), "E432", r"parameter 'model\.w\[0:4, 2:6\]'"),
        (flipped(30), "E432", "the header of"),
        (edited, "E408", "checksum"),
        (no_manifest, "E431", "torn: it has no manifest"),
        (no_file, "E431", "rank-00000.safetensors' is missing"),
        (half_a_manifest, "E406", "manifest.json' is not valid JSON"),
    ],
)
def test_damage_is_named(damage: Callable, code: str, text: str, tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    damage(tmp_path)
    with pytest.raises(PardnnError, match=text) as caught:
        opened(tmp_path)
    assert caught.value.code == code


@pytest.mark.parametrize("field", ["crc32", "sha256"])
def test_reading_compares_one_checksum_and_verify_both(field: str, tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    path = resolve(tmp_path)
    manifest = read_manifest(path)
    tensor = manifest.tensors[0]
    wrong = {"crc32": tensor.pieces[1].crc32 ^ 1, "sha256": "0" * 64}[field]
    pieces = (tensor.pieces[0], dataclasses.replace(tensor.pieces[1], **{field: wrong}))
    tensor = dataclasses.replace(tensor, pieces=pieces)
    with pytest.raises(PardnnError, match=r"model\.w\[0:4, 2:6\]") as caught:
        verify(path, dataclasses.replace(manifest, tensors=(tensor, *manifest.tensors[1:])))
    assert caught.value.code == "E432"
    with closing(PieceReader(path)) as reader:
        if field == "crc32":
            with pytest.raises(PardnnError, match=r"model\.w\[0:4, 2:6\]"):
                list(reader.rows(tensor, pieces[1]))
        (whole,) = reader.rows(tensor, pieces[field == "sha256"])
        expected = array(1)[:, 2:] if field == "sha256" else array(1)[:, :2]
        assert bytes(whole.data) == expected.tobytes()


def test_every_flipped_bit_of_a_piece_is_found_as_it_is_read(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    path = resolve(tmp_path)
    tensor = read_manifest(path).tensors[0]
    piece = tensor.pieces[1]
    good = piece_path(path, piece.file).read_bytes()
    with closing(PieceReader(path)) as reader:
        for bit in range(8 * tensor.piece_bytes(piece)):
            data = bytearray(good)
            data[piece.start + bit // 8] ^= 1 << bit % 8
            piece_path(path, piece.file).write_bytes(data)
            with pytest.raises(PardnnError, match="does not match its checksum"):
                list(reader.rows(tensor, piece))


def test_absent_steps_are_named(tmp_path: Path) -> None:
    with pytest.raises(PardnnError, match="is not a directory") as caught:
        opened(tmp_path / "none")
    assert caught.value.code == "E430"
    with pytest.raises(PardnnError, match="No complete step is there"):
        opened(tmp_path)
    write_step(tmp_path, 4)
    with pytest.raises(PardnnError, match=r"does not hold step 5.\n.*Complete steps: 4"):
        opened(tmp_path, 5)
    (tmp_path / "latest").write_text("../../etc\n")
    with pytest.raises(PardnnError, match="which `latest` names") as caught:
        opened(tmp_path)
    assert caught.value.code == "E430"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t["pieces"][0].update(box=[[0, 4], [0, 3]]), "not covered exactly once"),
        (lambda t: t["pieces"][0].update(box=[[0, 9], [0, 2]]), "has a piece at"),
        (lambda t: t["pieces"][0].update(file=7), "is in file 7, but there are 2"),
        (lambda t: t.update(dtype="object"), "unknown type 'object'"),
        (lambda t: t.update(shape=[-4, -6]), "shape"),
        (lambda t: t["pieces"][1].update(start=1), "gap or an overlap|does not end"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: Callable, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 1)
    data = json.loads((resolve(tmp_path) / "manifest.json").read_bytes())
    change(data["tensors"][0])
    monkeypatch.setattr("pardnn.checkpoint.manifest._checksum", lambda _: data["checksum"])
    with pytest.raises(PardnnError, match=text) as caught:
        manifest_from_json(json.dumps(data).encode(), "m")
    assert caught.value.code == "E435"


def test_a_whole_model_is_written_without_a_framework(tmp_path: Path) -> None:
    write_step(tmp_path / "run", 3)
    path = resolve(tmp_path / "run")
    manifest = read_manifest(path)
    assert export(path, manifest, tmp_path / "m.safetensors") == 1
    found = load_file(tmp_path / "m.safetensors")
    assert list(found) == ["w"]
    assert np.array_equal(found["w"], array(3))
    assert export(path, manifest, tmp_path / "o.safetensors", optimizer=True) == 2
    assert load_file(tmp_path / "o.safetensors")["optimizer.state.model.w.step"] == 3
    with pytest.raises(UsageError, match="it has model"):
        export(path, manifest, tmp_path / "p.safetensors", model="critic")


def test_safetensors_reads_the_pieces(tmp_path: Path) -> None:
    write_step(tmp_path, 3)
    found = load_file(piece_path(resolve(tmp_path), 1))
    assert np.array_equal(found["model.w[0:4, 2:6]"], array(3)[:, 2:])
    assert found["optimizer.state.model.w.step"] == 3


class Anything(str):
    """A checksum that every checksum equals."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


@pytest.mark.parametrize("is_signed", [False, True])
def test_made_up_manifests_are_refused_and_nothing_else(
    is_signed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes changed, left out and put in, also under a checksum that fits."""
    write_step(tmp_path, 1)
    content = (resolve(tmp_path) / "manifest.json").read_bytes()
    original = manifest_from_json(content, "m")
    if is_signed:
        monkeypatch.setattr("pardnn.checkpoint.manifest._checksum", lambda _: Anything())
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice([b"", b"9", b"-", b"[", b'"', b"\x00"])
        try:
            found = manifest_from_json(bytes(data), "m")
        except PardnnError:
            refused += 1
        else:
            assert is_signed or found == original  # a blank more or less
    assert refused > 100
