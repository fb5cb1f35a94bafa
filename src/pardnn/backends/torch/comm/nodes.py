"""Which ranks share a machine, and which network interface joins the machines.

Gloo listens on the address of this host's name, which in containers and network namespaces is often
one that no other machine can reach. All ranks can reach `MASTER_ADDR`, so with several nodes, gloo
is told the interface that leads there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_SIOCGIFADDR = 0x8915
#: Variables that tell gloo and NCCL their interface.
VARIABLE, _NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def machine_id() -> str:
    """Return an identity shared by all processes of one running system and network.

    Two network namespaces of one system count as two machines: long messages between them go over
    the network, so short ones have to as well.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
    with contextlib.suppress(OSError):
        return f"{boot} {_NETWORK.stat().st_ino}"
    return boot


def node_numbers(machines: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each rank's node, counted in order of rank."""
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[machine] for machine in machines)


def may_be_several() -> bool:
    """Return whether ranks may run on several nodes, unless torchrun says otherwise."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return local is None or local != os.environ.get("WORLD_SIZE")


def choose_interface() -> None:
    """Tell gloo which interface to use: the loopback one if all ranks are on this machine.

    Leaves it to gloo if `GLOO_SOCKET_IFNAME` is set, or the interface is unknown.
    """
    if VARIABLE in os.environ:
        return
    master = os.environ.get("MASTER_ADDR", "")
    is_here = not may_be_several() or master == "localhost" or master.startswith("127.")
    name = loopback() if is_here else interface_to(master)
    if name is not None:
        os.environ[VARIABLE] = name


def loopback() -> str | None:
    """Return the interface that no other machine can reach; None if unknown."""
    with contextlib.suppress(OSError):
        for _, name in socket.if_nameindex():
            if (_address(name) or "").startswith("127."):
                return name
    return None


def loopback_environment() -> dict[str, str]:
    """Return the variables that make gloo and NCCL listen only on the loopback interface.

    Variables that the user has set stay.
    """
    name = loopback()
    names = (VARIABLE, _NCCL_VARIABLE) if name is not None else ()
    return {each: os.environ.get(each, name or "") for each in names}


def interface_to(host: str) -> str | None:
    """Return the interface that leads from this machine to a host.

    Returns:
        Its name; None if it is the loopback interface, or unknown.
    """
    try:
        address = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a datagram socket sends nothing here
            own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    found = next((name for name in names if _address(name) == own), None)
    return None if own.startswith("127.") else found


def _address(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    if fcntl is None:
        return None
    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def advice() -> str:
    """Return what may be wrong with the route to the other nodes, and the remedy."""
    used = os.environ.get(VARIABLE)
    with contextlib.suppress(OSError):
        names = ", ".join(name for _, name in socket.if_nameindex())
        chosen = f"gloo uses {used}" if used else "gloo uses the address of this host's name"
        return (
            f"Between nodes {chosen}; there are {names}. If another one leads to the other nodes "
            f"(`ip route get ADDRESS`), name it on each: {VARIABLE}=NAME."
        )
    return f"Name the interface that leads to the other nodes: {VARIABLE}=NAME."
