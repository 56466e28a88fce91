# SPDX-License-Identifier: Apache-2.0
"""Gives tests their guests. A test names its machine and takes the guest:

    @pytest.mark.guest(topology.cxl(512))
    def test_something(guest: Guest) -> None: ...

It runs on the kernel that the mark names (kernel=Kernel.LTS), by default the latest; one marked
`central` runs on all, and with --kernels=all every test does, but one of what a kernel alone has
(only=Kernel.LATEST). With debian=Debian.LATEST the guest is a bare Debian with systemd. One marked
`thorough` runs with --kernels=all alone: it takes long, and another one shows the essence.

One guest is up at a time and serves all tests of its machine in turn, so what a test changes in it,
the test puts back. A test whose guest ended by a fault of the emulator, and by nothing else, runs
again in a new one, and the summary tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from guests.boot import boot
from guests.debian import Debian
from guests.errors import EmulatorFault, GuestLost
from guests.guest import Guest
from guests.kernels import Kernel
from guests.topology import Topology


@dataclass(frozen=True, slots=True)
class Machine:
    """A topology under a kernel, and the Debian on top if it isn't the host's root."""

    topology: Topology
    kernel: Kernel
    debian: Debian | None

    def __str__(self) -> str:
        system = "" if self.debian is None else f"-debian{self.debian}"
        return f"{self.topology.name}-{self.kernel}{system}"


@dataclass(slots=True)
class OneGuest:
    """The guest that is up, if one is."""

    boots: list[str] = field(default_factory=list)
    _machine: Machine | None = None
    _guest: Guest | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def get(self, machine: Machine) -> Guest:
        """The guest of that machine, booted if it isn't the one that is up."""
        if self._guest is None or self._machine != machine or not _is_alive(self._guest):
            self.close()
            booted = boot(machine.topology, machine.kernel, machine.debian)
            self._guest = self._stack.enter_context(booted)
            self._machine = machine
            self.boots.append(f"{machine}: up after {self._guest.facts.up_after_s:.0f} s")
        return self._guest

    def close(self) -> None:
        """Shuts it down."""
        self._guest = None
        self._stack.close()


ONE_GUEST = pytest.StashKey[OneGuest]()
SUMMARY = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ONE_GUEST] = OneGuest()
    config.stash[SUMMARY] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in ("guest", "doomed_guest"):
        if fixture in metafunc.fixturenames:
            machines = _machines(metafunc)
            metafunc.parametrize(fixture, machines, ids=map(str, machines), indirect=True)


def _machines(metafunc: pytest.Metafunc) -> list[Machine]:
    definition = metafunc.definition
    mark = definition.get_closest_marker("guest")
    if mark is None:
        raise pytest.UsageError(f"{definition.nodeid} takes a guest, but has no mark `guest`")
    everywhere = metafunc.config.getoption("kernels") == "all"
    if "only" in mark.kwargs:
        kernels = [mark.kwargs["only"]]
    elif everywhere or definition.get_closest_marker("central"):
        kernels = list(Kernel)
    else:
        kernels = [mark.kwargs.get("kernel", Kernel.LATEST)]
    debian = mark.kwargs.get("debian")
    return [Machine(topology, kernel, debian) for topology in mark.args for kernel in kernels]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the tests of one machine together, after all tests that take none."""
    if config.getoption("kernels") != "all":
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if item not in thorough]
    order: dict[Machine | None, int] = {None: 0}
    for item in items:
        machine = _machine_of(item)
        order.setdefault(machine, len(order))
        if machine is not None:
            item.add_marker(pytest.mark.flaky(reruns=1, only_rerun=EmulatorFault))
    items.sort(key=lambda item: order[_machine_of(item)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Has a guest that several fixtures find lost count as lost once, or no test runs again."""
    try:
        yield
    except ExceptionGroup as found:
        faults, others = found.split(EmulatorFault)
        if faults is None or others is not None:
            raise
        raise _first_of(faults) from None


def _first_of(group: ExceptionGroup[EmulatorFault]) -> EmulatorFault:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first


def _machine_of(item: pytest.Item) -> Machine | None:
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec else {}
    machine: Machine | None = parameters.get("guest") or parameters.get("doomed_guest")
    return machine


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[ONE_GUEST].close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    one_guest = terminalreporter.config.stash[ONE_GUEST]
    if one_guest.boots:
        terminalreporter.section("guests")
        terminalreporter.write_line("\n".join(one_guest.boots))
    for line in terminalreporter.config.stash[SUMMARY]:
        terminalreporter.write_line(line)


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> list[str]:
    """Lines for the end of the tests' output, where a figure is part of what a test shows."""
    return request.config.stash[SUMMARY]


@pytest.fixture
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """The guest of the test's machine; the test fails if it leaves a process behind there."""
    found: Guest = request.config.stash[ONE_GUEST].get(request.param)
    yield found
    left = found.leftovers()
    assert not left, f"the test left processes behind: {left}"


@pytest.fixture
def doomed_guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """A guest that is not used after the test."""
    one_guest = request.config.stash[ONE_GUEST]
    yield one_guest.get(request.param)
    one_guest.close()


def _is_alive(guest: Guest) -> bool:
    try:
        guest.ping()
    except GuestLost:
        return False
    return True
