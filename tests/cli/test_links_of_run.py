"""`run` plans for the links of this machine; commands that plan for another one do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pardnn import backends
from pardnn.cli.cluster_options import cluster_from_options, devices_named
from pardnn.cost.links import LinkCosts, LinkFit
from pardnn.errors import UsageError

FIT = LinkFit(latency=12.34e-6, bandwidth=2.3456e9, error=0.0)
COSTS = LinkCosts(idle=FIT, sending=FIT, taking=FIT, posting=0.0, waking=0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts measurements, on a machine of which nothing is known."""
    count: list[int] = []

    def measure() -> LinkCosts:
        count.append(1)
        return COSTS

    for name, value in (
        ("this_device", lambda: "cpu"), ("cached_links", lambda: None), ("measure_links", measure),
    ):  # fmt: skip
        monkeypatch.setattr(backends, name, value, raising=False)
    return count


def rate(*given: Any, **kwargs: Any) -> tuple[float, float]:
    found = cluster_from_options(*given, **kwargs).default_link
    assert found is not None
    return found.bandwidth, found.latency


def test_what_is_not_given_is_measured_here(measured: list[int]) -> None:
    assert rate(2, None, None, None, None, None, of_this_machine=True) == (2.35e9, 1.23e-5)
    assert rate(2, None, "1GB/s", None, None, None, of_this_machine=True) == (1e9, 1.23e-5)
    assert len(measured) == 2
    assert rate(2, None, "1GB/s", "1ms", None, None, of_this_machine=True) == (1e9, 1e-3)
    assert rate(1, None, None, None, None, None, of_this_machine=True) == (300e9, 25e-6)
    assert rate(2, None, None, None, None, None) == (300e9, 25e-6)
    assert len(measured) == 2


def test_two_ranks_have_one_connection(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "rank_memory_bytes", lambda ranks: 120 // ranks, raising=False)

    def model(*given: Any, **kwargs: Any) -> str:
        return cluster_from_options(*given, **kwargs).link_model

    two = (2, None, None, None)
    assert model(*two, None, None, of_this_machine=True) == "serial"
    assert model(*two, "independent", None, of_this_machine=True) == "independent"
    assert model(*two, None, None) == "independent"
    assert model(None, None, None, None, None, "this:2") == "serial"


def test_gpus_keep_the_default(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "this_device", lambda: "cuda")
    assert rate(2, None, None, None, None, None, of_this_machine=True) == (300e9, 25e-6)
    assert not measured


def names(*given: Any, **kwargs: Any) -> list[str]:
    return [device.name for device in cluster_from_options(*given, **kwargs).devices]


def test_devices_are_called_what_they_are(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = (2, None, None, None, None, None)
    assert names(*two, of_this_machine=True) == ["cpu:0", "cpu:1"]
    assert names(*two, named=devices_named("step.py:training", None)) == ["cpu:0", "cpu:1"]
    assert names(*two, named=devices_named("g.json", "measured")) == ["cpu:0", "cpu:1"]
    assert names(*two, named=devices_named("g.json", "cpu")) == ["cpu:0", "cpu:1"]
    assert names(*two, named=devices_named("g.json", None)) == ["gpu:0", "gpu:1"]
    assert names(*two, named=devices_named("step.py:training", "v100")) == ["gpu:0", "gpu:1"]
    monkeypatch.setattr(backends, "this_device", lambda: "cuda")
    assert names(*two, of_this_machine=True) == ["gpu:0", "gpu:1"]
    assert names(*two, named=devices_named("step.py:training", None)) == ["gpu:0", "gpu:1"]


def test_this_is_a_cluster_of_ranks_here(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = (None, None, None, None, None)
    monkeypatch.setattr(backends, "visible_devices", lambda: ["cpu AVX2"], raising=False)
    monkeypatch.setattr(backends, "rank_memory_bytes", lambda ranks: 120 // ranks, raising=False)
    found = cluster_from_options(*here, "this:3")
    assert [(d.name, d.memory) for d in found.devices] == [(f"cpu:{i}", 40) for i in range(3)]
    assert rate(*here, "this:2") == (2.35e9, 1.23e-5)
    with pytest.raises(UsageError, match="this:2"):
        cluster_from_options(*here, "this")
    monkeypatch.setattr(backends, "this_device", lambda: "cuda")
    monkeypatch.setattr(backends, "visible_devices", lambda: ["cuda:0 A", "cuda:1 A", "cpu AVX2"])
    assert names(*here, "this") == ["gpu:0", "gpu:1"]
    assert rate(*here, "this") == (300e9, 25e-6)
    with pytest.raises(UsageError, match="torch sees 2 GPUs"):
        cluster_from_options(*here, "this:3")


def test_run_asks_for_them(measured: list[int], run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def stop(*args: Any, **kwargs: Any) -> Any:
        found.append(args[1])
        raise KeyboardInterrupt

    monkeypatch.setattr("pardnn.api.run.run_target", stop)
    run("run", "x.py:f", "--devices", 2)
    assert found[0].default_link.bandwidth == 2.35e9
    assert len(measured) == 1


def test_run_is_steered_as_plan_is(
    measured: list[int], run: Any, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    found: list[Any] = []

    def stop(*args: Any, **kwargs: Any) -> Any:
        found.append((args[2].constraints, kwargs["start_file"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("pardnn.api.run.run_target", stop)
    old = tiny / "plan.json"
    run(
        "run", "x.py:f", "--devices", 2, "--algorithm", "auto", "--start", old, "--pin", "a=1",
        "--forbid", "b=0", "--together", "a,b", "--apart", "c,d", "--layout", "w=0", "--pieces", 2,
        "--prefer", "e=1@2ms",
    )  # fmt: skip
    ((demanded, start),) = found
    assert start == old
    kinds = [each.kind for each in demanded]
    assert kinds == ["pin", "forbid", "together", "apart", "layout", "pieces", "pin"]
    for option in (["--start", old], ["--pin", "a=1"], ["--pieces", 2]):
        status, _, err = run("run", "x.py:f", "--plan", old, *option)
        assert (status, err[:4]) == (2, "E206")


def test_a_cluster_file_is_written_by_ranks_of_torchrun_alone(run: Any) -> None:
    status, _, err = run("profile", "--links", "-o", "cluster.json")
    assert status == 2
    assert "torchrun --nnodes 2" in err
