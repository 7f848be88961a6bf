"""A slow network by the kernel's own means: a network namespace for the server, a veth pair to it, and netem on both ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final

from benchmarks.network.links import Link
from benchmarks.network.traffic import Traffic

_PREFIX: Final = "moaserve-net-"
_FRAMES: Final = 66
"""Bytes of Ethernet, IP and TCP headers."""


class NetworkError(Exception):
    """The network cannot be had here; the message says why."""


def unavailable(*, shaped: bool = True) -> str | None:
    """Why there can be no such network here (one that is not ``shaped`` needs no netem); None where there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are missing: install iproute2"
    try:
        with Namespace() as network:
            if shaped:
                network.shape(Link("any", rtt=0.001))
    except NetworkError as error:
        return f"{error} (it is the kernel's module sch_netem)" if "netem" in str(error) else str(error)
    return None


class Namespace:
    """The server's side of the network is a namespace of its own, the edge's this machine's. A context manager.

    What processes that were killed have left behind goes when the next one is made.
    """

    def __init__(self) -> None:
        number = os.getpid()
        self._name, self._near, self._far = f"{_PREFIX}{number}", f"moa{number}e", f"moa{number}s"
        # 198.18.0.0/15 is for measurements (RFC 2544): nobody's real network.
        stretch = f"198.18.{number // 64 % 256}.{number % 64 * 4}".rsplit(".", 1)
        self._edge_address, self.address = (f"{stretch[0]}.{int(stretch[1]) + host}" for host in (1, 2))

    def __enter__(self) -> Namespace:
        _sweep()
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
            _run("ip", "address", "add", f"{self._edge_address}/30", "dev", self._near)
            _run("ip", "-n", self._name, "address", "add", f"{self.address}/30", "dev", self._far)
            # One packet at a time, so that a loss is one of a packet: else the kernel sends several as one.
            _run("ip", "link", "set", self._near, "gso_max_segs", "1", "up")
            _run("ip", "-n", self._name, "link", "set", self._far, "gso_max_segs", "1", "up")
            _run("ip", "-n", self._name, "link", "set", "lo", "up")
        except NetworkError:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._remove()

    def shape(self, link: Link) -> None:
        """Be this link from now on."""
        for inside in ((), ("-n", self._name)):
            device = self._far if inside else self._near
            if not link.shaped:
                subprocess.run(["tc", *inside, "qdisc", "del", "dev", device, "root"], capture_output=True)
                continue
            rules = ["delay", f"{link.delay * 1e6:.0f}us"]
            rules += ["rate", f"{link.rate:.0f}bit"] if link.rate else []
            rules += ["loss", f"{link.loss:.4%}"] if link.loss else []
            _run("tc", *inside, "qdisc", "replace", "dev", device, "root", "netem", "limit", "10000", *rules)

    def command(self, command: list[str]) -> list[str]:
        """What runs ``command`` on the server's side."""
        return ["ip", "netns", "exec", self._name, *command]

    @property
    def traffic(self) -> Traffic:
        """What has passed, acknowledgements included; of netem's losses nothing is known here."""
        counts = {name: _count(self._near, name) for name in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")}
        up, down = counts["tx_bytes"], counts["rx_bytes"]
        return Traffic(up - _FRAMES * counts["tx_packets"], down - _FRAMES * counts["rx_packets"], up, down)

    def _remove(self) -> None:
        for command in (["ip", "link", "del", self._near], ["ip", "netns", "del", self._name]):
            subprocess.run(command, capture_output=True)


def _sweep() -> None:
    """Remove the namespaces of processes that are no more; their ends of the veth pairs go with them."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isdigit() and not Path("/proc", number).exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True)


def _count(device: str, name: str) -> int:
    return int(Path("/sys/class/net", device, "statistics", name).read_text())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
