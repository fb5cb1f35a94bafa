"""Two nodes on one machine: network namespaces with a slow link between them, for torchrun.

    with two_nodes(bandwidth=125e6, latency=1e-3) as nodes:
        done = nodes.torchrun(["train.py"], per_node=2)

Each node has a network of its own (`slow_link.py`), a host name (`node0`, `node1`) that both
resolve, and private folders where `private` names some. Needs root, `ip` and `/dev/net/tun`;
`why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from testbed.slow_link import ADDRESSES

ROOT = Path(__file__).parents[1]
PORT = 29500


def why_not() -> str:
    """Return what keeps this machine from making nodes; "" if nothing does."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "`ip` (iproute2) or `unshare` (util-linux) is not installed"
    name = f"pardnn-{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "`ip netns add` is not permitted here"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun cannot be opened: {error.strerror}"
    return ""


class Done(NamedTuple):
    """How one node's torchrun ended."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Nodes:
    """Two nodes that run.

    Attributes:
        names: Of their network namespaces.
        folder: For files of this harness.
        has_names: Whether each node has a host name of its own, which resolves to its address;
            else both have this machine's, and rank 0 is found by its address.
        private: Folders that each node has for itself.
    """

    names: tuple[str, str]
    folder: Path
    has_names: bool
    private: tuple[Path, ...]

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command on a node."""
        lines = [f"mount -t tmpfs none {shlex.quote(str(path))}" for path in self.private]
        if self.has_names:
            lines += [
                f"hostname node{node}",
                f"mount --bind {self.folder}/hosts /etc/hosts",
                f"mount --bind {self.folder}/nsswitch.conf /etc/nsswitch.conf",
            ]
        script = " && ".join([*lines, 'exec "$@"'])
        inside = ["ip", "netns", "exec", self.names[node]]
        return [*inside, "unshare", "--mount", "--uts", "sh", "-c", script, "sh", *command]

    def torchrun(
        self,
        script: Sequence[str],
        *,
        per_node: int = 1,
        environment: Mapping[str, str] | None = None,
        limit_s: float = 300.0,
    ) -> list[Done]:
        """Run a script by torchrun on both nodes, and return how each ended.

        Args:
            script: A file or `-m MODULE`, and its arguments.
            per_node: Ranks of each node.
            environment: Variables beside this process's own.
            limit_s: After which both are ended, with all their ranks.
        """
        found = []
        given = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        for node in range(2):
            name = "node0" if self.has_names else ADDRESSES[0]
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{name}:{PORT}"]
            if not self.has_names:
                where = ["--node-rank", str(node), "--master-addr", name]
                where += ["--master-port", str(PORT)]
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--nproc-per-node", str(per_node), *where, *script]
            files = [(self.folder / f"{kind}{node}").open("w+") for kind in ("out", "err")]
            process = subprocess.Popen(
                self.command(node, command), stdout=files[0], stderr=files[1], env=given,
                start_new_session=True,
            )  # fmt: skip
            found.append((process, files))
        end = time.monotonic() + limit_s
        for process, _ in found:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        for process, _ in found:
            _end(process)
        return [Done(process.returncode, *map(_text, files)) for process, files in found]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(file: object) -> str:
    with file as stream:  # type: ignore[attr-defined]
        stream.seek(0)
        return stream.read()


@contextlib.contextmanager
def two_nodes(
    *,
    bandwidth: float = 125e6,
    latency: float = 1e-3,
    has_names: bool = True,
    private: Sequence[Path] = (),
) -> Iterator[Nodes]:
    """Make two nodes and the link between them; take them down afterwards.

    Args:
        bandwidth: Of the link in each direction, bytes/s.
        latency: Of the link one way, seconds.
        has_names: See `Nodes`.
        private: See `Nodes`.
    """
    names = (f"pardnn-{os.getpid()}-0", f"pardnn-{os.getpid()}-1")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-")))
        hosts = "".join(f"{address} node{i}\n" for i, address in enumerate(ADDRESSES))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (folder / "nsswitch.conf").write_text("hosts: files\n")  # no name server is asked
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        command = [sys.executable, "-m", "testbed.slow_link", *names]
        command += ["--bandwidth", str(bandwidth), "--latency", str(latency)]
        link = stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(link.kill)
        assert link.stdout is not None
        if link.stdout.readline().strip() != "up":
            raise OSError("the link between the nodes did not come up")
        yield Nodes(names, folder, has_names, tuple(private))
