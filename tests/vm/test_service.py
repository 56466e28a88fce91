# SPDX-License-Identifier: Apache-2.0
"""tierd as a service of a bare Debian, from its installation to its removal, by its own systemd.

The tests are one life: the first that needs it installs, the last one removes. Each can be run
alone, too.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from guests import wheels
from guests.damon import footprint
from guests.debian import Debian
from guests.guest import Completed, Guest
from guests.tiering import DEMOTION, WITHIN_S
from guests.topology import Emulator, cxl
from guests.workloads import Hotset, build

MACHINE = cxl(512, 256, plugged=1, emulator=Emulator.FAST)
pytestmark = pytest.mark.guest(MACHINE, debian=Debian.LATEST)

INSTALL_S = 240
NOBODY = "65534"
CONFIG = "/etc/tierd/tierd.toml"
DROP_IN = "/etc/tierd/tierd.toml.d/50-test.toml"
UNIT_DROP_IN = Path("/run/systemd/system/tierd.service.d/test.conf")
NUMA_BALANCING = "/proc/sys/kernel/numa_balancing"
LOOKS = "/sys/kernel/debug/sched/numa_balancing/"
LONGEST_LOOK, HOT_WITHIN = (f"{LOOKS}{name}_ms" for name in ("scan_period_max", "hot_threshold"))
LEAST_CACHE = "/proc/sys/vm/min_unmapped_ratio"
PROMOTES = (NUMA_BALANCING, DEMOTION, LONGEST_LOOK, HOT_WITHIN)
METRICS = "127.0.0.1:9464"
SETTINGS = """
[conflicts]
numa_balancing = "take_over"
[damon]
cpu_percent = 50.0  # an emulated CPU is slow, and kdamond's share of it large
take_over = true
[policy]
horizon_s = 300
"""
RULE = """
[[target]]
command = "hotset"
"""
CAPABILITIES = {"SYS_PTRACE": 19, "DAC_READ_SEARCH": 2, "SYS_ADMIN": 21, "NET_ADMIN": 12}

LIST = """
find /mnt -not -type d -printf '%p %y %m\\n' | sed s,^/mnt,,
find /etc /usr /opt /root /srv /var/lib -path /usr/lib/modules -prune -o -type d -printf '%p/\\n'
find /run/tierd /run/systemd/system
getent group | sed 's/^/group /'
getent passwd | sed 's/^/user /'
systemctl list-unit-files --no-legend 'tierd*'
"""
"""All that an installation might leave: files written since the boot, folders, groups, units."""

OTHERS = (
    *("/etc/.pwd.lock", "/etc/group", "/etc/gshadow", "/etc/passwd", "/etc/shadow"),
    *("/etc/subuid", "/etc/subgid"),
    *("/var/lib/systemd/", "/var/log/journal/"),
)
"""What others keep by themselves: who writes users and groups keeps a lock and what was before."""


class Service:
    """tierd in a guest: installed, with the tests' settings, and running unless a test stops it."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.found = listing(guest)
        self.machine = footprint(guest)
        self.installed = self.install()
        guest.write(DROP_IN, (SETTINGS + RULE).encode())

    def install(self, *options: str, version: str = "0.1.0") -> Completed:
        folder = wheels.build(Debian.LATEST, version)
        return script(self.guest, "--wheels", str(folder), *options)

    def show(self, name: str) -> str:
        """A property of the unit."""
        command = ["systemctl", "show", "--value", f"--property={name}", "tierd"]
        return self.guest.run(command).stdout.strip()

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    @property
    def is_up(self) -> bool:
        return self.show("ActiveState") == "active"

    @property
    def next_delay_s(self) -> float:
        """How long systemd will wait before the next restart."""
        shown = self.show("RestartUSecNext")  # such as 1min 2.039s
        units = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60}
        parts = re.findall(r"([\d.]+)(us|ms|s|min)\b", shown)
        return sum(float(number) * units[unit] for number, unit in parts)

    def start(self) -> None:
        self.guest.run(["systemctl", "start", "tierd"], timeout=WITHIN_S)

    def log(self) -> str:
        """What it has said, of all its runs."""
        return self.guest.run(["journalctl", "--output=cat", "--unit=tierd"]).stdout

    @property
    def status(self) -> dict[str, Any]:
        """What it has published last, nothing before the first round."""
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(self.guest.read("/run/tierd/status.json"))
            return found
        return {}

    def reload(self, settings: str) -> Completed:
        self.guest.write(DROP_IN, (SETTINGS + settings).encode())
        return self.guest.run(["systemctl", "reload", "tierd"], timeout=WITHIN_S, check=False)


def listing(guest: Guest) -> list[str]:
    done = guest.run(["sh", "-c", LIST], timeout=WITHIN_S, check=False)
    return sorted(line for line in done.stdout.splitlines() if not line.startswith(OTHERS))


def script(guest: Guest, *arguments: str, user: str = "0") -> Completed:
    command = ["setpriv", f"--reuid={user}", "./scripts/install", *arguments]
    return guest.run(command, timeout=INSTALL_S, check=False)


SERVICES: dict[Guest, Service] = {}
"""The installation of each guest that has one."""


@pytest.fixture
def service(guest: Guest) -> Service:
    if guest not in SERVICES:
        SERVICES[guest] = Service(guest)
    return SERVICES[guest]


@contextmanager
def workload(guest: Guest, *options: str) -> Iterator[Hotset]:
    """A hotset on slow memory, of a user other than root."""
    guest.run(["install", "-m", "755", build("hotset"), "/tmp/hotset"])
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    sizes = ("--mib", "32", "--hot-mib", "4", "--share", "95", "--node", "1")
    process = guest.start([*user, "/tmp/hotset", "--cpu", "1", "--fast-nodes", "0", *sizes])
    load = Hotset(process)
    try:
        load.sample()
        yield load
    finally:
        load.stop()


@contextmanager
def unit_settings(guest: Guest, *settings: str) -> Iterator[None]:
    """Has the unit set otherwise, until the next boot or the end of the block."""
    guest.run(["mkdir", "-p", str(UNIT_DROP_IN.parent)])
    guest.write(UNIT_DROP_IN, "\n".join(["[Service]", *settings, ""]).encode())
    guest.run(["systemctl", "daemon-reload"])
    try:
        yield
    finally:
        guest.run(["rm", "-r", str(UNIT_DROP_IN.parent)])
        guest.run(["systemctl", "daemon-reload"])


def until(load: Hotset, service: Service, holds: Callable[[], bool]) -> None:
    for _ in load.samples(WITHIN_S):
        if holds():
            return
    raise AssertionError(service.log())


def watches(service: Service, load: Hotset) -> bool:
    """Whether the daemon that runs now says that it samples the workload."""
    status = service.status or {"pid": None}
    return status["pid"] == service.pid and any(
        target["pid"] == load.pid and target["pieces"] for target in status["targets"]
    )


def test_who_is_not_root_is_told(guest: Guest) -> None:
    refused = script(guest, user=NOBODY)
    assert (refused.rc, refused.stderr) == (
        1,
        "./scripts/install: this needs root: sudo ./scripts/install\n",
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--frob"], "unknown option --frob"),
        (["--prefix", "/home/x"], "--prefix /home/x: the service does not see that folder"),
        (["--prefix", "/opt/a b"], "--prefix /opt/a b: only letters, digits"),
        (["--wheels", "/srv"], "--wheels /srv: no wheel of tierd there"),
        (["--upgrade"], "no tierd is installed: leave out --upgrade"),
        (["--uninstall"], "no tierd is installed: "),
    ],
)
def test_a_wrong_command_line_is_told(guest: Guest, arguments: list[str], complaint: str) -> None:
    refused = script(guest, *arguments)
    assert refused.rc == 1
    assert refused.stderr.startswith(f"./scripts/install: {complaint}")


def test_where_pip_fails_nothing_is_left(guest: Guest) -> None:
    guest.run(["mkdir", "/tmp/broken"])
    guest.write("/tmp/broken/tierd-0.1.0-py3-none-any.whl", b"no wheel")
    refused = script(guest, "--wheels", "/tmp/broken")
    assert refused.rc == 1
    assert "./scripts/install: pip could not install tierd; without a net" in refused.stderr
    assert "./scripts/install: not installed; what had been put is removed again" in refused.stderr
    assert guest.run(["find", "/mnt/etc", "/mnt/usr", "-name", "tierd*"]).stdout == ""


def test_installed_it_waits_to_be_started_and_only_observes(service: Service) -> None:
    guest, done = service.guest, service.installed
    assert done.rc == 0, done.stderr
    assert done.stdout.startswith("tierd 0.1.0 is installed, and not started.")
    assert (service.show("ActiveState"), service.show("UnitFileState")) == ("inactive", "disabled")
    unit = ["systemctl", "show", "--property=LoadState,UnitFileState,ActiveState", "--value"]
    donor = guest.run([*unit, "tierd-donor"]).stdout.split()
    assert sorted(donor) == ["disabled", "inactive", "loaded"]
    assert b'\nmode = "observe"\n' in guest.read(CONFIG)
    added = {line for line in listing(guest) if line not in service.found}
    assert "/usr/local/bin/tierctl l 777" in added
    assert "/usr/local/sbin/tierd-donor l 777" in added
    assert "/usr/local/share/man/man8/tierd.8 f 644" in added
    assert "/usr/local/share/bash-completion/completions/tierctl f 644" in added
    assert f"{CONFIG} f 644" in added
    assert any(re.fullmatch(r"group tierd:x:\d+:", line) for line in added)


def test_it_starts_and_is_confined(service: Service) -> None:
    guest = service.guest
    service.start()
    assert service.is_up
    effective = re.search(r"CapEff:\s(\w+)", guest.read(f"/proc/{service.pid}/status").decode())
    assert effective
    assert int(effective[1], 16) == sum(1 << bit for bit in CAPABILITIES.values())
    assert guest.read("/sys/fs/cgroup/tierd.slice/tierd.service/memory.min") == b"100663296\n"
    paths = ("/run/tierd", "/run/tierd/tierd.sock", "/run/tierd/monitor.sock", "/var/lib/tierd")
    found = guest.run(["stat", "--format=%a %U %G", *paths]).stdout.splitlines()
    assert found == ["755 root root", "660 root tierd", "666 root root", "700 root root"]


def test_confined_it_moves_what_is_hot_and_a_reload_lets_it(service: Service) -> None:
    """The kernel's own placement is off meanwhile, and on again when it only observes."""
    guest = service.guest
    service.start()
    with workload(guest) as load:
        until(load, service, lambda: watches(service, load))
        assert service.status["mode"] == "observe"
        assert load.sample().hot_share == 0

        refused = service.reload('mode = "plaice"\n')
        assert refused.rc == 1
        assert f"{DROP_IN}:9: policy.mode: " in service.log()
        assert (service.is_up, service.status["mode"]) == (True, "observe")

        done = service.reload('mode = "place"\n' + RULE)
        assert (done.rc, done.stderr) == (0, "")
        until(load, service, lambda: load.sample().hot_share >= 0.95)
        # A round moves pages before it tells so.
        until(load, service, lambda: service.status["mode"] == "place")
        status = service.status
        assert (status["mode"], status["sampler"]["way"]) == ("place", "tracepoint")
        assert "reloaded: policy.mode" in service.log()
        assert "no process events" not in service.log()
        assert "no events of memory" not in service.log()

        guest.write(NUMA_BALANCING, b"1")
        until(load, service, lambda: guest.read(NUMA_BALANCING) == b"0\n")
        assert service.reload('mode = "observe"\n' + RULE).rc == 0
        until(load, service, lambda: "numa_balancing is 1" in str(service.status))
        assert guest.read(NUMA_BALANCING) == b"1\n"
        guest.write(NUMA_BALANCING, b"0")


def test_confined_it_has_the_kernel_promote_and_puts_all_back(service: Service) -> None:
    guest, settings = service.guest, SETTINGS.replace("take_over", "cooperate", 1)
    before = [guest.read(path) for path in PROMOTES]
    guest.write(DROP_IN, f'{settings}mode = "place"\n{RULE}'.encode())
    guest.run(["systemctl", "restart", "tierd"], timeout=WITHIN_S)
    meanwhile = [guest.read(path) for path in PROMOTES]
    guest.write(DROP_IN, (SETTINGS + RULE).encode())
    guest.run(["systemctl", "stop", "tierd"], timeout=WITHIN_S)
    assert meanwhile == [b"2\n", b"true\n", b"1000\n", b"700\n"], service.log()
    assert [guest.read(path) for path in PROMOTES] == before
    assert before == [b"0\n", b"false\n", b"60000\n", b"1000\n"]


def test_a_new_cxl_device_becomes_memory_where_that_is_asked_for(service: Service) -> None:
    guest, unit = service.guest, "tierd-cxl@mem1"
    guest.write(DROP_IN, f'{SETTINGS}{RULE}[cxl]\nprovision = "volatile"\n'.encode())
    guest.plug(1)
    ended = ["systemctl", "show", "--value", "--property=ExecMainExitTimestamp", unit]
    deadline = time.monotonic() + WITHIN_S
    while not guest.run(ended).stdout.strip():
        assert time.monotonic() < deadline, "udev did not have it made memory of"
        time.sleep(0.5)
    guest.write(DROP_IN, (SETTINGS + RULE).encode())
    log = guest.run(["journalctl", "--output=cat", f"--unit={unit}"]).stdout
    assert "tier cxl" in log, log
    blocks = [line for line in log.splitlines() if "blocks" in line]
    assert [line.partition(": ")[2] for line in blocks] == ["256 MiB online, Movable"]
    assert guest.read("/sys/devices/system/node/has_memory") == b"0-2\n"


def test_the_unit_can_be_given_what_some_settings_want(service: Service) -> None:
    guest = service.guest
    ask = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
    opened = ("RestrictAddressFamilies=AF_INET AF_INET6", "IPAddressAllow=localhost")
    wants = f'[api]\nmetrics_listen = "{METRICS}"\n[migrate]\ndemote_cache = true\n'
    files = f"ReadWritePaths=/sys/devices/system/node {LEAST_CACHE}"
    with unit_settings(guest, *opened, files):
        guest.write(DROP_IN, f'{SETTINGS}mode = "place"\n{RULE}{wants}'.encode())
        guest.run(["systemctl", "restart", "tierd"], timeout=WITHIN_S)
        metrics, status = (
            guest.run(["python3", "-c", ask, f"http://{METRICS}{path}"], check=False)
            for path in ("/metrics", "/v1/status")
        )
        demotes = settings_of_cache(guest)
        guest.write(DROP_IN, (SETTINGS + RULE).encode())
        guest.run(["systemctl", "stop", "tierd"], timeout=WITHIN_S)
    assert demotes == (b"true\n", b"0\n")
    assert settings_of_cache(guest) == (b"false\n", b"1\n")
    assert "tierd_targets " in metrics.stdout
    assert "HTTP Error 404" in status.stderr


def settings_of_cache(guest: Guest) -> tuple[bytes, bytes]:
    return guest.read(DEMOTION), guest.read(LEAST_CACHE)


def test_a_daemon_that_hangs_is_killed_and_undone(service: Service) -> None:
    guest = service.guest
    with unit_settings(guest, "WatchdogSec=10"), workload(guest) as load:
        guest.run(["systemctl", "restart", "tierd"], timeout=WITHIN_S)
        until(load, service, lambda: watches(service, load))
        restarts, hung = int(service.show("NRestarts")), service.pid
        guest.run(["kill", "-STOP", str(hung)])
        until(load, service, lambda: service.pid != hung and watches(service, load))
        assert int(service.show("NRestarts")) == restarts + 1
        said = service.log()
        assert "Watchdog timeout" in said
        assert f"undone: kdamond 31 of process {load.pid} stopped" in said


def test_a_daemon_that_crashes_is_back_and_waits_longer_each_time(service: Service) -> None:
    guest = service.guest
    service.start()
    with workload(guest) as load:
        until(load, service, lambda: watches(service, load))
        crashed, delay_s = service.pid, service.next_delay_s
        guest.run(["kill", "-KILL", str(crashed)])
        until(load, service, lambda: service.pid != crashed and watches(service, load))
        assert f"undone: kdamond 31 of process {load.pid} stopped" in service.log()
        assert service.next_delay_s > delay_s


def test_an_upgrade_keeps_the_configuration_and_goes_on(service: Service) -> None:
    guest = service.guest
    service.start()
    own = guest.read(CONFIG) + b"# mine\n"
    guest.write(CONFIG, own)
    before = service.pid
    done = service.install("--upgrade", version="0.1.1")
    assert done.rc == 0, done.stderr
    assert done.stdout == (
        f"{CONFIG} is kept as it is\n"
        "/etc/tierd/donor.toml is kept as it is\n"
        "tierd 0.1.1 runs, with the configuration that it had\n"
    )
    assert guest.read(CONFIG) == own
    assert guest.read(DROP_IN).startswith(SETTINGS.encode())
    assert service.is_up
    assert service.pid != before


def test_uninstalled_it_leaves_nothing_even_where_it_was_killed(service: Service) -> None:
    guest = service.guest
    guest.run(["systemctl", "enable", "--now", "tierd"], timeout=WITHIN_S)
    with unit_settings(guest, "Restart=no"), workload(guest) as load:
        until(load, service, lambda: watches(service, load))
        guest.run(["kill", "-KILL", str(service.pid)])
        until(load, service, lambda: service.show("ActiveState") == "failed")
        assert footprint(guest) != service.machine
        del SERVICES[guest]
        done = script(guest, "--uninstall")
        assert done.rc == 0, done.stderr
        assert f"tierd: undone: kdamond 31 of process {load.pid} stopped" in done.stderr
    assert footprint(guest) == service.machine
    assert listing(guest) == service.found
