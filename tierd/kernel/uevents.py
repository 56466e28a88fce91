# SPDX-License-Identifier: Apache-2.0
"""Memory blocks, nodes, dax and CXL devices that come, go or change: the kernel's uevents.

Follows lib/kobject_uevent.c and device_online() in drivers/base/core.c. When the memory of a dax
device goes offline and the device is taken from kmem, the kernel sends, a line each::

    offline /devices/system/memory/memory39 (memory)         each block; nothing of the node
    remove  /devices/virtual/memory_tiering/memory_tier22    when the tier's last node has no memory
    remove  /devices/system/memory/memory39 (memory)         from here on for kmem alone
    remove  /devices/system/node/node1 (node)
    unbind  /devices/platform/ACPI0012:00/ndbus0/region0/dax0.0/dax0.0 (dax)

and when it comes back::

    add     /devices/system/node/node1 (node)
    add     /devices/system/memory/memory39 (memory)
    add     /devices/virtual/memory_tiering/memory_tier22
    online  /devices/system/memory/memory39 (memory)         each block, when its memory is there
    bind    /devices/platform/ACPI0012:00/ndbus0/region0/dax0.0/dax0.0 (dax)

A CXL region comes and goes around all that::

    add     /devices/platform/ACPI0017:00/root0/decoder0.0/region0 (cxl)
    bind    /devices/platform/ACPI0017:00/root0/decoder0.0/region0 (cxl)

So no change of a node's memory goes without an event of a block, be it by daxctl, by a block's
`state` or by itself (auto_online_blocks). A balloon that takes pages out of a node sends none.

They are the kernel's own events, not those that udevd sends on when it has handled them: udevd may
not run, as in containers, and what counts is what the kernel has, not what rules have made of it.
"""

from typing import Self

from pyudev import Context, Monitor

SUBSYSTEMS = ("memory", "node", "dax", "cxl")


class Uevents:
    """A context that listens to the uevents of SUBSYSTEMS.

    Raises:
        OSError: they cannot be listened to.
        ImportError: there is no libudev.
    """

    def __init__(self) -> None:
        self._context = Context()
        self._monitor = self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        del self._monitor, self._context

    def read(self) -> bool:
        """Returns whether there were any since the last call.

        One is as good as a thousand, so the others are left unread: a new monitor takes the place
        of the one that they wait in. That also helps where so many came that some were lost
        (ENOBUFS): pyudev cannot read on from there (its issue 194).

        Raises:
            OSError: there can be no new monitor; the old one stays.
        """
        try:
            if self._monitor.poll(0) is None:
                return False
        except OSError:
            pass
        self._monitor = self._listen()
        return True

    def _listen(self) -> Monitor:
        monitor = Monitor.from_netlink(self._context, source="kernel")
        for subsystem in SUBSYSTEMS:
            monitor.filter_by(subsystem)
        monitor.start()
        return monitor
