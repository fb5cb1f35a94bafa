"""Clusters: links, forms, files and what is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pardnn.cluster import (
    PRESETS,
    Cluster,
    Device,
    Link,
    Rate,
    Sharing,
    cluster_from_json,
    cluster_to_dict,
    more_like,
    write_cluster,
)
from pardnn.errors import FileError, MismatchError, UsageError
from pardnn.report.text import cluster_text


def _text(**changes: object) -> bytes:
    data = cluster_to_dict(Cluster.uniform(2, memory="1GiB")) | changes
    return json.dumps(data).encode()


def test_a_missing_direction_uses_the_other_and_a_missing_pair_the_default() -> None:
    cluster = Cluster(
        devices=tuple(Device(name=name) for name in "abc"),
        links=(
            Link(source="a", target="b", bandwidth=4.0, latency=1.0),
            Link(source="b", target="c", bandwidth=8.0, latency=2.0),
            Link(source="c", target="b", bandwidth=2.0, latency=3.0),
        ),
        default_link=Rate(bandwidth=1.0, latency=9.0),
    )
    assert cluster.seconds(0, 1, 8) == cluster.seconds(1, 0, 8) == 3.0
    assert cluster.seconds(1, 2, 8) == 3.0
    assert cluster.seconds(2, 1, 8) == 7.0
    assert cluster.seconds(0, 2, 8) == 17.0
    assert cluster.seconds(1, 1, 8) == 0.0


def test_without_a_link_there_is_no_way() -> None:
    cluster = Cluster(devices=(Device(name="a"), Device(name="b")))
    assert cluster.seconds(0, 1, 1) == float("inf")
    assert not np.isnan(cluster.arrays.bandwidth).any()


def test_file_round_trip(tmp_path: Path) -> None:
    cluster = Cluster.uniform(3, memory={0: "1GiB", 4: 7, "cpu": 5, 1: 3}, links="serial")
    assert [device.name for device in cluster.devices] == ["gpu:0", "gpu:4", "cpu", "gpu:1"]
    write_cluster(cluster, tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == cluster


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    assert Cluster.preset(name, 2).num_devices == 2
    assert Cluster.preset(name).num_devices == PRESETS[name][0]


def test_cpu_ranks_are_called_what_they_are() -> None:
    names = [device.name for device in Cluster.uniform(2, named="cpu").devices]
    assert names == ["cpu:0", "cpu:1"]
    assert [device.name for device in Cluster.preset("cpu", 1).devices] == ["cpu:0"]
    assert [device.name for device in Cluster.preset("dgx-v100", 1).devices] == ["gpu:0"]
    assert cluster_text(Cluster.uniform(2, named="cpu")).startswith("2 x cpu without limit")
    assert cluster_text(Cluster(devices=(Device(name="a"),))).startswith("1 x accelerator")
    with pytest.raises(UsageError, match="gpu or cpu"):
        Cluster.uniform(2, named="tpu")  # pyright: ignore[reportArgumentType]


def test_more_devices_are_called_as_the_first() -> None:
    first = Device(name="cpu:1", memory=7)
    assert [d.name for d in more_like(first, 2, ["cpu:1", "cpu:0"])] == ["cpu:2", "cpu:3"]
    assert [d.name for d in more_like(Device(name="a"), 2)] == ["gpu:0", "gpu:1"]
    assert more_like(first, 1)[0].memory == 7


def test_unknown_preset_lists_the_names() -> None:
    with pytest.raises(UsageError, match="dgx-v100"):
        Cluster.preset("dgx")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"devices": []}, "no devices"),
        ({"devices": [{"name": "a"}, {"name": "a"}]}, "two devices"),
        ({"devices": [{"name": "a", "speed": 0.0}]}, "speed"),
        ({"devices": [{"name": "a", "memory": -1}]}, "memory"),
        ({"devices": [{"name": "a", "memory": True}]}, r"\$\.devices\[0\]\.memory"),
        ({"default_link": {"bandwidth": 0.0}}, "bandwidth"),
        ({"default_link": {"bandwidth": 1e-309}}, "at least 1e-06"),
        ({"links": [{"from": "gpu:0", "to": "gpu:1", "bandwidth": 1e-7}]}, "at least 1e-06"),
        ({"default_link": {"bandwidth": 1.0, "latency": -1.0}}, "latency"),
        ({"default_link": {"bandwidth": 1.0, "latency": 1e308}}, "latency"),
        ({"links": [{"from": "x", "to": "gpu:0", "bandwidth": 1.0}]}, "no such device"),
        ({"links": [{"from": "gpu:0", "to": "gpu:0", "bandwidth": 1.0}]}, "itself"),
        ({"links": [{"from": "gpu:0", "to": "gpu:1", "bandwidth": 1.0}] * 2}, "twice"),
        ({"link_model": "fast"}, "link_model"),
        ({"colour": "red"}, "colour"),
        ({"sharing": {"slowdown": [], "overhead": {"bandwidth": 1.0}}}, "begins with 1"),
        ({"sharing": {"slowdown": [1.5, 2], "overhead": {"bandwidth": 1.0}}}, "begins with 1"),
        ({"sharing": {"slowdown": [1, 2, 1.5], "overhead": {"bandwidth": 1.0}}}, "never falls"),
        ({"sharing": {"slowdown": [1], "overhead": {"bandwidth": 0.0}}}, "sharing: overhead"),
    ],
)
def test_refused(changes: dict[str, object], what: str) -> None:
    with pytest.raises(FileError, match=what):
        cluster_from_json(_text(**changes))


def test_what_devices_share_is_kept(tmp_path: Path) -> None:
    overhead = Rate(bandwidth=2e9, latency=2e-5)
    shared = Sharing(slowdown=(1.0, 1.25, 1.5), overhead=overhead)
    cluster = dataclasses.replace(Cluster.uniform(3), sharing=shared)
    write_cluster(cluster, tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == cluster
    bare = dataclasses.replace(cluster, sharing=dataclasses.replace(shared, overhead=None))
    write_cluster(bare, tmp_path / "bare.json")
    assert Cluster.load(tmp_path / "bare.json") == bare
    assert "sharing" not in cluster_to_dict(Cluster.uniform(3))


def test_other_version() -> None:
    with pytest.raises(MismatchError, match="pardnn.cluster/2"):
        cluster_from_json(_text(format="pardnn.cluster/2"))


@pytest.mark.parametrize(("count", "links"), [(0, "serial"), (-1, "serial"), (2, "fast")])
def test_uniform_refuses(count: int, links: str) -> None:
    with pytest.raises(UsageError):
        Cluster.uniform(count, links=links)  # pyright: ignore[reportArgumentType]


def test_other_limits_leave_all_else(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_cluster(Cluster.preset("dgx-v100", 2), path)
    found, before = Cluster.load(path).limited(["1GiB", "2GiB"]), Cluster.load(path)
    assert [device.memory for device in found.devices] == [1 << 30, 2 << 30]
    assert found.limited("32GiB").devices[0].name == before.devices[0].name
    assert found.seconds(0, 1, 1 << 20) == before.seconds(0, 1, 1 << 20)
    with pytest.raises(UsageError, match="name 1 devices, but there are 2"):
        found.limited(["1GiB"])
