# SPDX-License-Identifier: Apache-2.0
"""Hosts as network namespaces on one bridge, with links that can be cut and slowed."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

SLOW = ["rate", "4mbit", "burst", "16kb", "latency", "50ms"]
"""A link of which a block of 64 KiB takes 0.13 s, of the seconds that a batch may take."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the network: commands run on it behind `prefix`."""

    space: str
    address: str
    switch: str
    port: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.space]

    def cut(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "down")

    def restore(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "up")

    def slow_down(self) -> None:
        for space, link in ((self.space, "eth0"), (self.switch, self.port)):
            tc("-n", space, "qdisc", "add", "dev", link, "root", "tbf", *SLOW)

    def speed_up(self) -> None:
        for space, link in ((self.space, "eth0"), (self.switch, self.port)):
            tc("-n", space, "qdisc", "del", "dev", link, "root")

    def sent_bytes(self) -> int:
        """Tells what the host has sent so far."""
        show = ["ip", "-json", "-stats", "-n", self.switch, "link", "show", self.port]
        [told] = json.loads(subprocess.run(show, check=True, capture_output=True).stdout)
        return int(told["stats64"]["rx"]["bytes"])


@contextmanager
def network(names: Sequence[str]) -> Iterator[list[Host]]:
    """Makes hosts; they are gone after it, with what runs on them still."""
    switch = f"tierd-{os.getpid()}-switch"
    with ExitStack() as stack:
        _add(switch, stack)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        hosts = []
        for number, name in enumerate(names, 1):
            host = Host(f"tierd-{os.getpid()}-{name}", f"10.77.0.{number}", switch, f"v{number}")
            _add(host.space, stack)
            peer = ["peer", "name", "eth0", "netns", host.space]
            ip("link", "add", host.port, "netns", switch, "type", "veth", *peer)
            ip("-n", switch, "link", "set", host.port, "master", "br0", "up")
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", host.space, "link", "set", link, "up")
            hosts.append(host)
        yield hosts


def _add(space: str, stack: ExitStack) -> None:
    ip("netns", "add", space)
    stack.callback(ip, "netns", "del", space)


def tc(*arguments: str) -> None:
    subprocess.run(["tc", *arguments], check=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
