"""Ranks prove that they belong to the run, and pass over what others write."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from pardnn.backends.torch.comm.secret import (
    VARIABLE,
    ForgedError,
    SignedStore,
    make_secret,
    prove_links,
)
from pardnn.errors import RankError
from tests.backends.torch.ranks import connect, run_ranks


def test_a_value_is_read_by_who_has_the_secret() -> None:
    plain = dist.HashStore()
    ours, others = SignedStore(plain, b"a"), SignedStore(plain, b"b")
    ours.set("key", "value")
    assert ours.get("key") == b"value"
    with pytest.raises(ForgedError, match="'key' is not from a rank of this run"):
        others.get("key")
    plain.set("other", plain.get("key"))  # a value of ours under another key
    with pytest.raises(RankError):
        ours.get("other")
    assert ours.compare_set("first", "", "mine") == b"mine"
    assert ours.compare_set("first", "", "later") == b"mine"


def test_a_forged_failure_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, make_secret())

    def body(rank: int, store: str) -> object:
        world = connect(rank, 2, store, 20.0)
        assert isinstance(world.store, SignedStore)
        if rank == 0:
            world.store.plain.set("failure", json.dumps({"rank": 1, "code": "E601"}))
        world.all_gather("forged", None)
        world.detect_failures()
        found = world.first_failure()
        world.all_gather("end", None)
        world.close()
        return found

    outcomes = run_ranks(2, body)
    assert [(each.status, each.value) for each in outcomes] == [(0, None)] * 2


def test_who_has_another_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, store: str) -> None:
        monkeypatch.setenv(VARIABLE, f"secret {rank // 2}")
        connect(rank, 3, store, 20.0)

    outcomes = run_ranks(3, body)
    assert {each.code for each in outcomes} == {"E607"}
    assert outcomes[0].error["details"] == {"rank": 0, "peer": 2}


def test_without_a_secret_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    prove_links(None, 0, 2)  # type: ignore[arg-type]
