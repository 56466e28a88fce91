# SPDX-License-Identifier: Apache-2.0
"""The guests themselves: what they have, how they are talked to, and how they are lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from guests import topology
from guests.boot import boot
from guests.errors import CommandEnded, CommandFailed, CommandTimeout, GuestLost, GuestPanic
from guests.guest import REPOSITORY, Guest
from guests.topology import Emulator
from guests.workloads import build, hotset

CXL = topology.cxl(512)
TIERS = Path("/sys/devices/virtual/memory_tiering")


def tiers(guest: Guest) -> list[str]:
    """The nodes of each memory tier, the fastest first."""
    files = guest.run(["sh", "-c", f"ls -v {TIERS}/memory_tier*/nodelist"]).stdout.split()
    return [guest.read(file).decode().strip() for file in files]


def size_mib(guest: Guest, node: int) -> int:
    meminfo = guest.read(f"/sys/devices/system/node/node{node}/meminfo").decode()
    return int(meminfo.split()[3]) // 1024


@pytest.mark.guest(CXL)
def test_cxl_device_is_a_lower_tier(guest: Guest) -> None:
    assert (guest.facts.fast, guest.facts.slow) == ((0,), (1,))
    assert tiers(guest) == ["0", "1"]
    assert size_mib(guest, 1) == 512
    assert guest.read("/sys/bus/cxl/devices/region0/size") == b"0x20000000\n"


@pytest.mark.guest(CXL)
def test_cxl_memory_is_movable_only(guest: Guest) -> None:
    zones = guest.run(["sh", "-c", "cat /sys/devices/system/node/node1/memory*/valid_zones"]).stdout
    assert set(zones.splitlines()) == {"Movable"}


@pytest.mark.guest(topology.cxl(256, 512))
def test_two_cxl_devices_are_two_nodes(guest: Guest) -> None:
    assert guest.facts.slow == (1, 2)
    assert [size_mib(guest, node) for node in guest.facts.slow] == [256, 512]


@pytest.mark.guest(topology.cxl(256, 256, interleaved=True))
def test_interleaved_cxl_devices_are_one_node(guest: Guest) -> None:
    assert guest.facts.slow == (1,)
    assert size_mib(guest, 1) == 512
    assert guest.read("/sys/bus/cxl/devices/region0/interleave_ways") == b"2\n"


@pytest.mark.central
@pytest.mark.guest(topology.slow_node())
def test_slow_node_is_a_lower_tier(guest: Guest) -> None:
    assert (guest.facts.fast, guest.facts.slow) == ((0,), (1,))
    assert tiers(guest) == ["0", "1"]


@pytest.mark.guest(topology.numa())
def test_numa_nodes_share_a_tier(guest: Guest) -> None:
    assert (guest.facts.fast, guest.facts.slow) == ((0,), (1,))
    assert tiers(guest) == ["0-1"]


@pytest.mark.guest(topology.flat())
def test_flat_guest_has_one_node(guest: Guest) -> None:
    assert (guest.facts.fast, guest.facts.slow) == ((0,), ())


@pytest.mark.guest(topology.slow_node(by_words=True, counted=True))
def test_instructions_count_for_the_cpu_that_ran_them(guest: Guest) -> None:
    """Though CPUs take turns. One that is there for real isn't counted."""
    if guest.facts.kvm:
        with pytest.raises(FileNotFoundError):
            guest.counter.of_cpu(0)
        return
    for busy, idle in ((0, 1), (1, 0)):
        ran, idled = guest.counter.of_cpu(busy), guest.counter.of_cpu(idle)
        loop = ["taskset", "-c", f"{busy}", "timeout", "2", "sh", "-c", "while :; do :; done"]
        guest.run(loop, check=False)
        assert guest.counter.of_cpu(busy) - ran > 5 * (guest.counter.of_cpu(idle) - idled)


@pytest.mark.guest(CXL)
def test_numa_balancing_is_off(guest: Guest) -> None:
    assert guest.read("/proc/sys/kernel/numa_balancing") == b"0\n"


@pytest.mark.guest(CXL)
def test_pages_are_where_hotset_says(guest: Guest) -> None:
    """Held against numa_maps, the other oracle."""
    with hotset(guest, "--mib", "4", "--hot-mib", "1", "--node", "1") as workload:
        sample = workload.sample()
        maps = guest.read(f"/proc/{workload.pid}/numa_maps").decode()
    assert (sample.hot_pages, sample.cold_pages) == (256, 768)
    assert (sample.hot_on_fast, sample.cold_on_slow, sample.absent) == (0, 768, 0)
    assert "N1=1024" in maps
    # The policy under which it was filled is gone, so nothing holds the pages there.
    assert "prefer" not in maps


@pytest.mark.guest(CXL)
def test_fast_emulator_maps_cxl_memory(guest: Guest) -> None:
    """So slow, by contrast, is the one that emulates each access."""
    with hotset(guest, "--mib", "4", "--hot-mib", "1", "--node", "1") as slow:
        on_cxl = slow.sample().ops_per_s
    with hotset(guest, "--mib", "4", "--hot-mib", "1", "--node", "0") as fast:
        on_dram = fast.sample().ops_per_s
    assert on_cxl * 4 < on_dram


@pytest.mark.guest(topology.cxl(512, emulator=Emulator.FAST))
def test_cxl_memory_of_the_fast_emulator_is_fast(guest: Guest) -> None:
    with hotset(guest, "--mib", "64", "--hot-mib", "1", "--node", "1") as on_cxl:
        cxl = on_cxl.sample()
    with hotset(guest, "--mib", "64", "--hot-mib", "1", "--node", "0") as on_dram:
        dram = on_dram.sample()
    assert cxl.hot_on_fast == 0
    assert cxl.ops_per_s * 4 > dram.ops_per_s


DAMAGE = """
import sys
maps = [line.split() for line in open(f"/proc/{sys.argv[1]}/maps")]
nameless = [[int(end, 16) for end in fields[0].split("-")] for fields in maps if len(fields) == 5]
buffer = max(nameless, key=lambda ends: ends[1] - ends[0])
with open(f"/proc/{sys.argv[1]}/mem", "r+b", buffering=0) as memory:
    memory.seek(buffer[0] + 8 * 77)
    memory.write(b"damaged!")
"""


@pytest.mark.guest(topology.flat())
def test_hotset_notices_damage(guest: Guest) -> None:
    # No access goes outside the window, so none mends the word.
    options = ("--mib", "4", "--hot-mib", "1", "--hot-offset-mib", "2", "--share", "100")
    workload = guest.start([build("hotset"), "--verify", *options])
    workload.readline()
    guest.run(["python3", "-c", DAMAGE, str(workload.pid)])
    workload.signal(signal.SIGTERM)
    done = workload.wait()
    assert (done.rc, "1 of 524288 words are damaged" in done.stderr) == (1, True)


@pytest.mark.guest(CXL)
def test_hotset_moves_its_window(guest: Guest) -> None:
    with hotset(guest, "--mib", "4", "--hot-mib", "1") as workload:
        assert workload.sample().window == 0
        workload.move_window()
        assert [sample.window for sample in workload.samples(3)][-1] == 1


@pytest.mark.guest(topology.flat())
def test_streams_and_status_come_apart(guest: Guest) -> None:
    done = guest.run(["sh", "-c", "echo out; echo err >&2; exit 3"], check=False)
    assert (done.rc, done.stdout, done.stderr) == (3, "out\n", "err\n")


@pytest.mark.guest(topology.flat())
def test_all_output_comes_before_the_end(guest: Guest) -> None:
    done = guest.run(["python3", "-c", "import sys; sys.stdout.write('x' * 1_000_000)"])
    assert len(done.stdout) == 1_000_000


@pytest.mark.guest(topology.flat())
def test_commands_that_end_together_lose_no_output(guest: Guest) -> None:
    guest.run(["mkfifo", "/run/start"])
    wait_for_line = "exec 3<>/run/start; read line <&3"
    waiting = [guest.start(["sh", "-c", f"{wait_for_line}; echo {n}"]) for n in range(30)]
    guest.run(["sh", "-c", "exec 3<>/run/start; yes '' | head -n 30 >&3"])
    assert [process.wait().stdout for process in waiting] == [f"{n}\n" for n in range(30)]


@pytest.mark.guest(topology.flat())
def test_failure_is_raised_when_checked(guest: Guest) -> None:
    with pytest.raises(CommandFailed, match="not ok"):
        guest.run(["sh", "-c", "echo not ok >&2; false"])


@pytest.mark.guest(topology.flat())
def test_missing_program_is_an_os_error(guest: Guest) -> None:
    with pytest.raises(FileNotFoundError):
        guest.run(["no-such-program"])


@pytest.mark.guest(topology.flat())
def test_commands_run_at_once(guest: Guest) -> None:
    guest.run(["mkfifo", "/run/fifo"])
    reader = guest.start(["sh", "-c", "echo first; cat /run/fifo; rm /run/fifo"])
    assert reader.readline() == "first"
    guest.run(["sh", "-c", "echo second > /run/fifo"])
    assert reader.readline() == "second"
    assert reader.wait().rc == 0


@pytest.mark.guest(topology.flat())
def test_lines_are_passed_over(guest: Guest) -> None:
    printer = guest.start(["seq", "4"])
    assert printer.readline() == "1"
    printer.wait()
    printer.skip_lines(but=1)
    assert printer.readline() == "4"
    printer.skip_lines(but=1)
    with pytest.raises(CommandEnded):
        printer.readline()


@pytest.mark.guest(topology.flat())
def test_end_without_a_line_is_told(guest: Guest) -> None:
    with pytest.raises(CommandEnded, match=r"^true ended with 0$"):
        guest.start(["true"]).readline()


@pytest.mark.guest(topology.flat())
def test_signal_reaches_the_command(guest: Guest) -> None:
    process = guest.start(["sleep", "1000"])
    process.signal(signal.SIGINT)
    assert process.wait().rc == -signal.SIGINT


@pytest.mark.guest(topology.flat())
def test_command_that_takes_too_long_is_killed(guest: Guest) -> None:
    with pytest.raises(CommandTimeout):
        guest.run(["sleep", "1000"], timeout=1)


@pytest.mark.guest(topology.flat())
def test_commands_run_in_the_repository(guest: Guest) -> None:
    assert guest.run(["pwd"]).stdout.strip() == str(REPOSITORY)
    python = guest.run(["sh", "-c", "command -v python"]).stdout.strip()
    assert python == str(REPOSITORY / ".venv/bin/python")
    assert guest.run(["id", "-u"]).stdout == "0\n"


@pytest.mark.guest(topology.flat())
def test_writes_stay_in_the_guest(guest: Guest) -> None:
    path = REPOSITORY / f"written-by-a-guest-{os.getpid()}"
    guest.write(path, b"\x00\xff")
    assert guest.read(path) == b"\x00\xff"
    guest.run(["rm", path])
    assert not path.exists()


@pytest.mark.guest(topology.flat())
def test_unreadable_file_is_an_os_error(guest: Guest) -> None:
    with pytest.raises(FileNotFoundError, match="/no/such"):
        guest.read("/no/such")


@pytest.mark.guest(topology.flat())
def test_leftovers_are_told_and_killed(guest: Guest) -> None:
    # The shell ends, and its child, in a session of its own, is the agent's.
    begun = "/run/has-begun"
    child = f"setsid sh -c 'touch {begun}; sleep 1000; true' > /dev/null 2>&1 &"
    guest.run(["sh", "-c", f"{child} until rm {begun}; do sleep 0.1; done 2> /dev/null"])
    left = guest.leftovers()
    assert any("sleep 1000" in line for line in left)
    assert guest.leftovers() == []


@pytest.mark.guest(topology.flat())
def test_panic_is_told_from_failure(doomed_guest: Guest) -> None:
    with pytest.raises(GuestPanic, match="sysrq triggered crash"):
        doomed_guest.run(["sh", "-c", "echo c > /proc/sysrq-trigger"])
    assert "Kernel panic" in doomed_guest.console.read_text()


@pytest.mark.guest(topology.flat())
def test_guest_that_ends_is_lost(doomed_guest: Guest) -> None:
    with pytest.raises(GuestLost, match="ended") as lost:
        doomed_guest.run(["sh", "-c", "echo o > /proc/sysrq-trigger; sleep 1000"])
    assert not isinstance(lost.value, GuestPanic)


def test_boot_that_hangs_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("guests.boot.BOOT_TIMEOUT_S", 0.1)
    of_other_tests = psutil.Process().children(recursive=True)
    with pytest.raises(GuestLost, match=r"was not up after 0\.1 s"), boot(topology.flat()):
        pytest.fail("it is up")
    assert [record.message for record in caplog.records if "booting again" in record.message]
    assert psutil.Process().children(recursive=True) == of_other_tests


BOOTS = """
from guests import topology
from guests.boot import boot
with boot(topology.flat()) as guest:
    print("up", flush=True)
    guest.run(["sleep", "1000"], timeout=1000)
"""


def test_guest_does_not_outlive_its_killed_owner() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BOOTS],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests/vm")},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        (qemu,) = psutil.Process(owner.pid).children(recursive=True)
        owner.kill()
    assert psutil.wait_procs([qemu], timeout=30) == ([qemu], [])


def test_workload_is_compiled_once() -> None:
    program = build("hotset")
    before = program.stat().st_mtime_ns
    assert build("hotset").stat().st_mtime_ns == before
