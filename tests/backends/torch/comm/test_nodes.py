"""Which ranks share a machine, and the interface that joins machines."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from pardnn.backends.torch.comm import nodes
from pardnn.backends.torch.comm.joining import join
from tests.backends.torch.ranks import connect, run_ranks

_NEW_NETWORK = 0x40000000


def test_processes_of_one_machine_have_one_identity() -> None:
    def body(rank: int, store: str) -> list[object]:
        world = connect(rank, 2, store, 20.0)
        assert world.channel is not None
        return [list(world.nodes), world.channel.local is not None]

    assert [each.value for each in run_ranks(2, body)] == [[[0, 0], True]] * 2


def test_ranks_of_another_machine_are_left_to_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int, store: str) -> list[object]:
        for module in ("unix_sockets", "joining"):
            monkeypatch.setattr(
                f"pardnn.backends.torch.comm.{module}.machine_id", lambda: f"machine {rank // 2}"
            )
        world = connect(rank, 3, store, 20.0)
        assert world.channel is not None
        local = world.channel.local
        return [list(world.nodes), [p for p in range(3) if local and local.carries(p, 8)]]

    found = [each.value for each in run_ranks(3, body)]
    assert [nodes for nodes, _ in found] == [[0, 0, 1]] * 3
    assert [peers for _, peers in found] == [[1], [0], []]


def test_ranks_without_a_common_folder_are_left_to_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two containers of one machine: same identity, but a socket's path is nothing there."""

    def body(rank: int, store: str) -> bool:
        import pardnn.backends.torch.comm.unix_sockets as module

        listening = module._listening
        monkeypatch.setattr(module, "_listening", lambda stack: (listening(stack)[0], "/no/s"))
        world = connect(rank, 2, store, 20.0)
        assert world.channel is not None
        return world.channel.local is None

    assert [each.value for each in run_ranks(2, body)] == [True, True]


def test_another_network_is_another_machine() -> None:
    if not hasattr(os, "fork") or os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    import ctypes

    def body(rank: int, _: str) -> str | None:
        libc = ctypes.CDLL(None, use_errno=True)
        if rank == 1 and libc.unshare(_NEW_NETWORK):
            return None
        return nodes.machine_id()

    here, there = (each.value for each in run_ranks(2, body))
    if there is None:
        pytest.skip("a network namespace is not permitted here")
    assert here == nodes.machine_id()
    assert there != here


def test_the_interface_is_the_one_that_leads_to_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(nodes.VARIABLE, "")  # so that it is taken away afterwards
    monkeypatch.delenv(nodes.VARIABLE)
    monkeypatch.setattr(nodes, "interface_to", lambda host: {"node0": "eth7"}.get(host))
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    nodes.choose_interface()
    assert os.environ.pop(nodes.VARIABLE).startswith("lo")  # one node: nobody else reaches it
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    nodes.choose_interface()
    assert os.environ.pop(nodes.VARIABLE).startswith("lo")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    nodes.choose_interface()
    assert os.environ[nodes.VARIABLE] == "eth7"
    monkeypatch.setenv(nodes.VARIABLE, "mine")
    nodes.choose_interface()
    assert os.environ[nodes.VARIABLE] == "mine"


def test_no_interface_is_chosen_that_other_machines_do_not_reach() -> None:
    assert nodes.interface_to("127.0.0.1") is None
    assert nodes.interface_to("no such host") is None
    assert nodes.interface_to("") is None


def test_an_interface_is_told_by_its_address() -> None:
    own = [a for _, name in socket.if_nameindex() if (a := nodes._address(name)) is not None]
    assert "127.0.0.1" in own
    others = [each for each in own if not each.startswith("127.")]
    for address in others:
        name = nodes.interface_to(address)
        assert name is not None
        assert nodes._address(name) == address


def test_nodes_that_do_not_reach_each_other_are_told_how_to_name_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int, _: str) -> None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", nodes.VARIABLE: "lo"}
        join(torch.device("cpu"), timeout_s=0.3)

    (outcome,) = run_ranks(1, body)
    assert outcome.code == "E605"
    assert "gloo uses lo; there are lo" in outcome.error["message"]
    assert "GLOO_SOCKET_IFNAME=NAME" in outcome.error["message"]
