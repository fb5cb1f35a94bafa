"""Ranks that add gradients up in place train bit by bit as ranks that make new sums."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest

import pardnn
from pardnn.cluster import Cluster
from pardnn.plan.partitioned_graph import ADD, ADD_IN_PLACE
from pardnn.plan.plan import Plan
from pardnn.planner.sharded import complete
from pardnn.shard.spmd.partitioner import spmd_partition
from tests.backends.torch import models
from tests.backends.torch.executors import captured, on_ranks
from tests.long_cases import long_but


def planned(factory: Any, algorithm: str, *, in_place: bool) -> Plan:
    made = functools.partial(spmd_partition, sums_in_place=in_place)
    with mock.patch.object(complete, "spmd_partition", made):
        return pardnn.plan(
            captured(factory), Cluster.uniform(2), algorithm, "bytes", costs="v100", reserve=0.0
        )


CASES = [("lstm", "tofu"), ("lstm", "zero-3"), ("gpt2", "tofu"), ("unet", "data-parallel")]


@pytest.mark.parametrize(("name", "algorithm"), long_but({("lstm", "tofu")}, CASES))
def test_sums_in_place_keep_every_bit(name: str, algorithm: str) -> None:
    factory = models.MODELS[name]
    plans = [planned(factory, algorithm, in_place=flag) for flag in (False, True)]
    kinds = {op.name: op.kind for op in captured(factory).ops}
    parts = [plan.partition for plan in plans]
    made = [
        sum(
            op.kind == ADD_IN_PLACE and kinds.get(op.name.rpartition("@")[0]) == ADD
            for op in part.ops
        )
        for part in parts
        if part is not None
    ]
    assert made[0] == 0
    assert made[1] > 0
    found = []
    for plan in plans:
        outcomes = on_ranks(factory, plan, steps=4)
        assert [outcome.error for outcome in outcomes] == [{}] * 2
        assert all(outcome.value[2] <= outcome.value[3] for outcome in outcomes)  # peaks
        found.append([outcome.value[:2] for outcome in outcomes])
    assert found[0] == found[1]
    predicted = [dataclasses.astuple(plan.predicted)[1] for plan in plans if plan.predicted]
    assert max(predicted[1]) <= max(predicted[0])
