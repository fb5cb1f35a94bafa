"""What a process and its children listen on, read from the system while they run (Linux)."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LISTENING = "0A"


def family(pid: int) -> set[int]:
    """A process and all that it started, however deep."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = str(handle.readlink())
                if name.startswith("socket:["):
                    found.add(name[8:-1])
    return found


def address(text: str) -> str:
    """`0100007F:1F90` as `127.0.0.1`; words of four bytes, each in this machine's order."""
    digits = bytes.fromhex(text.split(":")[0])
    words = [digits[i : i + 4][::-1] for i in range(0, len(digits), 4)]
    return str(ipaddress.ip_address(b"".join(words)))


def listening(pid: int) -> set[str]:
    """The addresses at which a process, or one that it started, takes TCP connections."""
    own = set().union(*(sockets(each) for each in family(pid)))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == _LISTENING and cells[9] in own:
                found.add(address(cells[1]))
    return found


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collect what this process and its children listen on, every 50 ms."""
    found: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            found.update(listening(os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
