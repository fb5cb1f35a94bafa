"""The cost cache: round trips, damage, foreign machines, concurrent writers, no place to write."""

import multiprocessing
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from pardnn.cost.table import (
    CostCacheWarning,
    CostTable,
    Entry,
    Machine,
    cache_folder,
    load_table,
    save_table,
)

MACHINE = Machine(device="Some GPU, 80 GiB", library="torch 2.13.0", threads=0)
ENTRIES = {
    f'["aten.mm.default", [{i}]]': Entry(
        seconds=1e-3 / (i + 1), spread=1e-5, repetitions=7 + i, workspace=i
    )
    for i in range(8)
}

finite = st.floats(0, 1e6, allow_nan=False)
entries = st.builds(
    Entry,
    seconds=finite,
    spread=finite,
    repetitions=st.integers(0, 10**9),
    workspace=st.integers(0, 2**62),
)
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """File of a saved table."""
    save_table(CostTable(MACHINE, ENTRIES), tmp_path)
    return tmp_path / MACHINE.file_name


@in_one_folder
@given(st.dictionaries(st.text(max_size=50), entries, min_size=1, max_size=5))
def test_round_trip_to_the_last_bit(tmp_path, made):
    folder = tmp_path
    (folder / MACHINE.file_name).unlink(missing_ok=True)
    assert save_table(CostTable(MACHINE, made), folder).entries == made
    assert load_table(MACHINE, folder).entries == made


def test_no_file_is_no_cause_for_a_warning(tmp_path):
    assert load_table(MACHINE, tmp_path).entries == {}
    assert load_table(MACHINE, None).entries == {}


def test_the_same_entries_give_the_same_bytes(path):
    before = path.read_bytes()
    save_table(CostTable(MACHINE, dict(reversed(ENTRIES.items()))), path.parent)
    assert path.read_bytes() == before


@in_one_folder
@given(st.data())
def test_damage_never_gives_a_wrong_number(path, data):
    save_table(CostTable(MACHINE, ENTRIES), path.parent)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load_table(MACHINE, path.parent).entries
    assert all(ENTRIES.get(text) == entry for text, entry in found.items())
    assert len(caught) == (len(found) < len(ENTRIES))
    path.unlink()


def test_every_truncation_is_survived(path):
    content = path.read_bytes()
    for length in range(0, len(content) - 2, 7):
        path.write_bytes(content[:length])
        with pytest.warns(CostCacheWarning):
            assert load_table(MACHINE, path.parent).entries == {}


def test_one_damaged_entry_costs_only_itself_and_is_measured_again(path):
    content = path.read_text()
    assert content.count('"repetitions": 9') == 1
    path.write_text(content.replace('"repetitions": 9', '"repetitions": 8'))
    with pytest.warns(CostCacheWarning, match="1 of 8 entries"):
        assert len(load_table(MACHINE, path.parent).entries) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who loaded it has been told
        save_table(CostTable(MACHINE, ENTRIES), path.parent)
    assert load_table(MACHINE, path.parent).entries == ENTRIES


@pytest.mark.parametrize(
    "change", [{"device": "Other GPU"}, {"library": "torch 2.12.0"}, {"threads": 2}]
)
def test_costs_of_another_machine_are_never_used(path, change):
    other = replace(MACHINE, **change)
    assert load_table(other, path.parent).entries == {}
    (path.parent / other.file_name).write_bytes(path.read_bytes())  # copied by hand
    with pytest.warns(CostCacheWarning, match="another machine"):
        assert load_table(other, path.parent).entries == {}
    # Even with the file's own name for its machine edited, no entry passes.
    text = path.read_text()
    (path.parent / other.file_name).write_text(
        text.replace('"Some GPU, 80 GiB"', f'"{other.device}"')
        .replace('"torch 2.13.0"', f'"{other.library}"')
        .replace('"threads": 0', f'"threads": {other.threads}')
    )
    with pytest.warns(CostCacheWarning, match="8 of 8 entries"):
        assert load_table(other, path.parent).entries == {}


class _Payload:
    def __reduce__(self):
        return (Path.touch, (Path(os.environ["PAYLOAD"]),))


def test_a_pickle_is_not_executed(path, monkeypatch, tmp_path):
    mark = tmp_path / "payload-ran"
    monkeypatch.setenv("PAYLOAD", str(mark))
    path.write_bytes(pickle.dumps(_Payload()))
    with pytest.warns(CostCacheWarning):
        assert load_table(MACHINE, path.parent).entries == {}
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"{}", b'{"format": "pardnn.costs/1"}', b"[" * 10**5]
)
def test_other_content_is_ignored(path, content):
    path.write_bytes(content)
    with pytest.warns(CostCacheWarning):
        assert load_table(MACHINE, path.parent).entries == {}


def _write_many(folder: Path, writer: int) -> None:
    for i in range(20):
        save_table(CostTable(MACHINE, {f"{writer}.{i}": Entry(seconds=float(i))}), folder)


def test_two_writers_at_once_lose_nothing(tmp_path):
    fork = multiprocessing.get_context("spawn")
    writers = [fork.Process(target=_write_many, args=(tmp_path, writer)) for writer in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    found = load_table(MACHINE, tmp_path).entries
    assert found == {f"{w}.{i}": Entry(seconds=float(i)) for w in range(2) for i in range(20)}
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".lock"]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    gone = tmp_path / "gone"
    with pytest.warns(CostCacheWarning, match="not kept"):
        assert save_table(CostTable(MACHINE, ENTRIES), gone).entries == ENTRIES
    assert save_table(CostTable(MACHINE, ENTRIES), None).entries == ENTRIES


def test_the_folder_is_the_first_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PARDNN_CACHE", str(tmp_path / "chosen"))
    assert cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("PARDNN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "pardnn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "pardnn"


def test_a_home_that_cannot_be_written_gives_a_private_temporary_folder(tmp_path, monkeypatch):
    occupied = tmp_path / "file"
    occupied.touch()  # no folder can be made below a file, whoever runs the test
    monkeypatch.delenv("PARDNN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(occupied))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = tmp_path / f"pardnn-{os.getuid()}"
    assert cache_folder() == found
    assert found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o777)  # someone else could plant numbers in it
    assert cache_folder() is None
    found.rmdir()
    found.symlink_to(tmp_path)
    assert cache_folder() is None


def test_no_place_at_all_is_no_cache(tmp_path, monkeypatch):
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("PARDNN_CACHE", str(occupied / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(occupied))
    assert cache_folder() is None
