"""Files of others: whatever they hold, commands end with a status and an error of the contract.

A short sample here; `make fuzz` runs as many seconds as `FUZZ` says, from the seed `FUZZ_SEED`, or
a new one, which it prints. `FUZZ_CASE=SEED-NUMBER` repeats one case.
"""

from __future__ import annotations

import collections
import gzip
import itertools
import os
import random
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from pardnn.place.polish import polish
from tests.fuzz.mutations import mutated, packed
from tests.fuzz.targets import PLANS, TARGETS, Fault, built_once, command, fill, limited

#: Of the short sample.
CASES = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(polish, "WORK", 100_000)
    with built_once():
        fill(tmp_path / "files")
        yield tmp_path / "files"


def fault_of(folder: Path, case: str) -> tuple[str, str] | None:
    """Run a case; return where in the package it failed, and all that is known of it."""
    rng = random.Random(case)
    target = rng.choice(TARGETS)
    path = folder / target.path
    content = path.read_bytes()
    is_packed = path.suffix == ".gz"
    found = mutated(gzip.decompress(content) if is_packed else content, rng)
    try:
        path.write_bytes(packed(found, rng) if is_packed else found)
        with limited():
            target.reads(folder, rng)
    except Exception as error:
        text = str(error) if isinstance(error, Fault) else traceback.format_exc()
        lines = [line.strip() for line in text.splitlines()]
        places = [line for line in lines if line.startswith("File ") and "pardnn" in line]
        return (places or lines)[-1], f"case {case} of {target.path}\n{text}"
    finally:
        path.write_bytes(content)
    return None


def test_the_files_are_valid_as_they_are(folder: Path) -> None:
    for name in PLANS:
        plan, graph = folder / f"{name}.json", folder / "packed.json.gz"
        assert (name, command("check", plan, "--graph", graph)) == (name, 0)
    assert command("checkpoint", "verify", folder / "run") == 0
    graph, demands = folder / "graph.json", ("--constraints", folder / "constraints.json")
    assert command("plan", graph, "--devices", 2, "--algorithm", "pardnn", *demands) == 0
    of = (folder / "plan.json", "--graph", graph)
    assert command("report", *of, "--run", folder / "record.json", "-o", folder / "r.html") == 0


def test_a_sample_of_damaged_files(folder: Path) -> None:
    faults = [fault_of(folder, f"1-{number}") for number in range(CASES)]
    assert [fault[1] for fault in faults if fault] == []


@pytest.mark.skipif("FUZZ" not in os.environ, reason="make fuzz: takes minutes")
def test_damaged_files_for_long(folder: Path) -> None:
    seed, end = os.environ.get("FUZZ_SEED") or secrets.token_hex(4), time.monotonic()
    only = os.environ.get("FUZZ_CASE")
    end += float(os.environ["FUZZ"])
    found: dict[str, list[str]] = collections.defaultdict(list)
    print(f"\nseed {seed}", flush=True)
    for number in itertools.count():
        if time.monotonic() > end or (only and number):
            break
        fault = fault_of(folder, only or f"{seed}-{number}")
        if fault:
            found[fault[0]].append(fault[1])
            if len(found[fault[0]]) == 1:
                print(fault[1], file=sys.stderr, flush=True)
    print(f"seed {seed}: {number} cases, {sum(map(len, found.values()))} faults")
    assert {place: len(faults) for place, faults in found.items()} == {}
