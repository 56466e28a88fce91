# SPDX-License-Identifier: Apache-2.0
"""Brings a guest's slow memory online, as an operator would. Runs in the guest, before anything.

CXL regions are made through sysfs, as Documentation/ABI/testing/sysfs-bus-cxl has it, since
ndctl 76 cannot make ones of RAM:

    echo region0     > decoder0.0/create_ram_region    the name that was read from there
    echo 256         > region0/interleave_granularity
    echo 1           > region0/interleave_ways
    echo 536870912   > region0/size
    echo ram         > decoder2.0/mode                 an endpoint's free decoder
    echo 536870912   > decoder2.0/dpa_size
    echo decoder2.0  > region0/target0
    echo 1           > region0/commit
    echo region0     > /sys/bus/cxl/drivers/cxl_region/bind

whereupon the dax and kmem drivers make it a NUMA node. Prints the kernel's release, the nodes with
CPUs, and the nodes with memory alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CXL = Path("/sys/bus/cxl/devices")
NODES = Path("/sys/devices/system/node")
AUTO_ONLINE = Path("/sys/devices/system/memory/auto_online_blocks")

CXL_MODULES = "cxl_acpi cxl_pci cxl_mem cxl_port dax_cxl device_dax kmem"
NVDIMM_MODULES = "nfit libnvdimm nd_pmem dax_pmem device_dax kmem"

MOUNTS = {
    "/sys/fs/cgroup": "cgroup2",
    "/sys/kernel/debug": "debugfs",
    "/sys/kernel/tracing": "tracefs",
}

TIMEOUT_S = 120


def main() -> None:
    """Does it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["cxl", "slow-node", "numa", "flat"])
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--interleaved", action="store_true")
    parser.add_argument("--numa-balancing", action="store_true")
    arguments = parser.parse_args()
    mount_filesystems()
    set_numa_balancing(on=arguments.numa_balancing)
    # Page tables and program text on emulated CXL memory would slow everything down.
    AUTO_ONLINE.write_text("online_movable")
    if arguments.kind == "cxl":
        set_up_cxl(arguments.devices, interleaved=arguments.interleaved)
    elif arguments.kind == "slow-node":
        set_up_nvdimm()
    report()


def mount_filesystems() -> None:
    """Mounts what virtme-ng may have left out."""
    for target, kind in MOUNTS.items():
        if not os.path.ismount(target):
            run("mount", "-t", kind, kind, target)


def set_numa_balancing(*, on: bool) -> None:
    """Debian's kernels balance by default where there are two nodes, which moves pages too."""
    switch = Path("/proc/sys/kernel/numa_balancing")
    if switch.exists():
        switch.write_text("1" if on else "0")


def set_up_cxl(devices: int, *, interleaved: bool) -> None:
    """Makes a region of each device, or one of all."""
    load(CXL_MODULES)
    wait("CXL endpoints", lambda: len(endpoint_decoders()) == devices)
    roots = root_decoders()
    decoders = endpoint_decoders()
    groups = [decoders] if interleaved else [[decoder] for decoder in decoders]
    for group in groups:
        root = next(root for root in roots if reaches(root, group))
        make_region(root, in_order(root, group))
    wait("memory of the CXL regions", lambda: len(memory_only_nodes()) == len(groups))
    settle()


def root_decoders() -> list[Path]:
    """The host's windows for volatile memory."""
    return sorted(path.parent for path in CXL.glob("decoder0.*/create_ram_region"))


def endpoint_decoders() -> list[Path]:
    """The first decoder of each endpoint, by the name of its memory device."""
    endpoints = sorted(CXL.glob("endpoint*"), key=lambda path: (path / "uport").resolve().name)
    return [decoder for endpoint in endpoints for decoder in endpoint.glob("decoder*.0")]


def targets(root: Path) -> list[str]:
    """The ids of a window's host bridges, in the order in which it interleaves over them."""
    return (root / "target_list").read_text().strip().split(",")


def reaches(root: Path, decoders: list[Path]) -> bool:
    """Whether all of the window's host bridges, and no others, lead to these decoders."""
    return set(targets(root)) == {bridge_target(root, decoder) for decoder in decoders}


def in_order(root: Path, decoders: list[Path]) -> list[Path]:
    """The decoders as the window interleaves over them; the kernel refuses any other order."""
    order = targets(root)
    return sorted(decoders, key=lambda decoder: order.index(bridge_target(root, decoder)))


def bridge_target(root: Path, decoder: Path) -> str:
    """The id by which a window names the host bridge that a decoder is behind."""
    bridge = Path(os.path.realpath(decoder))
    while bridge.parent.name != root.resolve().parent.name:
        bridge = bridge.parent
    for dport in root.resolve().parent.glob("dport*"):
        if dport.resolve() == (bridge / "uport").resolve():
            return dport.name.removeprefix("dport")
    raise SystemExit(f"no window for {decoder.name}")


def make_region(root: Path, decoders: list[Path]) -> None:
    """Makes one region of all of the decoders' memory."""
    name = (root / "create_ram_region").read_text().strip()
    (root / "create_ram_region").write_text(name)
    region = CXL / name
    size = sum(capacity(decoder) for decoder in decoders)
    (region / "interleave_granularity").write_text((root / "interleave_granularity").read_text())
    (region / "interleave_ways").write_text(str(len(decoders)))
    (region / "size").write_text(str(size))
    for position, decoder in enumerate(decoders):
        (decoder / "mode").write_text("ram")
        (decoder / "dpa_size").write_text(str(size // len(decoders)))
        (region / f"target{position}").write_text(decoder.name)
    (region / "commit").write_text("1")
    Path("/sys/bus/cxl/drivers/cxl_region/bind").write_text(name)


def capacity(decoder: Path) -> int:
    """The volatile capacity of the device that a decoder belongs to, in bytes."""
    return int((decoder.resolve().parent / "uport/ram/size").read_text(), 0)


def set_up_nvdimm() -> None:
    """Makes the NVDIMM system RAM."""
    load(NVDIMM_MODULES)
    run("ndctl", "create-namespace", "-f", "-e", "namespace0.0", "-m", "devdax", "--map=mem")
    run("daxctl", "reconfigure-device", "-m", "system-ram", "--force", "dax0.0")
    wait("memory of the NVDIMM", lambda: len(memory_only_nodes()) == 1)


def memory_only_nodes() -> list[int]:
    """The nodes that have memory and no CPUs."""
    return sorted(nodes("has_memory") - nodes("has_cpu"))


def nodes(state: str) -> set[int]:
    """The nodes in a file such as has_cpu, which says 0-1,4."""
    found: set[int] = set()
    for part in filter(None, (NODES / state).read_text().strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def report() -> None:
    """Tells the host what the guest turned out to be."""
    for line in ([os.uname().release], sorted(nodes("has_cpu")), memory_only_nodes()):
        sys.stdout.write(" ".join(map(str, line)) + "\n")


def load(modules: str) -> None:
    """Loads modules, and waits for what follows from that."""
    run("modprobe", "-a", *modules.split())
    settle()


def settle() -> None:
    """Waits for udev; one that is just starting hangs up on who waits, where the host is slow."""
    wait("answer of udev", lambda: succeeds("udevadm", "settle"))


def wait(what: str, there: Callable[[], bool]) -> None:
    """Waits for the kernel to make something, which it doesn't announce in one place."""
    deadline = time.monotonic() + TIMEOUT_S
    while not there():
        if time.monotonic() > deadline:
            sys.exit(f"no {what} after {TIMEOUT_S} s")
        time.sleep(0.1)


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run(*command: str) -> None:
    """Runs a program, whose output matters only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr or done.stdout}")


if __name__ == "__main__":
    main()
