# SPDX-License-Identifier: Apache-2.0
"""Stops a child before each system call that changes something, and kills it there if asked to.

The child knows nothing of it: no module of it is patched, and what its C code calls counts too. A
seccomp filter (Documentation/userspace-api/seccomp_filter.rst) picks the calls that can change the
machine, and hands them to us as ptrace(2) stops before the kernel does anything. One that is killed
at such a stop hasn't made the call. To be killed after a call is to be killed before the next one.

The numbers of system calls are x86-64's (arch/x86/entry/syscalls/syscall_64.tbl).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long

PTRACE_CONT, PTRACE_SEIZE, PTRACE_GET_SYSCALL_INFO = 7, 0x4206, 0x420E
PTRACE_O_TRACECLONE, PTRACE_O_TRACESECCOMP, PTRACE_O_EXITKILL = 0x8, 0x80, 0x100000
PTRACE_EVENT_SECCOMP = 7
WALL = 0x40000000  # __WALL of waitpid(2): threads too
SYSCALL_INFO = struct.Struct("=B3xIQQQ6Q")  # struct ptrace_syscall_info, of a seccomp stop

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD | BPF_W | BPF_ABS, ...
TRACE, ALLOW = 0x7FF00000, 0x7FFF0000
NUMBER, ARGUMENTS = 0, 16  # where struct seccomp_data has them

OPENAT, MOVE_PAGES = 257, 279
ONLY_WITH = {
    OPENAT: (2, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC),
    MOVE_PAGES: (3, 0xFFFFFFFF),  # without an array of nodes it only asks
}
"""The bits of an argument of which one must be set, or the call changes nothing."""

SHOWN_BYTES = 256
LONGEST_PATH = 4096


class Argument(Enum):
    """What an argument of a system call is."""

    FD = auto()
    PATH = auto()
    DATA = auto()
    """A buffer, whose length is the next argument."""


FD, PATH, DATA = Argument.FD, Argument.PATH, Argument.DATA

CALLS: Mapping[int, tuple[str, Mapping[int, Argument]]] = {
    1: ("write", {0: FD, 1: DATA}),
    18: ("pwrite", {0: FD, 1: DATA}),
    20: ("writev", {0: FD}),
    42: ("connect", {0: FD, 1: DATA}),
    44: ("send", {0: FD, 1: DATA}),
    46: ("sendmsg", {0: FD}),
    49: ("bind", {0: FD, 1: DATA}),
    50: ("listen", {0: FD}),
    62: ("kill", {}),
    73: ("flock", {0: FD}),
    74: ("fsync", {0: FD}),
    75: ("fdatasync", {0: FD}),
    76: ("truncate", {0: PATH}),
    77: ("ftruncate", {0: FD}),
    82: ("rename", {0: PATH, 1: PATH}),
    83: ("mkdir", {0: PATH}),
    84: ("rmdir", {0: PATH}),
    86: ("link", {0: PATH, 1: PATH}),
    87: ("unlink", {0: PATH}),
    88: ("symlink", {0: PATH, 1: PATH}),
    90: ("chmod", {0: PATH}),
    91: ("fchmod", {0: FD}),
    92: ("chown", {0: PATH}),
    93: ("fchown", {0: FD}),
    94: ("lchown", {0: PATH}),
    165: ("mount", {0: PATH, 1: PATH}),
    166: ("umount", {0: PATH}),
    256: ("migrate_pages", {}),
    OPENAT: ("open", {1: PATH}),
    258: ("mkdir", {1: PATH}),
    260: ("chown", {1: PATH}),
    263: ("unlink", {1: PATH}),
    264: ("rename", {1: PATH, 3: PATH}),
    265: ("link", {1: PATH, 3: PATH}),
    266: ("symlink", {0: PATH, 2: PATH}),
    268: ("chmod", {1: PATH}),
    MOVE_PAGES: ("move_pages", {}),
    285: ("fallocate", {0: FD}),
    298: ("perf_event_open", {}),
    316: ("rename", {1: PATH, 3: PATH}),
    440: ("process_madvise", {}),
}
"""The system calls that can change the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A system call that a child is about to make."""

    pid: int
    name: str
    paths: tuple[str, ...]
    data: bytes
    """What is to be written or sent, the first of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a child ended: its exit status, or minus the signal."""

    rc: int
    stderr: str


class HasHung(Exception):
    """A child that was still there after its time."""


Before = Callable[[Call], bool]
"""Is told each call before it is made; says whether the child may go on."""


def run(
    main: Callable[[], int], stderr: Path, *, before: Before | None = None, within_s: float
) -> Ending:
    """Runs a function in a child of its own, which `before` follows and may end by SIGKILL.

    Raises:
        HasHung: it was not done in time, and was killed.
    """
    begin, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        _be_child(main, stderr, begin, is_traced=before is not None)
    os.close(begin)
    if before is not None:
        options = PTRACE_O_TRACECLONE | PTRACE_O_TRACESECCOMP | PTRACE_O_EXITKILL
        _ptrace(PTRACE_SEIZE, pid, options)
    os.close(go)
    with _alarm(within_s):
        try:
            status = _follow(pid, before)
        except HasHung:
            os.kill(pid, signal.SIGKILL)
            _follow(pid, None)
            raise HasHung(f"after {within_s} s: {stderr.read_text()}") from None
    return Ending(rc=os.waitstatus_to_exitcode(status), stderr=stderr.read_text())


def _be_child(main: Callable[[], int], stderr: Path, begin: int, *, is_traced: bool) -> None:
    rc = 70
    try:
        os.read(begin, 1)
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        if is_traced:
            _install_filter()
        rc = main()
    except BaseException:  # noqa: BLE001  # whatever it is, the parent's stack isn't to be unwound
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(rc)


def _follow(pid: int, before: Before | None) -> int:
    """Waits for the end; returns the wait status."""
    while True:
        thread, status = os.waitpid(-1, WALL)
        if not os.WIFSTOPPED(status):
            if thread == pid:
                return status
            continue
        event = status >> 16
        if event == PTRACE_EVENT_SECCOMP and before and not before(_read_call(pid, thread)):
            os.kill(pid, signal.SIGKILL)
            continue
        _let_go(thread, 0 if event else os.WSTOPSIG(status))


def _let_go(thread: int, number: int) -> None:
    with suppress(ProcessLookupError):
        _ptrace(PTRACE_CONT, thread, number)


def _read_call(pid: int, thread: int) -> Call:
    info = ctypes.create_string_buffer(SYSCALL_INFO.size)
    _ptrace(PTRACE_GET_SYSCALL_INFO, thread, ctypes.addressof(info), SYSCALL_INFO.size)
    _, _, _, _, number, *arguments = SYSCALL_INFO.unpack(info.raw)
    name, kinds = CALLS[number]
    paths, data = [], b""
    for index, kind in kinds.items():
        match kind:
            case Argument.FD:
                paths.append(_opened(pid, ctypes.c_int(arguments[index]).value))
            case Argument.PATH:
                paths.append(_string(pid, arguments[index]))
            case Argument.DATA:
                data = _memory(pid, arguments[index], min(arguments[index + 1], SHOWN_BYTES))
    return Call(pid=pid, name=name, paths=tuple(paths), data=data)


def _opened(pid: int, fd: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/{fd}").readlink())
    except FileNotFoundError:
        return "no file"


def _string(pid: int, address: int) -> str:
    return _memory(pid, address, LONGEST_PATH).split(b"\0")[0].decode(errors="replace")


def _memory(pid: int, address: int, length: int) -> bytes:
    """Reads memory up to the end of its page, and on where that is mapped too."""
    first = min(length, 4096 - address % 4096)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        found = os.pread(memory.fileno(), first, address)
        with suppress(OSError):
            found += os.pread(memory.fileno(), length - first, address + first)
    return found


def _ptrace(request: int, thread: int, data: int, address: int = 0) -> None:
    if libc.ptrace(request, thread, address or None, data or None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x}: {os.strerror(number)}")


@contextmanager
def _alarm(within_s: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise HasHung

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, within_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _install_filter() -> None:
    """Has this thread, and those that it starts, stop before CALLS. It needs CAP_SYS_ADMIN."""
    code = [(LOAD, 0, 0, NUMBER)]
    for number, (argument, mask) in ONLY_WITH.items():
        code += [
            (JUMP_EQUAL, 0, 4, number),
            (LOAD, 0, 0, ARGUMENTS + 8 * argument),
            (JUMP_ANY_BIT, 0, 1, mask),
            (RETURN, 0, 0, TRACE),
            (RETURN, 0, 0, ALLOW),
        ]
    for number in CALLS:
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, TRACE)]
    code.append((RETURN, 0, 0, ALLOW))
    program = _Filter(len(code), b"".join(struct.pack("=HBBI", *line) for line in code))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
